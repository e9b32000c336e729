"""Time the Triton kernels on a GPU, each beside what it is to be compared with, in one run.

    python -m perf.kernels [--only decode products router small pages] [--out FILE]

Ceilings are measured first: the bandwidth of a large copy (bytes read plus bytes written) and the rate of a large bf16
matrix product. Attention is compared with FlashInfer where that is installed, on the same values. Every kernel's result
is checked against float32 torch on the same inputs before it is timed; a wrong one ends the run. Times are medians,
those under a millisecond of graph replays, so that launches do not count. `perf.prefill` and
`perf.experts` have prompts' attention and experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perf.common import report
from perf.gpu import ceilings, error, milliseconds, rounded, show
from perf.paged import DEEPSEEK, Paged, flashinfer_mla, reference
from splash.core.spec import MoeSpec
from splash.platform.cpu.kernels import CpuKernels
from splash.platform.triton.attention import TritonAttention
from splash.platform.triton.kernels import TritonKernels
from splash.platform.triton.pages import chunk_table, copy_chunks, region_table

QUERY, C, R = 1536, DEEPSEEK.latent, DEEPSEEK.rotary
NOPE, PAGE, SCALE = DEEPSEEK.nope, DEEPSEEK.page, DEEPSEEK.scale
DECODE = [(1, 4 << 10), (16, 4 << 10), (16, 32 << 10), (128, 4 << 10), (1, 128 << 10)]  # requests x tokens
DECODE_HEADS = (16, 64, 128)
PRODUCTS = {  # summed dim, columns, and whether the columns of a weight are dense
    "Q-A and KV-A": (7168, 2112, True),
    "Q-B": (1536, 24576, True),
    "Q-B of 16 heads": (1536, 3072, True),
    "O": (16384, 7168, False),
    "O of 16 heads": (2048, 7168, False),
    "shared gate and up": (7168, 4096, True),
    "shared down": (2048, 7168, True),
    "dense down": (18432, 7168, True),
}
PRODUCT_ROWS = (1, 4, 16)
COLD_BYTES = 512 << 20  # of weights that take turns, so that none is left in the cache


def decode(limits: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    attention = TritonAttention("cuda")
    for requests, length in DECODE:
        cache = Paged(requests, length, 1)
        for heads in DECODE_HEADS:
            q = torch.randn(requests, heads, C + R, device="cuda", dtype=torch.bfloat16)
            out, lse = attention.attend(q, cache.pages, cache.batch, SCALE, C)
            want, want_lse = reference(q[requests // 2], cache.history(requests // 2))
            row: dict[str, Any] = {"what": "decode", "requests": requests, "tokens": length, "heads": heads}
            row["error"] = error(out[requests // 2], want)
            error(lse[requests // 2], want_lse)
            ms = milliseconds(lambda: attention.attend(q, cache.pages, cache.batch, SCALE, C))  # noqa: B023
            row |= {"ms": ms, "gb_s": requests * length * (C + R) * 2 / ms / 1e6}
            row["of_copy"] = row["gb_s"] / limits["copy_gb_s"]
            row["tflop_s"] = 2 * requests * length * heads * (2 * C + R) / ms / 1e9
            theirs = flashinfer_mla(cache, heads, q, False)
            if theirs is not None:
                error(theirs(), out)
                row["flashinfer_ms"] = milliseconds(theirs)
                row["of_flashinfer"] = row["flashinfer_ms"] / ms
            show(row)
            rows.append(row)
    return rows


def products(limits: dict[str, float]) -> list[dict[str, Any]]:
    """Products of a few rows with the model's weights, beside torch's: of one among many with other weights."""
    kernels, rows = TritonKernels("cuda"), []
    for name, (depth, columns, k_inner) in PRODUCTS.items():
        size = depth * columns * 2
        count = max(2, -(-COLD_BYTES // size))
        stored = torch.randn(count, depth, columns, device="cuda", dtype=torch.bfloat16) * depth**-0.5
        weights = list(stored.transpose(1, 2).contiguous().transpose(1, 2) if k_inner else stored)
        for num_rows in PRODUCT_ROWS:
            x = torch.randn(num_rows, depth, device="cuda", dtype=torch.bfloat16)
            row: dict[str, Any] = {"what": name, "rows": num_rows, "mb": size / 1e6}
            row["error"] = error(kernels.product(x, weights[0]), x.float() @ weights[0].float())
            row["is_ours"] = kernels._products.fits(x, weights[0])
            row["ms"] = milliseconds(lambda: [kernels._products.run(x, w) for w in weights]) / count  # noqa: B023
            row["torch_ms"] = milliseconds(lambda: [x @ w for w in weights]) / count  # noqa: B023
            row["of_torch"] = row["torch_ms"] / row["ms"]
            row["of_copy"] = size / row["ms"] / 1e6 / limits["copy_gb_s"]
            show(row)
            rows.append(row)
    return rows


def router(limits: dict[str, float]) -> list[dict[str, Any]]:
    """The router's kernels against the same in torch; a few microseconds, whatever the ceilings are."""
    kernels, oracle = TritonKernels("cuda"), CpuKernels()
    rows = []
    for num_experts in (64, 256):
        moe = MoeSpec(num_experts, 8, 2048, 1, num_groups=8, top_k_groups=4, routed_scaling_factor=2.5)
        weight = torch.randn(num_experts, 7168, device="cuda") * 7168**-0.5
        bias = torch.rand(num_experts, device="cuda") * 0.1
        for num_rows in (1, 16, 128, 256, 512, 2048):
            x = torch.randn(num_rows, 7168, device="cuda", dtype=torch.bfloat16)
            args = (x, weight, bias, moe)
            got, want = (
                torch.zeros(num_rows, num_experts, device="cuda").scatter_(1, *k.route(*args))
                for k in (kernels, oracle)
            )
            row: dict[str, Any] = {"what": "router", "rows": num_rows, "experts": num_experts}
            row["error"] = error(got, want)
            row["ms"] = milliseconds(lambda: kernels.route(*args))  # noqa: B023
            row["torch_ms"] = milliseconds(lambda: oracle.route(*args))  # noqa: B023
            row["of_torch"] = row["torch_ms"] / row["ms"]
            show(row)
            rows.append(row)
    return rows


def small(limits: dict[str, float]) -> list[dict[str, Any]]:
    """Kernels that only move bytes, against the copy bandwidth."""
    kernels, oracle = TritonKernels("cuda"), torch.nn.functional
    n, heads, bf16 = 16384, 128, torch.bfloat16
    x, weight = torch.randn(n, 7168, device="cuda", dtype=bf16), torch.rand(7168, device="cuda", dtype=bf16)
    other = torch.randn_like(x)
    q = torch.randn(4096, heads, NOPE + R, device="cuda", dtype=bf16)
    angle = torch.rand(n, R // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    down = torch.randn(n, QUERY + C + R, device="cuda", dtype=bf16)
    cache = torch.zeros(n // PAGE * 2, PAGE, C + R, device="cuda", dtype=bf16)
    index = torch.randperm(2 * n, device="cuda")[:n]
    gate_up = torch.randn(n, 4096, device="cuda", dtype=bf16)
    error(kernels.rms_norm(x, weight, 1e-6), oracle.rms_norm(x.float(), (7168,), weight.float(), 1e-6))
    error(kernels.silu_and_mul(gate_up), oracle.silu(gate_up[:, :2048].float()) * gate_up[:, 2048:].float())
    rotary = q[:, :, NOPE:]
    first, second = rotary.float().chunk(2, dim=-1)
    c, s = cos[:4096, None], sin[:4096, None]
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    rotated = torch.empty_like(rotary)
    kernels.rotate(rotary, cos[:4096], sin[:4096], rotated)
    error(rotated, turned)
    latents = lambda: kernels.latent_store(down, weight[:QUERY], weight[:C], 1e-6, cos, sin, cache, index)  # noqa: E731
    part = down[:, :QUERY].float()
    error(latents(), oracle.rms_norm(part, (QUERY,), weight[:QUERY].float(), 1e-6))
    part = down[:, QUERY : QUERY + C].float()
    error(cache.flatten(0, 1)[index][:, :C], oracle.rms_norm(part, (C,), weight[:C].float(), 1e-6))
    size = lambda *tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "rms_norm": (lambda: kernels.rms_norm(x, weight, 1e-6), 2 * size(x)),
        "add_rms_norm": (lambda: kernels.add_rms_norm(x, other, weight, 1e-6), 4 * size(x)),
        "silu_and_mul": (lambda: kernels.silu_and_mul(gate_up), size(gate_up) * 3 // 2),
        "rotate in place": (lambda: kernels.rotate(rotary, cos[:4096], sin[:4096], rotary), 2 * 4096 * heads * R * 2),
        "latent_store": (latents, 2 * size(down)),
    }
    rows = []
    for name, (call, moved) in calls.items():
        ms = milliseconds(call)
        rows.append(
            {"what": name, "ms": ms, "gb_s": moved / ms / 1e6, "of_copy": moved / ms / 1e6 / limits["copy_gb_s"]}
        )
        show(rows[-1])
    return rows


def pages(limits: dict[str, float]) -> list[dict[str, Any]]:
    """Scattered pages copied within the device, by few programs and by many."""
    slot, count = PAGE * (C + R) * 2, 4096
    source = torch.randint(0, 255, (2 * count * slot,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    order = np.random.default_rng(0).permutation(2 * count)[:count].astype(np.int64)
    extents = np.stack((order * slot, order[::-1] * slot, np.full(count, slot)), axis=1)
    table, regions = chunk_table(extents, target.device), region_table([target], [source], target.device)
    rows = []
    for programs in (8, 16, 32, 132):
        target.zero_()
        copy_chunks(regions, table, programs)
        got, want = target.view(-1, slot)[order], source.view(-1, slot)[order[::-1].copy()]
        if not torch.equal(got, want):
            raise SystemExit("wrong: pages differ after the copy")
        ms = milliseconds(lambda: copy_chunks(regions, table, programs))  # noqa: B023
        moved = 2 * count * slot
        rows.append({"what": "pages", "programs": programs, "ms": ms, "gb_s": moved / ms / 1e6})
        rows[-1]["of_copy"] = rows[-1]["gb_s"] / limits["copy_gb_s"]
        show(rows[-1])
    return rows


SECTIONS: dict[str, Callable[[dict[str, float]], list[dict[str, Any]]]] = {
    "decode": decode,
    "products": products,
    "router": router,
    "small": small,
    "pages": pages,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with torch.inference_mode():
        limits = ceilings()
        print(f"ceilings: copy {limits['copy_gb_s']:.0f} GB/s, bf16 product {limits['gemm_tflop_s']:.0f} TFLOP/s")
        results = {name: SECTIONS[name](limits) for name in options.only}
    records = {name: [rounded(row) for row in rows] for name, rows in results.items()}
    report("kernels", {"ceilings": {k: round(v, 1) for k, v in limits.items()}, **records}, options.out)


if __name__ == "__main__":
    main()
