"""The ownership algebra: holders, and the difference between two states. Properties hold for any load."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import Counter, defaultdict
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.diff import NO_SOURCE, BlockDiff, Primitive, diff, diff_blocks
from splash.core.layout import KV, LAYOUTS, Layout, Projections
from splash.core.ownership import PageBlock, State, WeightBlock, holders, page_holders, weight_holders

PAPER = ("tp", "dp", "cp", "dop")
layouts = st.sampled_from(list(LAYOUTS.values()))


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, np.ndarray, list[np.ndarray], np.ndarray | None]:
    """(T, numbers, two sets of owners, pages): requests of uneven lengths, owners that may leave ranks idle, prefixes
    that several requests share."""
    ranks = draw(st.integers(1, 10))
    lengths = draw(st.lists(st.integers(0, 12), max_size=8))
    shared = draw(st.booleans())
    prefix = draw(st.integers(1, 6)) if shared else 0
    numbers: list[int] = []
    requests: list[int] = []
    pages: list[int] = []
    fresh = itertools.count(prefix)
    for request, length in enumerate(lengths):
        numbers += range(length)
        requests += [request] * length
        pages += [number if number < prefix else next(fresh) for number in range(length)]
    # Pages nobody got as far as are left out, so that page numbers have no gaps.
    order = {page: index for index, page in enumerate(dict.fromkeys(pages))}
    owner = st.lists(st.integers(0, ranks - 1), min_size=len(lengths), max_size=len(lengths))
    owners = [np.array(draw(owner), dtype=np.int64)[np.array(requests, dtype=np.int64)] for _ in range(2)]
    claims = np.array([order[page] for page in pages], dtype=np.int64) if shared else None
    return ranks, np.array(numbers, dtype=np.int64), owners, claims


def balanced(layout: Layout, ranks: int, rounds: int = 1) -> State:
    """Every rank owns `rounds` requests of T pages."""
    request, number = np.divmod(np.arange(rounds * ranks * ranks), ranks)
    return State(layout, ranks, number, request % ranks)


def check_exact(blocks: BlockDiff, held: np.ndarray, need: np.ndarray) -> None:
    """Keep, fetch and drop are exactly what the two matrices say, and every source holds what it sends."""
    assert (blocks.keep == (held & need)).all()
    assert ((blocks.keep | blocks.fetch) == need).all() and not (blocks.keep & blocks.fetch).any()
    assert ((blocks.keep | blocks.drop) == held).all() and not (blocks.keep & blocks.drop).any()
    assert not (blocks.fetch & held).any(), "something resident is fetched"
    block, rank = np.nonzero(blocks.fetch)
    assert held[block, blocks.fetch_source[block, rank]].all(), "a source does not hold what it is asked for"
    assert (blocks.fetch_source[~blocks.fetch] == NO_SOURCE).all()
    assert blocks.received.sum() == blocks.sent.sum() == blocks.fetch.sum()


def check_balance(blocks: BlockDiff, held: np.ndarray) -> None:
    """Ranks that hold the same blocks send equally many, to within one."""
    sent = defaultdict(list)
    for rank in range(held.shape[1]):
        sent[held[:, rank].tobytes()].append(int(blocks.sent[rank]))
    assert all(max(same) - min(same) <= 1 for same in sent.values())


def test_the_table_of_holders() -> None:
    """T = 2, one request of three pages that rank 1 owns: the table in the module's docstring."""
    table = {
        "tp": ("x y", "* * *"),
        "dp": ("* *", "y y y"),
        "cp": ("* *", "x y x"),
        "dop": ("x y", "y y y"),
        "dcp": ("x y", "x y x"),
    }
    sets = {"x": {0}, "y": {1}, "*": {0, 1}}
    for name, (groups, pages) in table.items():
        layout = LAYOUTS[name]
        assert [holders(WeightBlock("o", h), layout, {}, 2) for h in range(2)] == [
            sets[mark] for mark in groups.split()
        ]
        assert [holders(PageBlock(7, c), layout, {7: 1}, 2) for c in range(3)] == [sets[mark] for mark in pages.split()]


@given(layouts, st.integers(1, 16), st.integers(0, 1000), st.data())
def test_every_block_is_held_by_one_rank_or_by_all(
    layout: Layout, ranks: int, number: int, data: st.DataObject
) -> None:
    owner = data.draw(st.integers(0, ranks - 1))
    group = data.draw(st.integers(0, ranks - 1))
    everyone = frozenset(range(ranks))
    page = {KV.REPLICATED: everyone, KV.REQUEST: {owner}, KV.POSITION: {number % ranks}}
    weight = {Projections.SHARDED: {group}, Projections.REPLICATED: everyone}
    assert holders(PageBlock(3, number), layout, {3: owner}, ranks) == page[layout.kv]
    assert holders(WeightBlock("kv_b", group), layout, {3: owner}, ranks) == weight[layout.projections]


@given(layouts, loads())
def test_a_page_is_held_by_the_union_of_its_claims(layout: Layout, load: tuple) -> None:
    ranks, numbers, (owners, _), pages = load
    state = State(layout, ranks, numbers, owners, pages)
    expected: dict[int, set[int]] = defaultdict(set)
    for claim, (number, owner) in enumerate(zip(numbers.tolist(), owners.tolist(), strict=True)):
        page = claim if pages is None else int(pages[claim])
        expected[page] |= holders(PageBlock(0, number), layout, {0: owner}, ranks)
    assert state.num_pages == len(expected)
    assert [set(np.flatnonzero(row).tolist()) for row in state.page_holders] == [expected[p] for p in sorted(expected)]
    for rank in range(ranks):
        assert state.held_pages(rank).tolist() == sorted(page for page, ranks_ in expected.items() if rank in ranks_)


@given(layouts, st.integers(1, 12), st.integers(0, 50))
def test_holders_depend_on_the_page_number_modulo_the_ranks_only(layout: Layout, ranks: int, number: int) -> None:
    numbers, owners = np.array([number, number % ranks]), np.zeros(2, dtype=np.int64)
    first, second = page_holders(numbers, owners, layout, ranks)
    assert (first == second).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_cover_every_head_group(name: str) -> None:
    for ranks in range(1, 9):
        held = weight_holders(LAYOUTS[name], ranks)
        assert held.shape == (ranks, ranks) and held.any(axis=1).all()
        groups = State(LAYOUTS[name], ranks, np.zeros(0, int), np.zeros(0, int)).weight_holders[:, ranks - 1]
        assert groups.sum() == (1 if LAYOUTS[name].projections is Projections.SHARDED else ranks)


@given(layouts, layouts, loads())
def test_a_difference_is_exact_and_balanced(src: Layout, dst: Layout, load: tuple) -> None:
    ranks, numbers, (before, after), pages = load
    old, new = State(src, ranks, numbers, before, pages), State(dst, ranks, numbers, after, pages)
    moved = diff(old, new)
    check_exact(moved.pages, old.page_holders, new.page_holders)
    check_balance(moved.pages, old.page_holders)
    check_exact(moved.weights, old.weight_holders, new.weight_holders)
    check_balance(moved.weights, old.weight_holders)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_any_two_holder_matrices_differ_exactly_and_in_balance(ranks: int, num_blocks: int, seed: int) -> None:
    """More shapes of sharing than layouts can make: any block on any set of ranks."""
    random = np.random.default_rng(seed)
    held = random.random((num_blocks, ranks)) < random.random()
    held[np.arange(num_blocks), random.integers(0, ranks, num_blocks)] = True
    need = random.random((num_blocks, ranks)) < random.random()
    columns = random.integers(0, ranks, ranks)  # some ranks hold the same blocks
    held = held[:, columns] | (~held[:, columns].any(axis=1))[:, None]
    moved = diff_blocks(held, need)
    check_exact(moved, held, need)
    check_balance(moved, held)


def test_a_block_that_no_rank_holds_cannot_be_planned() -> None:
    with pytest.raises(AssertionError, match="held by no rank"):
        diff_blocks(np.zeros((1, 2), dtype=bool), np.ones((1, 2), dtype=bool))


def test_copies_share_the_sending() -> None:
    """Ten blocks that ranks 0 to 2 all hold go to rank 3, in turn rather than in runs."""
    held = np.array([[True, True, True, False]] * 10)
    moved = diff_blocks(held, np.ones_like(held))
    assert sorted(moved.sent.tolist()) == [0, 3, 3, 4]
    sources = moved.fetch_source[:9, 3].reshape(3, 3).tolist()
    assert all(sorted(turn) == [0, 1, 2] for turn in sources)


@given(layouts, layouts, loads())
def test_there_and_back_restores_every_holder(src: Layout, dst: Layout, load: tuple) -> None:
    ranks, numbers, (before, after), pages = load
    old, new = State(src, ranks, numbers, before, pages), State(dst, ranks, numbers, after, pages)
    there, back = diff(old, new), diff(new, old)
    resident = there.pages.keep | there.pages.fetch
    assert (resident == new.page_holders).all()
    assert ((resident & ~back.pages.drop) | back.pages.fetch == old.page_holders).all()
    assert (there.pages.fetch == back.pages.drop).all() and (there.pages.drop == back.pages.fetch).all()


@given(layouts, loads())
def test_the_same_state_differs_in_nothing(layout: Layout, load: tuple) -> None:
    ranks, numbers, (owners, _), pages = load
    state = State(layout, ranks, numbers, owners, pages)
    moved = diff(state, State(layout, ranks, numbers, owners, pages))
    assert moved.pages.primitive is moved.weights.primitive is Primitive.NONE


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_primitives_of_the_twelve_directions(ranks: int) -> None:
    states = {name: balanced(LAYOUTS[name], ranks) for name in PAPER}
    kv: dict[Primitive, set[str]] = defaultdict(set)
    weights: dict[Primitive, set[str]] = defaultdict(set)
    for src, dst in itertools.permutations(PAPER, 2):
        moved = diff(states[src], states[dst])
        kv[moved.pages.primitive].add(f"{src}->{dst}")
        weights[moved.weights.primitive].add(f"{src}->{dst}")
    assert kv == {
        Primitive.ALL_GATHER: {"dp->tp", "cp->tp", "dop->tp"},
        Primitive.ALL_TO_ALL: {"cp->dp", "dp->cp", "cp->dop", "dop->cp"},
        Primitive.DISCARD: {"tp->dp", "tp->cp", "tp->dop"},
        Primitive.NONE: {"dp->dop", "dop->dp"},
    }
    assert weights[Primitive.ALL_GATHER] == {"tp->dp", "tp->cp", "dop->dp", "dop->cp"}
    assert weights[Primitive.DISCARD] == {"dp->tp", "cp->tp", "dp->dop", "cp->dop"}


def test_primitives_of_all_twenty_directions() -> None:
    count = Counter()
    for src, dst in itertools.permutations(LAYOUTS.values(), 2):
        moved = diff(balanced(src, 8), balanced(dst, 8))
        count["kv", moved.pages.primitive.value] += 1
        count["weights", moved.weights.primitive.value] += 1
    assert count == {
        ("kv", "all_gather"): 4,
        ("kv", "all_to_all"): 8,
        ("kv", "discard"): 4,
        ("kv", "none"): 4,
        ("weights", "all_gather"): 6,
        ("weights", "discard"): 6,
        ("weights", "none"): 8,
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_has_nothing_to_switch(name: str) -> None:
    for other in LAYOUTS.values():
        moved = diff(balanced(LAYOUTS[name], 1, rounds=5), balanced(other, 1, rounds=5))
        assert moved.pages.primitive is moved.weights.primitive is Primitive.NONE


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_received_shares_at_balanced_load(ranks: int) -> None:
    """Into TP a rank receives (T-1)/T of all pages; an exchange moves (T-1)/T of each rank's T-th."""
    rounds = 3
    pages = rounds * ranks**2

    def received(src: str, dst: str) -> set[int]:
        return set(diff(balanced(LAYOUTS[src], ranks, rounds), balanced(LAYOUTS[dst], ranks, rounds)).pages.received)

    assert received("dp", "tp") == received("cp", "tp") == {pages * (ranks - 1) // ranks}
    assert received("dp", "cp") == received("cp", "dop") == {pages * (ranks - 1) // ranks**2}


def test_new_owners_in_one_layout_are_a_rebalance() -> None:
    numbers, owners = np.arange(6), np.array([0, 0, 0, 1, 1, 1])
    moved = diff(State(LAYOUTS["dp"], 2, numbers, owners), State(LAYOUTS["dp"], 2, numbers, owners * 0))
    assert moved.weights.primitive is Primitive.NONE
    assert moved.pages.received.tolist() == [3, 0] and moved.pages.sent.tolist() == [0, 3]
    position = diff(State(LAYOUTS["cp"], 2, numbers, owners), State(LAYOUTS["cp"], 2, numbers, owners * 0))
    assert position.pages.primitive is Primitive.NONE


@given(layouts, layouts, loads(), st.data())
def test_idle_pages_stay_where_they_already_suffice_and_never_move(
    src: Layout, dst: Layout, load: tuple, data: st.DataObject
) -> None:
    ranks, numbers, (before, after), pages = load
    old, new = State(src, ranks, numbers, before, pages), State(dst, ranks, numbers, after, pages)
    idle = np.array(data.draw(st.lists(st.booleans(), min_size=old.num_pages, max_size=old.num_pages)), dtype=bool)
    moved = diff(old, new, idle).pages
    suffices = ~(new.page_holders & ~old.page_holders).any(axis=1)
    need = new.page_holders & (~idle | suffices)[:, None]
    check_exact(moved, old.page_holders, need)
    assert not moved.fetch[idle].any()
    assert (moved.keep[idle & suffices] == new.page_holders[idle & suffices]).all()
    assert not moved.keep[idle & ~suffices].any()


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(LAYOUTS, 2)))
def test_planning_is_arrays_and_not_loops_over_pages(src: str, dst: str) -> None:
    """65,536 pages take exactly as many lines of Python as 512."""
    algebra = {inspect.getfile(module) for module in (sys.modules[diff.__module__], sys.modules[State.__module__])}

    def lines_run(num_pages: int) -> int:
        numbers, owners = np.arange(num_pages), np.arange(num_pages) // 64 % 8
        count = 0

        def tracer(frame: FrameType, *_: object) -> object:
            nonlocal count
            if frame.f_code.co_filename not in algebra:
                return None
            count += 1
            return tracer

        previous = sys.gettrace()
        sys.settrace(tracer)
        try:
            diff(State(LAYOUTS[src], 8, numbers, owners), State(LAYOUTS[dst], 8, numbers, owners))
        finally:
            sys.settrace(previous)
        return count

    assert lines_run(65536) == lines_run(512) > 0
