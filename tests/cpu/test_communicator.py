"""Both communicators under one suite: right sums and rows for any counts and dtype, errors instead of wrong bytes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.errors import WorkerError
from splash.platform.base import Communicator, Rank
from splash.platform.cpu.shared import LINE_WORDS, MAILBOX_BYTES, mailbox_memory_bytes
from splash.platform.cpu.shm import ShmCommunicator
from tests.cpu.group import run_group

HERE = "tests.cpu.test_communicator"
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
MOVED = (*SUMMED, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
Case = tuple[str, int, tuple[tuple[int, ...], ...], int, int]  # operation, dtype, counts [T][T], row width, seed


def tensor_of(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What `rank` holds; every rank can make every other's."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5
    if dtype.is_floating_point:
        return (torch.randn(tuple(shape), generator=generator) * 3).to(dtype)
    return torch.randint(0, 50, tuple(shape), generator=generator).to(dtype)


def sum_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if parts[0].dtype.is_floating_point and parts[0].itemsize < 4 else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def check(
    comm: Communicator, operation: str, dtype: torch.dtype, counts: Sequence[Sequence[int]], width: int, seed: int
) -> None:
    """Run one collective and compare its bits. `counts[i]` are rank i's rows for each rank; else `counts[0]` counts."""
    ranks, me = range(comm.size), comm.rank
    if operation == "all_to_all":
        inputs = [tensor_of(i, (sum(counts[i]), width), dtype, seed) for i in ranks]
        want = torch.cat([inputs[i].split(list(counts[i]))[me] for i in ranks])
        got = comm.all_to_all(inputs[me], counts[me], [counts[i][me] for i in ranks])
    elif operation == "all_gather":
        inputs = [tensor_of(i, (counts[0][i], width), dtype, seed) for i in ranks]
        want, got = torch.cat(inputs), comm.all_gather(inputs[me], counts[0])
    elif operation == "reduce_scatter":
        inputs = [tensor_of(i, (sum(counts[0]), width), dtype, seed) for i in ranks]
        want = sum_in_rank_order(inputs).split(list(counts[0]))[me]
        got = comm.reduce_scatter(inputs[me], counts[0])
    else:
        inputs = [tensor_of(i, (sum(counts[0]), width), dtype, seed) for i in ranks]
        want, got = sum_in_rank_order(inputs), comm.all_reduce(inputs[me].clone())
    assert same_bits(got, want), (operation, dtype, counts, width, seed, got, want)


def conformance(rank: Rank) -> int:
    """The fixed part of the suite. Returns the number of checks."""
    comm, size = rank.comm, rank.size
    done = 0
    even, one = [[3] * size] * size, [[0] * size for _ in range(size)]
    for row in one:
        row[-1] = 1  # only the last rank gives, gets or keeps anything
    uneven = [[(3 * i + 5 * j) % 7 for j in range(size)] for i in range(size)]
    none = [[0] * size] * size
    for number, counts in enumerate((even, one, uneven, none)):
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for dtype in MOVED if operation in ("all_gather", "all_to_all") else SUMMED:
                check(comm, operation, dtype, counts, 5, number)
                done += 1
    for dtype in (torch.float32, torch.bfloat16):  # large enough to be summed in two phases
        check(comm, "all_reduce", dtype, [[140_001]], 1, 7)
    x = comm.all_reduce(torch.full((), 1.0))
    assert x.shape == () and x == size
    rows = tensor_of(comm.rank, (2, 3, 4), torch.float32, 1)
    assert comm.all_gather(rows, [2] * size).shape == (2 * size, 3, 4)
    assert comm.reduce_scatter(rows.repeat(size, 1, 1), [2] * size).shape == (2, 3, 4)
    assert comm.all_to_all(rows.repeat(size, 1, 1), [2] * size, [2] * size).shape == (2 * size, 3, 4)
    return done + 6


def large(rank: Rank) -> None:
    """Payloads beyond the mailbox, uneven so that no window ends where a rank's share does."""
    elements = MAILBOX_BYTES // 4
    size = rank.size
    shares = [elements // 3 + 1001 * i + 1 for i in range(size)]
    check(rank.comm, "all_reduce", torch.float32, [[elements + 12345]], 1, 1)
    check(rank.comm, "all_gather", torch.float32, [[elements + 777, *shares[1:]]], 1, 2)
    check(rank.comm, "reduce_scatter", torch.float32, [[elements + 777, *shares[1:]]], 1, 3)
    matrix = [[(elements // 2 if i == 0 else 4000) + 100 * j + i for j in range(size)] for i in range(size)]
    matrix[0][-1] += elements  # rank 0 needs several rounds, the others one
    check(rank.comm, "all_to_all", torch.float32, matrix, 1, 4)


def barriers(rank: Rank) -> None:
    """After a barrier every rank sees what every other wrote before it, many times over."""
    mine = rank.arenas.local(0)[:8].view(torch.int64)
    others = [rank.arenas.peer(peer, 0)[:8].view(torch.int64) for peer in range(rank.size)]
    for number in range(1, 300):
        mine.fill_(number)
        rank.comm.barrier()
        assert all(int(other) == number for other in others)
        rank.comm.barrier()


def run_cases(rank: Rank, cases: Sequence[Case]) -> None:
    for operation, dtype, counts, width, seed in cases:
        check(rank.comm, operation, MOVED[dtype], counts, width, seed)


def late(rank: Rank) -> float:
    """Rank 0 comes late by far more than the others spin."""
    if rank.rank == 0:
        threading.Event().wait(0.1)
    return float(rank.comm.all_reduce(torch.ones(3)).sum())


OPERATIONS: dict[str, Callable[[Communicator, int], object]] = {
    "barrier": lambda comm, rows: comm.barrier(),
    "all_reduce": lambda comm, rows: comm.all_reduce(torch.ones(rows, 2)),
    "all_gather": lambda comm, rows: comm.all_gather(torch.ones(rows, 2), [rows] * comm.size),
    "reduce_scatter": lambda comm, rows: comm.reduce_scatter(torch.ones(rows * comm.size, 2), [rows] * comm.size),
    "all_to_all": lambda comm, rows: comm.all_to_all(
        torch.ones(rows * comm.size, 2), [rows] * comm.size, [rows] * comm.size
    ),
}


def call_each_its_own(
    rank: Rank, calls: Sequence[tuple[str, int] | None], close: bool = False
) -> tuple[str, int | None]:
    """Every rank makes the call at its place in `calls`, after one that succeeds; None makes none.

    Returns:
        (message, rank blamed) of the `WorkerError`, or ("", None).
    """
    rank.comm.all_reduce(torch.ones(4))
    call = calls[rank.rank]
    if call is None:
        if close:
            rank.comm.close()
        return "", None
    try:
        OPERATIONS[call[0]](rank.comm, call[1])
    except WorkerError as error:
        return str(error), error.rank
    return "", None


def unequal_gather(rank: Rank) -> str:
    """The same total, shared out differently in the eyes of the two ranks."""
    counts = [1, 3] if rank.rank == 0 else [2, 2]
    with pytest.raises(WorkerError) as caught:
        rank.comm.all_gather(torch.ones(counts[rank.rank], 2), counts)
    return str(caught.value)


def unequal_exchange(rank: Rank) -> str:
    send, receive = ([1, 1], [1, 2]) if rank.rank == 0 else ([3, 1], [1, 1])
    try:
        rank.comm.all_to_all(torch.ones(sum(send), 2), send, receive)
    except WorkerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_dtype_and_kind_of_counts(ranks: int, collectives: str) -> None:
    assert run_group(f"{HERE}:conformance", ranks, collectives=collectives) == [4 * (7 + 11 + 7 + 11) + 6] * ranks


@pytest.mark.parametrize(("ranks", "collectives"), [(2, "shm"), (3, "shm"), (2, "gloo")])
def test_payloads_larger_than_a_mailbox(ranks: int, collectives: str) -> None:
    run_group(f"{HERE}:large", ranks, collectives=collectives)


@pytest.mark.parametrize(("ranks", "collectives"), [(2, "shm"), (4, "shm"), (2, "gloo")])
def test_barriers_order_memory(ranks: int, collectives: str) -> None:
    run_group(f"{HERE}:barriers", ranks, collectives=collectives)


@settings(max_examples=15)
@given(data=st.data())
def test_any_sequence_of_collectives(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 4))
    counts = st.tuples(*[st.tuples(*[st.integers(0, 9)] * ranks)] * ranks)
    width, seed = st.sampled_from([1, 3, 1000]), st.integers(0, 99)
    sums = st.tuples(
        st.sampled_from(["all_reduce", "reduce_scatter"]), st.integers(0, len(SUMMED) - 1), counts, width, seed
    )
    moves = st.tuples(
        st.sampled_from(["all_gather", "all_to_all"]), st.integers(0, len(MOVED) - 1), counts, width, seed
    )
    run_group(f"{HERE}:run_cases", ranks, {"cases": data.draw(st.lists(sums | moves, min_size=1, max_size=40))})


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_a_late_rank_is_waited_for(collectives: str) -> None:
    assert run_group(f"{HERE}:late", 2, collectives=collectives) == [6.0, 6.0]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_a_rank_that_does_not_arrive_is_named(operation: str) -> None:
    calls = [(operation, 2), (operation, 2), None]
    results = run_group(f"{HERE}:call_each_its_own", 3, {"calls": calls}, collective_timeout_s=1.0)
    for message, blamed in results[:2]:
        assert operation in message and "rank 2 did not arrive within 1 s" in message
        assert blamed == 2


def test_all_missing_ranks_are_named() -> None:
    calls = [("barrier", 0), None, None]
    results = run_group(f"{HERE}:call_each_its_own", 3, {"calls": calls}, collective_timeout_s=1.0)
    assert "barrier: ranks 1, 2 did not arrive" in results[0][0]


def test_gloo_names_the_rank_that_does_not_arrive() -> None:
    calls = [("all_gather", 2), ("all_gather", 2), None]
    results = run_group(f"{HERE}:call_each_its_own", 3, {"calls": calls}, collectives="gloo", collective_timeout_s=2.0)
    for message, blamed in results[:2]:
        assert "all_gather: rank 2 did not arrive" in message
        assert blamed == 2


def test_a_rank_that_left_is_not_waited_for() -> None:
    calls = [("all_reduce", 2), None]
    results = run_group(f"{HERE}:call_each_its_own", 2, {"calls": calls, "close": True}, collective_timeout_s=30.0)
    assert results[0] == ("all_reduce of 4 float32 elements: rank 1 left the group before it", 1)


class ControlThatMoves:
    """Control lines on which something happens right after the first look at a word."""

    def __init__(self, control: memoryview, word: int, happens: Callable[[], None]) -> None:
        self._control, self._word, self._happens = control, word, happens

    def __getitem__(self, word: int) -> int:
        value = self._control[word]
        if word == self._word and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        return value


def test_a_rank_that_arrives_and_leaves_while_it_is_looked_for_has_arrived() -> None:
    memory = mmap.mmap(-1, mailbox_memory_bytes(2))
    waiting = ShmCommunicator(memory, 0, 2, 20.0)
    control = waiting._control

    def arrive_and_leave() -> None:
        control[LINE_WORDS] = 1  # the round that it publishes
        peer.close()

    for word in (LINE_WORDS, LINE_WORDS + 1):  # what it has published, and whether it has left
        control[LINE_WORDS] = control[LINE_WORDS + 1] = 0
        peer = ShmCommunicator(memory, 1, 2, 20.0)
        waiting._control = ControlThatMoves(control, word, arrive_and_leave)
        waiting._check_arrivals(1, 0, 0.0)
        assert (control[LINE_WORDS], control[LINE_WORDS + 1]) == (1, 1)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (("all_reduce", 2), ("barrier", 0)),
        (("all_reduce", 2), ("all_reduce", 3)),
        (("all_gather", 2), ("reduce_scatter", 2)),
        (("reduce_scatter", 2), ("reduce_scatter", 1)),
    ],
)
def test_ranks_in_different_collectives_all_fail(usual: tuple[str, int], other: tuple[str, int], ranks: int) -> None:
    calls = [usual] * (ranks - 1) + [other]
    results = run_group(f"{HERE}:call_each_its_own", ranks, {"calls": calls})
    for message, _ in results:
        assert message.startswith("ranks disagree") and usual[0] in message and other[0] in message


def test_ranks_with_different_counts_fail() -> None:
    for message in run_group(f"{HERE}:unequal_gather", 2):
        assert "disagree on the counts of all_gather" in message
    first, _ = run_group(f"{HERE}:unequal_exchange", 2)
    assert first == ("ranks disagree on the counts of all_to_all: rank 1 sends 6 elements, rank 0 expects 4")
