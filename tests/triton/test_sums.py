"""Sums over ranks in one kernel: the kernel in real ranks, and every order in which ranks can come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.memory import ArenaGeometry
from splash.core.spec import ModelSpec, RopeSpec, kv_format
from splash.platform.triton.sums import region_bytes
from tests.cpu.group import run_group
from tests.triton.conftest import DEVICE
from tests.triton.sum_programs import MAX_BYTES, PART_BYTES, Call

HERE = "tests.triton.sum_programs"
SPEC = ModelSpec("test", 1, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())


def calls_for(ranks: int, dtypes: Sequence[str]) -> list[Call]:
    """Long and short sums in turns, so that programs have had different numbers of calls; uneven shares and none."""
    calls: list[Call] = []
    for dtype in dtypes:
        calls += [(dtype, (), 40), (dtype, (), 1), (dtype, (2,) * ranks, 13), (dtype, (), 3)]
        calls += [(dtype, (0, 5, *[1] * (ranks - 2)), 9), (dtype, (), 50), (dtype, (4, *[0] * (ranks - 1)), 16)]
    return calls


@pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU kernels are not interpreted")
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_ranks_that_share_memory(ranks: int) -> None:
    """float32 is exact; half precision is rounded by the interpreter in its own way."""
    geometry = ArenaGeometry(SPEC, kv_format(SPEC, "float32"), 16, 4, ranks, num_slots=257)
    assert geometry.arena_bytes >= region_bytes(MAX_BYTES, PART_BYTES)
    for dtypes, tolerance in ((("float32",), 0.0), (("float16",), 2e-2)):
        calls = calls_for(ranks, dtypes)
        arguments = {"calls": calls, "tolerance": tolerance}
        got = run_group(f"{HERE}:sums", ranks, arguments, geometry=geometry, timeout_s=120.0)
        assert got == [len(calls)] * ranks


@pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU kernels are not interpreted")
def test_short_sums_take_the_kernel_and_long_ones_do_not() -> None:
    geometry = ArenaGeometry(SPEC, kv_format(SPEC, "float32"), 16, 4, 2, num_slots=257)
    assert run_group(f"{HERE}:by_length", 2, geometry=geometry) == [[3, 3, 1, 1]] * 2


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the assertion takes the process with it")
def test_a_peer_that_does_not_come_ends_the_wait() -> None:
    geometry = ArenaGeometry(SPEC, kv_format(SPEC, "float32"), 16, 4, 2, num_slots=257)
    said = run_group(f"{HERE}:stays_away", 2, geometry=geometry)
    assert "a peer did not come in time" in said[0] and not said[1]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sums_on_gpus(ranks: int) -> None:
    """Of ranks that have a GPU each or share one, in the stream and in a graph that is replayed."""
    calls = calls_for(ranks, ("float32", "float16", "bfloat16")) if ranks > 1 else [("bfloat16", (), 40)]
    arguments = {"calls": calls, "tolerance": 2e-2, "replays": 5}
    got = run_group(f"{HERE}:sums", ranks, arguments, platform="cuda", timeout_s=240.0)
    assert got == [6 * len(calls)] * ranks


# The protocol of one program number, without the kernel: what each rank does, one memory operation after another.

Step = tuple[str, int, int]  # write (place, call) | add (peer, 1) | wait (0, how many) | read (rank and place, call)


def steps(rank: int, calls: int, peers: Sequence[int], places: int = 2, early: bool = False) -> list[Step]:
    """What a rank does, and tells its peers in their order; `early`, it tells them before it has written."""
    done: list[Step] = []
    for call in range(calls):
        write: Step = ("write", call % places, call)
        told: list[Step] = [("add", peer, 1) for peer in peers if peer != rank]
        done += [*told, write] if early else [write, *told]
        done.append(("wait", 0, (call + 1) * (len(peers) - 1)))
        done += [("read", peer * places + call % places, call) for peer in range(len(peers))]
    return done


class World:
    """All regions, and how far each rank is. Raises AssertionError where a rank reads what it should not."""

    def __init__(self, programs: Sequence[Sequence[Step]], places: int = 2, at: Sequence[int] = ()) -> None:
        self.programs, self.places = programs, places
        self.at = list(at) or [0] * len(programs)

    def counter(self, rank: int) -> int:
        """How often peers have added to a rank's."""
        return sum(program[: self.at[of]].count(("add", rank, 1)) for of, program in enumerate(self.programs))

    def held(self, rank: int, place: int) -> int:
        """The call whose input is there, -1 at first."""
        written = [call for what, to, call in self.programs[rank][: self.at[rank]] if what == "write" and to == place]
        return written[-1] if written else -1

    def can_go(self, rank: int) -> bool:
        """Whether the rank has something to do but to wait."""
        if self.at[rank] == len(self.programs[rank]):
            return False
        what, _, wanted = self.programs[rank][self.at[rank]]
        return what != "wait" or self.counter(rank) >= wanted

    def go(self, rank: int) -> None:
        """One step of a rank."""
        what, number, call = self.programs[rank][self.at[rank]]
        if what == "read":
            found = self.held(number // self.places, number % self.places)
            assert found == call, f"rank {rank} reads call {found} in call {call}"
        self.at[rank] += 1


def explore(ranks: int, calls: int, places: int = 2, early: bool = False) -> int:
    """Every state that ranks can reach, whoever goes first: how many. Each is left by somebody, or is the end."""
    programs = [steps(rank, calls, range(ranks), places, early) for rank in range(ranks)]
    end = tuple(map(len, programs))
    seen, waiting = {(0,) * ranks}, [(0,) * ranks]
    while waiting:
        state = waiting.pop()
        able = [rank for rank in range(ranks) if World(programs, places, state).can_go(rank)]
        assert able or state == end, f"nobody can go on at {state}"
        for rank in able:
            world = World(programs, places, state)
            world.go(rank)
            after = tuple(world.at)
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    assert end in seen
    return len(seen)


@pytest.mark.parametrize(("ranks", "calls"), [(2, 6), (3, 3)])
def test_no_order_of_ranks_reads_early_late_or_never(ranks: int, calls: int) -> None:
    assert explore(ranks, calls) > 100


def test_one_place_would_be_written_while_a_peer_reads() -> None:
    with pytest.raises(AssertionError, match="reads call"):
        explore(2, 3, places=1)


def test_who_is_told_too_early_reads_too_early() -> None:
    with pytest.raises(AssertionError, match="reads call"):
        explore(2, 1, early=True)


@settings(max_examples=100)
@given(ranks=st.integers(2, 8), data=st.data())
def test_many_ranks_in_any_order(ranks: int, data: st.DataObject) -> None:
    """Peers are told in any order as well."""
    orders = [data.draw(st.permutations(range(ranks)), label=f"peers of {rank}") for rank in range(ranks)]
    world = World([steps(rank, 4, orders[rank]) for rank in range(ranks)])
    turns: Iterator[int] = iter(data.draw(st.lists(st.integers(0, 7), max_size=200), label="turns"))
    for _ in count():
        able = [rank for rank in range(ranks) if world.can_go(rank)]
        if not able:
            break
        rank = able[next(turns, 0) % len(able)]
        for _ in range(1 + next(turns, 0)):
            if world.can_go(rank):
                world.go(rank)
    assert world.at == [len(program) for program in world.programs]
