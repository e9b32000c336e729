"""The fused operations over the Triton kernels: shapes, strides and launches."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from splash.core.spec import MoeSpec
from splash.platform.kernels import Kernels
from splash.platform.triton import fused
from splash.platform.triton.experts import GroupedTiles, experts
from splash.platform.triton.launch import Target, next_power_of_2, target_of
from splash.platform.triton.nucleus import nucleus_floor
from splash.platform.triton.products import Products
from splash.platform.triton.route import route

_ROTATED_HEADS = 16  # heads a program rotates
_HEIGHTS = (16, 32, 64, 128)  # of tiles of an expert's rows, where rows are few


class TritonKernels(Kernels):
    """`Kernels` in Triton. Operands may be strided in every dim but the last; results are contiguous."""

    def __init__(self, device: torch.device | str) -> None:
        self._target = target_of(torch.device(device))
        self._products = Products(self._target, device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm(rows, rows, weight, out, out, eps, False)
        return out

    def add_rms_norm(
        self, x_nD: torch.Tensor, residual_nD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm of the sum, the sum) of [n, D] and [n, D]."""
        total = torch.empty(x_nD.shape, dtype=x_nD.dtype, device=x_nD.device)
        out = torch.empty_like(total)
        _norm(_rows(x_nD), _rows(residual_nD), weight_D, out, total, eps, True)
        return out, total

    def product(self, x_nK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
        """As `Kernels.product`: by a kernel of our own where that is the faster one, else by torch."""
        return self._products.run(x_nK, w_KN) if self._products.fits(x_nK, w_KN) else x_nK @ w_KN

    def latent_rows(
        self,
        down_nX: torch.Tensor,
        q_weight_Q: torch.Tensor,
        kv_weight_C: torch.Tensor,
        eps: float,
        cos_nR: torch.Tensor,
        sin_nR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = down_nX.new_empty(len(down_nX), down_nX.shape[1] - len(q_weight_Q))
        return _latents(down_nX, q_weight_Q, kv_weight_C, eps, cos_nR, sin_nR, out, None), out

    def latent_store(
        self,
        down_nX: torch.Tensor,
        q_weight_Q: torch.Tensor,
        kv_weight_C: torch.Tensor,
        eps: float,
        cos_nR: torch.Tensor,
        sin_nR: torch.Tensor,
        pages_SPK: torch.Tensor,
        index_n: torch.Tensor,
    ) -> torch.Tensor:
        return _latents(down_nX, q_weight_Q, kv_weight_C, eps, cos_nR, sin_nR, pages_SPK, index_n)

    def rotate(self, x_nHR: torch.Tensor, cos_nR: torch.Tensor, sin_nR: torch.Tensor, out_nHR: torch.Tensor) -> None:
        if not x_nHR.numel():
            return
        assert x_nHR.stride(2) == out_nHR.stride(2) == 1
        cos_nR, sin_nR = cos_nR.contiguous(), sin_nR.contiguous()
        num_rows, num_heads, dim = x_nHR.shape
        block = min(_ROTATED_HEADS, next_power_of_2(num_heads))
        fused.rotate_kernel[(num_rows, triton.cdiv(num_heads, block))](
            x_nHR, cos_nR, sin_nR, out_nHR, num_heads,
            x_nHR.stride(0), x_nHR.stride(1), out_nHR.stride(0), out_nHR.stride(1), dim // 2,
            BLOCK_HALF=next_power_of_2(dim // 2), BLOCK_H=block,
        )  # fmt: skip

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows = _rows(x)
        width = x.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        if out.numel():
            block = min(1024, next_power_of_2(width))
            grid = (len(rows), triton.cdiv(width, block))
            fused.silu_and_mul_kernel[grid](rows, out, rows.stride(0), width, BLOCK_I=block)
        return out

    def store(self, pages_SPK: torch.Tensor, index_n: torch.Tensor, rows_nK: torch.Tensor) -> None:
        """As `Kernels.store`; a negative index stores nothing."""
        if not len(index_n):
            return
        rows_nK = _rows(rows_nK)
        width = rows_nK.shape[1]
        assert pages_SPK.stride(2) == 1
        fused.store_kernel[(len(index_n),)](
            rows_nK, index_n, pages_SPK, rows_nK.stride(0), pages_SPK.stride(0), pages_SPK.stride(1), width,
            BLOCK_K=next_power_of_2(width), PAGE=pages_SPK.shape[1],
        )  # fmt: skip

    def route(
        self, x_nD: torch.Tensor, router_ED: torch.Tensor, bias_E: torch.Tensor, moe: MoeSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Kernels.route`; of equal groups or experts the first are chosen, and the best come first."""
        return route(_rows(x_nD), router_ED, bias_E, moe)

    def experts(
        self,
        x_nD: torch.Tensor,
        expert_nk: torch.Tensor,
        weight_nk: torch.Tensor,
        w13_EID: torch.Tensor,
        w2_EDI: torch.Tensor,
        first_expert: int,
        beside_nD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pairs = expert_nk.numel() / max(1, len(w13_EID))
        up, down = expert_tiles(self._target, x_nD.dtype, pairs, len(x_nD))
        return experts(_rows(x_nD), expert_nk, weight_nk, w13_EID, w2_EDI, first_expert, beside_nD, up, down)

    def nucleus_floor(self, scores_mV: torch.Tensor, top_p_m: torch.Tensor) -> torch.Tensor:
        return nucleus_floor(scores_mV, top_p_m)


def expert_tiles(
    target: Target, dtype: torch.dtype, rows_an_expert: float, num_rows: int
) -> tuple[GroupedTiles, GroupedTiles]:
    """Tiles of the products with w13 and w2, by how many rows an expert gets at most on average, and how many at most.

    Where rows are few, weights are what is read, once for each block of an expert: so that one block will do for the
    rows of any expert, there are heights to choose from. And w2's columns are wide, since every program of a block
    reads its rows again.
    """
    if dtype == torch.float32 or target.kind == "interpreter":
        tiles = GroupedTiles((16,), 32, 32, warps=4, stages=(1,))
        return tiles, tiles
    if target.has_tma:
        if num_rows <= 16:
            tiles = GroupedTiles((16,), 64, 128, warps=4, stages=(4,), tma=True, swap=True)
            return tiles, tiles
        if rows_an_expert <= 64:
            up = GroupedTiles(_HEIGHTS, 64, 128, warps=4, stages=(4, 4, 4, 3), tma=True, swap=True)
            return up, replace(up, columns=128, depth=64, stages=(5, 5, 4, 3))
        if rows_an_expert <= 128:
            tiles = GroupedTiles((64,), 128, 64, warps=8, stages=(4,), tma=True)
            return tiles, tiles
        up = GroupedTiles((128,), 128, 64, warps=8, stages=(3,), tma=True)
        return up, GroupedTiles((128,), 256, 64, warps=8, stages=(3,), tma=True)
    heights = (16,) if num_rows <= 16 else (16, 64) if rows_an_expert <= 64 else (64,)
    stages = (1 if target.kind == "hip" else 3,) * len(heights)
    tiles = GroupedTiles(heights, 64, 64, warps=4, stages=stages)
    return tiles, tiles


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [n, D] whose rows are dense; a copy only where they are not."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _norm(
    x_nD: torch.Tensor,
    residual_nD: torch.Tensor,
    weight_D: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    num_rows, dim = x_nD.shape
    if num_rows:
        fused.rms_norm_kernel[(num_rows,)](
            x_nD, residual_nD, weight_D, out, total, eps, x_nD.stride(0), residual_nD.stride(0), dim,
            BLOCK_D=next_power_of_2(dim), ADD=add, num_warps=8 if dim > 2048 else 4,
        )  # fmt: skip


def _latents(
    down_nX: torch.Tensor,
    q_weight_Q: torch.Tensor,
    kv_weight_C: torch.Tensor,
    eps: float,
    cos_nR: torch.Tensor,
    sin_nR: torch.Tensor,
    out: torch.Tensor,
    index_n: torch.Tensor | None,
) -> torch.Tensor:
    """Latents and keys to `out` [n, C + R], or with an index to the cache [S, P, C + R]. Returns the queries [n, Q]."""
    num_rows = len(down_nX)
    query_dim, dim, half = len(q_weight_Q), len(kv_weight_C), cos_nR.shape[1]
    query_nQ = down_nX.new_empty(num_rows, query_dim)
    if not num_rows:
        return query_nQ
    down_nX = _rows(down_nX)
    cos_nR, sin_nR = cos_nR.contiguous(), sin_nR.contiguous()
    assert out.stride(-1) == 1 and down_nX.shape[1] == query_dim + dim + 2 * half and out.dtype == down_nX.dtype
    page_size, slot_stride = (0, 0) if index_n is None else (out.shape[1], out.stride(0))
    fused.latent_kernel[(num_rows, 2 if query_dim else 1)](
        down_nX, q_weight_Q, kv_weight_C, cos_nR, sin_nR, index_n, query_nQ, out, eps, down_nX.stride(0), slot_stride,
        out.stride(-2), query_dim, dim, half,
        BLOCK_Q=next_power_of_2(query_dim), BLOCK_C=next_power_of_2(dim), BLOCK_HALF=max(1, next_power_of_2(half)),
        PAGE=page_size,
    )  # fmt: skip
    return query_nQ
