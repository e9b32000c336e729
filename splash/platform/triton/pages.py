"""Copies of many short byte ranges in one launch: scattered pages pulled from a peer's arena, or moved within one.

The copy engine starts one copy at a time and needs long ones; this kernel takes a few multiprocessors instead, as many
as `programs` says, so that a transfer leaves the rest to the step beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

CHUNK_BYTES = 32 << 10  # a program's unit of work
_WARPS = 16


@triton.jit
def copy_chunks_kernel(source_ptr, target_ptr, chunks_ptr, num_chunks, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Chunks (to, from, length) in units of one byte, or with WORDS of 4 bytes of which every 4 are aligned."""
    x_X = tl.arange(0, BLOCK)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        to = tl.load(chunks_ptr + chunk * 3)
        start = tl.load(chunks_ptr + chunk * 3 + 1)
        length = tl.load(chunks_ptr + chunk * 3 + 2)
        if WORDS:
            to, start = tl.multiple_of(to, 4), tl.multiple_of(start, 4)
        values_X = tl.load(source_ptr + start + x_X, mask=x_X < length, other=0)
        tl.store(target_ptr + to + x_X, values_X, mask=x_X < length)


@dataclass(frozen=True)
class ChunkTable:
    """Extents cut into chunks, on the device: made once, used for every layer."""

    chunks: torch.Tensor
    words: bool


def chunk_table(extents: np.ndarray, device: torch.device) -> ChunkTable:
    """The table of `extents`, int64 [n, 3] of (to, from, bytes), uploaded on the current stream."""
    chunks = split_extents(extents, CHUNK_BYTES)
    words = not (chunks % 16).any()
    table = torch.from_numpy(np.ascontiguousarray(chunks // 4 if words else chunks))
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    return ChunkTable(table, words)


def copy_chunks(target: torch.Tensor, source: torch.Tensor, table: ChunkTable, programs: int) -> None:
    """Copy what the table says on the current stream, in one launch and without waiting for it.

    Args:
        target: uint8 [bytes] on this device.
        source: uint8 [bytes], on this device or a peer's memory mapped here; may be `target`. No range written may
            overlap one read.
        programs: multiprocessors to use at most.
    """
    num_chunks = len(table.chunks)
    if not num_chunks:
        return
    block = CHUNK_BYTES
    if table.words:
        assert target.data_ptr() % 16 == 0 and source.data_ptr() % 16 == 0
        target, source, block = _words(target), _words(source), CHUNK_BYTES // 4
    copy_chunks_kernel[(min(programs, num_chunks),)](
        source, target, table.chunks, num_chunks, BLOCK=block, WORDS=table.words, num_warps=_WARPS
    )


def copy_extents(target: torch.Tensor, source: torch.Tensor, extents: np.ndarray, programs: int = 16) -> None:
    """`copy_chunks` of extents that are used once."""
    copy_chunks(target, source, chunk_table(extents, target.device), programs)


def move_pages(arena: torch.Tensor, to: np.ndarray, start: np.ndarray, slot_bytes: int, programs: int = 16) -> None:
    """Copy slots `start` of an arena, uint8 [bytes], to slots `to`; no slot may be in both."""
    assert not np.intersect1d(to, start).size
    sizes = np.full(len(to), slot_bytes)
    extents = np.stack((np.asarray(to) * slot_bytes, np.asarray(start) * slot_bytes, sizes), axis=1)
    copy_extents(arena, arena, extents.astype(np.int64), programs)


def split_extents(extents: np.ndarray, chunk_bytes: int) -> np.ndarray:
    """Cut extents (to, from, bytes) into pieces of at most `chunk_bytes`. int64 [n, 3] -> [m, 3]; empty ones vanish."""
    pieces = -(-extents[:, 2] // chunk_bytes)
    of = np.repeat(np.arange(len(extents)), pieces)
    skip = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * chunk_bytes
    whole = extents[of]
    return np.stack((whole[:, 0] + skip, whole[:, 1] + skip, np.minimum(chunk_bytes, whole[:, 2] - skip)), axis=1)


def _words(x: torch.Tensor) -> torch.Tensor:
    """The same memory in words of 4 bytes; a rest that fills none is never addressed."""
    return x[: x.numel() // 4 * 4].view(torch.int32)
