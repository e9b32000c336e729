"""The local part of a mixture of experts: rows sorted by expert into blocks, two grouped products, a weighted sum.

    assign    the pair, a row and one of its choices, that each row of the blocks is, -1 where it is padding
    up        silu(x w1^T) * (x w3^T) of each padded row          one block of rows x one block of I a program
    down      its product with w2, at the pair's own place        one block of rows x one block of D
    combine   the weighted sum of each row's local pairs, in a fixed order, and what is beside them

Few pairs are assigned by one program, many by three kernels: how many pairs each local expert has, and each pair's
place among them (count); where each expert's rows begin once its share is padded to whole blocks (offsets); and then
the pairs (place). All sizes are bounds that the host knows; how many blocks are used, only the device does. So nothing
waits for the device, and a graph can hold all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash.platform.triton.launch import Tiles, descriptor, next_power_of_2

_PAIRS_AT_ONCE = 256
_BLOCKS_AT_ONCE = 32
_ASSIGNED_AT_ONCE = 2048  # pairs that one program assigns


@triton.jit
def _product(a_MK, b_NK, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b^T, [M, N]; swapped, acc + b a^T, [N, M], where few rows would waste the tensor cores' 64."""
    if SWAP:
        acc = tl.dot(b_NK, a_MK.T, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a_MK, b_NK.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def assign_kernel(
    expert_ptr, starts_ptr, block_expert_ptr, pairs_ptr, num_pairs, first_expert, num_experts, max_blocks,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """All pairs in one program: the expert of each block (-1 beyond the last), and the pair that each row is.

    `starts` is for the program itself: each expert's next free row. Rows of blocks that have no expert are left as is.
    """
    p_P, e_E, b_B = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_B)
    expert_P = tl.load(expert_ptr + p_P, mask=p_P < num_pairs, other=-1).to(tl.int32) - first_expert
    local_P = (expert_P >= 0) & (expert_P < num_experts) & (p_P < num_pairs)
    expert_P = tl.where(local_P, expert_P, 0)
    counts_E = tl.histogram(expert_P, BLOCK_E, mask=local_P)
    blocks_E = (counts_E + BLOCK_M - 1) // BLOCK_M
    ends_E = tl.cumsum(blocks_E, 0)
    starts_E = ends_E - blocks_E
    tl.store(starts_ptr + e_E, starts_E * BLOCK_M, mask=e_E < num_experts)
    for block in range(tl.max(blocks_E)):
        tl.store(block_expert_ptr + starts_E + block, e_E, mask=block < blocks_E)
    tl.store(block_expert_ptr + b_B, -1, mask=(b_B >= tl.sum(blocks_E)) & (b_B < max_blocks))
    padding_EM = tl.arange(0, BLOCK_M)[None, :]
    is_padding_EM = padding_EM < (blocks_E * BLOCK_M - counts_E)[:, None]
    tl.store(pairs_ptr + ends_E[:, None] * BLOCK_M - 1 - padding_EM, -1, mask=is_padding_EM)
    tl.debug_barrier()  # `starts` is written
    row_P = tl.atomic_add(starts_ptr + expert_P, 1, mask=local_P)
    tl.store(pairs_ptr + row_P, p_P, mask=local_P)


@triton.jit
def count_kernel(
    expert_ptr, counts_ptr, places_ptr, num_pairs, first_expert, num_experts, BLOCK: tl.constexpr
):  # fmt: skip
    pair_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert_B = tl.load(expert_ptr + pair_B, mask=pair_B < num_pairs, other=-1).to(tl.int32) - first_expert
    local_B = (expert_B >= 0) & (expert_B < num_experts) & (pair_B < num_pairs)
    place_B = tl.atomic_add(counts_ptr + tl.where(local_B, expert_B, 0), 1, mask=local_B)
    tl.store(places_ptr + pair_B, place_B, mask=local_B)


@triton.jit
def offsets_kernel(
    counts_ptr, starts_ptr, block_expert_ptr, num_experts, max_blocks,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First padded row of each expert, and the expert of each of BLOCK blocks; blocks beyond the last get -1."""
    e_E = tl.arange(0, BLOCK_E)
    counts_E = tl.load(counts_ptr + e_E, mask=e_E < num_experts, other=0)
    blocks_E = (counts_E + BLOCK_M - 1) // BLOCK_M
    ends_E = tl.cumsum(blocks_E, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + e_E, (ends_E - blocks_E) * BLOCK_M, mask=e_E < num_experts)
    block_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ended_BE = (ends_E[None, :] <= block_B[:, None]) & (e_E < num_experts)[None, :]
    expert_B = tl.sum(ended_BE.to(tl.int32), 1)
    tl.store(block_expert_ptr + block_B, tl.where(expert_B < num_experts, expert_B, -1), mask=block_B < max_blocks)


@triton.jit
def place_kernel(
    expert_ptr, places_ptr, starts_ptr, pairs_ptr, num_pairs, first_expert, num_experts, BLOCK: tl.constexpr
):  # fmt: skip
    pair_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert_B = tl.load(expert_ptr + pair_B, mask=pair_B < num_pairs, other=-1).to(tl.int32) - first_expert
    local_B = (expert_B >= 0) & (expert_B < num_experts) & (pair_B < num_pairs)
    start_B = tl.load(starts_ptr + expert_B, mask=local_B, other=0)
    place_B = tl.load(places_ptr + pair_B, mask=local_B, other=0)
    tl.store(pairs_ptr + start_B + place_B, pair_B, mask=local_B)


@triton.jit
def up_kernel(
    x_ptr, w13_ptr, w13_desc, pairs_ptr, block_expert_ptr, hidden_ptr, x_row, D, I, top_k,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of padded rows times a block of gate and up columns, and silu(gate) * up into `hidden` [padded, I]."""
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block)
    if expert < 0:
        return
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pair_M = tl.load(pairs_ptr + row_M)
    x_M = x_ptr + (tl.maximum(pair_M, 0) // top_k).to(tl.int64) * x_row
    first_n = tl.program_id(0) * BLOCK_N
    n_N, k_K = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gate_row = expert * 2 * I + first_n
    w_N = w13_ptr + (expert.to(tl.int64) * 2 * I + n_N) * D
    gate_MN = tl.zeros([BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N], dtype=tl.float32)
    up_MN = tl.zeros([BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        x_MK = tl.load(
            x_M[:, None] + (k + k_K)[None, :], mask=(pair_M >= 0)[:, None] & (k + k_K < D)[None, :], other=0.0
        )
        if USE_TMA:
            gate_NK = w13_desc.load([gate_row, k])
            up_NK = w13_desc.load([gate_row + I, k])
        else:
            mask_NK = (n_N < I)[:, None] & (k + k_K < D)[None, :]
            gate_NK = tl.load(w_N[:, None] + (k + k_K)[None, :], mask=mask_NK, other=0.0)
            up_NK = tl.load(w_N[:, None] + I.to(tl.int64) * D + (k + k_K)[None, :], mask=mask_NK, other=0.0)
        gate_MN = _product(x_MK, gate_NK, gate_MN, SWAP, PRECISION)
        up_MN = _product(x_MK, up_NK, up_MN, SWAP, PRECISION)
    if SWAP:
        gate_MN, up_MN = gate_MN.T, up_MN.T
    dtype = hidden_ptr.dtype.element_ty
    # Rounded as the plain modules round: the product, SiLU, and the product with `up`.
    gate_MN, up_MN = gate_MN.to(dtype).to(tl.float32), up_MN.to(dtype).to(tl.float32)
    silu_MN = (gate_MN / (1.0 + tl.exp(-gate_MN))).to(dtype).to(tl.float32)
    tl.store(hidden_ptr + row_M.to(tl.int64)[:, None] * I + n_N[None, :], silu_MN * up_MN, mask=(n_N < I)[None, :])


@triton.jit
def down_kernel(
    hidden_ptr, hidden_desc, w2_ptr, w2_desc, pairs_ptr, block_expert_ptr, y_ptr, D, I,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of padded rows of `hidden` times a block of w2's rows, to the rows' own pairs in `y` [pairs, D]."""
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block)
    if expert < 0:
        return
    first_row, first_n = block * BLOCK_M, tl.program_id(0) * BLOCK_N
    row_M = first_row + tl.arange(0, BLOCK_M)
    pair_M = tl.load(pairs_ptr + row_M)
    n_N, k_K = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    hidden_M = hidden_ptr + row_M.to(tl.int64) * I
    w_N = w2_ptr + (expert.to(tl.int64) * D + n_N) * I
    y_MN = tl.zeros([BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        if USE_TMA:
            hidden_MK = hidden_desc.load([first_row, k])
            w_NK = w2_desc.load([expert * D + first_n, k])
        else:
            hidden_MK = tl.load(hidden_M[:, None] + (k + k_K)[None, :], mask=(k + k_K < I)[None, :], other=0.0)
            w_NK = tl.load(
                w_N[:, None] + (k + k_K)[None, :], mask=(n_N < D)[:, None] & (k + k_K < I)[None, :], other=0.0
            )
        y_MN = _product(hidden_MK, w_NK, y_MN, SWAP, PRECISION)
    if SWAP:
        y_MN = y_MN.T
    y_M = y_ptr + tl.maximum(pair_M, 0).to(tl.int64) * D
    tl.store(y_M[:, None] + n_N[None, :], y_MN, mask=(pair_M >= 0)[:, None] & (n_N < D)[None, :])


@triton.jit
def combine_kernel(
    y_ptr, expert_ptr, weight_ptr, beside_ptr, out_ptr, first_expert, num_experts, D,
    TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        expert = tl.load(expert_ptr + pair).to(tl.int32) - first_expert
        weight = tl.load(weight_ptr + pair)
        expert_D = expert + tl.zeros([BLOCK_D], dtype=tl.int32)
        local_D = (expert_D >= 0) & (expert_D < num_experts) & (d_D < D)
        sum_D += weight * tl.load(y_ptr + pair * D + d_D, mask=local_D, other=0.0).to(tl.float32)
    if ADD:
        sum_D = sum_D.to(out_ptr.dtype.element_ty).to(tl.float32)
        sum_D += tl.load(beside_ptr + row * D + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d_D, sum_D, mask=d_D < D)


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that `num_pairs` pairs fill, each expert's padded to whole ones."""
    return min(num_pairs, num_experts + (num_pairs - min(num_pairs, num_experts)) // block_rows)


def experts(
    x_nD: torch.Tensor,
    expert_nk: torch.Tensor,
    weight_nk: torch.Tensor,
    w13_EID: torch.Tensor,
    w2_EDI: torch.Tensor,
    first_expert: int,
    beside_nD: torch.Tensor | None,
    up_tiles: Tiles,
    down_tiles: Tiles,
) -> torch.Tensor:
    """`Kernels.experts`; both products use blocks of `up_tiles.rows` rows."""
    num_rows, dim = x_nD.shape
    num_experts, two_width = w13_EID.shape[:2]
    width, top_k = two_width // 2, expert_nk.shape[1]
    num_pairs = num_rows * top_k
    out = torch.empty_like(x_nD, memory_format=torch.contiguous_format)
    if not num_rows:
        return out
    if not num_experts:
        return out.zero_() if beside_nD is None else out.copy_(beside_nD)
    block_rows = up_tiles.rows
    assert down_tiles.rows == block_rows
    expert_nk, weight_nk = expert_nk.contiguous(), weight_nk.contiguous()
    w13_EID, w2_EDI = w13_EID.contiguous(), w2_EDI.contiguous()
    blocks = max_blocks(num_pairs, num_experts, block_rows)
    device = x_nD.device
    block_expert, pairs = _assigned(expert_nk, first_expert, num_experts, blocks, block_rows)
    hidden = torch.empty(blocks * block_rows, width, dtype=x_nD.dtype, device=device)
    y = torch.empty(num_pairs, dim, dtype=x_nD.dtype, device=device)

    t = up_tiles
    tma = t.tma and width % t.columns == 0 and dim % t.depth == 0
    up_kernel[(triton.cdiv(width, t.columns), blocks)](
        x_nD, w13_EID, descriptor(w13_EID.flatten(0, 1), t.columns, t.depth) if tma else None,
        pairs, block_expert, hidden, x_nD.stride(0), dim, width, top_k,
        BLOCK_M=t.rows, BLOCK_N=t.columns, BLOCK_K=t.depth, USE_TMA=tma, SWAP=t.swap,
        PRECISION=t.precision, STAGES=t.stages, num_warps=t.warps,
    )  # fmt: skip
    t = down_tiles
    tma = t.tma and dim % t.columns == 0 and width % t.depth == 0
    down_kernel[(triton.cdiv(dim, t.columns), blocks)](
        hidden, descriptor(hidden, t.rows, t.depth) if tma else None,
        w2_EDI, descriptor(w2_EDI.flatten(0, 1), t.columns, t.depth) if tma else None,
        pairs, block_expert, y, dim, width,
        BLOCK_M=t.rows, BLOCK_N=t.columns, BLOCK_K=t.depth, USE_TMA=tma, SWAP=t.swap,
        PRECISION=t.precision, STAGES=t.stages, num_warps=t.warps,
    )  # fmt: skip
    block_dim = min(1024, next_power_of_2(dim))
    beside_nD = None if beside_nD is None else beside_nD.contiguous()
    combine_kernel[(num_rows, triton.cdiv(dim, block_dim))](
        y, expert_nk, weight_nk, beside_nD, out, first_expert, num_experts, dim,
        TOP_K=top_k, BLOCK_D=block_dim, ADD=beside_nD is not None,
    )  # fmt: skip
    return out


def _assigned(
    expert_nk: torch.Tensor, first_expert: int, num_experts: int, blocks: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert of each of `blocks` blocks, -1 beyond the last, and the pair of each of their rows: int32."""
    num_pairs, device = expert_nk.numel(), expert_nk.device
    starts = torch.empty(num_experts, dtype=torch.int32, device=device)
    block_expert = torch.empty(blocks, dtype=torch.int32, device=device)
    pairs = torch.empty(blocks * block_rows, dtype=torch.int32, device=device)
    if num_pairs <= _ASSIGNED_AT_ONCE:
        assign_kernel[(1,)](
            expert_nk, starts, block_expert, pairs, num_pairs, first_expert, num_experts, blocks,
            BLOCK_P=max(32, next_power_of_2(num_pairs)), BLOCK_E=next_power_of_2(num_experts),
            BLOCK_B=next_power_of_2(blocks), BLOCK_M=block_rows,
        )  # fmt: skip
        return block_expert, pairs
    counts = torch.zeros_like(starts)
    places = torch.empty(num_pairs, dtype=torch.int32, device=device)
    pairs.fill_(-1)
    grid = (triton.cdiv(num_pairs, _PAIRS_AT_ONCE),)
    count_kernel[grid](expert_nk, counts, places, num_pairs, first_expert, num_experts, BLOCK=_PAIRS_AT_ONCE)
    offsets_kernel[(triton.cdiv(blocks, _BLOCKS_AT_ONCE),)](
        counts, starts, block_expert, num_experts, blocks,
        BLOCK_E=next_power_of_2(num_experts), BLOCK_M=block_rows, BLOCK=_BLOCKS_AT_ONCE,
    )  # fmt: skip
    place_kernel[grid](expert_nk, places, starts, pairs, num_pairs, first_expert, num_experts, BLOCK=_PAIRS_AT_ONCE)
    return block_expert, pairs
