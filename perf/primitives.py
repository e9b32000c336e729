"""What a switch moves a layer, by each way that the platform has: collectives, long extents and scattered pages.

    python -m perf.primitives --hardware cuda --ranks 2 --model deepseek_v3 --tokens 65536

Three movements of a layer: projections gathered (sharded to replicated), pages gathered (into replicated KV) and pages
exchanged (request to position, either way). Prints milliseconds a layer, the median of the slowest rank, with the bytes
that a rank receives and their rate. One GPU a rank is needed for figures that mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perf.common import report
from splash.core.memory import ArenaGeometry
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.model.choice import ModelChoice
from splash.platform import registry
from splash.platform.base import Rank
from splash.settings import build, compose

REPEATS = 9


def geometry_of(model: str, dtype: str, page_size: int, ranks: int, tokens: int) -> ArenaGeometry:
    """Arenas with room for the weights and for `tokens` on every rank twice."""
    spec = build(ModelChoice, compose("config", [f"model={model}"])["model"], "model.").spec()
    kv, element = kv_format(spec, dtype), DTYPE_BYTES[dtype]
    weights = ArenaGeometry(spec, kv, page_size, element, ranks, 1 << 40).num_weight_slots
    return ArenaGeometry(spec, kv, page_size, element, ranks, weights + 2 * -(-tokens // page_size))


def movements(rank: Rank, geometry: ArenaGeometry, tokens: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> (bytes that this rank receives, the movement)."""
    ranks, slot = rank.size, geometry.slot_bytes
    group_bytes = geometry.attention_bytes // ranks
    pages = tokens // geometry.page_size // ranks  # held by each rank
    share = pages // ranks  # exchanged with each
    first = geometry.num_weight_slots
    local = rank.arenas.local(0)
    own = local[: pages * slot].clone()
    peers = [peer for peer in range(ranks) if peer != rank.rank]
    scattered = np.random.default_rng(0).permutation(pages)

    def pull_weights() -> None:
        for peer in peers:
            runs = [geometry.run(module, peer) for module in geometry.modules]
            extents = np.array([(offset, offset, size) for offset, size in runs])
            rank.copies.copy(local, rank.arenas.peer(peer, 0), extents)

    def pull_pages(slots: np.ndarray, merged: bool) -> None:
        for place, peer in enumerate(peers):
            to = first + pages * (1 + place) + np.arange(len(slots))
            extents = np.stack((to * slot, (first + slots) * slot, np.full(len(slots), slot)), axis=1)
            whole = np.array([(int(extents[0, 0]), int(extents[0, 1]), slot * len(slots))])
            rank.copies.copy(local, rank.arenas.peer(peer, 0), whole if merged else extents)

    weights = local[:group_bytes].clone()
    gathered, exchanged = (ranks - 1) * pages * slot, (ranks - 1) * share * slot
    return {
        "weights, all-gather": (
            (ranks - 1) * group_bytes,
            lambda: rank.comm.all_gather(weights, [group_bytes] * ranks),
        ),
        "weights, pull": ((ranks - 1) * group_bytes, pull_weights),
        "pages gathered, all-gather": (gathered, lambda: rank.comm.all_gather(own, [len(own)] * ranks)),
        "pages gathered, pull of one extent": (gathered, lambda: pull_pages(np.arange(pages), True)),
        "pages gathered, pull of scattered pages": (gathered, lambda: pull_pages(scattered, False)),
        "pages exchanged, all-to-all": (
            exchanged,
            lambda: rank.comm.all_to_all(own[: share * ranks * slot], [share * slot] * ranks, [share * slot] * ranks),
        ),
        "pages exchanged, pull of one extent": (exchanged, lambda: pull_pages(np.arange(share), True)),
        "pages exchanged, pull of scattered pages": (exchanged, lambda: pull_pages(scattered[:share], False)),
    }


def measure(rank: Rank, geometry: ArenaGeometry, tokens: int) -> dict[str, dict[str, float]]:
    """Name -> milliseconds and rate."""

    def sync() -> None:
        if rank.device.type == "cuda":
            torch.cuda.synchronize()

    results = {}
    for name, (received, move) in movements(rank, geometry, tokens).items():
        times = []
        for _ in range(REPEATS):
            rank.comm.barrier()
            sync()
            started = time.perf_counter()
            move()
            sync()
            took = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=rank.device)
            times.append(float(rank.comm.all_gather(took, [1] * rank.size).max()))
        seconds = statistics.median(times[2:])
        results[name] = {"ms": seconds * 1e3, "mib": received / 2**20, "gb_s": received / seconds / 1e9}
    return results


def become_rank(args: argparse.Namespace) -> None:
    """One rank: rank 0 prints the results."""
    info: Mapping[str, Any] = json.loads(args.group)
    geometry = geometry_of(args.model, args.dtype, args.page_size, args.ranks, args.tokens)
    rank = registry.get_platform(args.hardware).join(info, args.rank, 60.0)
    results = measure(rank, geometry, args.tokens)
    rank.comm.barrier()
    if args.rank == 0:
        print(json.dumps(results))
    rank.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="deepseek_v3")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=65536, help="of the whole group")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--group", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        become_rank(args)
        return
    platform = registry.require(args.hardware)
    geometry = geometry_of(args.model, args.dtype, args.page_size, args.ranks, args.tokens)
    handle = platform.create_group(args.ranks, 1, geometry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "perf.primitives", *sys.argv[1:], "--rank", str(rank), "--group",
             json.dumps(dict(handle.info))],
            pass_fds=handle.fds,
            env={**os.environ, **platform.rank_environment(args.ranks)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    handle.close()
    assert not any(process.returncode for process in processes), "a rank failed"
    results = json.loads(outputs[0])
    for name, result in results.items():
        print(f"{name}: {result['ms']:.3f} ms for {result['mib']:.0f} MiB, {result['gb_s']:.0f} GB/s received")
    options = {key: getattr(args, key) for key in ("hardware", "ranks", "model", "dtype", "page_size", "tokens")}
    report("primitives", {**options, "movements": results}, args.out)


if __name__ == "__main__":
    main()
