"""Products of few rows with a weight matrix, which are as fast as the weights can be read.

The transposed product is computed, whose 64 rows or more are weights, so that few rows waste little of the tensor
cores. Programs take a block of columns and a part of the summed dim, as many parts as make the device full. One row
times 30 MB of weights takes seven microseconds, of which a late start or a second launch would be a large share. So
partial sums are added up, in a fixed order, by whichever program of a block is the last to arrive. And programs that
start while the kernel before still runs ask for their first weights before they wait for its results.

Letters: n rows, K summed dim, N columns, B batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash.platform.triton.launch import Target, Tiles, begin, describable, descriptor, early

MAX_ROWS, MAX_COLUMNS = 16, 128  # of a tile
MAX_WEIGHT_BYTES = 512 << 20  # of more, the library reads as fast
_SHARED_BYTES = 220 << 10  # of a multiprocessor, for the tiles of the programs that run on it at once
_MAX_PROGRAMS = 4  # of a multiprocessor
_PARTS_AT_ONCE = 4


@triton.jit
def _prefetch(
    w_ptr, w_n, w_k, N, first_n, first_tile, tile_end,
    K_INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Ask the L2 cache for a program's first tiles of 16-bit weights, by lines of 64. Again for those there are not."""
    for ahead in tl.static_range(TILES):
        k = tl.minimum(first_tile + ahead, tile_end - 1) * BLOCK_K
        if K_INNER:
            n_X = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
            lines = w_ptr + n_X[:, None] * w_n + (k + 64 * tl.arange(0, BLOCK_K // 64))[None, :]
        else:
            n_X = tl.minimum(first_n + 64 * tl.arange(0, BLOCK_N // 64), N - 1)
            lines = w_ptr + (k + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None] * w_k + n_X[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def product_kernel(
    x_ptr, rows, w_ptr, weights, out_ptr, part_ptr, arrivals_ptr, num_rows, N, K, x_row, x_batch, w_n, w_k, w_batch,
    batch_rows, out_row, out_batch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_INNER: tl.constexpr, USE_TMA: tl.constexpr,
    X_TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, part of the summed dim, member of the batch).

    `weights` describes the batch as one matrix, `batch_rows` of its rows a member; with K_INNER its rows have dim K.
    `rows` describes x where there is no batch; rows beyond its end are loaded as zeros.
    """
    block, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_parts = tl.num_programs(1)
    num_tiles = tl.cdiv(K, BLOCK_K)
    first_n = block * BLOCK_N
    m_M, n_N, k_K = tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_M = x_ptr + batch.to(tl.int64) * x_batch + m_M.to(tl.int64) * x_row
    w_N = w_ptr + batch.to(tl.int64) * w_batch + n_N.to(tl.int64) * w_n
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first_tile, tile_end = num_tiles * part // num_parts, num_tiles * (part + 1) // num_parts
    if EARLY and USE_TMA:
        member_ptr = w_ptr + batch.to(tl.int64) * w_batch
        _prefetch(member_ptr, w_n, w_k, N, first_n, first_tile, tile_end, K_INNER, BLOCK_N, BLOCK_K, STAGES)
    begin(EARLY)
    for tile in tl.range(first_tile, tile_end, num_stages=STAGES):
        k = tile * BLOCK_K
        is_k_K = k + k_K < K
        if X_TMA:
            x_MK = rows.load([0, k])
        else:
            mask_MK = (m_M < num_rows)[:, None] & is_k_K[None, :]
            x_MK = tl.load(x_M[:, None] + (k + k_K)[None, :], mask=mask_MK, other=0.0)
        if USE_TMA:
            if K_INNER:
                w_NK = weights.load([batch * batch_rows + first_n, k])
            else:
                w_NK = weights.load([batch * batch_rows + k, first_n]).T
        else:
            w_NK = tl.load(
                w_N[:, None] + (k + k_K).to(tl.int64)[None, :] * w_k,
                mask=(n_N < N)[:, None] & is_k_K[None, :],
                other=0.0,
            )
        acc_NM = tl.dot(w_NK, x_MK.T, acc_NM, input_precision=PRECISION)
    mask_NM = (n_N < N)[:, None] & (m_M < num_rows)[None, :]
    out_NM = out_ptr + batch.to(tl.int64) * out_batch + m_M.to(tl.int64)[None, :] * out_row + n_N[:, None]
    if num_parts == 1:
        tl.store(out_NM, acc_NM, mask=mask_NM)
    else:
        place = batch * tl.num_programs(0) + block
        parts_NM = part_ptr + place.to(tl.int64) * num_parts * (BLOCK_M * BLOCK_N)
        parts_NM += m_M[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(parts_NM + part * (BLOCK_M * BLOCK_N), acc_NM, mask=mask_NM)
        tl.debug_barrier()  # the whole part is written before it counts
        arrived = tl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel")
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
            tl.store(arrivals_ptr + place, 0)  # for the next product


def product_tiles(target: Target, dtype: torch.dtype) -> Tiles:
    """rows: rows of x; columns: of the result; depth: of a step of the sum."""
    if target.kind == "interpreter" or dtype == torch.float32:
        return Tiles(MAX_ROWS, 32, 32, warps=4, stages=1)
    if target.has_tma:
        return Tiles(MAX_ROWS, 64, 128, warps=4, stages=4, tma=True)
    return Tiles(MAX_ROWS, 64, 64, warps=4, stages=1 if target.kind == "hip" else 3)


class Products:
    """Products on one device, with the memory that they share: they run one after another.

    Args:
        target: the device.
        device: its torch name.
    """

    def __init__(self, target: Target, device: torch.device | str) -> None:
        self._target = target
        # Measured on Hopper; elsewhere the library is left to it.
        self._is_faster = target.capability == 9 or target.kind == "interpreter"
        # Made here, since graphs hold the addresses. No more programs than run at once have a part.
        self._most = target.processors * _MAX_PROGRAMS
        self._parts = torch.empty(self._most * MAX_ROWS * MAX_COLUMNS, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(self._most, dtype=torch.int32, device=device)  # 0 between products

    def fits(self, x_BnK: torch.Tensor, w_BKN: torch.Tensor) -> bool:
        """Whether `run` is for these, and is the faster way to do them."""
        return (
            self._is_faster
            and 0 < x_BnK.shape[1] <= MAX_ROWS
            and 0 < w_BKN.numel() * w_BKN.element_size() <= MAX_WEIGHT_BYTES
            and x_BnK.dtype == w_BKN.dtype
            and (x_BnK.element_size() == 2 or self._target.kind == "interpreter")
            and x_BnK.stride(2) == 1
            and 1 in w_BKN.stride()[1:]
        )

    def run(
        self,
        x_BnK: torch.Tensor,
        w_BKN: torch.Tensor,
        out_BnN: torch.Tensor,
        tiles: Tiles | None = None,
        num_parts: int | None = None,
    ) -> None:
        """out = x @ w of each member of the batch.

        Args:
            x_BnK: [B, n, K], at most MAX_ROWS rows, which are dense.
            w_BKN: [B, K, N], whose columns or rows are dense.
            out_BnN: [B, n, N], whose rows are dense.
            tiles, num_parts: in place of those that are best on most devices.
        """
        t = tiles or product_tiles(self._target, x_BnK.dtype)
        (batch, num_rows, depth), columns = x_BnK.shape, w_BKN.shape[2]
        assert num_rows <= t.rows and t.columns <= MAX_COLUMNS and x_BnK.stride(2) == out_BnN.stride(2) == 1
        blocks = triton.cdiv(columns, t.columns)
        programs = self._programs(t, x_BnK.element_size())
        parts = num_parts or split(blocks * batch, triton.cdiv(depth, t.depth), programs)
        assert parts == 1 or blocks * batch * parts <= self._most
        k_inner = w_BKN.stride(1) == 1
        described = _matrix(w_BKN, k_inner, t.depth) if t.tma else None
        weights, batch_rows = None, 0
        if described is not None:
            matrix, batch_rows = described
            weights = descriptor(matrix, *((t.columns, t.depth) if k_inner else (t.depth, t.columns)))
        rows = None
        if weights is not None and batch == 1 and describable(x_BnK[0]):
            rows = descriptor(x_BnK[0], t.rows, t.depth)
        product_kernel[(blocks, parts, batch)](
            x_BnK, rows, w_BKN, weights, out_BnN, self._parts, self._arrivals, num_rows, columns, depth,
            x_BnK.stride(1), x_BnK.stride(0), w_BKN.stride(2), w_BKN.stride(1), w_BKN.stride(0), batch_rows,
            out_BnN.stride(1), out_BnN.stride(0),
            BLOCK_M=t.rows, BLOCK_N=t.columns, BLOCK_K=t.depth, K_INNER=k_inner, USE_TMA=weights is not None,
            X_TMA=rows is not None, STAGES=t.stages, PRECISION=t.precision, UNROLL=_PARTS_AT_ONCE,
            num_warps=t.warps, **early(x_BnK.device),
        )  # fmt: skip

    def _programs(self, tiles: Tiles, element_bytes: int) -> int:
        """How many programs the device runs at once."""
        shared = tiles.stages * (tiles.rows + tiles.columns) * tiles.depth * element_bytes
        return self._target.processors * max(1, min(_MAX_PROGRAMS, _SHARED_BYTES // shared))


def _matrix(w_BKN: torch.Tensor, k_inner: bool, depth: int) -> tuple[torch.Tensor, int] | None:
    """All members as one matrix, and its rows from one member to the next; None where tiles cannot be described."""
    batch, num_k, columns = w_BKN.shape
    inner, outer = (num_k, columns) if k_inner else (columns, num_k)
    pitch = w_BKN.stride(2 if k_inner else 1)
    rows, left = divmod(w_BKN.stride(0), pitch) if batch > 1 else (outer, 0)
    if left or rows < outer or num_k % depth:  # a tile's end may not have another member's weights
        return None
    matrix = w_BKN.as_strided(((batch - 1) * rows + outer, inner), (pitch, 1))
    return (matrix, rows) if describable(matrix) else None


def split(blocks: int, tiles: int, programs: int) -> int:
    """In how many parts to sum `tiles` tiles a block, so that the last program ends soonest: rounds times longest part.

    Of parts as good the fewest. More rounds than one are worse than their tiles say: a program's first tile comes late.
    """
    best, ends = 1, float("inf")
    for parts in range(1, min(tiles, max(1, programs // max(1, blocks))) + 1):
        rounds = -(-blocks * parts // programs)
        end = rounds * (-(-tiles // parts) + 1)
        if end < ends:
            best, ends = parts, end
    return best
