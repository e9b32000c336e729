"""How fast a switch moves its bytes: collectives, long extents, scattered pages, and each of the twenty directions.

    python -m perf.primitives --hardware cuda --ranks 2 --model deepseek_v3 --num-layers 8 --tokens 262144

Everything is moved in all layers, as a switch does, and timed from a barrier to the end of the device's work on the
slowest rank: the median of several times. The ceiling is one large copy from a peer, all ranks at once, in the same
run. The directions move exactly what the difference of ownership asks for, by the manifest and the transfer that
serving uses: pages as the allocator lays them for requests that grow side by side, and pages strewn over the arena. One
GPU a rank is needed for figures that mean anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perf.common import report
from perf.ranks import rank_zero
from splash.core.layout import LAYOUTS, Layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import HeldPages, PagePool, PageTable
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.core.step import NO_SLOT
from splash.model.choice import ModelChoice
from splash.platform import registry
from splash.platform.base import Rank
from splash.settings import build, compose
from splash.switch.counts import count
from splash.switch.manifest import Occupancy, plan_switch, rank_copies
from splash.switch.transfer import LayerCopies

TIMEOUT_S = 300.0
REPEATS = 7
WARM_UP = 2
CEILING_BYTES = 256 << 20
GROWTH = 32  # pages that a request grows by at a time, while others grow beside it


def geometry_of(args: argparse.Namespace) -> ArenaGeometry:
    """Arenas with room for the weights and for all tokens on every rank twice."""
    overrides = [f"model={args.model}", f"model.num_layers={args.num_layers}"]
    spec = build(ModelChoice, compose("config", overrides)["model"], "model.").spec()
    kv, element = kv_format(spec, args.dtype), DTYPE_BYTES[args.dtype]
    weights = ArenaGeometry(spec, kv, args.page_size, element, args.ranks, 1 << 40).num_weight_slots
    num_slots = weights + 2 * -(-args.tokens // args.page_size) + args.requests
    return ArenaGeometry(spec, kv, args.page_size, element, args.ranks, num_slots)


class Bench:
    """One rank, and how it measures."""

    def __init__(self, rank: Rank, geometry: ArenaGeometry) -> None:
        self.rank = rank
        self.geometry = geometry
        self.layers = range(geometry.spec.num_layers)
        self.local = [rank.arenas.local(layer) for layer in self.layers]

    def sync(self) -> None:
        """Wait for the device."""
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, move: Callable[[], object]) -> float:
        """Median seconds of the slowest rank."""
        times = []
        for _ in range(WARM_UP + REPEATS):
            self.rank.comm.barrier()
            self.sync()
            started = time.perf_counter()
            move()
            self.sync()
            micros = int((time.perf_counter() - started) * 1e6)
            times.append(max(most for (most,) in self.rank.exchange([micros], settled=False)) / 1e6)
        return statistics.median(times[WARM_UP:])

    def ceiling(self) -> float:
        """Bytes a second of one large copy from a peer, in one extent."""
        size = min(CEILING_BYTES, len(self.local[0]) // 2)
        whole = np.array([[size, 0, size]])  # the front of one into the back of another
        peer = self.rank.arenas.peer((self.rank.rank + 1) % self.rank.size, 0)
        transfer = self.rank.copies.prepare(whole, [self.local[0]], [peer])
        return size / self.seconds(transfer.run)


def collectives(bench: Bench, tokens: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> (bytes that a rank receives, the movement) of what a switch would move with collectives."""
    rank, geometry = bench.rank, bench.geometry
    ranks, slot = rank.size, geometry.slot_bytes
    group_bytes = geometry.attention_bytes // ranks
    pages = tokens // geometry.page_size // ranks  # held by each rank
    share = pages // ranks  # exchanged with each
    weights = [own[:group_bytes].clone() for own in bench.local]
    own = [arena[: pages * slot] for arena in bench.local]
    parts = [arena[: share * ranks * slot] for arena in bench.local]
    counts, others = [share * slot] * ranks, (ranks - 1) * len(bench.layers)
    return {
        "weights, all-gather": (
            others * group_bytes,
            lambda: [rank.comm.all_gather(x, [group_bytes] * ranks) for x in weights],
        ),
        "pages gathered, all-gather": (
            others * pages * slot,
            lambda: [rank.comm.all_gather(x, [len(x)] * ranks) for x in own],
        ),
        "pages exchanged, all-to-all": (
            others * share * slot,
            lambda: [rank.comm.all_to_all(x, counts, counts) for x in parts],
        ),
    }


def fill(geometry: ArenaGeometry, layout: Layout, num_requests: int, num_pages: int) -> Occupancy:
    """Requests that grew side by side, dealt out over the ranks, all of whose pages are full."""
    pool = PagePool.of_geometry(geometry, layout)
    held = [HeldPages(request % geometry.ranks, geometry.ranks) for request in range(num_requests)]
    each = num_pages // num_requests
    for grown in range(0, each, GROWTH):
        for pages in held:
            assert pool.grow(pages, min(GROWTH, each - grown))
    return Occupancy(
        layout=layout,
        requests=tuple(range(num_requests)),
        owners=tuple(pages.owner for pages in held),
        written=(each * geometry.page_size,) * num_requests,
        tables=tuple(pages.table for pages in held),
    )


def strew(occupancy: Occupancy, geometry: ArenaGeometry) -> Occupancy:
    """The same pages in slots at random, above those of weights."""
    rng = np.random.default_rng(0)
    usable = np.arange(geometry.num_weight_slots, geometry.num_slots)
    slots_T = [rng.permutation(usable) for _ in range(geometry.ranks)]
    tables, taken = [], [0] * geometry.ranks
    for table in occupancy.tables:
        slots_cT = table.slots_cT.copy()
        for rank in range(geometry.ranks):
            held = np.flatnonzero(slots_cT[:, rank] != NO_SLOT)
            slots_cT[held, rank] = slots_T[rank][taken[rank] : taken[rank] + len(held)]
            taken[rank] += len(held)
        tables.append(PageTable(geometry.ranks, slots_cT))
    return replace(occupancy, tables=tuple(tables))


def direction(bench: Bench, occupancy: Occupancy, target: Layout) -> dict[str, Any]:
    """One direction: bytes by rank as planned and as moved, the time to make the tables, and that of the movement."""
    rank, geometry = bench.rank, bench.geometry
    planned = plan_switch(occupancy, target, occupancy.owners, geometry, epoch=0)
    counts = count(planned.manifest, geometry)
    started = time.perf_counter()
    copies = LayerCopies(rank_copies(planned.manifest, geometry, rank.rank), geometry, rank)
    bench.sync()
    table_ms = (time.perf_counter() - started) * 1e3
    num_layers = len(bench.layers)
    moved = (copies.kv_bytes + copies.weight_bytes) * num_layers
    asked = [kv + weights for kv, weights in zip(counts.kv_bytes, counts.weight_bytes, strict=True)]
    if moved != asked[rank.rank]:
        raise SystemExit(f"{occupancy.layout} -> {target}: {moved} bytes moved, {asked[rank.rank]} in the difference")
    assert not copies.staging_bytes, "there is room for everything"
    seconds = bench.seconds(lambda: copies.read_first(num_layers)) if max(asked) else 0.0
    return {
        "kv_bytes": list(counts.kv_bytes),
        "weight_bytes": list(counts.weight_bytes),
        "table_ms": table_ms,
        "ms": seconds * 1e3,
        "gb_s": max(asked) / seconds / 1e9 if seconds else None,
    }


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, on every rank alike."""
    pages = args.tokens // args.page_size
    result: dict[str, Any] = {"ceiling_gb_s": bench.ceiling() / 1e9, "collectives": {}, "directions": {}}
    for name, (received, move) in collectives(bench, args.tokens).items():
        seconds = bench.seconds(move)
        result["collectives"][name] = {"bytes": received, "ms": seconds * 1e3, "gb_s": received / seconds / 1e9}
    for name, layout in LAYOUTS.items():
        allocated = fill(bench.geometry, layout, args.requests, pages)
        for kind, occupancy in (("allocated", allocated), ("strewn", strew(allocated, bench.geometry))):
            for target in LAYOUTS.values():
                if target != layout:
                    result["directions"].setdefault(f"{name}->{target.name}", {})[kind] = direction(
                        bench, occupancy, target
                    )
    result["ceiling_again_gb_s"] = bench.ceiling() / 1e9
    return result


def become_rank(args: argparse.Namespace) -> None:
    """One rank: rank 0 prints the results."""
    torch.set_grad_enabled(False)
    info: Mapping[str, Any] = json.loads(args.group)
    rank = registry.get_platform(args.hardware).join(info, args.rank, 60.0)
    results = measure(Bench(rank, geometry_of(args)), args)
    rank.comm.barrier()
    if args.rank == 0:
        print(json.dumps(results))
    rank.close()


def run_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """A process for each rank; what rank 0 measured."""
    platform = registry.require(args.hardware)
    geometry = geometry_of(args)
    handle = platform.create_group(args.ranks, geometry.spec.num_layers, geometry)
    measured: dict[str, Any] = json.loads(
        rank_zero("primitives", sys.argv[1:], platform, handle, args.ranks, TIMEOUT_S)
    )
    return measured


def print_results(result: dict[str, Any], num_layers: int) -> None:
    """A line for each movement: all layers, one layer, the rate and its share of the ceiling."""
    ceiling = max(result["ceiling_gb_s"], result["ceiling_again_gb_s"])
    print(f"ceiling: {result['ceiling_gb_s']:.0f} GB/s at first, {result['ceiling_again_gb_s']:.0f} GB/s at last")

    def line(name: str, row: dict[str, Any], received: int) -> str:
        return (
            f"{name}: {row['ms']:.2f} ms for {received / 2**20:.0f} MiB, {row['ms'] / num_layers:.3f} ms a layer, "
            f"{row['gb_s']:.0f} GB/s, {row['gb_s'] / ceiling:.0%} of the ceiling"
        )

    for name, row in result["collectives"].items():
        print(line(name, row, row["bytes"]))
    for name, kind in itertools.product(result["directions"], ("allocated", "strewn")):
        row = result["directions"][name][kind]
        received = max(kv + weights for kv, weights in zip(row["kv_bytes"], row["weight_bytes"], strict=True))
        if received:
            row["of_ceiling"] = row["gb_s"] / ceiling
            print(f"{line(f'{name}, {kind}', row, received)}, tables {row['table_ms']:.1f} ms")
        else:
            print(f"{name}, {kind}: nothing moves")


def main() -> None:
    """Parse the command line, measure, print, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="deepseek_v3")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=262144, help="of the whole group")
    parser.add_argument("--requests", type=int, default=16, help="that have the tokens")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--group", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        become_rank(args)
        return
    result = run_ranks(args)
    print_results(result, args.num_layers)
    options = ("hardware", "ranks", "model", "num_layers", "dtype", "page_size", "tokens", "requests")
    report("primitives", {**{key: getattr(args, key) for key in options}, **result}, args.out)


if __name__ == "__main__":
    main()
