"""Expanded attention on the device: each head's own keys and values, computed from the latents beforehand.

The keys of all sequences of a batch lie one after another, T of them: each head's [nope | value] in [T, h, N + V], the
rotary part that all heads share in the gathered latents [T, C + R]. A program attends one head of a block of rows to a
window of the keys; from the second window on it merges with what the windows before gave.

N may be any sum of a power of two and a smaller one (128, or 192 = 128 + 64): tiles are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_FIELDS = 5  # as `plan.ExpandedPlan.blocks`
_BLOCK_FIELDS = tl.constexpr(BLOCK_FIELDS)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(pointer, descriptor, row, column, rows_N, limit, stride, columns, num_columns, USE_TMA: tl.constexpr):
    """Rows `row` and on, some columns: by TMA, or by pointers and masked."""
    if USE_TMA:
        return descriptor.load([row, column])
    place_NX = rows_N.to(tl.int64)[:, None] * stride + (column + columns)[None, :]
    return tl.load(pointer + place_NX, mask=(rows_N < limit)[:, None] & (columns < num_columns)[None, :], other=0.0)


@triton.jit
def expanded_kernel(
    q_ptr, kv_ptr, latent_ptr, first_desc, second_desc, rotary_desc, value_desc, blocks_ptr, visible_ptr, out_ptr,
    lse_ptr, scale_log2, window_start, window_end, num_keys, first_head, q_row, q_head, kv_row, latent_row, out_row,
    out_head, num_heads,
    N: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, WINDOWS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block = blocks_ptr + tl.program_id(0) * _BLOCK_FIELDS
    head = tl.program_id(1)
    first_row, num_rows, key_offset = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    common, most = tl.load(block + 3), tl.load(block + 4)
    # The window in this sequence's own key numbers.
    start = tl.maximum(window_start - key_offset, 0)
    end = tl.minimum(window_end - key_offset, most)
    if end <= start:
        return

    index_M = tl.arange(0, BLOCK_M)
    valid_M = index_M < num_rows
    row_M = first_row + tl.where(valid_M, index_M, 0)
    visible_M = tl.load(visible_ptr + row_M)
    q_M = q_ptr + row_M.to(tl.int64) * q_row + (first_head + head) * q_head
    f_F, r_R, v_V = tl.arange(0, FIRST), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    q_MF = tl.load(q_M[:, None] + f_F[None, :], mask=valid_M[:, None] & (f_F < N)[None, :], other=0.0)
    q_MS = q_MF
    s_S = f_F
    if SECOND > 0:
        s_S = tl.arange(0, SECOND)
        q_MS = tl.load(
            q_M[:, None] + (FIRST + s_S)[None, :], mask=valid_M[:, None] & (FIRST + s_S < N)[None, :], other=0.0
        )
    q_MR = q_MF
    if R > 0:
        q_MR = tl.load(q_M[:, None] + (N + r_R)[None, :], mask=valid_M[:, None] & (r_R < R)[None, :], other=0.0)

    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    most_M = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    n_N = tl.arange(0, BLOCK_N)
    column = head * (N + V)
    whole_end = start + tl.maximum(tl.minimum(common, end) - start, 0) // BLOCK_N * BLOCK_N
    for phase in tl.static_range(2):  # tiles that every row sees whole, then the rest
        begin, stop = (start, whole_end) if phase == 0 else (whole_end, end)
        for key in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            row = key_offset + key - window_start
            rows_N = row + n_N
            k_NF = _load_tile(kv_ptr, first_desc, row, column, rows_N, num_keys, kv_row, f_F, N, USE_TMA)
            scores = tl.dot(q_MF, k_NF.T, input_precision=PRECISION)
            if SECOND > 0:
                k_NS = _load_tile(
                    kv_ptr, second_desc, row, column + FIRST, rows_N, num_keys, kv_row, s_S, N - FIRST, USE_TMA
                )
                scores = tl.dot(q_MS, k_NS.T, scores, input_precision=PRECISION)
            if R > 0:
                k_NR = _load_tile(latent_ptr, rotary_desc, row, C, rows_N, num_keys, latent_row, r_R, R, USE_TMA)
                scores = tl.dot(q_MR, k_NR.T, scores, input_precision=PRECISION)
            scores = scores * scale_log2
            if phase == 1:
                keys_N = key + n_N
                seen_MN = (keys_N[None, :] < visible_M[:, None]) & (keys_N < end)[None, :]
                scores = tl.where(seen_MN, scores, -float("inf"))
            higher_M = tl.maximum(most_M, tl.max(scores, 1))
            base_M = tl.where(higher_M == -float("inf"), 0.0, higher_M) if phase == 1 else higher_M
            weights = tl.exp2(scores - base_M[:, None])
            fade_M = tl.exp2(most_M - base_M)
            total_M = total_M * fade_M + tl.sum(weights, 1)
            acc_MV = acc_MV * fade_M[:, None]
            v_NV = _load_tile(kv_ptr, value_desc, row, column + N, rows_N, num_keys, kv_row, v_V, V, USE_TMA)
            acc_MV = tl.dot(weights.to(v_NV.dtype), v_NV, acc_MV, input_precision=PRECISION)
            most_M = higher_M

    acc_MV = acc_MV / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    out_MV = out_ptr + row_M.to(tl.int64)[:, None] * out_row + head * out_head + v_V[None, :]
    mask_MV = valid_M[:, None] & (v_V < V)[None, :]
    if WINDOWS:
        lse_M = (most_M + tl.log2(total_M)) * LN2
        lse_place_M = lse_ptr + row_M.to(tl.int64) * num_heads + head
        if start > 0:
            before_M = tl.load(lse_place_M, mask=valid_M, other=-float("inf"))
            top_M = tl.maximum(before_M, lse_M)
            top_M = tl.where(top_M == -float("inf"), 0.0, top_M)
            old_M, new_M = tl.exp2((before_M - top_M) * LOG2E), tl.exp2((lse_M - top_M) * LOG2E)
            sum_M = old_M + new_M
            share_M = 1.0 / tl.where(sum_M == 0.0, 1.0, sum_M)
            before_MV = tl.load(out_MV, mask=mask_MV, other=0.0)
            acc_MV = before_MV * (old_M * share_M)[:, None] + acc_MV * (new_M * share_M)[:, None]
            lse_M = top_M + tl.log2(sum_M) * LN2
        tl.store(lse_place_M, lse_M, mask=valid_M)
    tl.store(out_MV, acc_MV, mask=mask_MV)
