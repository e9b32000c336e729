"""Time of one step on one rank, by batch and context, beside the bytes or operations that bound it.

    python -m perf.step --hardware cuda --decode 1x4096,16x32768,128x4096 --prefill 2x1024x0,1x2048x32768

A decode case is REQUESTSxCONTEXT. A prefill case is REQUESTSxROWSxHISTORY. Weights are random and the cache is filled
with random keys, so that no checkpoint and no prompt is needed. Decode steps are timed as graphs and without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perf.common import report
from splash.core.capacity import geometry_for_budget
from splash.core.layout import LAYOUTS
from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.core.spec import DTYPE_BYTES, ModelSpec, kv_format
from splash.core.step import NewRequest, Query, StepPlan
from splash.engine.graphs import padded_counts
from splash.engine.runner import ModelRunner
from splash.model.choice import ModelChoice
from splash.platform import registry
from splash.platform.base import Rank
from splash.settings import build, compose

GIB = 1 << 30
REPEATS = 20


class Bench:
    """One rank in this process, with a model of random weights and a cache of random keys."""

    def __init__(self, args: argparse.Namespace, graph_rows: int) -> None:
        overrides = [f"model={args.model}", f"model.num_layers={args.num_layers}"]
        if args.num_experts:
            overrides.append(f"model.num_experts={args.num_experts}")
        self.spec = build(ModelChoice, compose("config", overrides)["model"], "model.").spec()
        element = DTYPE_BYTES[args.dtype]
        kv = kv_format(self.spec, args.dtype)
        self.geometry: ArenaGeometry = geometry_for_budget(
            self.spec, kv, args.page_size, element, 1, int(args.kv_cache_gib * GIB)
        )
        platform = registry.require(args.hardware)
        handle = platform.create_group(1, self.spec.num_layers, self.geometry, args.attention)
        self.rank: Rank = platform.join(handle.info, 0, 60.0)
        started = time.perf_counter()
        self.runner = ModelRunner(
            "random", self.geometry, self.rank, args.layout, args.dtype, self.spec.max_position_embeddings, (),
            load_format="dummy", graph_rows=graph_rows,
        )  # fmt: skip
        self.sync()
        self.seconds = time.perf_counter() - started
        self._layout, self._step, self._release = args.layout, 0, ()
        self._rng = np.random.default_rng(0)
        weights = self.geometry.num_weight_slots * self.geometry.slot_bytes
        dtype = torch.float32 if element == 4 else torch.bfloat16
        for layer in range(self.spec.num_layers):
            self.rank.arenas.local(layer)[weights:].view(dtype).normal_()

    def sync(self) -> None:
        """Wait for the device."""
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, requests: int, rows: int, history: int) -> tuple[float, Callable[[], None]]:
        """Median seconds of such a step, and the step itself."""
        size = self.geometry.page_size
        pages = -(-(history + rows) // size)
        slots = self.geometry.num_weight_slots + np.arange(requests * pages).reshape(requests, pages)
        assert slots.max() < self.geometry.num_slots, "the case does not fit in --kv-cache-gib"
        self._rng.shuffle(slots.reshape(-1))
        first = self._step * 1000
        queries, new = [], []
        for number in range(requests):
            tokens = tuple(self._rng.integers(0, self.spec.vocab_size, rows).tolist())
            table = tuple((int(slot),) for slot in slots[number])
            queries.append(Query(first + number, history, tokens, 0, True, table))
            new.append(NewRequest(first + number, (1,), SamplingParams(temperature=0.0, ignore_eos=True), 0))
        self._run(queries, new)
        self._release = tuple(query.request for query in queries)
        bare = [Query(q.request, q.start, q.tokens, q.owner, True) for q in queries]
        again = lambda: self._run(bare, (), release=False)  # noqa: E731
        again()
        times = []
        for _ in range(REPEATS if rows == 1 else 3):
            self.sync()
            started = time.perf_counter()
            again()
            self.sync()
            times.append(time.perf_counter() - started)
        return statistics.median(times), again

    def _run(self, queries: list[Query], new: Any, release: bool = True) -> None:
        released = self._release if release else ()
        plan = StepPlan(self._step, 0, self._layout, tuple(queries), tuple(new), released, released, greedy=True)
        self._step += 1
        self.runner.run(plan)


def replayed_seconds(runner: ModelRunner, requests: int, layout: str) -> float:
    """Seconds of a decode step's graph alone: what a step takes once the host does its part behind the one before.

    The graph is replayed as the last step left it, many times in a row, so that its launches are hidden.
    """
    assert runner._graphs is not None
    counts = padded_counts((requests,), LAYOUTS[layout], runner._graphs._buckets)
    assert counts is not None
    graph = runner._graphs._recorded[layout, counts].graph
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS / 1e3


def device_seconds(step: Callable[[], None], repeats: int = 3) -> tuple[float, list[tuple[str, float]]]:
    """Seconds a step in which the device works, and the kernels that take most of them, in milliseconds a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    rows = [(event.key, event.self_device_time_total / repeats / 1e3) for event in trace.key_averages()]
    rows.sort(key=lambda row: -row[1])
    return sum(ms for _, ms in rows) / 1e3, [(name[:60], round(ms, 4)) for name, ms in rows[:30]]


def decode_bytes(spec: ModelSpec, element: int, requests: int, context: int, same_experts: bool = False) -> int:
    """Bytes that a decode step must read: weights that its rows touch, and the keys of their contexts.

    Rows choose experts uniformly and independently, or all the same.
    """
    head = sum(spec.head_elements().values()) * spec.num_heads
    query_rank = spec.q_lora_rank or 0
    layer = head + spec.hidden_size * (query_rank + spec.latent_dim)
    dense = 3 * spec.hidden_size * spec.intermediate_size
    num_moe = sum(spec.is_moe_layer(number) for number in range(spec.num_layers))
    total = layer * spec.num_layers + dense * (spec.num_layers - num_moe) + spec.vocab_size * spec.hidden_size
    if spec.moe is not None:
        experts = spec.moe.num_experts
        touched = experts * (1 - (1 - spec.moe.top_k / experts) ** (1 if same_experts else requests))
        expert = 3 * spec.hidden_size * spec.moe.intermediate_size
        total += int(num_moe * expert * (touched + spec.moe.num_shared_experts))
    return element * (total + requests * context * spec.latent_dim * spec.num_layers)


def prefill_flops(spec: ModelSpec, requests: int, rows: int, history: int) -> float:
    """Operations of the model's own form of a prefill step: attention expanded, products over the rows alone."""
    query_rank = spec.q_lora_rank or 0
    layer = sum(spec.head_elements().values()) * spec.num_heads + spec.hidden_size * (query_rank + spec.latent_dim)
    num_moe = sum(spec.is_moe_layer(number) for number in range(spec.num_layers))
    dense = 3 * spec.hidden_size * spec.intermediate_size * (spec.num_layers - num_moe)
    routed = 0
    if spec.moe is not None:
        chosen = spec.moe.top_k + spec.moe.num_shared_experts
        routed = num_moe * 3 * spec.hidden_size * spec.moe.intermediate_size * chosen
    pairs = rows * history + rows * (rows + 1) / 2
    attention = pairs * spec.num_heads * (spec.qk_head_dim + spec.v_head_dim) * spec.num_layers
    return 2 * requests * (rows * (layer * spec.num_layers + dense + routed) + attention)


def ceilings(device: torch.device) -> tuple[float, float]:
    """(bytes/s of a large copy, reads and writes; operations/s of a bfloat16 8192^3 product), on random data."""
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    copy = _median(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = _median(lambda: a @ b)
    return 2 * source.numel() * 4 / copy, 2 * 8192**3 / product


def _median(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases. Prints a line for each."""
    decode = [tuple(map(int, case.split("x"))) for case in args.decode.split(",") if case]
    prefill = [tuple(map(int, case.split("x"))) for case in args.prefill.split(",") if case]
    most = max((requests for requests, _ in decode), default=0)
    bench = Bench(args, most)
    element = DTYPE_BYTES[args.dtype]
    copy, product = ceilings(bench.rank.device)
    print(f"copy {copy / 1e9:.0f} GB/s, bfloat16 product {product / 1e12:.0f} TFLOP/s, loaded in {bench.seconds:.1f} s")
    results: list[Mapping[str, Any]] = []
    for requests, context in decode:
        seconds, step = bench.time(requests, 1, context - 1)
        busy, kernels = device_seconds(step)
        replay = replayed_seconds(bench.runner, requests, args.layout)
        bound = decode_bytes(bench.spec, element, requests, context) / copy
        graphs, bench.runner._graphs = bench.runner._graphs, None
        eager, _ = bench.time(requests, 1, context - 1)
        bench.runner._graphs = graphs
        results.append(
            {
                "decode": f"{requests}x{context}", "ms": seconds * 1e3, "eager_ms": eager * 1e3,
                "bound_ms": bound * 1e3, "over_bound": seconds / bound, "graph_ms": replay * 1e3,
                "graph_over_bound": replay / bound, "device_ms": busy * 1e3, "host_share": 1 - replay / seconds,
                "kernels": kernels,
            }
        )  # fmt: skip
        print(
            f"decode {requests} x {context}: {seconds * 1e3:.3f} ms ({eager * 1e3:.3f} without graphs), bound "
            f"{bound * 1e3:.3f}, ratio {seconds / bound:.2f}, graph alone {replay * 1e3:.3f} ({replay / bound:.2f}), "
            f"kernels {busy * 1e3:.3f}"
        )
        print("   " + "; ".join(f"{name} {ms}" for name, ms in kernels[:8]))
    for requests, rows, history in prefill:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds, step = bench.time(requests, rows, history)
        peak = torch.cuda.max_memory_allocated() - before
        busy, kernels = device_seconds(step, 1)
        rate = prefill_flops(bench.spec, requests, rows, history) / seconds
        results.append(
            {
                "prefill": f"{requests}x{rows}x{history}", "ms": seconds * 1e3, "tflops": rate / 1e12,
                "of_product": rate / product, "device_ms": busy * 1e3, "peak_gib": peak / GIB, "kernels": kernels,
            }
        )  # fmt: skip
        print(
            f"prefill {requests} x {rows} after {history}: {seconds * 1e3:.1f} ms, {rate / 1e12:.0f} TFLOP/s, "
            f"{rate / product:.2f} of the product's, device busy {busy * 1e3:.1f} ms, workspace {peak / GIB:.2f} GiB"
        )
        print("   " + "; ".join(f"{name} {ms}" for name, ms in kernels[:8]))
    graphs = {"seconds": bench.runner.graph_seconds, "bytes": bench.runner.graph_bytes}
    return {
        "model": args.model, "num_layers": args.num_layers, "num_experts": args.num_experts, "dtype": args.dtype,
        "layout": args.layout, "attention": args.attention, "copy_gb_s": copy / 1e9, "product_tflops": product / 1e12,
        "load_s": bench.seconds, "graphs": graphs, "cases": results,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--model", default="deepseek_v3")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=64, help="0 for all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default="tp")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float, default=24.0)
    parser.add_argument("--decode", default="1x4096,16x4096,128x4096,16x32768")
    parser.add_argument("--prefill", default="2x1024x0,1x2048x32768")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    report("step", measure(args), args.out)


if __name__ == "__main__":
    main()
