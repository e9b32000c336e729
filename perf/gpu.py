"""What benchmarks of kernels share: times on the device, ceilings, and a check of every result before it is timed.

Without a GPU they run on the CPU, with Triton's interpreter (`TRITON_INTERPRET=1`) and the smallest shapes: that shows
that a benchmark works, and its times mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

TOLERANCE = 2e-2  # of bf16 results, |got - want| / |want|
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32  # Triton's interpreter computes wrongly in bfloat16


def recorded(call: Callable[[], object], graph: bool = True) -> Callable[[], object]:
    """The call, warm, as a graph's replay where that is wanted and there is a GPU."""
    call()
    if not HAS_GPU:
        return call
    torch.cuda.synchronize()
    timed = call
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):  # NCCL has a thread that watches
            call()
        timed = captured.replay
    for _ in range(2):
        timed()
    return timed


def one_time(timed: Callable[[], object]) -> float:
    """Milliseconds of one call on the device."""
    if not HAS_GPU:
        began = time.perf_counter()
        timed()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    timed()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def milliseconds(call: Callable[[], object], repeats: int = 20, graph: bool = True) -> float:
    """Median time of a call on the device."""
    timed = recorded(call, graph)
    return statistics.median(one_time(timed) for _ in range(repeats))


def in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int = 20, rounds: int = 5, graph: bool = True
) -> dict[str, list[float]]:
    """Milliseconds by name: the medians of each round, in which every call has its turn.

    So the calls are compared on the same machine in the same minute, and the spread over rounds says what noise is.
    """
    timed = {name: recorded(call, graph) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in timed.items():
            found[name].append(statistics.median(one_time(call) for _ in range(repeats)))
    return found


def ceilings() -> dict[str, float]:
    """Copy bandwidth in GB/s, reads and writes, and bf16 matrix rate in TFLOP/s."""
    size, side = (4 << 30, 8192) if HAS_GPU else (1 << 20, 64)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), graph=False)
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    gemm_ms = milliseconds(lambda: a @ b)
    return {"copy_gb_s": 2 * source.numel() / copy_ms / 1e6, "gemm_tflop_s": 2 * side**3 / gemm_ms / 1e9}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, checked against the tolerance."""
    found = ((got.float() - want.float()).norm() / want.float().norm()).item()
    if not found < TOLERANCE:
        raise SystemExit(f"wrong: the error is {found:.3g}, at most {TOLERANCE} is right")
    return found


def show(row: Mapping[str, Any]) -> None:
    """A line of a table."""
    texts = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
    print("  ".join(texts), flush=True)


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it is recorded."""
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
