"""Rows gathered by an index on the device, 16 bytes at a time where every address is a multiple of 16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 4096


@triton.jit
def gather_kernel(
    source_ptr, target_ptr, index_ptr, source_stride, target_stride, length, BLOCK: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Copy a part of row index[i] to row i; a negative entry reads as zeros.

    Units are bytes, or with WORDS 4 bytes of which every 4 are aligned.
    """
    row = tl.program_id(0).to(tl.int64)
    x_X = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_X = x_X < length
    index = tl.load(index_ptr + row).to(tl.int64)
    is_read_X = mask_X & (index + tl.zeros([BLOCK], dtype=tl.int64) >= 0)
    from_row, to_row = tl.maximum(index, 0) * source_stride, row * target_stride
    if WORDS:
        from_row, to_row = tl.multiple_of(from_row, 4), tl.multiple_of(to_row, 4)
    tl.store(target_ptr + to_row + x_X, tl.load(source_ptr + from_row + x_X, mask=is_read_X, other=0), mask=mask_X)


def gather_rows(source_m: torch.Tensor, index_n: torch.Tensor) -> torch.Tensor:
    """out[i] = source[index[i]], zeros where the index is negative. [m, ...] and [n] -> [n, ...]."""
    if len(source_m) and not source_m[0].is_contiguous():
        source_m = source_m.contiguous()
    out = source_m.new_empty(len(index_n), *source_m.shape[1:])
    size = source_m.element_size()
    length = source_m[:1].numel() * size
    if not len(index_n) * length:
        return out
    strides = (source_m.stride(0) * size, out.stride(0) * size)
    words = all(number % 16 == 0 for number in (source_m.data_ptr(), out.data_ptr(), length, *strides))
    unit, dtype = (4, torch.int32) if words else (1, torch.uint8)
    block = _BLOCK_BYTES // unit
    gather_kernel[(len(index_n), triton.cdiv(length // unit, block))](
        _as(source_m, dtype), _as(out, dtype), index_n, *(stride // unit for stride in strides), length // unit,
        BLOCK=block, WORDS=words,
    )  # fmt: skip
    return out


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of `x`'s memory under another dtype, which carries the address to a kernel."""
    size = x.element_size()
    flat = torch.as_strided(x, (max(1, 4 // size),), (1,), x.storage_offset())
    return flat.view(torch.uint8)[: dtype.itemsize].view(dtype)
