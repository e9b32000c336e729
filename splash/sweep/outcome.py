"""What a point gave, the same whether it was measured or simulated, and the row that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from splash.core.capacity import capacity, geometry_for_budget
from splash.core.hardware import GIB
from splash.core.layout import parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.scheduler.cost_model import CostModel
from splash.sweep.points import Point
from splash.sweep.served import served_s
from splash.workload import Requests

Floats = npt.NDArray[np.float64]

MAX_SAMPLES = 150
TIMELINE = ("t_s", "layout", "running", "waiting", "kv_used")  # columns of a time line


@dataclass(frozen=True)
class Outcome:
    """What serving a workload gave.

    Attributes:
        seconds: from the start to the last finish.
        arrival_s: float64 [N], when each request arrived.
        first_token_s: float64 [N], when it had its first token.
        finish_s: float64 [N], when it had its last.
        steps: steps that the group ran.
        preemptions: how often a request lost its pages to another.
        peak_running: most requests that held pages at once.
        switches: committed switches of layout.
        layout_seconds: seconds by layout.
        timeline: rows of `TIMELINE`, in order of time.
    """

    seconds: float
    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    steps: int
    preemptions: int
    peak_running: int
    switches: int
    layout_seconds: dict[str, float]
    timeline: list[list[Any]] = field(default_factory=list)


def thinned(samples: list[list[Any]]) -> list[list[Any]]:
    """At most about `MAX_SAMPLES` rows of a time line: evenly chosen, the last, and all at which the layout changes."""
    every = -(-len(samples) // MAX_SAMPLES)
    return [
        sample
        for number, sample in enumerate(samples)
        if number % every == 0 or number == len(samples) - 1 or sample[1] != samples[number - 1][1]
    ]


def short(value: float, digits: int = 6) -> float:
    """A figure of so many significant digits: more would only be noise in rows that are kept."""
    return float(f"{value:.{digits}g}")


def identity(point: Point, requests: Requests) -> dict[str, Any]:
    """The columns that say which point a row is of."""
    settings = point.settings
    length, output = requests.input_len, requests.output_len
    return {
        "grid": point.grid,
        "hardware": point.hardware.name,
        "model": settings.model.name,
        "ranks": point.ranks,
        "dtype": settings.dtype,
        "kv_dtype": settings.kv_dtype or settings.dtype,
        "layout": settings.layout,
        "policy": settings.policy.kind,
        "workload": point.workload.kind,
        "input": round(float(length.mean()), 1),
        "output": round(float(output.mean()), 1),
        "batch": requests.most_in_flight,
        "requests": len(requests),
        "chunk": settings.max_batched_tokens,
    }


def fitting(point: Point, batch: int) -> dict[str, Any]:
    """The columns on memory: what the layout holds on this hardware, worked out exactly.

    Raises:
        CapacityError: not even the weights fit.
        ConfigError: the layout cannot work with these ranks.
    """
    found = capacity(arenas(point), parse_layout(point.settings.layout), batch)
    return {
        "attention_gib": round(found.attention_bytes / GIB, 3),
        "kv_tokens": found.kv_tokens,
        "longest_context": found.longest_context,
    }


def cost_model(point: Point, ranks: int | None = None) -> CostModel:
    """What predicts the point's steps; `ranks` of another group of the same hardware."""
    settings = point.settings
    return CostModel(
        point.spec,
        point.hardware,
        ranks or point.ranks,
        settings.dtype,
        settings.page_size,
        settings.kv_dtype,
        settings.max_num_seqs,
        cheapest_forms=settings.cheapest_forms,
    )


def arenas(point: Point) -> ArenaGeometry:
    """The arenas that the point serves from."""
    settings = point.settings
    if settings.kv_cache_gib is None:
        return cost_model(point).planned_geometry(settings.mem_fraction)
    kv, weight_bytes = kv_format(point.spec, settings.kv_dtype or settings.dtype), DTYPE_BYTES[settings.dtype]
    budget = int(settings.kv_cache_gib * GIB)
    return geometry_for_budget(point.spec, kv, settings.page_size, weight_bytes, point.ranks, budget)


def figures(outcome: Outcome, requests: Requests) -> dict[str, Any]:
    """The columns on speed. Rates are over the whole time, in tokens a second."""
    inputs, outputs = int(requests.input_len.sum()), int(requests.output_len.sum())
    first, whole = outcome.first_token_s - outcome.arrival_s, outcome.finish_s - outcome.arrival_s
    decoded = requests.output_len > 1
    between = (outcome.finish_s - outcome.first_token_s)[decoded] / (requests.output_len[decoded] - 1)
    row: dict[str, Any] = {
        "seconds": short(outcome.seconds),
        "tokens_per_s": short((inputs + outputs) / outcome.seconds),
        "input_tokens_per_s": short(inputs / outcome.seconds),
        "output_tokens_per_s": short(outputs / outcome.seconds),
        "first_token_p50_s": short(np.percentile(first, 50)),
        "first_token_p99_s": short(np.percentile(first, 99)),
        "completion_mean_s": short(whole.mean()),
        "completion_p99_s": short(np.percentile(whole, 99)),
        "between_tokens_mean_ms": short(between.mean() * 1e3) if decoded.any() else None,
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "peak_running": outcome.peak_running,
        "switches": outcome.switches,
        "layout_seconds": {name: short(seconds) for name, seconds in sorted(outcome.layout_seconds.items())},
    }
    if outcome.timeline:
        row["timeline"] = outcome.timeline
        row["served_s"] = [short(mark) for mark in served_s(requests, outcome.first_token_s, outcome.finish_s)]
    return row
