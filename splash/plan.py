"""What fits on which hardware in each layout, and what a switch between two layouts moves. Needs no accelerator.

    python -m splash.plan model=deepseek_v3 +hardware=h200 ranks=8 dtype=fp8

`make_plan` computes a `Plan`; `to_json` and `plan_tables` show it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from splash.core.capacity import Capacity, capacity, freed_bytes, geometry_for_budget, other_weight_bytes
from splash.core.diff import diff
from splash.core.errors import CapacityError, ConfigError, SplashError
from splash.core.hardware import GIB, Hardware
from splash.core.layout import DOP, DP, LAYOUTS, Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State
from splash.core.spec import DTYPE_BYTES, ModelSpec, kv_format
from splash.model.choice import ModelChoice
from splash.settings import build, compose, options, usage

MAX_RANKS = 128


@dataclass(frozen=True)
class PlanSettings:
    """What to plan for. conf/plan.yaml explains each."""

    model: ModelChoice
    hardware: Hardware
    ranks: int | None
    dtype: Literal["float32", "bfloat16", "fp8"]
    batch: int
    page_size: int
    mem_fraction: float
    format: Literal["table", "json"]

    def __post_init__(self) -> None:
        for field, ok, accepted in (
            ("ranks", self.ranks is None or 1 <= self.ranks <= MAX_RANKS, f"between 1 and {MAX_RANKS}"),
            ("batch", 1 <= self.batch <= 1 << 20, "between 1 and 1048576"),
            ("page_size", self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0, "a power of two"),
            ("mem_fraction", 0 < self.mem_fraction <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise ConfigError(field, f"must be {accepted}, not {getattr(self, field)!r}")


@dataclass(frozen=True)
class Switch:
    """One direction. Bytes are received a rank and layer: weights in all, KV for each live token of the group."""

    weights: str
    kv: str
    weight_bytes_per_rank: Fraction
    kv_bytes_per_token: Fraction


@dataclass(frozen=True)
class Plan:
    """Everything that is printed. Mappings are by layout; `refused` says why a layout is missing from the others."""

    settings: PlanSettings
    spec: ModelSpec
    geometry: ArenaGeometry
    memory: dict[str, int]
    capacities: dict[str, Capacity]
    refused: dict[str, str]
    switches: dict[tuple[str, str], Switch]
    dop_frees_bytes: int | None
    shortage: str | None


def make_plan(settings: PlanSettings) -> Plan:
    """Work everything out.

    Raises:
        CheckpointError: the model's configuration cannot be read.
        ConfigError: an option cannot work.
    """
    spec = settings.model.spec()
    ranks = settings.ranks or settings.hardware.ranks
    memory = _memory(settings, spec, ranks)
    kv, weight_bytes = kv_format(spec, settings.dtype), DTYPE_BYTES[settings.dtype]
    shortage = None
    try:
        budget = memory["attention_and_kv"]
        geometry = geometry_for_budget(spec, kv, settings.page_size, weight_bytes, ranks, budget)
    except CapacityError as error:
        shortage = str(error) if budget > 0 else f"everything else takes {-budget / GIB:,.2f} GiB more than there is"
        # Sizes and switches are facts of the model: they are shown whether it fits or not.
        geometry = _smallest_geometry(spec, settings, ranks)

    capacities, refused = {}, {}
    for name, layout in LAYOUTS.items():
        try:
            fitting = capacity(geometry, layout, settings.batch)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        capacities[name] = Capacity(fitting.attention_bytes, 0, 0, 0) if shortage else fitting
    return Plan(
        settings=settings,
        spec=spec,
        geometry=geometry,
        memory=memory,
        capacities=capacities,
        refused=refused,
        switches={
            (src, dst): _switch(geometry, LAYOUTS[src], LAYOUTS[dst])
            for src, dst in itertools.permutations(capacities, 2)
        },
        dop_frees_bytes=None if DOP.name in refused else freed_bytes(geometry, DOP, baseline=DP),
        shortage=shortage,
    )


def _smallest_geometry(spec: ModelSpec, settings: PlanSettings, ranks: int) -> ArenaGeometry:
    """Arenas that hold the weights and nothing else."""
    kv, weight_bytes = kv_format(spec, settings.dtype), DTYPE_BYTES[settings.dtype]
    boundless = ArenaGeometry(spec, kv, settings.page_size, weight_bytes, ranks, num_slots=1 << 40)
    return ArenaGeometry(spec, kv, settings.page_size, weight_bytes, ranks, boundless.num_weight_slots)


def _memory(settings: PlanSettings, spec: ModelSpec, ranks: int) -> dict[str, int]:
    """Bytes a rank: what may be used, what everything but attention and KV takes of it, and what is left."""
    usable = int(settings.hardware.memory_gib * settings.mem_fraction * GIB)
    parts = other_weight_bytes(spec, settings.dtype, ranks) | {"reserve": int(settings.hardware.reserve_gib * GIB)}
    return {"usable": usable, **parts, "attention_and_kv": usable - sum(parts.values())}


def _switch(geometry: ArenaGeometry, src: Layout, dst: Layout) -> Switch:
    """One direction at balanced load: every rank owns as many pages of each number mod T."""
    ranks = geometry.ranks
    owners, numbers = np.divmod(np.arange(ranks * ranks), ranks)
    moved = diff(State(src, ranks, numbers, owners), State(dst, ranks, numbers, owners))
    groups, pages = int(moved.weights.received.max()), int(moved.pages.received.sum())
    return Switch(
        weights=moved.weights.primitive.value,
        kv=moved.pages.primitive.value,
        weight_bytes_per_rank=Fraction(geometry.attention_bytes * groups, ranks),
        kv_bytes_per_token=Fraction(geometry.kv.token_bytes * pages, ranks * ranks**2),
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON types. Bytes throughout; `layouts` covers all layers, `switches` one layer."""
    settings, geometry = plan.settings, plan.geometry
    return {
        "model": settings.model.name,
        "hardware": settings.hardware.name,
        "ranks": geometry.ranks,
        "dtype": settings.dtype,
        "batch": settings.batch,
        "page_size": settings.page_size,
        "num_layers": plan.spec.num_layers,
        "attention_bytes_per_layer": geometry.attention_bytes,
        "kv_bytes_per_token_per_layer": geometry.kv.token_bytes,
        "memory_bytes_per_rank": plan.memory,
        "shortage": plan.shortage,
        "layouts": {name: _layout_json(plan, name) for name in LAYOUTS},
        "refused": plan.refused,
        "dop_frees_bytes_per_rank_over_dp": plan.dop_frees_bytes,
        "switches": {
            f"{src}->{dst}": None
            if (switch := plan.switches.get((src, dst))) is None
            else {
                "weights": switch.weights,
                "kv": switch.kv,
                "weight_bytes_per_rank": _number(switch.weight_bytes_per_rank),
                "kv_bytes_per_token": _number(switch.kv_bytes_per_token),
            }
            for src, dst in itertools.permutations(LAYOUTS, 2)
        },
    }


def _layout_json(plan: Plan, name: str) -> dict[str, int] | None:
    if name in plan.refused:
        return None
    fitting = plan.capacities[name]
    return {
        "attention_bytes_per_rank": fitting.attention_bytes,
        "page_slots_per_rank": fitting.page_slots,
        "kv_tokens": fitting.kv_tokens,
        "longest_context": fitting.longest_context,
    }


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, or 2 where an option cannot work (one line on stderr says why)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument in ("-h", "--help") for argument in arguments):
        print(usage("python -m splash.plan", "plan"))
        return 0
    try:
        composed = compose("plan", arguments)
        if "hardware" not in composed:
            raise ConfigError("hardware", f"choose with +hardware=NAME; one of {', '.join(options('hardware'))}")
        plan = make_plan(build(PlanSettings, composed))
    except SplashError as error:
        print(f"splash.plan: {error}", file=sys.stderr)
        return 2
    if plan.settings.format == "json":
        print(json.dumps(to_json(plan)))
    else:
        from splash.plan_tables import print_tables

        print_tables(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
