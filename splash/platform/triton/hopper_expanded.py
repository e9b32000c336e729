"""Expanded attention for Hopper, in Gluon: the same blocks and results as `expanded.expanded_kernel`.

A block of 128 rows is two halves, a warpgroup each, which run by themselves: while one is at its softmax the other has
the tensor cores. A third partition of one warp does nothing but ask for keys and values, as soon as both halves are
done with what lies in their place.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splash.platform.triton.expanded import BLOCK_FIELDS

ROWS = 128  # rows of a block

_FIELDS = gl.constexpr(BLOCK_FIELDS)
_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)
_HALF = gl.constexpr(64)
# Names of Triton 3.9, and of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _clamped_rows(first_row, num_rows, LAYOUT: gl.constexpr):
    """The rows of a half; beyond its last, that one again, and row 0 where it has none."""
    row_M = first_row + gl.minimum(gl.arange(0, _HALF, LAYOUT), gl.maximum(num_rows, 1) - 1)
    return gl.where(num_rows > 0, row_M, 0)


@gluon.jit
def _load_queries(q_ptr, first_row, num_rows, q_row, first_column, q_MX, COLUMNS: gl.constexpr):
    """Some columns of a half's queries into shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    row_M = _clamped_rows(first_row, num_rows, gl.SliceLayout(1, LAYOUT))
    column_X = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    q_MX.store(gl.load(q_ptr + row_M.to(gl.int64)[:, None] * q_row + column_X[None, :]))


@gluon.jit
def _produce(
    first_desc, second_desc, rotary_desc, value_desc, k_BNF, k_BNS, k_BNR, v_BNV, full_B, free_B, first_row, column,
    num_tiles, N: gl.constexpr, C: gl.constexpr, R: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    V: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Keep both buffers of keys (barriers 0, 1) and of values (2, 3) filled."""
    for i in range(num_tiles):
        buffer, phase = i & 1, ((i >> 1) & 1) ^ 1
        row = first_row + i * KEYS
        mbarrier.wait(free_B.index(buffer), phase)
        full = full_B.index(buffer)
        mbarrier.expect(full, KEYS * (FIRST + SECOND + R) * 2)
        _copy(first_desc, [row, column], full, k_BNF.index(buffer))
        if SECOND > 0:
            _copy(second_desc, [row, column + FIRST], full, k_BNS.index(buffer))
        if R > 0:
            _copy(rotary_desc, [row, C], full, k_BNR.index(buffer))
        mbarrier.wait(free_B.index(2 + buffer), phase)
        full = full_B.index(2 + buffer)
        mbarrier.expect(full, KEYS * V * 2)
        _copy(value_desc, [row, column + N], full, v_BNV.index(buffer))


@gluon.jit
def _consume(
    half, q_ptr, visible_ptr, out_ptr, lse_ptr, q_HMF, q_HMS, q_HMR, k_BNF, k_BNS, k_BNR, v_BNV, full_B, free_B,
    first_row, num_rows, start, end, common, head, q_row, q_head_offset, out_row, out_head, num_heads, scale_log2,
    N: gl.constexpr, R: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, V: gl.constexpr,
    KEYS: gl.constexpr, WINDOWS: gl.constexpr,
):  # fmt: skip
    """Attend 64 rows, those of `half`, to all tiles and store what comes out."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    num_rows -= half * _HALF
    first_row += half * _HALF

    q_ptr += q_head_offset
    q_MF, q_MS, q_MR = q_HMF.index(half), q_HMS.index(half), q_HMR.index(half)
    _load_queries(q_ptr, first_row, num_rows, q_row, 0, q_MF, FIRST)
    if SECOND > 0:
        _load_queries(q_ptr, first_row, num_rows, q_row, FIRST, q_MS, SECOND)
    if R > 0:
        _load_queries(q_ptr, first_row, num_rows, q_row, N, q_MR, R)
    fence_async_shared()
    _barrier()

    visible_M = gl.load(visible_ptr + _clamped_rows(first_row, num_rows, SCORE_ROWS))
    most_M = gl.full([_HALF], -float("inf"), gl.float32, SCORE_ROWS)
    total_M = gl.zeros([_HALF], gl.float32, SCORE_ROWS)
    nothing = gl.zeros([_HALF, KEYS], gl.float32, SCORES)
    acc_MV = gl.zeros([_HALF, V], gl.float32, OUTPUT)
    num_tiles = (end - start + KEYS - 1) // KEYS
    for i in range(num_tiles):
        buffer, phase = i & 1, (i >> 1) & 1
        mbarrier.wait(full_B.index(buffer), phase)
        scores = warpgroup_mma(q_MF, k_BNF.index(buffer).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if SECOND > 0:
            scores = warpgroup_mma(q_MS, k_BNS.index(buffer).permute((1, 0)), scores, is_async=True)
        if R > 0:
            scores = warpgroup_mma(q_MR, k_BNR.index(buffer).permute((1, 0)), scores, is_async=True)
        scores_MN = warpgroup_mma_wait(0, deps=[scores])
        _barrier()
        mbarrier.arrive(free_B.index(buffer), count=1)
        key = start + i * KEYS
        if key + KEYS > gl.minimum(common, end):
            keys_N = key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
            seen_MN = (keys_N[None, :] < visible_M[:, None]) & (keys_N < end)[None, :]
            scores_MN = gl.where(seen_MN, scores_MN, -float("inf"))
        higher_M = gl.maximum(most_M, gl.max(scores_MN, 1) * scale_log2)
        # A row that has seen nothing yet has -inf here: taking 0 keeps exp2 at 0 where -inf - -inf would be NaN.
        base_M = gl.where(higher_M == -float("inf"), 0.0, higher_M)
        weights_MN = gl.exp2(scores_MN * scale_log2 - base_M[:, None])
        fade_M = gl.exp2(most_M - base_M)
        total_M = total_M * fade_M + gl.sum(weights_MN, 1)
        most_M = higher_M
        acc_MV = acc_MV * gl.convert_layout(fade_M, OUT_ROWS)[:, None]
        weights = gl.convert_layout(weights_MN.to(gl.bfloat16), gl.DotOperandLayout(0, OUTPUT, 2))
        mbarrier.wait(full_B.index(2 + buffer), phase)
        acc = warpgroup_mma(weights, v_BNV.index(buffer), acc_MV, is_async=True)
        acc_MV = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(free_B.index(2 + buffer), count=1)

    acc_MV = acc_MV * gl.convert_layout(1.0 / gl.where(total_M == 0.0, 1.0, total_M), OUT_ROWS)[:, None]
    index_M = gl.arange(0, _HALF, OUT_ROWS)
    out_M = out_ptr + (first_row + index_M).to(gl.int64) * out_row + head * out_head
    out_MV = out_M[:, None] + gl.arange(0, V, gl.SliceLayout(0, OUTPUT))[None, :]
    mask_M = index_M < num_rows
    if WINDOWS:
        lse_M = gl.convert_layout((most_M + gl.log2(total_M)) * _LN2, OUT_ROWS)
        lse_place_M = lse_ptr + (first_row + index_M).to(gl.int64) * num_heads + head
        if start > 0:
            before_M = gl.load(lse_place_M, mask=mask_M, other=-float("inf"))
            top_M = gl.maximum(before_M, lse_M)
            top_M = gl.where(top_M == -float("inf"), 0.0, top_M)
            old_M, new_M = gl.exp2((before_M - top_M) * _LOG2E), gl.exp2((lse_M - top_M) * _LOG2E)
            sum_M = old_M + new_M
            share_M = 1.0 / gl.where(sum_M == 0.0, 1.0, sum_M)
            before_MV = gl.load(out_MV, mask=mask_M[:, None], other=0.0)
            acc_MV = before_MV * (old_M * share_M)[:, None] + acc_MV * (new_M * share_M)[:, None]
            lse_M = top_M + gl.log2(sum_M) * _LN2
        gl.store(lse_place_M, lse_M, mask=mask_M)
    gl.store(out_MV, acc_MV.to(out_ptr.dtype.element_ty), mask=mask_M[:, None])


@gluon.jit
def expanded_kernel(
    q_ptr, first_desc, second_desc, rotary_desc, value_desc, blocks_ptr, visible_ptr, out_ptr, lse_ptr,
    scale_log2, window_start, window_end, first_head, q_row, q_head, out_row, out_head, num_heads,
    N: gl.constexpr, V: gl.constexpr, C: gl.constexpr, R: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    KEYS: gl.constexpr, WINDOWS: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    block = blocks_ptr + gl.program_id(0) * _FIELDS
    head = gl.program_id(1)
    first_row, num_rows, key_offset = gl.load(block), gl.load(block + 1), gl.load(block + 2)
    common, most = gl.load(block + 3), gl.load(block + 4)
    start = gl.maximum(window_start - key_offset, 0)
    end = gl.minimum(window_end - key_offset, most)
    if end <= start:
        return
    k_BNF = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, FIRST], TILE)
    q_HMF = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, FIRST], TILE)
    v_BNV = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, V], TILE)
    k_BNS, q_HMS, k_BNR, q_HMR = k_BNF, q_HMF, k_BNF, q_HMF
    if SECOND > 0:
        k_BNS = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, SECOND], TILE)
        q_HMS = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, SECOND], TILE)
    if R > 0:
        k_BNR = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, R], TILE)
        q_HMR = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, R], TILE)
    full_B = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free_B = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(4):
        mbarrier.init(full_B.index(b), count=1)
        mbarrier.init(free_B.index(b), count=2)
    fence_async_shared()
    _barrier()
    num_tiles = (end - start + KEYS - 1) // KEYS
    q_head_offset = (first_head + head) * q_head
    gl.warp_specialize(
        [
            (_consume, (
                0, q_ptr, visible_ptr, out_ptr, lse_ptr, q_HMF, q_HMS, q_HMR, k_BNF, k_BNS, k_BNR, v_BNV, full_B,
                free_B, first_row, num_rows, start, end, common, head, q_row, q_head_offset, out_row, out_head,
                num_heads, scale_log2, N, R, FIRST, SECOND, V, KEYS, WINDOWS,
            )),
            (_consume, (
                1, q_ptr, visible_ptr, out_ptr, lse_ptr, q_HMF, q_HMS, q_HMR, k_BNF, k_BNS, k_BNR, v_BNV, full_B,
                free_B, first_row, num_rows, start, end, common, head, q_row, q_head_offset, out_row, out_head,
                num_heads, scale_log2, N, R, FIRST, SECOND, V, KEYS, WINDOWS,
            )),
            (_produce, (
                first_desc, second_desc, rotary_desc, value_desc, k_BNF, k_BNS, k_BNR, v_BNV, full_B, free_B,
                key_offset + start - window_start, head * (N + V), num_tiles, N, C, R, FIRST, SECOND, V, KEYS,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits(q_nHd: torch.Tensor, kv_TE: torch.Tensor, latents_TK: torch.Tensor, dims: tuple[int, int, int]) -> bool:
    """Whether the kernel can take these: bfloat16, DeepSeek-like (nope, value, latent) dims, addresses TMA can take."""
    nope_dim, value_dim, latent_dim = dims
    first, second = _split(nope_dim)
    rotary_dim = latents_TK.shape[1] - latent_dim
    return (
        q_nHd.dtype == kv_TE.dtype == latents_TK.dtype == torch.bfloat16
        and first in (64, 128)
        and second in (0, 64)
        and first + second == nope_dim
        and rotary_dim in (0, 64)
        and value_dim in (64, 128, 256)
        and all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 for x in (kv_TE, latents_TK))
    )


def _split(nope_dim: int) -> tuple[int, int]:
    """A power of two, and the rest."""
    first = 1 << (nope_dim.bit_length() - 1)
    return first, nope_dim - first


def attend(
    q_nHd: torch.Tensor,
    kv_TE: torch.Tensor,
    latents_TK: torch.Tensor,
    blocks: torch.Tensor,
    visible: torch.Tensor,
    out_nhV: torch.Tensor,
    lse_nh: torch.Tensor,
    scale_log2: float,
    window_start: int,
    first_head: int,
    has_windows: bool,
    dims: tuple[int, int, int],
) -> None:
    """Launch the kernel over a plan's `blocks` of ROWS rows, for the heads and the window of keys in `kv_TE`."""
    nope_dim, value_dim, latent_dim = dims
    first, second = _split(nope_dim)
    rotary_dim = latents_TK.shape[1] - latent_dim
    keys = 128 if value_dim <= 128 else 64
    layout = gl.NVMMASharedLayout(128, 16, rank=2)

    def tiles(x: torch.Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [keys, columns], layout)

    num_heads = out_nhV.shape[1]
    expanded_kernel[(len(blocks), num_heads)](
        q_nHd, tiles(kv_TE, first), tiles(kv_TE, second or first),
        tiles(latents_TK, rotary_dim or first), tiles(kv_TE, value_dim), blocks, visible, out_nhV, lse_nh,
        scale_log2, window_start, window_start + len(kv_TE), first_head,
        q_nHd.stride(0), q_nHd.stride(1), out_nhV.stride(0), out_nhV.stride(1), num_heads,
        N=nope_dim, V=value_dim, C=latent_dim, R=rotary_dim, FIRST=first, SECOND=second, KEYS=keys,
        WINDOWS=has_windows, num_warps=4,
    )  # fmt: skip
