"""Products of few rows with a weight matrix, which are as fast as the weights can be read.

The transposed product is computed, whose 64 rows are weights, so that few rows waste little of the tensor cores.
Where a matrix has fewer blocks of columns than the device has processors, the summed dim is split as well. One row
times 30 MB of weights takes ten microseconds, of which a second launch would be a large share: partial sums are added
up, in a fixed order, by whichever program of a block is the last to arrive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash.platform.triton.launch import Target, Tiles, describable, descriptor, next_power_of_2

MAX_ROWS, MAX_COLUMNS = 16, 64  # of a tile
_MEASURED_BYTES = range(16 << 20, 300 << 20)  # of weights: with fewer the library is faster, with more it was not asked
_LEAST_TILES = 3  # of a part: one more part costs as much
_PARTS_AT_ONCE = 4


@triton.jit
def product_kernel(
    x_ptr, rows, w_ptr, weights, out_ptr, part_ptr, arrivals_ptr, num_rows, N, K, x_row, w_n, w_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_INNER: tl.constexpr, USE_TMA: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, part of the summed dim). With K_INNER the columns of w are dense, else its rows.

    With USE_TMA `rows` describes x, whose rows beyond the last are loaded as zeros, and `weights` the dense form of w.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    num_parts = tl.num_programs(1)
    num_tiles = tl.cdiv(K, BLOCK_K)
    first_n = block * BLOCK_N
    m_M, n_N, k_K = tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_M, w_N = x_ptr + m_M.to(tl.int64) * x_row, w_ptr + n_N.to(tl.int64) * w_n
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for tile in tl.range(num_tiles * part // num_parts, num_tiles * (part + 1) // num_parts, num_stages=STAGES):
        k = tile * BLOCK_K
        if USE_TMA:
            x_MK = rows.load([0, k])
            if K_INNER:
                w_NK = weights.load([first_n, k])
            else:
                w_NK = weights.load([k, first_n]).T
        else:
            is_k_K = k + k_K < K
            mask_MK, mask_NK = (m_M < num_rows)[:, None] & is_k_K[None, :], (n_N < N)[:, None] & is_k_K[None, :]
            x_MK = tl.load(x_M[:, None] + (k + k_K)[None, :], mask=mask_MK, other=0.0)
            w_NK = tl.load(w_N[:, None] + (k + k_K).to(tl.int64)[None, :] * w_k, mask=mask_NK, other=0.0)
        acc_NM = tl.dot(w_NK, x_MK.T, acc_NM, input_precision=PRECISION)
    mask_NM = (n_N < N)[:, None] & (m_M < num_rows)[None, :]
    out_NM = out_ptr + m_M.to(tl.int64)[None, :] * N + n_N[:, None]
    if num_parts == 1:
        tl.store(out_NM, acc_NM, mask=mask_NM)
    else:
        parts_NM = part_ptr + block * num_parts * (BLOCK_M * BLOCK_N)
        parts_NM += m_M[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(parts_NM + part * (BLOCK_M * BLOCK_N), acc_NM, mask=mask_NM)
        tl.debug_barrier()  # the whole part is written before it counts
        arrived = tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel")
        if arrived == num_parts - 1:
            sum_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for start in range(0, num_parts, UNROLL):
                for step in tl.static_range(UNROLL):  # independent loads, in flight together
                    is_part_N = start + step + tl.zeros([BLOCK_N], dtype=tl.int32) < num_parts
                    sum_NM += tl.load(
                        parts_NM + (start + step) * (BLOCK_M * BLOCK_N), mask=mask_NM & is_part_N[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
            tl.store(out_NM, sum_NM, mask=mask_NM)
            tl.store(arrivals_ptr + block, 0)  # for the next product


def product_tiles(target: Target, dtype: torch.dtype) -> Tiles:
    """rows: rows of x; columns: of the result; depth: of a step of the sum."""
    if target.kind == "interpreter" or dtype == torch.float32:
        return Tiles(MAX_ROWS, 32, 32, warps=4, stages=1)
    if target.has_tma:
        return Tiles(MAX_ROWS, 64, 128, warps=4, stages=5, tma=True)
    return Tiles(MAX_ROWS, 64, 64, warps=4, stages=1 if target.kind == "hip" else 3)


class Products:
    """Products on one device, with the memory that they share: they run one after another.

    Args:
        target: the device.
        device: its torch name.
    """

    def __init__(self, target: Target, device: torch.device | str) -> None:
        self._target = target
        # Made here, since graphs hold the addresses. Twice as many programs as processors have a part at most.
        most = 2 * target.processors
        self._parts = torch.empty(most * MAX_ROWS * MAX_COLUMNS, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(most, dtype=torch.int32, device=device)  # 0 between products

    def fits(self, x_nK: torch.Tensor, w_KN: torch.Tensor) -> bool:
        """Whether `run` is for these, and was measured to be faster than the library, which was done on Hopper."""
        num_bytes = w_KN.numel() * w_KN.element_size()
        is_faster = self._target.capability == 9 and x_nK.element_size() == 2 and num_bytes in _MEASURED_BYTES
        return (
            (is_faster or self._target.kind == "interpreter")
            and 0 < len(x_nK) <= MAX_ROWS
            and x_nK.dtype == w_KN.dtype
            and x_nK.stride(1) == 1
            and 1 in w_KN.stride()
        )

    def run(
        self, x_nK: torch.Tensor, w_KN: torch.Tensor, tiles: Tiles | None = None, num_parts: int | None = None
    ) -> torch.Tensor:
        """x @ w, [n, N].

        Args:
            x_nK: at most MAX_ROWS rows, which are dense.
            w_KN: its columns or its rows are dense.
            tiles, num_parts: in place of those that are best on most devices.
        """
        t = tiles or product_tiles(self._target, x_nK.dtype)
        (num_rows, depth), columns = x_nK.shape, w_KN.shape[1]
        out_nN = x_nK.new_empty(num_rows, columns)
        blocks = triton.cdiv(columns, t.columns)
        parts = num_parts or split(blocks, triton.cdiv(depth, t.depth), self._target.processors)
        assert num_rows <= t.rows <= MAX_ROWS and t.columns <= MAX_COLUMNS
        assert parts == 1 or blocks * parts <= len(self._arrivals)
        k_inner = w_KN.stride(0) == 1
        dense = w_KN.t() if k_inner else w_KN
        rows = weights = None
        if t.tma and describable(x_nK) and describable(dense):
            rows = descriptor(x_nK, t.rows, t.depth)
            weights = descriptor(dense, *((t.columns, t.depth) if k_inner else (t.depth, t.columns)))
        product_kernel[(blocks, parts)](
            x_nK, rows, w_KN, weights, out_nN, self._parts, self._arrivals, num_rows, columns, depth,
            x_nK.stride(0), w_KN.stride(1), w_KN.stride(0),
            BLOCK_M=t.rows, BLOCK_N=t.columns, BLOCK_K=t.depth, K_INNER=k_inner, USE_TMA=weights is not None,
            STAGES=t.stages, PRECISION=t.precision, UNROLL=_PARTS_AT_ONCE, num_warps=t.warps,
        )  # fmt: skip
        return out_nN


def split(blocks: int, tiles: int, processors: int) -> int:
    """In how many parts, a power of two, to sum `tiles` tiles a block: a program for each processor, or nearly so.

    Merging costs more than the last fourth of the processors gives, and so do short parts.
    """
    if 4 * blocks >= 3 * processors:
        return 1
    most = min(2 * processors // blocks, max(1, tiles // _LEAST_TILES))
    wanted = next_power_of_2(-(-processors // blocks))
    return min(wanted, 1 << (most.bit_length() - 1))
