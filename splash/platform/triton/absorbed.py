"""Absorbed attention on the device: every head of a row attends to the same paged [latent | rotary] keys.

A *pair* is a row and a head, number row * H + head. A block of up to BLOCK_M neighbouring pairs of one sequence attends
to a run of tiles of BLOCK_N keys: that is a segment, one program's work (`splash.platform.triton.plan`). Decode and
prefill, few heads and many are the same kernel with other segments. A block whose keys are split over segments leaves
partial results, which a second kernel merges.

Keys are loaded by the tensor copy engine (TMA) where a tile lies in one page, by cp.async of gathered rows otherwise.
TMA cannot mask, and what lies beyond a sequence's end in its last page may be anything: the last tile is gathered.

Softmax is in base 2 inside (one instruction a score) and base e outside.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splash.platform.triton.plan import SEGMENT_FIELDS, SPLIT_FIELDS

LN2 = tl.constexpr(0.6931471805599453)
_SEGMENT_FIELDS = tl.constexpr(SEGMENT_FIELDS)
_SPLIT_FIELDS = tl.constexpr(SPLIT_FIELDS)


@triton.jit
def _attend_tile(
    q_MC, q_MR, k_NC, k_NR, acc_MC, most_M, total_M, visible_M, keys_N, scale_log2,
    R: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax (arXiv 2205.14135): returns the accumulator, largest score and total."""
    scores = tl.dot(q_MC, k_NC.T, input_precision=PRECISION)
    if R > 0:
        scores = tl.dot(q_MR, k_NR.T, scores, input_precision=PRECISION)
    scores = scores * scale_log2
    if MASKED:
        scores = tl.where(keys_N[None, :] < visible_M[:, None], scores, -float("inf"))
    higher_M = tl.maximum(most_M, tl.max(scores, 1))
    # A row that has seen nothing yet has -inf here: taking 0 instead keeps exp2 at 0 where -inf - -inf would be NaN.
    base_M = tl.where(higher_M == -float("inf"), 0.0, higher_M) if MASKED else higher_M
    weights = tl.exp2(scores - base_M[:, None])
    fade_M = tl.exp2(most_M - base_M)
    total_M = total_M * fade_M + tl.sum(weights, 1)
    acc_MC = acc_MC * fade_M[:, None]
    acc_MC = tl.dot(weights.to(k_NC.dtype), k_NC, acc_MC, input_precision=PRECISION)
    return acc_MC, higher_M, total_M


@triton.jit
def attend_kernel(
    q_ptr, pages_ptr, latents, rotaries, segments_ptr, visible_ptr, slots_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    scale_log2, num_heads, q_row, q_head, slot_stride, key_stride, out_row, out_head,
    C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    USE_TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    segment = segments_ptr + tl.program_id(0) * _SEGMENT_FIELDS
    num_pairs = tl.load(segment + 1)
    if num_pairs == 0:
        return
    first_pair, first_page = tl.load(segment), tl.load(segment + 2)
    tile, tile_end = tl.load(segment + 3), tl.load(segment + 4)
    common, most = tl.load(segment + 5), tl.load(segment + 6)
    part = tl.load(segment + 7)

    index_M = tl.arange(0, BLOCK_M)
    valid_M = index_M < num_pairs
    pair_M = first_pair + tl.where(valid_M, index_M, 0)
    row_M, head_M = pair_M // num_heads, pair_M % num_heads
    visible_M = tl.load(visible_ptr + row_M)
    c_C, r_R = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    q_M = q_ptr + row_M.to(tl.int64) * q_row + head_M * q_head
    q_MC = tl.load(q_M[:, None] + c_C[None, :], mask=valid_M[:, None] & (c_C[None, :] < C), other=0.0)
    q_MR = q_MC
    if R > 0:
        q_MR = tl.load(q_M[:, None] + (C + r_R)[None, :], mask=valid_M[:, None] & (r_R[None, :] < R), other=0.0)

    acc_MC = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    most_M = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    slots_ptr += first_page
    n_N = tl.arange(0, BLOCK_N)
    if USE_TMA:
        whole_end = tl.minimum(tile_end, common // BLOCK_N)
        for t in tl.range(tile, whole_end, num_stages=STAGES):
            key = t * BLOCK_N
            place = tl.load(slots_ptr + key // PAGE) * PAGE + key % PAGE
            k_NC = latents.load([place, 0])
            k_NR = k_NC
            if R > 0:
                k_NR = rotaries.load([place, C])
            acc_MC, most_M, total_M = _attend_tile(
                q_MC, q_MR, k_NC, k_NR, acc_MC, most_M, total_M, visible_M, n_N, scale_log2, R, False, PRECISION
            )
        tile = tl.maximum(tile, whole_end)
    for t in tl.range(tile, tile_end, num_stages=STAGES):
        keys_N = t * BLOCK_N + n_N
        seen_N = keys_N < most
        slot_N = tl.load(slots_ptr + keys_N // PAGE, mask=seen_N, other=0)
        k_N = pages_ptr + slot_N.to(tl.int64) * slot_stride + (keys_N % PAGE) * key_stride
        k_NC = tl.load(k_N[:, None] + c_C[None, :], mask=seen_N[:, None] & (c_C[None, :] < C), other=0.0)
        k_NR = k_NC
        if R > 0:
            k_NR = tl.load(k_N[:, None] + (C + r_R)[None, :], mask=seen_N[:, None] & (r_R[None, :] < R), other=0.0)
        acc_MC, most_M, total_M = _attend_tile(
            q_MC, q_MR, k_NC, k_NR, acc_MC, most_M, total_M, visible_M, keys_N, scale_log2, R, True, PRECISION
        )

    acc_MC = acc_MC / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    lse_M = (most_M + tl.log2(total_M)) * LN2  # log2(0) = -inf, so a row that saw nothing gets -inf
    if part < 0:
        out_M = out_ptr + row_M.to(tl.int64) * out_row + head_M * out_head
        tl.store(out_M[:, None] + c_C[None, :], acc_MC, mask=valid_M[:, None] & (c_C[None, :] < C))
        tl.store(lse_ptr + pair_M, lse_M, mask=valid_M)
    else:
        part_M = part.to(tl.int64) * BLOCK_M + index_M
        tl.store(part_ptr + part_M[:, None] * C + c_C[None, :], acc_MC, mask=valid_M[:, None] & (c_C[None, :] < C))
        tl.store(part_lse_ptr + part_M, lse_M, mask=valid_M)


@triton.jit
def merge_splits_kernel(
    part_ptr, part_lse_ptr, splits_ptr, out_ptr, lse_ptr, num_heads, out_row, out_head,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of PAIRS neighbouring pairs. An empty part weighs nothing."""
    split = splits_ptr + tl.program_id(0) * _SPLIT_FIELDS
    num_pairs = tl.load(split + 1)
    first_in_block = tl.program_id(1) * PAIRS
    if first_in_block >= num_pairs:
        return
    first_pair, first_part, num_parts = tl.load(split), tl.load(split + 2), tl.load(split + 3)
    index_M = first_in_block + tl.arange(0, PAIRS)
    c_C = tl.arange(0, BLOCK_C)
    most_M = tl.full([PAIRS], -float("inf"), dtype=tl.float32)
    total_M = tl.zeros([PAIRS], dtype=tl.float32)
    acc_MC = tl.zeros([PAIRS, BLOCK_C], dtype=tl.float32)
    for start in range(0, num_parts, UNROLL):
        for step in tl.static_range(UNROLL):  # independent loads, in flight together
            part_M = start + step + tl.zeros([PAIRS], dtype=tl.int32)
            is_part_M = (part_M < num_parts) & (index_M < num_pairs)
            place_M = (first_part + part_M).to(tl.int64) * BLOCK_M + index_M
            lse_M = tl.load(part_lse_ptr + place_M, mask=is_part_M, other=-float("inf"))
            mask_MC = is_part_M[:, None] & (c_C[None, :] < C)
            part_MC = tl.load(part_ptr + place_M[:, None] * C + c_C[None, :], mask=mask_MC, other=0.0)
            higher_M = tl.maximum(most_M, lse_M)
            base_M = tl.where(higher_M == -float("inf"), 0.0, higher_M)
            fade_M, weight_M = tl.exp(most_M - base_M), tl.exp(lse_M - base_M)
            acc_MC = acc_MC * fade_M[:, None] + part_MC * weight_M[:, None]
            total_M = total_M * fade_M + weight_M
            most_M = higher_M
    pair_M = first_pair + index_M
    row_M, head_M = pair_M // num_heads, pair_M % num_heads
    out_M = out_ptr + row_M.to(tl.int64) * out_row + head_M * out_head
    acc_MC = acc_MC / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    valid_M = index_M < num_pairs
    tl.store(out_M[:, None] + c_C[None, :], acc_MC, mask=valid_M[:, None] & (c_C[None, :] < C))
    tl.store(lse_ptr + pair_M, most_M + tl.log(total_M), mask=valid_M)
