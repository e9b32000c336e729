"""What a run of `perf.switch` says of each direction, as numbers and as tables."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from perf.common import spread
from perf.switch_walk import Direction, Sample, Samples
from splash.core.diff import diff
from splash.core.layout import LAYOUTS
from splash.core.ownership import State

if TYPE_CHECKING:
    from rich.table import Table

WAYS = ("blocking", "layerwise", "precopy")
PREFILL_WAYS = WAYS[:2]
BUSY = 0.2  # cores that other processes may use before the figures are worth nothing
WORDS = {"none": "same", "discard": "drop", "all_gather": "gather", "all_to_all": "exchange"}
MIB = 1 << 20


def summarise(direction: Direction, decode: Samples, prefill: Samples, rate: float, ranks: int) -> dict[str, Any]:
    """A direction's row. Times in milliseconds."""
    pages = np.arange(ranks * ranks)  # of requests of which every rank owns one
    before, after = (State(LAYOUTS[name], ranks, pages // ranks, pages % ranks) for name in direction)
    moved = diff(before, after)
    records = [sample.record for sample in decode[direction, "blocking"]]
    kv_bytes, weight_bytes = (
        [round(statistics.median(values)) for values in zip(*received, strict=True)]
        for received in zip(*((r.kv_bytes_received, r.weight_bytes_received) for r in records), strict=True)
    )
    most = max(a + b for a, b in zip(kv_bytes, weight_bytes, strict=True))
    return {
        "direction": "->".join(direction),
        "kv": moved.pages.primitive.value,
        "weights": moved.weights.primitive.value,
        "kv_bytes_received": kv_bytes,
        "weight_bytes_received": weight_bytes,
        "ceiling_ms": _ms(most / rate),
        "decode": _compare({way: decode[direction, way] for way in WAYS}, most > 0),
        "prefill": _compare(
            {way: prefill[direction, way] for way in PREFILL_WAYS if prefill[direction, way]}, most > 0
        ),
    }


def _compare(samples: dict[str, list[Sample]], moves: bool) -> dict[str, Any]:
    """Each way beside blocking. Where nothing `moves` there is nothing to be better at."""
    if not samples:
        return {}
    ready = statistics.median(sample.ready for of_way in samples.values() for sample in of_way)
    blocking = statistics.median(sample.added for sample in samples["blocking"])
    result: dict[str, Any] = {"ready_ms": _ms(ready)}
    for way, of_way in samples.items():
        added = statistics.median(sample.added for sample in of_way)
        records = [sample.record for sample in of_way]
        received = [sum(record.kv_bytes_received) + sum(record.weight_bytes_received) for record in records]
        slowdowns = [sample.slowdown for sample in of_way if sample.slowdown is not None]
        result[way] = {
            "samples": len(of_way),
            "methods": dict(Counter(record.method for record in records)),
            "added_ms": spread([sample.added for sample in of_way], digits=3),
            "added_to_step_ms": spread([sample.added_step for sample in of_way], digits=3),
            "below_blocking": round(1 - added / blocking, 3) if moves and blocking > 0 else None,
            "of_step": round(added / ready, 3),
            "record_added_ms": round(statistics.median(record.added_ms for record in records), 3),
            "planning_ms": round(statistics.median(record.planning_ms for record in records), 3),
            "bytes_received": round(statistics.median(received)),
            "background_steps": round(statistics.fmean(record.background_steps for record in records), 1),
            "copying_slowdown": round(statistics.fmean(slowdowns), 3) if slowdowns else None,
        }
    return result


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def print_tables(run: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Decode, then prefill where it was measured."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if run["others_busy_cores"]["p50"] > BUSY:
        console.print(f"NOT TO BE RELIED ON: other processes kept {run['others_busy_cores']['p50']:.1f} cores busy")
    if run["tokens_wrong"] and run["dtype"] == "float32":  # narrower types round otherwise in another layout
        console.print("WRONG OUTPUT: tokens differ from those without switches")
    console.print(
        f"{run['model']}, {run['dtype']}, {run['ranks']} ranks, {run['batch']} requests of about {run['context']} "
        f"tokens, {run['rounds']} rounds; {run['tokens_wrong']} of {run['tokens_compared']} tokens differ from an "
        f"unswitched run; a rank copies {run['copy_gb_s_a_rank']:.1f} GB/s out of another process while all do, and "
        "the ceiling is the time for what the busiest rank receives (MiB)"
    )
    work = {"decode": "decode", "prefill": f"prefill of {run['prefill_chunk']} tokens beside the decodes"}
    for part in (part for part in work if rows[0][part]):
        console.print(_table(f"{work[part]}: ms added to the committing step", part, rows))
        moving = [row[part] for row in rows if row["ceiling_ms"]]
        for way in (way for way in WAYS if moving and way in moving[0]):
            mean, blocking = (statistics.fmean(row[w]["added_ms"]["p50"] for row in moving) for w in (way, WAYS[0]))
            below = f", {1 - mean / blocking:.0%} below blocking" if way != WAYS[0] else ""
            console.print(f" {way} adds {mean:.2f} ms on average of {len(moving)} directions that move anything{below}")


def _table(title: str, part: str, rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1))
    headings = ["\ndirection", "\nKV", "\nweights", "\nceiling", "ready\nstep", "blocking\np50", "\np95"]
    headings += ["layer-wise\np50", "\np95", "below\nblocking"]
    if part == "decode":
        headings += ["pre-copy\np50", "\np95", "below\nblocking", "of\nstep", "steps\nahead", "slower\nby"]
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 3 else "right", no_wrap=True)
    for row in rows:
        line = [row["direction"]]
        for name, received in (("kv", row["kv_bytes_received"]), ("weights", row["weight_bytes_received"])):
            line.append(WORDS[row[name]] + (f" {max(received) / MIB:.1f}" if any(received) else ""))
        figures = row[part]
        line += [f"{row['ceiling_ms']:.2f}", f"{figures['ready_ms']:.2f}", *_added(figures["blocking"])]
        line += [*_added(figures["layerwise"]), _percent(figures["layerwise"]["below_blocking"])]
        if part == "decode":
            precopy = figures["precopy"]
            line += [*_added(precopy), _percent(precopy["below_blocking"]), _percent(precopy["of_step"])]
            ahead = f"{precopy['background_steps']:.1f}" if "precopy" in precopy["methods"] else "none"
            line += [ahead, _percent(precopy["copying_slowdown"])]
        table.add_row(*line)
    return table


def _added(way: dict[str, Any]) -> tuple[str, str]:
    return f"{way['added_ms']['p50']:.2f}", f"{way['added_ms']['p95']:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
