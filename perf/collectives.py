"""Time the CPU's collectives: shared memory beside gloo, in real rank processes.

    python -m perf.collectives [--ranks 2 4] [--iterations 300]

Prints a table of medians in microseconds and one JSON line. The ceiling beside each figure is the time that the cores
take to move the bytes that the ranks must read and write, at the rate at which one copies a buffer of that size over
and over. It leaves out what waking and waiting cost, which is all there is to a small payload.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

from perf.ranks import rank_zero

SIZES = (64, 4 << 10, 64 << 10, 1 << 20)
OPERATIONS = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
COLLECTIVES = ("shm", "gloo")
TIMEOUT_S = 300.0


def measure(ranks: int, collectives: str, iterations: int) -> dict[str, float]:
    """Median microseconds by "operation bytes", timed by rank 0 of a fresh group. `bytes` are a rank's input."""
    from splash.core.memory import ArenaGeometry
    from splash.core.spec import ModelSpec, RopeSpec, kv_format
    from splash.platform.cpu.platform import CpuPlatform

    spec = ModelSpec("bench", 1, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())
    host = CpuPlatform(collectives)
    handle = host.create_group(ranks, 1, ArenaGeometry(spec, kv_format(spec, "float32"), 16, 4, ranks, 64))
    printed = rank_zero("collectives", ["--iterations", str(iterations)], host, handle, ranks, TIMEOUT_S)
    result: dict[str, float] = json.loads(printed)
    return result


def run_rank(rank: int, group: str, iterations: int) -> dict[str, float]:
    """In a rank: every operation at every size."""
    import torch

    from splash.platform.cpu.platform import CpuPlatform

    comm = CpuPlatform().join(json.loads(group), rank, 60.0).comm
    figures = {}
    with torch.inference_mode():
        for num_bytes in SIZES:
            x = torch.ones(num_bytes // 4)
            share = [len(x) // comm.size] * comm.size
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": lambda x=x: comm.all_reduce(x),
                "all_gather": lambda x=x: comm.all_gather(x, [len(x)] * comm.size),
                "reduce_scatter": lambda x=x, share=share: comm.reduce_scatter(x[: sum(share)], share),
                "all_to_all": lambda x=x, share=share: comm.all_to_all(x[: sum(share)], share, share),
            }
            if num_bytes == SIZES[0]:
                calls["barrier"] = comm.barrier
            for name, call in calls.items():
                x.zero_()  # repeated sums stay finite
                figures[name if name == "barrier" else f"{name} {num_bytes}"] = median_us(
                    call, iterations if num_bytes < 1 << 20 else max(10, iterations // 10)
                )
    comm.close()
    return figures


def median_us(call: Callable[[], object], iterations: int) -> float:
    """Median microseconds of a call."""
    for _ in range(10):
        call()
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def copy_rate(num_bytes: int) -> float:
    """Bytes a second that one core moves when it copies a buffer of that size, reads and writes counted."""
    import torch

    torch.set_num_threads(1)
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)

    def copy_often() -> None:
        for _ in range(100):
            target.copy_(source)

    return 2 * num_bytes * 100 / (median_us(copy_often, 5) * 1e-6)


def bytes_moved(name: str, ranks: int) -> float:
    """Bytes that a rank reads and writes: its input into the mailbox, and what it must see out of the mailboxes."""
    operation, _, size = name.partition(" ")
    payload = int(size or 0)
    seen = {"all_reduce": ranks, "all_gather": ranks, "reduce_scatter": 1, "all_to_all": 1, "barrier": 0}[operation]
    written = {"all_reduce": 1, "all_gather": ranks, "reduce_scatter": 1 / ranks, "all_to_all": 1, "barrier": 0}[
        operation
    ]
    return payload * (2 + seen + written)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes")
    parser.add_argument("--iterations", type=int, default=300, help="calls a median is taken of")
    for hidden in ("--rank", "--group"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        print(json.dumps(run_rank(int(options.rank), options.group, options.iterations)))
        return
    rates = {num_bytes: copy_rate(num_bytes) for num_bytes in SIZES}
    cores = len(os.sched_getaffinity(0))
    record: dict[str, object] = {
        "benchmark": "collectives",
        "unit": "us",
        "cores": cores,
        "machine": platform.machine(),
        "copy_gb_s": {num_bytes: round(rate / 1e9, 1) for num_bytes, rate in rates.items()},
    }
    print(f"{cores} cores, one copies {rates[SIZES[-1]] / 1e9:.1f} GB/s; medians in microseconds")
    for ranks in options.ranks:
        figures = {collectives: measure(ranks, collectives, options.iterations) for collectives in COLLECTIVES}
        record[f"{ranks} ranks"] = figures
        print(f"\n{ranks} ranks{'':18}{'ceiling':>10}{'shm':>10}{'gloo':>10}")
        for name in sorted(figures["shm"], key=lambda name: (OPERATIONS.index(name.split()[0]), len(name), name)):
            # With more ranks than cores the ranks take turns.
            rate = rates[int(name.partition(" ")[2] or SIZES[0])]
            ceiling = bytes_moved(name, ranks) / rate * 1e6 * max(1.0, ranks / cores)
            print(f"{name:25}{ceiling:10.1f}{figures['shm'][name]:10.1f}{figures['gloo'][name]:10.1f}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
