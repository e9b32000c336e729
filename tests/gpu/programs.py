"""Programs for `run_group` on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from splash.platform.base import Rank
from tests.cpu.test_communicator import sum_in_rank_order, tensor_of

COUNTS = ((2,) * 8, (0, 3, 1, 4, 0, 2, 7, 1), (0, 0, 5, 0, 0, 0, 0, 0), (0,) * 8)
SUMMED = (torch.float32, torch.bfloat16, torch.int64)
MOVED = (*SUMMED, torch.uint8, torch.float8_e4m3fn, torch.bool)


def collectives(rank: Rank) -> int:
    """Every collective with even, uneven and no rows. Moved rows keep their bits; sums are close."""
    comm, ranks = rank.comm, range(rank.size)
    me, width, checked = comm.rank, 5, 0
    for seed, counts in enumerate(c[: rank.size] for c in COUNTS):
        for dtype in MOVED:
            inputs = [tensor_of(i, (counts[i], width), dtype, seed) for i in ranks]
            checked += _same(comm.all_gather(inputs[me].to(rank.device), counts), torch.cat(inputs))
            # Rank i sends counts[(i + j) % T] rows to rank j.
            table = [[counts[(i + j) % rank.size] for j in ranks] for i in ranks]
            inputs = [tensor_of(i, (sum(table[i]), width), dtype, seed) for i in ranks]
            want = torch.cat([inputs[i].split(table[i])[me] for i in ranks])
            got = comm.all_to_all(inputs[me].to(rank.device), table[me], [table[i][me] for i in ranks])
            checked += _same(got, want)
        for dtype in SUMMED:
            inputs = [tensor_of(i, (sum(counts), width), dtype, seed) for i in ranks]
            total = sum_in_rank_order(inputs)
            checked += _close(comm.all_reduce(inputs[me].to(rank.device)), total)
            got = comm.reduce_scatter(inputs[me].to(rank.device), counts)
            checked += _close(got, total.split(list(counts))[me])
        comm.barrier()
    return checked


def _same(got: torch.Tensor, want: torch.Tensor) -> int:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.cpu().view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))
    return 1


def _close(got: torch.Tensor, want: torch.Tensor) -> int:
    torch.testing.assert_close(got.cpu(), want, rtol=2e-2 if want.dtype == torch.bfloat16 else 1e-5, atol=2e-2)
    return 1


def read_peers(rank: Rank, num_layers: int, extents: Sequence[Sequence[int]]) -> list[bytes]:
    """Fill the arenas, then copy `extents` of every peer's: in the stream, and behind it. Bytes that came, by peer."""
    size = rank.arenas.local(0).numel()
    for layer in range(num_layers):
        assert not bool(rank.arenas.local(layer).any()), "arenas start as zeros"
    rank.comm.barrier()
    for layer in range(num_layers):
        rank.arenas.local(layer).copy_(torch.from_numpy(arena_bytes(rank.rank, layer, size)))
    rank.comm.barrier()
    got = []
    for peer in range(rank.size):
        for layer in range(num_layers):
            target = torch.zeros(size, dtype=torch.uint8, device=rank.device)
            source, table = rank.arenas.peer(peer, layer), np.array(extents, dtype=np.int64)
            if layer % 2:
                rank.copies.begin(lambda t=target, s=source, e=table: rank.copies.copy(t, s, e)).wait()
            else:
                rank.copies.copy(target, source, table)
            got.append(target.cpu().numpy().tobytes())
    rank.comm.barrier()  # nobody's memory goes while a peer reads it
    return got


def arena_bytes(rank: int, layer: int, size: int) -> np.ndarray:
    """What `read_peers` writes."""
    return np.random.default_rng([rank, layer]).integers(0, 256, size).astype(np.uint8)


def failing_work(rank: Rank) -> str:
    """What beginning work that fails says."""

    def work() -> Any:
        raise OSError("the mapping is gone")

    try:
        rank.copies.begin(work)
    except OSError as error:
        return str(error)
    return ""
