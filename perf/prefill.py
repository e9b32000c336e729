"""Time attention of a chunk of a prompt over its history, absorbed and expanded, beside other libraries, in one run.

    python -m perf.prefill [--cases 2048x32768 8192x32768 2048x131072 8192x131072] [--heads 128 64] [--no-flashinfer]

A case is ROWSxHISTORY. `absorbed` is multi-query attention over latents, beside FlashInfer's over the same pages (fa3).
`expanded` makes each head's keys and values from the latents and attends to those. Beside it, given keys and values
that are made already: FlashInfer's ragged prefill (fa3) and FlashAttention 3, causal, and cuDNN, of every row to every
key. `make` is the product that makes them, alone: `attention` is what is left of `expanded` without it. Those who use
the others have to make them too, and to copy the rotary keys to every head: `whole`. `engine` is what is served where
FlashInfer is installed: FlashInfer's attention over keys and values that one product makes, rotary keys included.

The ceiling is the rate of a large product (`of_gemm`). Aims: absorbed 0.6 of it; expanded attention 0.8 of the faster
of FlashInfer's and FlashAttention's (`of_flashinfer`, `of_fa3`). All results are checked before they are timed; all
calls of a case take turns, and figures are medians over rounds. Libraries that are not installed are left out. Without
a GPU, `--tiny` with TRITON_INTERPRET=1 shows that it works.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from perf.common import report
from perf.gpu import DEVICE, DTYPE, HAS_GPU, ceilings, error, in_turns, rounded, show
from perf.paged import DEEPSEEK, TINY, Dims, Paged, flashinfer_mla, reference, reference_expanded
from splash.platform.triton.attention import TritonAttention

CASES = ("2048x32768", "8192x32768", "2048x131072", "8192x131072")
MADE_HEADS = 16  # at once, in the product alone
Call = Callable[[], torch.Tensor]


def case_of(text: str) -> tuple[int, int]:
    """Rows and history as the command line has them."""
    try:
        rows, history = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxHISTORY, as in 2048x32768") from None
    if rows < 1 or history < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: at least one row, over at least nothing")
    return rows, history


def absorbed(cache: Paged, heads: int, rounds: int, theirs: bool) -> dict[str, Any]:
    """Over latents."""
    attention, d = TritonAttention(DEVICE), cache.dims
    q = torch.randn(cache.rows, heads, d.latent + d.rotary, device=DEVICE, dtype=DTYPE)

    def ours() -> torch.Tensor:
        return attention.attend(q, cache.pages, cache.batch, d.scale, d.latent)[0]

    out, middle = ours(), cache.rows // 2
    want, _ = reference(q[middle], cache.history(0)[: cache.length - cache.rows + middle + 1], d)
    row: dict[str, Any] = {"error": error(out[middle], want)}
    calls: dict[str, Callable[[], object]] = {"ours": ours}
    other = flashinfer_mla(cache, heads, q, True) if theirs else None
    if other is not None:
        error(other(), out)
        calls["flashinfer"] = other
    times = {name: statistics.median(ms) for name, ms in in_turns(calls, 1, rounds, graph=False).items()}
    row |= {"ms": times["ours"], "tflop_s": 2 * cache.causal_pairs() * heads * (2 * d.latent + d.rotary) / 1e9}
    row["tflop_s"] /= times["ours"]
    if "flashinfer" in times:
        row |= {"flashinfer_ms": times["flashinfer"], "of_flashinfer": times["flashinfer"] / times["ours"]}
    return row


def expanded(cache: Paged, heads: int, rounds: int, theirs: bool) -> dict[str, Any]:
    """Over keys and values of every head, which are made first."""
    attention, d = TritonAttention(DEVICE), cache.dims
    q = torch.randn(cache.rows, heads, d.nope + d.rotary, device=DEVICE, dtype=DTYPE)
    kv_b = torch.randn(heads, d.nope + d.value, d.latent, device=DEVICE, dtype=DTYPE) * d.latent**-0.5
    keys = cache.history(0)

    def ours() -> torch.Tensor:
        return attention.attend_expanded(q, cache.pages, cache.batch, kv_b, d.scale)

    def make() -> None:
        for head in range(0, heads, MADE_HEADS):
            _ = keys[:, : d.latent] @ kv_b[head : head + MADE_HEADS].flatten(0, 1).t()

    out, middle = ours(), cache.rows // 2
    seen = keys[: cache.length - cache.rows + middle + 1]
    row: dict[str, Any] = {"error": error(out[middle, :2], reference_expanded(q[middle, :2], seen, kv_b[:2], d))}
    k = torch.empty(len(keys), heads, d.nope + d.rotary, device=DEVICE, dtype=DTYPE)
    v = torch.empty(len(keys), heads, d.value, device=DEVICE, dtype=DTYPE)

    def whole() -> None:
        """Keys and values as the others want them."""
        for head in range(0, heads, MADE_HEADS):
            part = slice(head, min(heads, head + MADE_HEADS))
            made = (keys[:, : d.latent] @ kv_b[part].flatten(0, 1).t()).view(len(keys), -1, d.nope + d.value)
            k[:, part, : d.nope], k[:, part, d.nope :] = made[..., : d.nope], keys[:, None, d.latent :]
            v[:, part] = made[..., d.nope :]

    whole()
    calls: dict[str, Callable[[], object]] = {"ours": ours, "make": make, "whole": whole}
    peers = {"fa3": flash_attention_3(q, k, v, d), "cudnn": cudnn_attention(q, k, v, d)}
    if theirs:
        peers["flashinfer"] = flashinfer_ragged(q, k, v, d)
        peers["engine"] = flashinfer_engine(q, cache, kv_b)
    for name, call in peers.items():
        if call is not None:
            if name != "cudnn":  # which is not causal
                error(call(), out)
            calls[name] = call
    times = {name: statistics.median(ms) for name, ms in in_turns(calls, 1, rounds, graph=False).items()}
    flop = 2 * cache.causal_pairs() * heads * (d.nope + d.rotary + d.value)
    alone = max(times["ours"] - times["make"], 1e-9)
    row |= {"ms": times["ours"], "tflop_s": flop / times["ours"] / 1e9, "make_ms": times["make"]}
    row |= {"whole_ms": times["whole"], "attention_tflop_s": flop / alone / 1e9}
    if "engine" in calls:
        row |= {"engine_ms": times["engine"], "engine_over_ours": times["ours"] / times["engine"]}
    for name in calls.keys() & peers.keys() - {"engine"}:
        counted = flop * cache.rows * cache.length / cache.causal_pairs() if name == "cudnn" else flop
        row |= {f"{name}_ms": times[name], f"{name}_tflop_s": counted / times[name] / 1e9}
        row[f"of_{name}"] = row["attention_tflop_s"] / row[f"{name}_tflop_s"]
    return row


def flashinfer_ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d: Dims) -> Call | None:
    """FlashInfer's causal attention, given keys and values; None where it is not installed."""
    try:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
    except ImportError:
        return None
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD", backend="fa3")
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (len(q), len(k))]
    heads = q.shape[1]
    wrapper.plan(
        *bounds, heads, heads, d.nope + d.rotary, head_dim_vo=d.value, causal=True, sm_scale=d.scale, q_data_type=DTYPE
    )
    return lambda: wrapper.run(q, k, v)


def flashinfer_engine(q: torch.Tensor, cache: Paged, kv_b: torch.Tensor) -> Call | None:
    """The engine's own path through FlashInfer, planned before; None where it is not installed."""
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return None
    from splash.platform.cuda.flashinfer_prefill import FlashInferKernels, FlashInferPrefill

    device = torch.device(DEVICE)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    prefill = FlashInferPrefill(FlashInferKernels(device), programs)

    def call() -> torch.Tensor:
        out = prefill.attend(q, cache.pages, cache.batch, kv_b, cache.dims.scale)
        assert out is not None
        return out

    return call


def flash_attention_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d: Dims) -> Call | None:
    """FlashAttention 3's, causal with the last row at the last key; None where it is not installed."""
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None

    def call() -> torch.Tensor:
        out = flash_attn_func(q[None], k[None], v[None], softmax_scale=d.scale, causal=True)
        result: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return result

    return call


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d: Dims) -> Call | None:
    """cuDNN's attention of every row to every key, given keys and values; None where it refuses these dims."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not HAS_GPU:
        return None
    qkv = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v)]

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, scale=d.scale)

    try:
        call()
    except RuntimeError:
        return None
    return call


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.prefill", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=case_of, nargs="+", default=[case_of(text) for text in CASES])
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--no-flashinfer", action="store_true", help="leave it out: its prefill takes minutes to compile"
    )
    parser.add_argument("--no-absorbed", action="store_true", help="leave out the slower form")
    parser.add_argument("--tiny", action="store_true", help="the smallest dims, for trying the benchmark itself")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    theirs = HAS_GPU and not options.no_flashinfer
    found = []
    with torch.inference_mode():
        limits = ceilings()
        print(f"ceiling: bf16 product {limits['gemm_tflop_s']:.0f} TFLOP/s")
        for rows, history in options.cases:
            cache = Paged(1, history + rows, rows, TINY if options.tiny else DEEPSEEK)
            for heads in options.heads:
                forms = {} if options.no_absorbed else {"absorbed": absorbed}
                for form, measure in (forms | {"expanded": expanded}).items():
                    row: dict[str, Any] = {"form": form, "rows": rows, "history": history, "heads": heads}
                    row |= measure(cache, heads, options.rounds, theirs)
                    row["of_gemm"] = row["tflop_s"] / limits["gemm_tflop_s"]
                    show(row)
                    found.append(rounded(row))
                    if HAS_GPU:
                        torch.cuda.empty_cache()
    report("prefill", {"rounds": options.rounds, "ceilings": rounded(limits), "rows": found}, options.out)


if __name__ == "__main__":
    main()
