"""What one rank of a group measures: `python -m splash.calibrate_rank`, started by `splash.calibrate` and nobody else.

All ranks measure the same at the same time, so that what they share (memory bandwidth, links) is shared as in serving.
The job arrives as JSON in the first argument; results leave as one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from splash.core.memory import ArenaGeometry
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.engine.worker import die_with_parent
from splash.model.arena import LayerArena
from splash.model.checkpoint import torch_dtype
from splash.model.config import parse_model_config
from splash.platform.base import AttentionBatch, Rank
from splash.platform.registry import get_platform

MIB = 1 << 20
FEW = 8  # a part of the heads, with which decode reads more than it computes
QUEUED = 10  # pieces of work timed together on a device that is queued to


class Job(msgspec.Struct, frozen=True):
    """What a rank is to be. `group` is the platform's handle; the arenas are those of the model."""

    platform: str
    group: dict[str, int | str | list[int]]
    rank: int
    ranks: int
    model_config: dict[str, Any]
    dtype: str
    page_size: int
    num_slots: int
    timeout_s: float
    budget_s: float


@dataclass(frozen=True)
class Sizes:
    """How much to measure with: small on processors, large on accelerators."""

    products: tuple[tuple[int, int, int], ...]
    copy_bytes: int
    matrix: int
    message_bytes: int
    context: int
    rows: int


CPU_SIZES = Sizes(((64, 256, 1536), (256, 512, 512), (512, 256, 768), (512, 768, 768)), 32 * MIB, 2048, MIB, 1024, 128)
ACCELERATOR_SIZES = Sizes(
    ((2048, 7168, 2048), (4096, 4096, 4096), (8192, 8192, 8192)), 512 * MIB, 16384, 64 * MIB, 8192, 1024
)


class Bench:
    """Times work on this rank."""

    def __init__(self, group: Rank, budget_s: float) -> None:
        self.group = group
        self.budget_s = budget_s
        # What is queued is timed many at a time: in steps the host is ahead of the device, and nobody waits for it.
        self._queued = 1 if group.device.type == "cpu" else QUEUED

    def seconds(self, work: Callable[[], object], repeats: int = 30) -> float:
        """Median time of `work`, which every rank starts together and repeats equally often."""
        return self._seconds(work, self._queued, repeats)

    def graph_seconds(self, work: Callable[[], object]) -> float:
        """The same as part of a graph, where the platform has them: what the host does for each is left out then."""
        graphs = self.group.graphs
        if graphs is None:
            return self.seconds(work)
        work()
        self._wait()
        graph, _ = graphs.capture(lambda: [work() for _ in range(QUEUED)])
        return self._seconds(graph.replay, 1, 30) / QUEUED

    def _seconds(self, work: Callable[[], object], queued: int, repeats: int) -> float:
        group = self.group

        def run() -> float:
            group.comm.barrier()
            self._wait()
            started = time.perf_counter()
            for _ in range(queued):
                work()
            self._wait()
            return (time.perf_counter() - started) / queued

        run()
        once = torch.tensor([run()], device=group.device)
        slowest = float(group.comm.all_gather(once, [1] * group.size).max())
        count = max(3, min(repeats, int(self.budget_s / max(slowest * queued, 1e-6))))
        return statistics.median([run() for _ in range(count)])

    def _wait(self) -> None:
        if self.group.device.type != "cpu":
            torch.accelerator.synchronize()


def measure(group: Rank, geometry: ArenaGeometry, dtype_name: str, budget_s: float) -> dict[str, float]:
    """Rates in operations or bytes a second, times in seconds."""
    bench, dtype = Bench(group, budget_s), torch_dtype(dtype_name)
    sizes = CPU_SIZES if group.device.type == "cpu" else ACCELERATOR_SIZES
    return {
        **_products(bench, sizes, dtype),
        **_memory(bench, sizes, dtype),
        **_attention(bench, sizes, geometry, dtype),
        **_experts(bench, dtype),
        **_collectives(bench, sizes, dtype),
        **_pulls(bench, geometry),
    }


def _products(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> dict[str, float]:
    rates = []
    for rows, inner, outer in sizes.products:
        x = torch.randn(rows, inner, device=bench.group.device).to(dtype)
        weight = torch.randn(outer, inner, device=bench.group.device).to(dtype)
        rates.append(2 * rows * inner * outer / bench.seconds(lambda x=x, weight=weight: x @ weight.t()))  # type: ignore[misc]
    return {"gemm_peak": max(rates), "gemm_typical": statistics.median(rates)}


def _memory(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> dict[str, float]:
    device = bench.group.device
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * sizes.copy_bytes / bench.seconds(lambda: target.copy_(source))
    weight = torch.randn(sizes.matrix, sizes.matrix, device=device).to(dtype)
    x = torch.randn(1, sizes.matrix, device=device).to(dtype)
    heads = torch.randn(sizes.rows, 8, 512, device=device).to(dtype)
    rest = torch.randn(sizes.rows, 8, 64, device=device).to(dtype)
    moved = 2 * (heads.nbytes + rest.nbytes)
    together = moved / bench.seconds(lambda: torch.cat((heads, rest), dim=-1))
    return {"copy": copy, "movement": together, "read": weight.nbytes / bench.seconds(lambda: x @ weight.t())}


def _batch(num_sequences: int, rows: int, context: int, page_size: int) -> AttentionBatch:
    """Sequences whose last `rows` of `context` positions attend, on pages of their own."""
    pages = context // page_size
    return AttentionBatch(
        row_positions=np.tile(np.arange(context - rows, context), num_sequences),
        row_starts=np.arange(num_sequences + 1) * rows,
        slots=np.arange(num_sequences * pages),
        numbers=np.tile(np.arange(pages), num_sequences),
        page_starts=np.arange(num_sequences + 1) * pages,
    )


def _attention(bench: Bench, sizes: Sizes, geometry: ArenaGeometry, dtype: torch.dtype) -> dict[str, float]:
    """Absorbed and expanded chunks, decode over as much cache as there is, and many tiny sequences.

    Sequences lie on the first slots of the first layer's arena, whose contents do not matter here.
    """
    group, spec, page_size = bench.group, geometry.spec, geometry.page_size
    arena = LayerArena(group.arenas.local(0), geometry, group.rank, dtype)
    pages_SPK = arena.pages_SPK
    group.arenas.local(0).zero_()  # uninitialised memory may hold infinities
    context, rows, heads = sizes.context // page_size * page_size, sizes.rows, spec.num_heads
    device = group.device

    def absorbed(sequences: int, rows: int, context: int, heads: int) -> float:
        q = torch.randn(sequences * rows, heads, spec.latent_dim, device=device).to(dtype)
        batch = _batch(sequences, rows, context, page_size)
        return bench.seconds(lambda: group.attention.attend(q, pages_SPK, batch, spec.softmax_scale, spec.kv_lora_rank))

    pairs = rows * (context - rows) + rows * (rows + 1) // 2
    flops = pairs * heads * 2 * (spec.latent_dim + spec.kv_lora_rank)
    q = torch.randn(rows, heads, spec.qk_head_dim, device=device).to(dtype)
    batch = _batch(1, rows, context, page_size)
    kv_b = torch.randn(heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank, device=device).to(dtype)
    expanded_s = bench.seconds(lambda: group.attention.attend_expanded(q, pages_SPK, batch, kv_b, spec.softmax_scale))
    sequences = (geometry.num_slots - geometry.num_weight_slots) * page_size // context
    keys, few = sequences * context, max(1, heads // FEW)
    return {
        "absorbed": flops / absorbed(1, rows, context, heads),
        "expanded_s": expanded_s,
        "expanded_rows": rows,
        "expanded_start": context - rows,
        "decode": keys * heads * 2 * (spec.latent_dim + spec.kv_lora_rank) / absorbed(sequences, 1, context, heads),
        "decode_read": keys * geometry.kv.latent_bytes / absorbed(sequences, 1, context, few),
        # Where batches are recorded, requests share a kernel.
        "tiny_sequence_s": absorbed(16, 1, page_size, heads) / 16 if group.graphs is None else 0.0,
    }


def _experts(bench: Bench, dtype: torch.dtype) -> dict[str, float]:
    """Time that an expert takes besides its products: eight rows to eight experts against eight rows to one."""
    group, num, hidden, inner = bench.group, 8, 64, 32
    x = torch.randn(num, hidden, device=group.device).to(dtype)
    w13 = torch.randn(num, 2 * inner, hidden, device=group.device).to(dtype)
    w2 = torch.randn(num, hidden, inner, device=group.device).to(dtype)
    weight = torch.ones(num, 1, device=group.device)
    each = torch.arange(num, device=group.device).unsqueeze(1)
    one = torch.zeros_like(each)
    apart = bench.graph_seconds(lambda: group.kernels.experts(x, each, weight, w13, w2, 0))
    together = bench.graph_seconds(lambda: group.kernels.experts(x, one, weight, w13, w2, 0))
    return {"expert_s": max(0.0, apart - together) / (num - 1)}


def _collectives(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> dict[str, float]:
    """Latency with one row a rank; bytes that a rank receives a second with many, without the latency."""
    group, comm, size, width = bench.group, bench.group.comm, bench.group.size, 64
    measured = {}

    def run(rows: int) -> dict[str, tuple[Callable[[], object], float]]:
        """Primitive -> (what to time, bytes received) with `rows` rows a rank."""
        counts = [rows] * size
        x = torch.zeros(rows, width, dtype=dtype, device=group.device)
        every = torch.zeros(rows * size, width, dtype=dtype, device=group.device)
        foreign = x.nbytes * (size - 1)
        return {
            "all_reduce": (lambda: comm.all_reduce(every), 2 * foreign),
            "all_gather": (lambda: comm.all_gather(x, counts), foreign),
            "reduce_scatter": (lambda: comm.reduce_scatter(every, counts), foreign),
            "all_to_all": (lambda: comm.all_to_all(every, counts, counts), foreign),
        }

    few, many = run(1), run(sizes.message_bytes // (width * dtype.itemsize))
    for name, (work, _) in few.items():
        latency = bench.graph_seconds(work)
        seconds, received = bench.seconds(many[name][0]), many[name][1]
        measured[f"{name}_latency_s"] = latency
        measured[f"{name}_rate"] = received / max(seconds - latency, seconds / 10) if size > 1 else 1e12
    return measured


def _pulls(bench: Bench, geometry: ArenaGeometry) -> dict[str, float]:
    """One-sided reads of a peer's arena: in one extent, page by page in no order, and of next to nothing."""
    group = bench.group
    source, target = group.arenas.peer((group.rank + 1) % group.size, 0), group.arenas.local(0)
    page, num = geometry.slot_bytes, max(2, min(64 * MIB // geometry.slot_bytes, geometry.num_slots) // 2)
    # Read the front half into the back half: ranks read each other, and never what is being written.
    whole = np.array([[num * page, 0, num * page]])
    order = np.random.default_rng(0).permutation(num)
    pages = np.stack(((order + num) * page, np.arange(num) * page, np.full(num, page)), axis=1)

    long, scattered = (group.copies.prepare(extents, [target], [source]) for extents in (whole, pages))

    def begin() -> None:
        group.comm.barrier()
        group.copies.begin(lambda: group.copies.copy(target, source, whole * [1, 1, 0] + [0, 0, 1])).wait()
        group.comm.barrier()

    return {
        "pull_rate": num * page / bench.seconds(long.run),
        "page_pull_rate": num * page / bench.seconds(scattered.run),
        "pull_s": bench.seconds(begin),
    }


def main(arguments: Sequence[str]) -> None:
    """One rank of a calibration."""
    die_with_parent()
    job = msgspec.json.decode(arguments[0], type=Job)
    torch.set_grad_enabled(False)
    spec = parse_model_config(job.model_config, "model").spec
    kv, weight_bytes = kv_format(spec, job.dtype), DTYPE_BYTES[job.dtype]
    geometry = ArenaGeometry(spec, kv, job.page_size, weight_bytes, job.ranks, job.num_slots)
    group = get_platform(job.platform).join(job.group, job.rank, job.timeout_s)
    try:
        print(json.dumps(measure(group, geometry, job.dtype, job.budget_s)))
    finally:
        group.close()


if __name__ == "__main__":
    main(sys.argv[1:])
