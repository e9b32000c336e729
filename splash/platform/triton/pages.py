"""Copies of many short byte ranges in one launch: scattered pages pulled from a peer's arenas, or moved within one.

The copy engine starts one copy at a time and needs long ones; this kernel takes a few multiprocessors instead, as many
as `programs` says, so that a transfer leaves the rest to the step beside it. The ranges are the same in every layer: a
table of them is made once, and one launch serves as many layers as there are to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

CHUNK_BYTES = 64 << 10  # a program's unit of work in words; a quarter of that in bytes, which take as many registers
_WARPS = 16


@triton.jit(do_not_specialize=["num_regions", "num_chunks"])
def copy_chunks_kernel(regions_ptr, num_regions, chunks_ptr, num_chunks, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Chunks (to, from, length) in every pair of regions, whose addresses (target, source) are in `regions_ptr`.

    Chunks are in units of one byte, or with WORDS of 4 bytes of which every 4 are aligned, as the regions are then.
    """
    x_X = tl.arange(0, BLOCK)
    for piece in range(tl.program_id(0), num_regions * num_chunks, tl.num_programs(0)):
        region = piece // num_chunks
        chunk = piece - region * num_chunks
        target = tl.load(regions_ptr + region * 2)
        source = tl.load(regions_ptr + region * 2 + 1)
        to = tl.load(chunks_ptr + chunk * 3)
        start = tl.load(chunks_ptr + chunk * 3 + 1)
        length = tl.load(chunks_ptr + chunk * 3 + 2)
        if WORDS:
            # The length as well: where a mask may end inside 16 bytes, each word would be loaded by itself.
            length = tl.multiple_of(length, 4)
            target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int32)) + to, 16)
            source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)) + start, 16)
            values_X = tl.load(source_ptr + x_X, mask=x_X < length, other=0)
            tl.store(target_ptr + x_X, values_X, mask=x_X < length)
        else:
            target_ptr = target.to(tl.pointer_type(tl.uint8))
            source_ptr = source.to(tl.pointer_type(tl.uint8))
            values_X = tl.load(source_ptr + start + x_X, mask=x_X < length, other=0)
            tl.store(target_ptr + to + x_X, values_X, mask=x_X < length)


@dataclass(frozen=True)
class ChunkTable:
    """Extents cut into chunks, on the device: int64 [n, 3], those of aligned words and those of bytes."""

    words: torch.Tensor
    bytes: torch.Tensor


def chunk_table(extents: np.ndarray, device: torch.device) -> ChunkTable:
    """The table of `extents`, int64 [n, 3] of (to, from, bytes), uploaded on the current stream."""
    aligned = ~(extents % 16).any(axis=1)
    words, rest = split_extents(extents[aligned], CHUNK_BYTES), split_extents(extents[~aligned], CHUNK_BYTES // 4)
    return ChunkTable(_upload(words // 4, device), _upload(rest, device))


def region_table(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """int64 [n, 2] on the device: the addresses of pairs of regions, uint8 [bytes] each.

    A source may be memory of this device, a peer's that is mapped here, or the target itself.
    """
    addresses = [(target.data_ptr(), source.data_ptr()) for target, source in zip(targets, sources, strict=True)]
    assert all(address % 16 == 0 for pair in addresses for address in pair)
    return _upload(np.array(addresses, dtype=np.int64).reshape(-1, 2), device)


def _upload(table: np.ndarray, device: torch.device) -> torch.Tensor:
    on_host = torch.from_numpy(np.ascontiguousarray(table))
    return on_host if device.type == "cpu" or not len(table) else on_host.pin_memory().to(device, non_blocking=True)


def copy_chunks(regions: torch.Tensor, table: ChunkTable, programs: int) -> None:
    """Copy what the table says in every pair of regions, on the current stream and without waiting for it.

    Args:
        regions: as from `region_table`, which keeps nothing alive. No range written may overlap one read.
        table: the ranges.
        programs: multiprocessors to use at most.
    """
    for chunks, words in ((table.words, True), (table.bytes, False)):
        pieces = len(regions) * len(chunks)
        if pieces:
            copy_chunks_kernel[(min(programs, pieces),)](
                regions,
                len(regions),
                chunks,
                len(chunks),
                BLOCK=CHUNK_BYTES // 4,
                WORDS=words,
                num_warps=_WARPS,
            )


def split_extents(extents: np.ndarray, chunk_bytes: int) -> np.ndarray:
    """Cut extents (to, from, bytes) into pieces of at most `chunk_bytes`, a multiple of 16. int64 [n, 3] -> [m, 3].

    The pieces of an extent are equally long, to within 16 bytes a piece, and empty extents have none.
    """
    assert chunk_bytes % 16 == 0
    pieces = -(-extents[:, 2] // chunk_bytes)
    length = -(-extents[:, 2] // (16 * np.maximum(pieces, 1))) * 16
    of = np.repeat(np.arange(len(extents)), pieces)
    skip = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * length[of]
    whole = extents[of]
    cut = np.stack((whole[:, 0] + skip, whole[:, 1] + skip, np.minimum(length[of], whole[:, 2] - skip)), axis=1)
    return cut[cut[:, 2] > 0]
