"""Sequences in a paged cache, attention over them in float32, and FlashInfer's: for benchmarks of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from perf.gpu import DEVICE, DTYPE
from splash.platform.base import AttentionBatch


@dataclass(frozen=True)
class Dims:
    """Of a head: what its keys have besides the rotary part, its values, latents and rotary keys; and page size."""

    nope: int
    value: int
    latent: int
    rotary: int
    page: int

    @property
    def scale(self) -> float:
        """Of the scores."""
        return (self.nope + self.rotary) ** -0.5


DEEPSEEK, TINY = Dims(128, 128, 512, 64, 64), Dims(16, 16, 32, 16, 4)


class Paged:
    """`requests` sequences of `length` tokens in scattered pages, the last `rows` of each being queries."""

    def __init__(self, requests: int, length: int, rows: int, dims: Dims = DEEPSEEK) -> None:
        pages_each = -(-length // dims.page)
        total = requests * pages_each
        self.requests, self.length, self.rows, self.dims = requests, length, rows, dims
        self.pages = torch.randn(total, dims.page, dims.latent + dims.rotary, device=DEVICE, dtype=DTYPE)
        self.slots = np.random.default_rng(0).permutation(total).reshape(requests, pages_each)
        self.batch = AttentionBatch(
            row_positions=np.tile(np.arange(length - rows, length), requests),
            row_starts=np.arange(requests + 1) * rows,
            slots=self.slots.reshape(-1),
            numbers=np.tile(np.arange(pages_each), requests),
            page_starts=np.arange(requests + 1) * pages_each,
        )

    def history(self, request: int) -> torch.Tensor:
        """[L, C + R] of one request."""
        slots = torch.from_numpy(self.slots[request]).to(DEVICE)
        return self.pages[slots].flatten(0, 1)[: self.length]

    def causal_pairs(self) -> int:
        """Pairs of a row and a key that it sees, of one request."""
        return self.rows * (self.length - self.rows) + self.rows * (self.rows + 1) // 2

    def indptr(self) -> tuple[torch.Tensor, ...]:
        """FlashInfer's description: query and page boundaries, pages, lengths (int32)."""
        starts, page_starts = (
            torch.from_numpy(np.asarray(x)).int() for x in (self.batch.row_starts, self.batch.page_starts)
        )
        return (
            starts,
            page_starts,
            torch.from_numpy(self.slots.reshape(-1)).int(),
            torch.full((self.requests,), self.length).int(),
        )


def reference(q_hK: torch.Tensor, keys_LK: torch.Tensor, dims: Dims = DEEPSEEK) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention of one row in float32."""
    scores = q_hK.float() @ keys_LK.float().T * dims.scale
    return scores.softmax(-1) @ keys_LK[:, : dims.latent].float(), scores.logsumexp(-1)


def reference_expanded(
    q_hd: torch.Tensor, keys_LK: torch.Tensor, kv_b_hEC: torch.Tensor, dims: Dims = DEEPSEEK
) -> torch.Tensor:
    """Expanded attention of one row in float32, with keys and values rounded as the kernels round them."""
    expanded_hLE = torch.einsum("hec,lc->hle", kv_b_hEC.float(), keys_LK[:, : dims.latent].float()).to(DTYPE).float()
    rotary_hLR = keys_LK[:, dims.latent :].float().expand(len(q_hd), -1, -1)
    keys_hLd = torch.cat((expanded_hLE[..., : dims.nope], rotary_hLR), dim=-1)
    scores = torch.einsum("hd,hld->hl", q_hd.float(), keys_hLd) * dims.scale
    return torch.einsum("hl,hlv->hv", scores.softmax(-1), expanded_hLE[..., dims.nope :])


def flashinfer_mla(cache: Paged, heads: int, q: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor] | None:
    """FlashInfer's absorbed attention on the same values, None where it is not installed."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return None
    d = cache.dims
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), backend="fa3")
    starts, page_starts, slots, lengths = (x.to(DEVICE) for x in cache.indptr())
    wrapper.plan(
        starts, page_starts, slots, lengths, heads, d.latent, d.rotary, d.page, causal, d.scale, DTYPE, DTYPE
    )  # fmt: skip
    latents, rotary = cache.pages[..., : d.latent].contiguous(), cache.pages[..., d.latent :].contiguous()
    nope, pe = q[..., : d.latent].contiguous(), q[..., d.latent :].contiguous()
    out, lse = torch.empty_like(nope), torch.empty(q.shape[:2], dtype=torch.float32, device=DEVICE)

    def call() -> torch.Tensor:
        wrapper.run(nope, pe, latents, rotary, out=out, lse=lse, return_lse=True)
        return out

    return call
