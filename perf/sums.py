"""Time short sums over ranks that have a GPU each: one kernel over mapped memory beside NCCL, in one run, by size.

    python -m perf.sums --ranks 2 [--bytes 14336 57344 229376 ...] [--parts 2048 4096 8192] [--out FILE]

For each operation and size, a graph holds the same sum several times over; figures are microseconds of one, medians
over rounds in which NCCL and the kernel, with parts of several sizes a program, take turns. The ceiling is the bytes
that a rank must read from its peers over the rate of a large copy from one; the shortest size shows what meeting costs.
Every result is checked before it is timed. Without a GPU the ranks share the CPU's memory and kernels are interpreted
(TRITON_INTERPRET=1), with one choice of parts and beside the host's own collectives: that shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from perf.common import report
from perf.gpu import DTYPE, HAS_GPU, one_time, recorded, rounded, show
from perf.ranks import rank_zero
from splash.core.memory import ArenaGeometry
from splash.core.spec import ModelSpec, RopeSpec, kv_format
from splash.platform.base import Arenas, Communicator, Platform, Rank
from splash.platform.cuda.comm import ShortSumsCommunicator
from splash.platform.registry import get_platform
from splash.platform.triton.sums import PeerSums, region_bytes

SIZES = (2048, 14336, 57344, 114688, 229376, 458752, 917504)  # up to 64 rows of 7,168 in bf16
PARTS = (2048, 4096, 8192, 16384)
REPEATED = 20 if HAS_GPU else 1  # sums in a graph
COPIED = 256 << 20 if HAS_GPU else 1 << 16
TIMEOUT_S = 540.0
SPEC = ModelSpec("bench", 1, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())


def geometry(ranks: int) -> ArenaGeometry:
    """Of arenas in which one long copy from a peer fits."""
    kv = kv_format(SPEC, "float32")
    return ArenaGeometry(SPEC, kv, 16, 4, ranks, -(-COPIED // (16 * kv.latent_bytes)))


def spawn(ranks: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that rank 0 of a fresh group measures."""
    platform: Platform = get_platform("cuda" if HAS_GPU else "cpu")
    handle = platform.create_group(ranks, 1, geometry(ranks), "triton" if HAS_GPU else "auto")
    printed = rank_zero("sums", options, platform, handle, ranks, TIMEOUT_S)
    rows: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return rows


def measure(rank: Rank, sizes: Sequence[int], parts: Sequence[int], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """In a rank: every operation and size."""
    host = rank.host or rank.comm
    library = rank.comm.rest if isinstance(rank.comm, ShortSumsCommunicator) else rank.comm
    longest = max(sizes)
    regions = [_regions(rank, region_bytes(longest, part)) for part in parts]
    kernels = {
        f"parts of {part}": PeerSums(region, rank.rank, rank.size, 60.0, longest, part)
        for part, region in zip(parts, regions, strict=True)
    }
    rate = peer_rate(rank)
    rows = []
    for size in sizes:
        filled = torch.randn(size // DTYPE.itemsize, generator=torch.Generator().manual_seed(rank.rank))
        filled = filled.to(rank.device, DTYPE)
        counts = [len(filled) // rank.size] * rank.size
        even = sum(counts)
        ways: dict[str, Communicator | PeerSums] = {"nccl" if HAS_GPU else "host": library, **kernels}
        for operation in ("all_reduce", "reduce_scatter"):
            x = filled.clone()
            calls: dict[str, Callable[[], object]] = {}
            for name, way in ways.items():
                call = _call(way, operation, x[:even], counts)
                x.copy_(filled)
                _check(call(), filled[:even], rank, operation)

                def often(call: Callable[[], object] = call) -> None:
                    for _ in range(REPEATED):
                        call()

                calls[name] = recorded(often)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, timed in calls.items():
                    found = []
                    for _ in range(repeats):
                        x.copy_(filled)
                        host.barrier()
                        found.append(one_time(timed) * 1e3 / REPEATED)
                    times[name].append(statistics.median(found))
            read = (rank.size - 1) * even * DTYPE.itemsize // (1 if operation == "all_reduce" else rank.size)
            first = statistics.median(next(iter(times.values())))
            for name, values in times.items():
                us = statistics.median(values)
                row = {"operation": operation, "bytes": size, "by": name, "us": us, "ceiling_us": read / rate * 1e6}
                rows.append(rounded(row | {"of_first": first / us, "spread": max(values) / min(values)}))
    host.barrier()  # nobody's memory goes while a peer reads it
    for region in regions:
        if region is not rank.arenas:
            region.close()
    return rows


def _call(way: Communicator | PeerSums, operation: str, x: torch.Tensor, counts: list[int]) -> Callable[[], object]:
    return (lambda: way.all_reduce(x)) if operation == "all_reduce" else (lambda: way.reduce_scatter(x, counts))


def _check(got: object, x: torch.Tensor, rank: Rank, operation: str) -> None:
    """The sum against that of everybody's inputs, gathered over the host's memory."""
    gathered = (rank.host or rank.comm).all_gather(x.cpu().view(1, -1), [1] * rank.size)
    want = gathered.float().sum(0)
    if operation == "reduce_scatter":
        want = want.chunk(rank.size)[rank.rank]
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got.float().cpu(), want, atol=5e-2, rtol=2e-2)


def peer_rate(rank: Rank) -> float:
    """Bytes a second of a long copy from the next rank, while all do so."""
    source = rank.arenas.peer((rank.rank + 1) % rank.size, 0)[:COPIED]
    target = torch.empty_like(source)
    timed = recorded(lambda: target.copy_(source), graph=False)
    (rank.host or rank.comm).barrier()
    return len(source) / statistics.median(one_time(timed) for _ in range(5)) * 1e3


def _regions(rank: Rank, num_bytes: int) -> Arenas:
    """Memory of its own that all ranks map: on the CPU the arenas, which nothing else uses."""
    if not HAS_GPU:
        return rank.arenas
    from splash.platform.cuda.arena import MappedArenas

    assert rank.host is not None
    return MappedArenas(rank.host, 1, num_bytes, rank.device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.sums", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(SIZES), help="of an input")
    parser.add_argument("--parts", type=int, nargs="+", default=list(PARTS), help="bytes that a program takes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of NCCL and the kernel")
    parser.add_argument("--repeats", type=int, default=20, help="of each in a turn")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    for hidden in ("--rank", "--group"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.group:
        platform = get_platform("cuda" if HAS_GPU else "cpu")
        rank = platform.join(json.loads(options.group), int(options.rank), 120.0)
        with torch.inference_mode():
            rows = measure(rank, options.bytes, options.parts, options.rounds, options.repeats)
        print(json.dumps(rows), flush=True)
        os._exit(0)  # graphs hold NCCL's kernels, with which a process would not end
    if HAS_GPU and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks: {options.ranks} ranks need as many GPUs, and {torch.cuda.device_count()} are here")
    if not HAS_GPU and len(options.parts) > 1:
        parser.error("--parts: on the CPU there is memory for one choice")
    passed = [f"--bytes {' '.join(map(str, options.bytes))}", f"--parts {' '.join(map(str, options.parts))}"]
    passed += [f"--rounds {options.rounds}", f"--repeats {options.repeats}"]
    rows = spawn(options.ranks, " ".join(passed).split())
    for row in rows:
        show(row)
    report("sums", {"ranks": options.ranks, "rounds": options.rounds, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
