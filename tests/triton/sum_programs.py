"""Programs for `run_group`: sums by one kernel over memory that the ranks share, interpreted or on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from splash.platform.base import Arenas, Rank
from splash.platform.triton.sums import PeerSums, region_bytes
from tests.cpu.test_communicator import sum_in_rank_order, tensor_of

MAX_BYTES, PART_BYTES = 1536, 512  # three programs at most
Call = tuple[str, tuple[int, ...], int]  # dtype, the rows that each rank keeps (none: all ranks keep all), row width


def sums(rank: Rank, calls: Sequence[Call], tolerance: float, replays: int = 0) -> int:
    """Every call's sum against that of everybody's inputs; then, with `replays`, all of them often in one graph."""
    arenas = _arenas(rank)
    peers = PeerSums(arenas, rank.rank, rank.size, 60.0, MAX_BYTES, PART_BYTES)
    inputs, wants = [], []
    for seed, (name, counts, width) in enumerate(calls):
        dtype = getattr(torch, name)
        shape = (sum(counts) or 7, width)
        parts = [tensor_of(of, shape, dtype, seed) for of in range(rank.size)]
        total = sum_in_rank_order(parts)
        inputs.append(parts[rank.rank].to(rank.device))
        wants.append(total.split(list(counts))[rank.rank] if counts else total)

    def run() -> list[torch.Tensor]:
        return [
            peers.reduce_scatter(x, counts) if counts else peers.all_reduce(x.clone())
            for x, (_, counts, _) in zip(inputs, calls, strict=True)
        ]

    checked = 0
    for got, want in zip(run(), wants, strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=tolerance, rtol=tolerance)
        checked += 1
    if replays:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            results = run()
        for _ in range(replays):
            for result in results:
                result.fill_(torch.nan)
            graph.replay()
            for got, want in zip(results, wants, strict=True):
                torch.testing.assert_close(got.cpu(), want, atol=tolerance, rtol=tolerance)
                checked += 1
    (rank.host or rank.comm).barrier()  # nobody's memory goes while a peer reads it
    if arenas is not rank.arenas:
        arenas.close()
    return checked


def by_length(rank: Rank) -> list[int]:
    """Short sums by the kernel, long ones and other dtypes by the host: how often the host was asked for each."""
    from splash.platform.cuda.comm import ShortSumsCommunicator

    rest = mock.Mock(wraps=rank.comm, rank=rank.rank, size=rank.size)
    comm = ShortSumsCommunicator(
        rest, [PeerSums(rank.arenas, rank.rank, rank.size, 60.0, MAX_BYTES, PART_BYTES)], [rank.arenas]
    )
    counts = [1] * (rank.size - 1) + [4]
    for dtype, rows in ((torch.float32, 1), (torch.float32, 400), (torch.int64, 1), (torch.float32, 0)):
        parts = [tensor_of(of, (sum(counts), rows), dtype, 0) for of in range(rank.size)]
        total = sum_in_rank_order(parts)
        assert torch.equal(comm.reduce_scatter(parts[rank.rank], counts), total.split(counts)[rank.rank])
        assert torch.equal(comm.all_reduce(parts[rank.rank]), total)
    x = tensor_of(rank.rank, (1, 3), torch.float32, 0)
    assert len(comm.all_gather(x, [1] * rank.size)) == rank.size
    assert len(comm.all_to_all(x.repeat(rank.size, 1), [1] * rank.size, [1] * rank.size)) == rank.size
    comm.barrier()
    return [getattr(rest, name).call_count for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")]


def stays_away(rank: Rank) -> str:
    """Rank 1 does not come to the sum: what rank 0 is told."""
    said = ""
    if rank.rank == 0:
        builder: Any = interpreter.interpreter_builder
        builder.options = replace(builder.options, debug=True)  # where assertions on the device are looked at
        peers = PeerSums(rank.arenas, 0, 2, 1e-5, MAX_BYTES, PART_BYTES)
        try:
            peers.all_reduce(torch.ones(4))
        except InterpreterError as error:
            said = repr(error.__cause__)
    rank.comm.barrier()
    return said


def _arenas(rank: Rank) -> Arenas:
    """The group's own on the CPU; on GPUs a region of their own."""
    if rank.device.type == "cpu":
        return rank.arenas
    from splash.platform.cuda.arena import MappedArenas

    assert rank.host is not None
    return MappedArenas(rank.host, 1, region_bytes(MAX_BYTES, PART_BYTES), rank.device)
