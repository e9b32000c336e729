"""Measured points: where a point's hardware is present, a real engine serves its workload in real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from splash.core.errors import ConfigError
from splash.core.request import SamplingParams
from splash.engine.config import DTYPES, EngineConfig
from splash.engine.engine import Engine
from splash.engine.outputs import GenerationRequest
from splash.platform.registry import get_platform
from splash.sweep.outcome import Outcome, short, thinned
from splash.sweep.points import Point
from splash.workload import Feed, Requests

IDLE_S = 0.05  # longest sleep while nothing is due


@dataclass(frozen=True)
class Basis:
    """Whether a point is measured or simulated, and why.

    Attributes:
        name: "measured" or "simulated".
        why: the device that is measured, or what stands in the way of measuring.
    """

    name: str
    why: str


def basis_of(point: Point) -> Basis:
    """What happens to a point here.

    Raises:
        ConfigError: it is to be measured, and cannot be.
    """
    asked = point.settings.run
    if asked == "simulate":
        return Basis("simulated", "as asked")
    device, obstacle = _presence(point)
    if not obstacle:
        return Basis("measured", device)
    if asked == "measure":
        raise ConfigError("run", f"{point.label} cannot be measured: {obstacle}")
    return Basis("simulated", obstacle)


def _presence(point: Point) -> tuple[str, str]:
    """(device, what stands in the way of measuring on it, empty if nothing)."""
    settings, hardware = point.settings, point.hardware
    platform = get_platform(hardware.platform)
    availability = platform.availability()
    if not availability.ok:
        return "", availability.reason
    devices = platform.devices()
    device = devices[0].name
    # One description stands for any processor; an accelerator has to be the one described.
    if hardware.platform != "cpu" and hardware.name not in device.lower():
        return device, f"the device here is {device}, not {hardware.name}"
    for obstacle, reason in (
        (settings.model.path is None, f"{settings.model.name} comes without weights"),
        (settings.dtype not in DTYPES, f"the engine serves {' and '.join(DTYPES)}, not {settings.dtype}"),
        (settings.kv_dtype not in (None, settings.dtype), "the engine caches in the dtype of its weights"),
        (settings.serving != "colocated", "disaggregated serving is only simulated"),
        (settings.cheapest_forms, "the cheapest forms of attention are only simulated"),
        (settings.kv_cache_gib is None, "the engine needs kv_cache_gib"),
        (
            hardware.platform != "cpu" and len(devices) < point.ranks,
            f"{len(devices)} devices are here, not {point.ranks}",
        ),
    ):
        if obstacle:
            return device, reason
    return device, ""


def engine_config(point: Point) -> EngineConfig:
    """The engine that serves a point."""
    settings = point.settings
    assert settings.model.path is not None and settings.kv_cache_gib is not None
    return EngineConfig(
        model=settings.model.path,
        hardware=point.hardware.platform,
        ranks=point.ranks,
        layout=settings.layout,
        dtype=settings.dtype,
        page_size=settings.page_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        prefix_cache=settings.prefix_cache,
        policy=settings.policy,
        description=point.hardware,
    )


class Bench:
    """Engines for measured points. One is kept for as long as the points ask for the same.

    Leaving its `with` block ends the ranks.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._config: EngineConfig | None = None

    def run(self, point: Point, requests: Requests, progress: Callable[[float], None]) -> Outcome:
        """Serve `requests` and say what it gave. `progress` is told the share of requests that have finished.

        Raises:
            RequestError, CapacityError, ConfigError: the point cannot be served.
            WorkerError: a rank died.
        """
        engine = self._engine_of(engine_config(point))
        params = [
            SamplingParams(max_tokens=int(length), temperature=0.0, ignore_eos=True) for length in requests.output_len
        ]
        vocab = engine.model_config.spec.vocab_size
        count = len(requests)
        feed = Feed(requests)
        arrival, first, finish = np.zeros(count), np.zeros(count), np.zeros(count)
        samples: list[list[Any]] = []
        stats = engine.stats()
        steps_before, preempted_before, peak, left = stats.steps, stats.preemptions, 0, count
        layout_seconds: dict[str, float] = {}
        switches, layout, since = 0, stats.layout, 0.0
        started = time.monotonic()
        while left:
            now = time.monotonic() - started
            for index, due_s in feed.take(now):
                arrival[index] = due_s
                prompt = tuple(requests.tokens(index, vocab).tolist())
                engine.add_request(GenerationRequest(str(index), prompt, params[index]))
            if not engine.has_work:
                time.sleep(max(0.0, min(IDLE_S, feed.next_time() - now)))
                continue
            outputs = engine.step()
            now = time.monotonic() - started
            for output in outputs:
                index = int(output.id)
                if output.num_output_tokens == 1:
                    first[index] = now
                if output.finish_reason is not None:
                    finish[index] = now
                    left -= 1
                    feed.finish(index, now)
                    progress(1 - left / count)
            stats = engine.stats()
            peak = max(peak, stats.running)
            layout_seconds[layout] = layout_seconds.get(layout, 0.0) + now - since
            switches, layout, since = switches + (stats.layout != layout), stats.layout, now
            used = max(1 - free / total for free, total in zip(stats.free_pages, stats.total_pages, strict=True))
            samples.append([short(now), stats.layout, stats.running, stats.waiting, short(used, 3)])
        while engine.has_work:  # the step that was begun before the last one was known to be the last
            engine.step()
        return Outcome(
            seconds=float(finish.max()),
            arrival_s=arrival,
            first_token_s=first,
            finish_s=finish,
            steps=stats.steps - steps_before,
            preemptions=stats.preemptions - preempted_before,
            peak_running=peak,
            switches=switches,
            layout_seconds=layout_seconds,
            timeline=thinned(samples) if point.settings.timeline else [],
        )

    def _engine_of(self, config: EngineConfig) -> Engine:
        # A prefix cache remembers the point before, and so does a policy: they get an engine of their own.
        remembers = config.prefix_cache or config.policy.kind != "static"
        if self._engine is None or config != self._config or remembers:
            self.close()
            self._engine, self._config = Engine(config), config
        return self._engine

    def close(self) -> None:
        """End the ranks. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
