"""Absorbed attention for Hopper, in Gluon: the segments and results of `absorbed.attend_kernel`, scheduled by hand.

Two warpgroups share a block of 64 pairs. For the scores each takes half of a tile's keys, for the output half of the
value dims, so that 64 x 512 accumulators fit in registers. Shared memory holds the queries and two tiles of keys and no
more, and Triton's own pipeline asks for a tile only when the one before it is done. Here a tile is asked for as soon as
the buffer is free, which is right after the last tile's values have been used: it arrives behind the scores and the
softmax of the tile at hand.

    tensor cores   | scores i                  |                    | values i
    softmax        |                           | softmax i, rescale |
    copy engine    |  tile i+1 into the buffer of i-1 .....................

Some of the queries are held in registers: products with keys that only one operand comes from shared memory for run at
full rate, those with both at two thirds (a warpgroup's 32 keys are few beside its 64 queries).
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splash.platform.triton.plan import SEGMENT_FIELDS

ROWS, KEYS, WARPS = 64, 64, 8  # pairs of a block, keys of a tile

_FIELDS = gl.constexpr(SEGMENT_FIELDS)
_LN2 = gl.constexpr(0.6931471805599453)
_ZEROED_ROWS = gl.constexpr(16)
_HELD = gl.constexpr(128)  # latent dims of the queries that are held in registers, beside the rotary ones
# Names of Triton 3.9, and of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _copy_tile(
    latents, rotaries, slots_ptr, key, last_key, latent_NC, rotary_NR, arrived,
    is_wanted, C: gl.constexpr, R: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Ask for a tile, a page or a part of a page at a time. Pages beyond the last one are not read: it is, again.

    Predicated rather than branched around: ptxas gives up overlapping products across a branch.
    """
    RUN: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    mbarrier.expect(arrived, KEYS * (C + R) * 2, pred=is_wanted)
    for run in gl.static_range(KEYS // RUN):
        first = gl.minimum(key + run * RUN, last_key // RUN * RUN)
        place = gl.load(slots_ptr + first // PAGE) * PAGE + first % PAGE
        _copy(latents, [place, 0], arrived, latent_NC.slice(run * RUN, RUN), pred=is_wanted)
        if R > 0:
            _copy(rotaries, [place, C], arrived, rotary_NR.slice(run * RUN, RUN), pred=is_wanted)


@gluon.jit
def _rows(
    q_ptr, first_pair, num_pairs, num_heads, q_row, q_head, first_column, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pointers to some columns of a block's queries; pairs beyond the block's are its last one again."""
    pair_M = first_pair + gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), num_pairs - 1)
    q_M = q_ptr + (pair_M // num_heads).to(gl.int64) * q_row + (pair_M % num_heads) * q_head
    return q_M[:, None] + (first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)))[None, :]


@gluon.jit
def _silence(latent_NC, key, most, C: gl.constexpr, KEYS: gl.constexpr):
    """Zero the tile's rows beyond the end: what lies there may be NaN, which a weight of 0 does not silence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    for run in gl.static_range(KEYS // _ZEROED_ROWS):
        within_N = key + run * _ZEROED_ROWS + gl.arange(0, _ZEROED_ROWS, gl.SliceLayout(1, LAYOUT)) < most
        rows_NC = latent_NC.slice(run * _ZEROED_ROWS, _ZEROED_ROWS)
        values = rows_NC.load(LAYOUT)
        rows_NC.store(gl.where(within_N[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    _barrier()


@gluon.jit
def _attend_tile(
    i, tile, num_tiles, q_MC, held_MC, held_MR, weights_MN, latent_BNC, rotary_BNR, arrived_B, latents, rotaries,
    slots_ptr, most, visible_M, nothing, acc, most_M, total_MN, scale_log2, C: gl.constexpr, R: gl.constexpr,
    KEYS: gl.constexpr, PAGE: gl.constexpr, PIECES: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Tile `tile`, the program's i-th: returns the product with its values still running."""
    buffer = i & 1
    latent_NC, rotary_NR = latent_BNC.index(buffer), rotary_BNR.index(buffer)
    acc_MC = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.wait(arrived_B.index(buffer), (i >> 1) & 1)
    keys_CN = latent_NC.permute((1, 0))
    scores = warpgroup_mma(held_MC, keys_CN.slice(0, _HELD, dim=0), nothing, use_acc=False, is_async=True)
    for piece in gl.static_range(PIECES):  # the rest in powers of two
        part_MC = q_MC.slice(_HELD << piece, _HELD << piece, dim=1)
        part_CN = keys_CN.slice(_HELD << piece, _HELD << piece, dim=0)
        scores = warpgroup_mma(part_MC, part_CN, scores, is_async=True)
    if R > 0:
        scores = warpgroup_mma(held_MR, rotary_NR.permute((1, 0)), scores, is_async=True)
    _barrier()  # both warpgroups are done with the tile before and its weights
    _copy_tile(
        latents, rotaries, slots_ptr, (tile + 1) * KEYS, most - 1, latent_BNC.index(buffer ^ 1),
        rotary_BNR.index(buffer ^ 1), arrived_B.index(buffer ^ 1), i + 1 < num_tiles, C, R, KEYS, PAGE,
    )  # fmt: skip
    scores_MN = warpgroup_mma_wait(0, deps=[scores])
    keys_N = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    scores_MN = gl.where(keys_N[None, :] < visible_M[:, None], scores_MN * scale_log2, -float("inf"))
    higher_M = gl.maximum(most_M, gl.max(scores_MN, 1))
    # A row that has seen nothing yet has -inf here: taking 0 instead keeps exp2 at 0 where -inf - -inf would be NaN.
    base_M = gl.where(higher_M == -float("inf"), 0.0, higher_M)
    own_MN = gl.exp2(scores_MN - base_M[:, None])
    weights_MN.store(own_MN.to(gl.bfloat16))
    fade_M = gl.exp2(most_M - base_M)
    total_MN = total_MN * fade_M[:, None] + own_MN
    acc_MC = acc_MC * gl.convert_layout(fade_M, gl.SliceLayout(1, OUTPUT))[:, None]
    fence_async_shared()
    _barrier()
    return warpgroup_mma(weights_MN, latent_NC, acc_MC, is_async=True), higher_M, total_MN


@gluon.jit
def attend_kernel(
    q_ptr, latents, rotaries, segments_ptr, visible_ptr, slots_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    scale_log2, num_heads, q_row, q_head, out_row, out_head,
    C: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, PAGE: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    OUT_COLUMNS: gl.constexpr = gl.SliceLayout(0, OUTPUT)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)

    segment = segments_ptr + gl.program_id(0) * _FIELDS
    num_pairs = gl.load(segment + 1)
    if num_pairs == 0:
        return
    first_pair, first_page = gl.load(segment), gl.load(segment + 2)
    first_tile, tile_end = gl.load(segment + 3), gl.load(segment + 4)
    most, part = gl.load(segment + 6), gl.load(segment + 7)
    slots_ptr += first_page
    num_tiles = tile_end - first_tile

    latent_BNC = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, C], TILE)
    rotary_BNR = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, R if R > 0 else 64], TILE)
    q_MC = gl.allocate_shared_memory(gl.bfloat16, [ROWS, C], TILE)
    weights_MN = gl.allocate_shared_memory(gl.bfloat16, [ROWS, KEYS], TILE)
    arrived_B = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(arrived_B.index(b), count=1)
    fence_async_shared()
    _barrier()
    if num_tiles > 0:
        _copy_tile(
            latents, rotaries, slots_ptr, first_tile * KEYS, most - 1, latent_BNC.index(0), rotary_BNR.index(0),
            arrived_B.index(0), True, C, R, KEYS, PAGE,
        )  # fmt: skip

    # One load of all there is: in pieces, each would wait for the one before.
    q_MC.store(gl.load(_rows(q_ptr, first_pair, num_pairs, num_heads, q_row, q_head, 0, C, ROWS, LOADED)))
    held_MC = gl.load(_rows(q_ptr, first_pair, num_pairs, num_heads, q_row, q_head, 0, _HELD, ROWS, HELD))
    held_MR = held_MC
    if R > 0:
        held_MR = gl.load(_rows(q_ptr, first_pair, num_pairs, num_heads, q_row, q_head, C, R, ROWS, HELD))
    fence_async_shared()
    _barrier()

    score_pair_M = first_pair + gl.minimum(gl.arange(0, ROWS, SCORE_ROWS), num_pairs - 1)
    visible_M = gl.load(visible_ptr + score_pair_M // num_heads)
    most_M = gl.full([ROWS], -float("inf"), gl.float32, SCORE_ROWS)
    total_MN = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    acc = warpgroup_mma_init(gl.zeros([ROWS, C], gl.float32, OUTPUT))
    whole = num_tiles - (tile_end * KEYS > most).to(gl.int32)  # all but a last tile that reaches beyond the end
    for i in range(whole):
        acc, most_M, total_MN = _attend_tile(
            i, first_tile + i, num_tiles, q_MC, held_MC, held_MR, weights_MN, latent_BNC, rotary_BNR, arrived_B,
            latents, rotaries, slots_ptr, most, visible_M, nothing, acc, most_M, total_MN, scale_log2, C, R, KEYS,
            PAGE, PIECES, SCORES, OUTPUT,
        )  # fmt: skip
    acc_MC = warpgroup_mma_wait(0, deps=[acc])
    for i in range(whole, num_tiles):
        mbarrier.wait(arrived_B.index(i & 1), (i >> 1) & 1)
        _silence(latent_BNC.index(i & 1), (first_tile + i) * KEYS, most, C, KEYS)
        acc, most_M, total_MN = _attend_tile(
            i, first_tile + i, num_tiles, q_MC, held_MC, held_MR, weights_MN, latent_BNC, rotary_BNR, arrived_B,
            latents, rotaries, slots_ptr, most, visible_M, nothing, warpgroup_mma_init(acc_MC), most_M, total_MN,
            scale_log2, C, R, KEYS, PAGE, PIECES, SCORES, OUTPUT,
        )  # fmt: skip
        acc_MC = warpgroup_mma_wait(0, deps=[acc])

    for b in gl.static_range(2):
        mbarrier.invalidate(arrived_B.index(b))
    total_M = gl.sum(total_MN, 1)
    lse_M = (most_M + gl.log2(total_M)) * _LN2
    share_M = 1.0 / gl.where(total_M == 0.0, 1.0, total_M)
    acc_MC = acc_MC * gl.convert_layout(share_M, OUT_ROWS)[:, None]
    o_M, s_M = gl.arange(0, ROWS, OUT_ROWS), gl.arange(0, ROWS, SCORE_ROWS)
    column_C = gl.arange(0, C, OUT_COLUMNS)
    if part < 0:
        to_M = first_pair + gl.minimum(o_M, num_pairs - 1)
        out_M = out_ptr + (to_M // num_heads).to(gl.int64) * out_row + (to_M % num_heads) * out_head
        gl.store(out_M[:, None] + column_C[None, :], acc_MC.to(gl.bfloat16), mask=(o_M < num_pairs)[:, None])
        gl.store(lse_ptr + first_pair + s_M, lse_M, mask=s_M < num_pairs)
    else:
        first_part = part.to(gl.int64) * ROWS
        part_M = part_ptr + (first_part + o_M) * C
        gl.store(part_M[:, None] + column_C[None, :], acc_MC, mask=(o_M < num_pairs)[:, None])
        gl.store(part_lse_ptr + first_part + s_M, lse_M, mask=s_M < num_pairs)


def fits(q_nHK: torch.Tensor, pages_SPK: torch.Tensor, value_dim: int) -> bool:
    """Whether the kernel can take these: bfloat16, DeepSeek-like dims, dense slots of 16 keys or more."""
    rotary_dim = q_nHK.shape[2] - value_dim
    size = pages_SPK.element_size()
    return (
        q_nHK.dtype == pages_SPK.dtype == torch.bfloat16
        and value_dim in (256, 512)
        and rotary_dim in (0, 64)
        and pages_SPK.shape[1] >= 16
        and pages_SPK.stride(0) == pages_SPK.shape[1] * pages_SPK.stride(1)
        and pages_SPK.stride(2) == 1
        and pages_SPK.stride(1) * size % 16 == 0
        and pages_SPK.data_ptr() % 16 == 0
    )


def attend(
    q_nHK: torch.Tensor,
    pages_SPK: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    visible: torch.Tensor,
    slots: torch.Tensor,
    out_nHC: torch.Tensor,
    lse_nH: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    scale_log2: float,
    value_dim: int,
) -> None:
    """Launch the kernel over the first segments of a plan of blocks of ROWS pairs and tiles of KEYS keys."""
    page_size = pages_SPK.shape[1]
    rotary_dim = q_nHK.shape[2] - value_dim
    flat_LK = pages_SPK.flatten(0, 1)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    run = min(page_size, KEYS)
    latents = TensorDescriptor(flat_LK, list(flat_LK.shape), list(flat_LK.stride()), [run, value_dim], layout)
    rotaries = latents
    if rotary_dim:
        rotaries = TensorDescriptor(flat_LK, list(flat_LK.shape), list(flat_LK.stride()), [run, rotary_dim], layout)
    attend_kernel[(num_segments,)](
        q_nHK, latents, rotaries, segments, visible, slots, out_nHC, lse_nH, part_out, part_lse, scale_log2,
        q_nHK.shape[1], q_nHK.stride(0), q_nHK.stride(1), out_nHC.stride(0), out_nHC.stride(1),
        C=value_dim, R=rotary_dim, ROWS=ROWS, KEYS=KEYS, PAGE=page_size,
        PIECES=(value_dim // _HELD.value).bit_length() - 1, num_warps=WARPS,
    )  # fmt: skip
