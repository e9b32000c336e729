"""The local part of a mixture of experts: rows sorted by expert into blocks, two grouped products, a weighted sum.

    assign    which rows of the sorted pairs each block has, of which expert; and the pair, a row and one of its
              choices, that each sorted row is
    up        silu(x w1^T) * (x w3^T) of each sorted row          one block of rows x one block of I a program
    down      its product with w2, at the pair's own place        one block of rows x one block of D
    combine   the weighted sum of each row's local pairs, in a fixed order, and what is beside them

Few pairs are assigned by one program, many by three kernels: how many pairs each local expert has, and each pair's
place among them (count); where each expert's rows and blocks begin (offsets); and then the pairs (place). All sizes are
bounds that the host knows; how many blocks are used and how many rows each has, only the device does. So nothing waits
for the device, and a graph can hold all of it.

A block has as many rows as the tallest tile, or what is left of its expert's. Each program takes the least tall tile
that holds its block's rows: an expert's weights are read once for each of its blocks, so that those of an expert with
many rows are to be tall, while a tall tile of few rows would keep tensor cores and copies busy with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splash.platform.triton.launch import descriptor, next_power_of_2

_PAIRS_AT_ONCE = 256
_BLOCKS_AT_ONCE = 32
_ASSIGNED_AT_ONCE = 2048  # pairs that one program assigns
_BLOCK_FIELDS = 3  # of a block: its expert, its first sorted row, and how many rows it has, 0 where it is not used


@dataclass(frozen=True)
class GroupedTiles:
    """A grouped product's tiles of weights, and the heights of the tiles of rows that they meet.

    Attributes:
        heights: rows of a tile, ascending. A block has at most the last.
        columns: rows of the weights that a program takes.
        depth: of the summed dim, at once.
        warps: of a program.
        stages: loads in flight, for each height.
        tma: tensor copy engine where the shapes allow it.
        swap: compute the transpose, where rows are few.
        precision: of products of float32; others are exact before they are summed.
    """

    heights: tuple[int, ...]
    columns: int
    depth: int
    warps: int
    stages: tuple[int, ...]
    tma: bool = False
    swap: bool = False
    precision: str = "ieee"

    def __post_init__(self) -> None:
        assert len(self.heights) == len(self.stages) and self.heights == tuple(sorted(set(self.heights))), self


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
    expert_ptr, starts_ptr, blocks_ptr, pairs_ptr, num_pairs, first_expert, num_experts, max_blocks,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr, HEIGHT: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """All pairs in one program: what each block has, and the pair that each sorted row is.

    `starts` is for the program itself: each expert's next free row.
    """
    p_P, e_E, b_B = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_B)
    expert_P = tl.load(expert_ptr + p_P, mask=p_P < num_pairs, other=-1).to(tl.int32) - first_expert
    local_P = (expert_P >= 0) & (expert_P < num_experts) & (p_P < num_pairs)
    expert_P = tl.where(local_P, expert_P, 0)
    counts_E = tl.histogram(expert_P, BLOCK_E, mask=local_P)
    starts_E = tl.cumsum(counts_E, 0) - counts_E
    blocks_E = (counts_E + HEIGHT - 1) // HEIGHT
    first_block_E = tl.cumsum(blocks_E, 0) - blocks_E
    tl.store(starts_ptr + e_E, starts_E, mask=e_E < num_experts)
    for block in range(tl.max(blocks_E)):
        block_E = blocks_ptr + (first_block_E + block) * FIELDS
        tl.store(block_E, e_E, mask=block < blocks_E)
        tl.store(block_E + 1, starts_E + block * HEIGHT, mask=block < blocks_E)
        tl.store(block_E + 2, tl.minimum(counts_E - block * HEIGHT, HEIGHT), mask=block < blocks_E)
    tl.store(blocks_ptr + b_B * FIELDS + 2, 0, mask=(b_B >= tl.sum(blocks_E)) & (b_B < max_blocks))
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
    counts_ptr, starts_ptr, blocks_ptr, num_experts, max_blocks,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """First sorted row of each expert, and what each of BLOCK blocks has; those beyond the last have no rows."""
    e_E = tl.arange(0, BLOCK_E)
    counts_E = tl.load(counts_ptr + e_E, mask=e_E < num_experts, other=0)
    starts_E = tl.cumsum(counts_E, 0) - counts_E
    blocks_E = (counts_E + HEIGHT - 1) // HEIGHT
    ends_E = tl.cumsum(blocks_E, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + e_E, starts_E, mask=e_E < num_experts)
    block_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nth_BE = block_B[:, None] - (ends_E - blocks_E)[None, :]  # which of an expert's blocks
    is_its_BE = (nth_BE >= 0) & (block_B[:, None] < ends_E[None, :])
    first_BE, rows_BE = starts_E[None, :] + nth_BE * HEIGHT, counts_E[None, :] - nth_BE * HEIGHT
    block_ptr_B = blocks_ptr + block_B * FIELDS
    tl.store(block_ptr_B, tl.sum(tl.where(is_its_BE, e_E[None, :], 0), 1), mask=block_B < max_blocks)
    tl.store(block_ptr_B + 1, tl.sum(tl.where(is_its_BE, first_BE, 0), 1), mask=block_B < max_blocks)
    rows_B = tl.sum(tl.where(is_its_BE, tl.minimum(rows_BE, HEIGHT), 0), 1)
    tl.store(block_ptr_B + 2, rows_B, mask=block_B < max_blocks)


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
def _up_tile(
    x_ptr, w13_ptr, w13_desc, pairs_ptr, hidden_ptr, x_row, D, I, top_k, expert, first_row, num_rows, first_n,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m_M, n_N, k_K = tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row_M = m_M < num_rows
    pair_M = tl.load(pairs_ptr + first_row + m_M, mask=is_row_M, other=0)
    x_M = x_ptr + (pair_M // top_k).to(tl.int64) * x_row
    gate_row = expert * 2 * I + first_n
    w_N = w13_ptr + (expert.to(tl.int64) * 2 * I + n_N) * D
    gate_MN = tl.zeros([BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N], dtype=tl.float32)
    up_MN = tl.zeros([BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        x_MK = tl.load(x_M[:, None] + (k + k_K)[None, :], mask=is_row_M[:, None] & (k + k_K < D)[None, :], other=0.0)
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
    hidden_M = hidden_ptr + (first_row + m_M).to(tl.int64) * I
    tl.store(hidden_M[:, None] + n_N[None, :], silu_MN * up_MN, mask=is_row_M[:, None] & (n_N < I)[None, :])


@triton.jit
def up_kernel(
    x_ptr, w13_ptr, w13_desc, pairs_ptr, blocks_ptr, hidden_ptr, x_row, D, I, top_k,  # noqa: E741
    HEIGHTS: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """A block of sorted rows times a block of gate and up columns, and silu(gate) * up into `hidden` [pairs, I]."""
    block_ptr = blocks_ptr + tl.program_id(1) * FIELDS
    first_n = tl.program_id(0) * BLOCK_N
    num_rows = tl.load(block_ptr + 2)
    if num_rows == 0:
        return
    expert, first_row = tl.load(block_ptr), tl.load(block_ptr + 1)
    for i in tl.static_range(len(HEIGHTS)):
        if (num_rows > (HEIGHTS[i - 1] if i > 0 else 0)) & (num_rows <= HEIGHTS[i]):
            _up_tile(
                x_ptr, w13_ptr, w13_desc, pairs_ptr, hidden_ptr, x_row, D, I, top_k,
                expert, first_row, num_rows, first_n,
                HEIGHTS[i], BLOCK_N, BLOCK_K, USE_TMA, SWAP, PRECISION, STAGES[i],
            )  # fmt: skip


@triton.jit
def _down_tile(
    hidden_ptr, hidden_desc, w2_ptr, w2_desc, pairs_ptr, y_ptr, D, I, expert, first_row, num_rows, first_n,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    HIDDEN_TMA: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m_M, n_N, k_K = tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row_M = m_M < num_rows
    pair_M = tl.load(pairs_ptr + first_row + m_M, mask=is_row_M, other=0)
    hidden_M = hidden_ptr + (first_row + m_M).to(tl.int64) * I
    w_N = w2_ptr + (expert.to(tl.int64) * D + n_N) * I
    y_MN = tl.zeros([BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        if HIDDEN_TMA:  # rows beyond the block's are another's, and their results are not stored
            hidden_MK = hidden_desc.load([first_row, k])
        else:
            mask_MK = is_row_M[:, None] & (k + k_K < I)[None, :]
            hidden_MK = tl.load(hidden_M[:, None] + (k + k_K)[None, :], mask=mask_MK, other=0.0)
        if USE_TMA:
            w_NK = w2_desc.load([expert * D + first_n, k])
        else:
            mask_NK = (n_N < D)[:, None] & (k + k_K < I)[None, :]
            w_NK = tl.load(w_N[:, None] + (k + k_K)[None, :], mask=mask_NK, other=0.0)
        y_MN = _product(hidden_MK, w_NK, y_MN, SWAP, PRECISION)
    if SWAP:
        y_MN = y_MN.T
    y_M = y_ptr + pair_M.to(tl.int64) * D
    tl.store(y_M[:, None] + n_N[None, :], y_MN, mask=is_row_M[:, None] & (n_N < D)[None, :])


@triton.jit
def down_kernel(
    hidden_ptr, hidden_desc, w2_ptr, w2_desc, pairs_ptr, blocks_ptr, y_ptr, D, I,  # noqa: E741
    HEIGHTS: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
    HIDDEN_TMA: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """A block of sorted rows of `hidden` times a block of w2's rows, to the rows' own pairs in `y` [pairs, D]."""
    block_ptr = blocks_ptr + tl.program_id(1) * FIELDS
    first_n = tl.program_id(0) * BLOCK_N
    num_rows = tl.load(block_ptr + 2)
    if num_rows == 0:
        return
    expert, first_row = tl.load(block_ptr), tl.load(block_ptr + 1)
    for i in tl.static_range(len(HEIGHTS)):
        if (num_rows > (HEIGHTS[i - 1] if i > 0 else 0)) & (num_rows <= HEIGHTS[i]):
            _down_tile(
                hidden_ptr, hidden_desc, w2_ptr, w2_desc, pairs_ptr, y_ptr, D, I, expert, first_row, num_rows, first_n,
                HEIGHTS[i], BLOCK_N, BLOCK_K, USE_TMA, HIDDEN_TMA, SWAP, PRECISION, STAGES[i],
            )  # fmt: skip


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


def max_blocks(num_pairs: int, num_experts: int, height: int) -> int:
    """Most blocks that `num_pairs` pairs fill, each of one expert and of at most `height` rows."""
    return min(num_pairs, num_experts + (num_pairs - min(num_pairs, num_experts)) // height)


def experts(
    x_nD: torch.Tensor,
    expert_nk: torch.Tensor,
    weight_nk: torch.Tensor,
    w13_EID: torch.Tensor,
    w2_EDI: torch.Tensor,
    first_expert: int,
    beside_nD: torch.Tensor | None,
    up_tiles: GroupedTiles,
    down_tiles: GroupedTiles,
) -> torch.Tensor:
    """`Kernels.experts`; blocks of both products have at most as many rows as both tallest tiles, which are alike."""
    num_rows, dim = x_nD.shape
    num_experts, two_width = w13_EID.shape[:2]
    width, top_k = two_width // 2, expert_nk.shape[1]
    num_pairs = num_rows * top_k
    out = torch.empty_like(x_nD, memory_format=torch.contiguous_format)
    if not num_rows:
        return out
    if not num_experts:
        return out.zero_() if beside_nD is None else out.copy_(beside_nD)
    height = up_tiles.heights[-1]
    assert down_tiles.heights[-1] == height
    expert_nk, weight_nk = expert_nk.contiguous(), weight_nk.contiguous()
    w13_EID, w2_EDI = w13_EID.contiguous(), w2_EDI.contiguous()
    num_blocks = max_blocks(num_pairs, num_experts, height)
    device = x_nD.device
    blocks, pairs = _assigned(expert_nk, first_expert, num_experts, num_blocks, height)
    hidden = torch.empty(num_pairs, width, dtype=x_nD.dtype, device=device)
    y = torch.empty(num_pairs, dim, dtype=x_nD.dtype, device=device)

    t = up_tiles
    tma = t.tma and width % t.columns == 0 and dim % t.depth == 0
    up_kernel[(triton.cdiv(width, t.columns), num_blocks)](
        x_nD, w13_EID, descriptor(w13_EID.flatten(0, 1), t.columns, t.depth) if tma else None,
        pairs, blocks, hidden, x_nD.stride(0), dim, width, top_k,
        HEIGHTS=t.heights, STAGES=t.stages, BLOCK_N=t.columns, BLOCK_K=t.depth, USE_TMA=tma, SWAP=t.swap,
        PRECISION=t.precision, FIELDS=_BLOCK_FIELDS, num_warps=t.warps,
    )  # fmt: skip
    t = down_tiles
    tma = t.tma and dim % t.columns == 0 and width % t.depth == 0
    hidden_tma = tma and len(t.heights) == 1  # a descriptor has one height
    down_kernel[(triton.cdiv(dim, t.columns), num_blocks)](
        hidden, descriptor(hidden, height, t.depth) if hidden_tma else None,
        w2_EDI, descriptor(w2_EDI.flatten(0, 1), t.columns, t.depth) if tma else None,
        pairs, blocks, y, dim, width,
        HEIGHTS=t.heights, STAGES=t.stages, BLOCK_N=t.columns, BLOCK_K=t.depth, USE_TMA=tma, HIDDEN_TMA=hidden_tma,
        SWAP=t.swap, PRECISION=t.precision, FIELDS=_BLOCK_FIELDS, num_warps=t.warps,
    )  # fmt: skip
    block_dim = min(1024, next_power_of_2(dim))
    beside_nD = None if beside_nD is None else beside_nD.contiguous()
    combine_kernel[(num_rows, triton.cdiv(dim, block_dim))](
        y, expert_nk, weight_nk, beside_nD, out, first_expert, num_experts, dim,
        TOP_K=top_k, BLOCK_D=block_dim, ADD=beside_nD is not None,
    )  # fmt: skip
    return out


def _assigned(
    expert_nk: torch.Tensor, first_expert: int, num_experts: int, num_blocks: int, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each of `num_blocks` blocks has [num_blocks, 3], and the pair that each sorted row is [pairs]: int32.

    Rows beyond the last local pair are left as they are, and no block has them.
    """
    num_pairs, device = expert_nk.numel(), expert_nk.device
    starts = torch.empty(num_experts, dtype=torch.int32, device=device)
    blocks = torch.empty(num_blocks, _BLOCK_FIELDS, dtype=torch.int32, device=device)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    if num_pairs <= _ASSIGNED_AT_ONCE:
        assign_kernel[(1,)](
            expert_nk, starts, blocks, pairs, num_pairs, first_expert, num_experts, num_blocks,
            BLOCK_P=max(32, next_power_of_2(num_pairs)), BLOCK_E=next_power_of_2(num_experts),
            BLOCK_B=next_power_of_2(num_blocks), HEIGHT=height, FIELDS=_BLOCK_FIELDS,
        )  # fmt: skip
        return blocks, pairs
    counts = torch.zeros_like(starts)
    places = torch.empty(num_pairs, dtype=torch.int32, device=device)
    grid = (triton.cdiv(num_pairs, _PAIRS_AT_ONCE),)
    count_kernel[grid](expert_nk, counts, places, num_pairs, first_expert, num_experts, BLOCK=_PAIRS_AT_ONCE)
    offsets_kernel[(triton.cdiv(num_blocks, _BLOCKS_AT_ONCE),)](
        counts, starts, blocks, num_experts, num_blocks,
        BLOCK_E=next_power_of_2(num_experts), BLOCK=_BLOCKS_AT_ONCE, HEIGHT=height, FIELDS=_BLOCK_FIELDS,
    )  # fmt: skip
    place_kernel[grid](expert_nk, places, starts, pairs, num_pairs, first_expert, num_experts, BLOCK=_PAIRS_AT_ONCE)
    return blocks, pairs
