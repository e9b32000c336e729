"""What fits on which hardware in each layout, and what a switch between two layouts moves. Needs no accelerator.

    python -m splash.plan model=deepseek_v3 +hardware=h200 ranks=8 dtype=fp8

`make_plan` computes a `Plan`; `to_json` and `print_tables` show it.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from splash.core.capacity import Capacity, capacity, freed_bytes, geometry_for_budget
from splash.core.diff import diff
from splash.core.errors import CapacityError, ConfigError, SplashError
from splash.core.hardware import GIB, Hardware
from splash.core.layout import DOP, DP, LAYOUTS, Layout, check_layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State
from splash.core.spec import DTYPE_BYTES, ModelSpec, kv_format
from splash.model.config import load_model_config, parse_model_config
from splash.settings import build, compose, options, resolve_model_path, usage

if TYPE_CHECKING:
    from rich.table import Table

MIB = 1 << 20
MAX_RANKS = 128
NORM_BYTES = 2  # embeddings, LM head and norms stay in bfloat16 where weights are FP8
ROUTER_BYTES = 4  # routers are kept in float32


@dataclass(frozen=True)
class ModelChoice:
    """A model as conf/model describes it: a checkpoint directory, or the contents of a config.json."""

    name: str
    path: str | None = None
    config: Mapping[str, Any] | None = None

    def spec(self) -> ModelSpec:
        """Its dimensions. A path, where one is given, comes first.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ConfigError: neither a path nor a config is given.
        """
        if self.path is not None:
            return load_model_config(resolve_model_path(self.path)).spec
        if self.config is not None:
            return parse_model_config(self.config, f"model={self.name}").spec
        raise ConfigError("model.path", f"model {self.name!r} has neither a path nor a config; give one")


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
        shortage = str(error) if budget > 0 else f"the other weights need {_gib(-budget)} more than there is"
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
    element = DTYPE_BYTES[settings.dtype]
    wide = max(element, NORM_BYTES)
    dims, moe = spec.hidden_size, spec.moe
    usable = int(settings.hardware.memory_gib * settings.mem_fraction * GIB)
    num_moe = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    sharded_mlp = 3 * dims * spec.intermediate_size * (spec.num_layers - num_moe)
    experts = router = 0
    if moe is not None:
        experts = math.ceil(moe.num_experts / ranks) * 3 * dims * moe.intermediate_size * num_moe
        sharded_mlp += 3 * dims * moe.intermediate_size * moe.num_shared_experts * num_moe
        router = (dims + 1) * moe.num_experts * num_moe
    vocabulary = math.ceil(spec.vocab_size / ranks) * dims * (1 if spec.tie_word_embeddings else 2)
    query_rank = spec.q_lora_rank or 0
    projections = dims * (query_rank + spec.latent_dim)
    norms = 2 * dims + query_rank + spec.kv_lora_rank
    if spec.indexer is not None:
        index = spec.indexer
        projections += index.num_heads * (spec.query_input_dim * index.head_dim + dims) + dims * index.head_dim
        norms += 2 * index.head_dim
    parts = {
        "experts": experts * element,
        "dense_and_shared_mlp": math.ceil(sharded_mlp / ranks) * element,
        "embedding_and_lm_head": vocabulary * wide,
        "replicated": projections * spec.num_layers * element
        + (norms * spec.num_layers + dims) * wide
        + router * ROUTER_BYTES,
        "reserve": int(settings.hardware.reserve_gib * GIB),
    }
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


def print_tables(plan: Plan) -> None:
    """Print the plan for people."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    settings, geometry = plan.settings, plan.geometry
    console.print()
    console.print(
        Text.assemble(
            ("SPLASH plan  ", "bold"),
            (settings.model.name, "bold cyan"),
            f"  {settings.dtype}  on  {geometry.ranks} x ",
            (settings.hardware.name, "bold cyan"),
        )
    )
    console.print(
        f"Q-B, KV-B and O take [bold]{_mib(geometry.attention_bytes)}[/] a layer, a cached token "
        f"[bold]{geometry.kv.token_bytes}[/] bytes a layer; {plan.spec.num_layers} layers, pages of "
        f"{settings.page_size} tokens.\n"
    )
    console.print(_memory_table(plan))
    if plan.shortage:
        console.print(f"[bold red]Does not fit:[/] {plan.shortage}.")
    if settings.dtype == "fp8" and settings.hardware.fp8_tflops is None:
        console.print(
            f"[yellow]{settings.hardware.name} has no FP8 arithmetic[/]; the sizes hold for any 8-bit format."
        )
    console.print()
    console.print(_layout_table(plan))
    console.print(
        "[dim]KV tokens: distinct tokens of the whole group at balanced load. "
        f"Longest context: of each of {settings.batch} equal requests.[/]"
    )
    if plan.refused:
        console.print(
            f"[yellow]Refused: {', '.join(plan.refused)}[/], which shard attention heads: "
            f"{geometry.ranks} ranks do not divide {plan.spec.num_heads} heads."
        )
    if plan.dop_frees_bytes is not None:
        console.print(_dop_line(plan))
    console.print()
    console.print(_switch_table(plan))
    console.print(
        "[dim]W: weights, MiB received a rank and layer. KV: bytes received a rank, layer and live token of the group.\n"
        "gather: all-gather. exchange: all-to-all. drop: nothing moves, memory is freed. same: nothing changes.[/]"
    )


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )


def _memory_table(plan: Plan) -> Table:
    hardware, memory = plan.settings.hardware, plan.memory
    labels = {
        "usable": f"{hardware.memory_gib:g} GiB x {plan.settings.mem_fraction:g}",
        "experts": "experts, expert-parallel",
        "dense_and_shared_mlp": "dense MLPs and shared experts, sharded",
        "embedding_and_lm_head": "embedding and LM head, vocabulary-parallel",
        "replicated": "Q-A, KV-A, indexer, norms and router, replicated",
        "reserve": "reserve for graphs, workspace and activations",
        "attention_and_kv": "left for attention weights and KV",
    }
    table = _table("Memory of a rank")
    table.add_column("")
    table.add_column("GiB", justify="right")
    for key, label in labels.items():
        taken = key not in ("usable", "attention_and_kv")
        style = None if taken else "bold" if memory[key] >= 0 else "bold red"
        table.add_row(label, f"{'-' if taken else ''}{memory[key] / GIB:,.2f}", style=style)
    return table


def _layout_table(plan: Plan) -> Table:
    table = _table("What fits")
    table.add_column("layout", style="bold cyan")
    table.add_column("projections")
    table.add_column("KV")
    for heading in ("attention / rank", "KV / rank", "KV tokens", "longest context"):
        table.add_column(heading, justify="right")
    best = max((fitting.kv_tokens for fitting in plan.capacities.values()), default=0)
    for name, layout in LAYOUTS.items():
        placement = (name, layout.projections.value, layout.kv.value)
        if name in plan.refused:
            table.add_row(*placement, *["refused"] * 4, style="dim")
            continue
        fitting = plan.capacities[name]
        kv_bytes = fitting.page_slots * plan.geometry.slot_bytes * plan.spec.num_layers
        tokens = f"{fitting.kv_tokens:,}"
        table.add_row(
            *placement,
            _gib(fitting.attention_bytes),
            _gib(kv_bytes),
            f"[bold green]{tokens}[/]" if best and fitting.kv_tokens == best else tokens,
            f"{fitting.longest_context:,}",
        )
    return table


def _dop_line(plan: Plan) -> str:
    """What sharding the projections is worth to request-owned KV."""
    assert plan.dop_frees_bytes is not None
    dop, dp = plan.capacities["dop"], plan.capacities["dp"]
    line = f"DOP frees [bold]{_gib(plan.dop_frees_bytes)}[/] a rank over DP-attention"
    if dp.kv_tokens:
        more = dop.kv_tokens - dp.kv_tokens
        line += f": room for {more:,} more tokens, {100 * more / dp.kv_tokens:.1f} % more"
    return line + "."


def _switch_table(plan: Plan) -> Table:
    table = _table("Switches, from row to column")
    table.add_column("", style="bold cyan", no_wrap=True)
    for name in plan.capacities:
        table.add_column(f"[bold cyan]{name}[/]", no_wrap=True)
    for src in plan.capacities:
        cells = ["[dim]·[/]" if src == dst else _switch_cell(plan.switches[src, dst]) for dst in plan.capacities]
        table.add_row(src, *cells, end_section=src != list(plan.capacities)[-1])
    return table


def _switch_cell(switch: Switch) -> str:
    words = {"none": "same", "discard": "drop", "all_gather": "gather", "all_to_all": "exchange"}
    styles = {"none": "dim", "discard": "green", "all_gather": "yellow", "all_to_all": "magenta"}
    weights = f"W  {words[switch.weights]}"
    if switch.weight_bytes_per_rank:
        weights += f" {float(switch.weight_bytes_per_rank) / MIB:,.1f}"
    kv = f"KV {words[switch.kv]}"
    if switch.kv_bytes_per_token:
        kv += f" {float(switch.kv_bytes_per_token):,.1f}"
    return f"[{styles[switch.weights]}]{weights}[/]\n[{styles[switch.kv]}]{kv}[/]"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


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
        print_tables(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
