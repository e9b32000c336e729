"""A plan as tables for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splash.core.hardware import GIB
from splash.core.layout import LAYOUTS

if TYPE_CHECKING:
    from splash.plan import Plan, Switch

MIB = 1 << 20


def print_tables(plan: Plan) -> None:
    """Print the plan for people."""
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
        "[dim]W: weights, MiB received a rank and layer. "
        "KV: bytes received a rank, layer and live token of the group.\n"
        "gather: all-gather. exchange: all-to-all. drop: nothing moves, memory is freed. same: nothing changes.[/]"
    )


def _table(title: str) -> Table:
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
