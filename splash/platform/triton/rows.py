"""Row movement of the DOP exchange: heads to and from the order of an all-to-all, and rows by an index on the device.

Everything here copies runs of bytes: 16 at a time where every address is a multiple of 16, one at a time otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 4096


@triton.jit
def copy_runs_kernel(
    source_ptr, target_ptr, index_ptr, num_b, source_a, source_b, target_a, target_b, length,
    INDEXED: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy run (a, b), `length` units from a * source_a + b * source_b to a * target_a + b * target_b.

    INDEXED 1 takes the source's a from the index, 2 the target's; a negative entry reads as zeros, or writes nothing.
    Units are bytes, or with WORDS 4 bytes of which every 4 are aligned.
    """
    run = tl.program_id(0).to(tl.int64)
    a, b = run // num_b, run % num_b
    from_a, to_a = a, a
    x_X = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_X = x_X < length
    is_read_X = mask_X
    if INDEXED > 0:
        index = tl.load(index_ptr + a).to(tl.int64)
        if INDEXED == 1:
            is_read_X = mask_X & (index + tl.zeros([BLOCK], dtype=tl.int64) >= 0)
            from_a = tl.maximum(index, 0)
        else:
            if index < 0:
                return
            to_a = index
    from_run, to_run = from_a * source_a + b * source_b, to_a * target_a + b * target_b
    if WORDS:
        from_run, to_run = tl.multiple_of(from_run, 4), tl.multiple_of(to_run, 4)
    values_X = tl.load(source_ptr + from_run + x_X, mask=is_read_X, other=0)
    tl.store(target_ptr + to_run + x_X, values_X, mask=mask_X)


def _copy_runs(
    source: torch.Tensor,
    target: torch.Tensor,
    counts: tuple[int, int],
    from_strides: tuple[int, int],
    to_strides: tuple[int, int],
    length: int,
    index: torch.Tensor | None = None,
    indexed: int = 0,
) -> None:
    """Copy counts[0] x counts[1] runs of `length` bytes; strides in bytes."""
    if not counts[0] * counts[1] * length:
        return
    sizes = (source.data_ptr(), target.data_ptr(), length, *from_strides, *to_strides)
    words = all(size % 16 == 0 for size in sizes)
    unit, dtype = (4, torch.int32) if words else (1, torch.uint8)
    block = _BLOCK_BYTES // unit
    grid = (counts[0] * counts[1], triton.cdiv(length // unit, block))
    copy_runs_kernel[grid](
        _as(source, dtype), _as(target, dtype), index, counts[1],
        *(stride // unit for stride in (*from_strides, *to_strides)), length // unit,
        INDEXED=indexed, BLOCK=block, WORDS=words,
    )  # fmt: skip


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of `x`'s memory under another dtype, which carries the address to a kernel."""
    size = x.element_size()
    flat = torch.as_strided(x, (max(1, 4 // size),), (1,), x.storage_offset())
    return flat.view(torch.uint8)[: dtype.itemsize].view(dtype)


def pack_heads(x_nHW: torch.Tensor, ranks: int, out_TnhW: torch.Tensor | None = None) -> torch.Tensor:
    """[n, H, W] -> contiguous [T, n, H / T, W], the heads for rank 0 first."""
    x_nHW = _rows_dense(x_nHW)
    n, num_heads, width = x_nHW.shape
    assert num_heads % ranks == 0
    shape = (ranks, n, num_heads // ranks, width)
    out = x_nHW.new_empty(shape) if out_TnhW is None else out_TnhW
    assert out.shape == shape and out.is_contiguous()
    run = num_heads // ranks * width * x_nHW.element_size()
    row = x_nHW.stride(0) * x_nHW.element_size()
    _copy_runs(x_nHW, out, (n, ranks), (row, run), (run, n * run), run)
    return out


def unpack_heads(x_TnhW: torch.Tensor, out_nHW: torch.Tensor | None = None) -> torch.Tensor:
    """Contiguous [T, n, h, W] -> [n, T * h, W], the reverse of `pack_heads`."""
    assert x_TnhW.is_contiguous()
    ranks, n, heads, width = x_TnhW.shape
    shape = (n, ranks * heads, width)
    out = x_TnhW.new_empty(shape) if out_nHW is None else out_nHW
    assert out.shape == shape and _rows_dense(out) is out
    run = heads * width * x_TnhW.element_size()
    row = out.stride(0) * out.element_size()
    _copy_runs(x_TnhW, out, (n, ranks), (run, n * run), (row, run), run)
    return out


def gather_rows(source_m: torch.Tensor, index_n: torch.Tensor, out_n: torch.Tensor | None = None) -> torch.Tensor:
    """out[i] = source[index[i]], zeros where the index is negative. [m, ...] and [n] -> [n, ...]."""
    source_m = _rows_dense(source_m)
    shape = (len(index_n), *source_m.shape[1:])
    out = source_m.new_empty(shape) if out_n is None else out_n
    assert out.shape == shape and _rows_dense(out) is out
    _copy_rows(source_m, out, index_n, 1)
    return out


def _copy_rows(source: torch.Tensor, target: torch.Tensor, index_n: torch.Tensor, indexed: int) -> None:
    size = source.element_size()
    assert target.dtype == source.dtype
    length = source[:1].numel() * size
    from_row, to_row = source.stride(0) * size, target.stride(0) * size
    _copy_runs(source, target, (len(index_n), 1), (from_row, 0), (to_row, 0), length, index_n, indexed)


def _rows_dense(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where each row is one run of memory, else a contiguous copy."""
    return x if x.shape[0] == 0 or x[0].is_contiguous() else x.contiguous()
