"""Page allocation: no slot twice, exact counts, all or nothing, long extents, and holders as ownership has them."""

from __future__ import annotations

import copy
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import DCP, DOP, DP, LAYOUTS, TP, Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.pages import HeldPages, PagePool, PageTable
from splash.core.slots import PageAllocator
from splash.core.spec import KVFormat, ModelSpec, RopeSpec
from splash.core.step import NO_SLOT


def runs(slots: list[int] | set[int]) -> list[int]:
    """Lengths of the maximal runs of consecutive slots."""
    ordered = np.sort(np.fromiter(slots, dtype=np.int64))
    return [len(run) for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)] if len(ordered) else []


slot_sets = st.sets(st.integers(0, 60), min_size=1, max_size=40)


@given(slots=slot_sets, data=st.data())
def test_allocator_against_a_set(slots: set[int], data: st.DataObject) -> None:
    used = data.draw(st.sets(st.sampled_from(sorted(slots))), label="used")
    allocator = PageAllocator(np.array(sorted(slots), dtype=np.int64), used)
    free = slots - used
    held: list[list[int]] = [sorted(used)]
    for _ in range(data.draw(st.integers(0, 25), label="calls")):
        assert (allocator.num_free, allocator.num_total) == (len(free), len(slots))
        if data.draw(st.booleans(), label="allocate"):
            count = data.draw(st.integers(0, len(free)), label="count")
            after = data.draw(st.none() | st.sampled_from(sorted(slots - free) or [None]), label="after")
            taken = allocator.allocate(count, after)
            assert len(taken) == count == len(set(taken))
            assert set(taken) <= free
            if after is not None and after + 1 in free and count:
                assert taken[0] == after + 1
            elif count <= max(runs(free), default=0):
                assert taken == list(range(taken[0], taken[0] + count)) if count else True
            assert len(runs(taken)) <= len(runs(free))
            free -= set(taken)
            held.append(taken)
        else:
            chosen = held.pop(data.draw(st.integers(0, len(held) - 1), label="freed")) if held else []
            allocator.free(data.draw(st.permutations(chosen), label="order"))
            free |= set(chosen)
    for chosen in held:
        allocator.free(chosen)
    # Neighbours have merged again: the longest runs come first, each whole.
    everything = allocator.allocate(len(slots))
    assert set(everything) == slots
    lengths = sorted(runs(slots), reverse=True)
    starts = np.cumsum([0, *lengths])[:-1]
    assert all(
        everything[a : a + n] == list(range(everything[a], everything[a] + n))
        for a, n in zip(starts, lengths, strict=True)
    )


def extents(free: set[int], border: int) -> list[tuple[int, int]]:
    """The maximal runs start .. end - 1 of some slots, which a border parts."""
    starts = sorted(slot for slot in free if slot - 1 not in free or slot == border)
    ends = sorted(slot + 1 for slot in free if slot + 1 not in free or slot + 1 == border)
    return list(zip(starts, ends, strict=True))


def place(slots: set[int], free: set[int], border: int, count: int, after: int | None) -> list[int]:
    """Where `count` pages go, one extent after the other, by the rule as it is written down."""
    if not count:
        return []
    start, end = min(extents(free, border), key=lambda run: (run[0] < border, run[0] - run[1], run[1]))
    if after is not None and after + 1 in free:
        start, end = next(run for run in extents(free, border) if run[0] == after + 1)
    num = min(count, end - start)
    if start - 1 in slots - free and start - 1 != after:
        start += (end - start - num) // 2
    taken = list(range(start, start + num))
    return taken + place(slots, free - set(taken), border, count - num, None)


@given(slots=slot_sets, border=st.integers(0, 61), data=st.data())
def test_pages_go_to_the_middle_of_the_largest_extent_or_behind_the_last(
    slots: set[int], border: int, data: st.DataObject
) -> None:
    allocator = PageAllocator(np.array(sorted(slots), dtype=np.int64), (), border)
    free = set(slots)
    for _ in range(data.draw(st.integers(0, 40), label="calls")):
        used = sorted(slots - free)
        match data.draw(st.sampled_from(["allocate", "each", "claim", "free"]), label="call"):
            case "allocate":
                count = data.draw(st.integers(0, min(7, len(free))), label="count")
                after = data.draw(st.none() | st.sampled_from(used or [None]), label="after")
                expected = place(slots, free, border, count, after)
                assert allocator.allocate(count, after) == expected
                free -= set(expected)
            case "each":
                last_slots = st.lists(st.none() | st.sampled_from(used or [None]), max_size=min(7, len(free)))
                last = data.draw(last_slots, label="last")
                expected = []
                for after in last:
                    expected += place(slots, free, border, 1, after)
                    free.discard(expected[-1])
                assert allocator.allocate_each(last) == expected
            case "claim" if free:
                chosen = data.draw(st.lists(st.sampled_from(sorted(free)), unique=True), label="claimed")
                assert allocator.are_free(chosen)
                allocator.claim(chosen)
                free -= set(chosen)
            case "free" if used:
                chosen = data.draw(st.lists(st.sampled_from(used), unique=True), label="freed")
                allocator.free(chosen)
                free |= set(chosen)
        assert np.flatnonzero(allocator.free_flags(61)).tolist() == sorted(free)
        assert allocator.num_free == len(free)


@pytest.mark.parametrize("freed", [[3, 3], [2, 9], [40], [-1], [0]])
def test_freeing_what_is_not_in_use_fails(freed: list[int]) -> None:
    allocator = PageAllocator(np.arange(1, 16), used=[2, 3])
    with pytest.raises(AssertionError, match="not all in use"):
        allocator.free(freed)


def test_allocating_more_than_is_free_fails() -> None:
    allocator = PageAllocator(np.arange(4), used=[1])
    with pytest.raises(AssertionError, match="3 free"):
        allocator.allocate(4)
    assert allocator.num_free == 3


@pytest.mark.parametrize("used", [[7], [2, 2]])
def test_a_page_cannot_lie_in_a_slot_that_is_absent_or_taken(used: list[int]) -> None:
    with pytest.raises(AssertionError, match="slot"):
        PageAllocator(np.arange(4), used)


def test_interleaved_growth_keeps_requests_in_one_extent() -> None:
    allocator = PageAllocator(np.arange(1024))
    requests: list[list[int]] = [allocator.allocate(4) for _ in range(8)]
    for _ in range(60):
        for slots in requests:
            slots += allocator.allocate(1, slots[-1])
    assert [len(runs(slots)) for slots in requests] == [1] * 8


def test_churn_leaves_no_trace() -> None:
    allocator = PageAllocator(np.arange(512))
    for round_ in range(2000):
        first, second = allocator.allocate(1 + round_ % 7), allocator.allocate(1 + round_ % 3)
        allocator.free(first)
        allocator.free(second)
    assert allocator.num_free == 512
    assert allocator.allocate(512) == list(range(512))
    assert len(allocator._heap) < 256


layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)


@given(layout=layouts, ranks=st.integers(1, 4), data=st.data())
def test_pool_grows_all_or_nothing_on_the_ranks_that_hold(layout: Layout, ranks: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks), label="slots a rank")
    pool = PagePool(layout, [np.arange(100 * rank, 100 * rank + size) for rank, size in enumerate(sizes)])
    live: list[HeldPages] = []
    for _ in range(data.draw(st.integers(0, 20), label="calls")):
        match data.draw(st.sampled_from(["new", "grow", "release"]), label="call"):
            case "new":
                live.append(HeldPages(data.draw(st.integers(0, ranks - 1), label="owner"), ranks))
            case "grow" if live:
                held = data.draw(st.sampled_from(live), label="request")
                count = data.draw(st.integers(0, 12), label="count")
                numbers = np.arange(len(held), len(held) + count)
                needs = page_holders(numbers, np.full(count, held.owner), layout, ranks).sum(axis=0)
                before, pages = pool.num_free, held.table.rows(0, len(held))
                lacking = [rank for rank in range(ranks) if needs[rank] > before[rank]]
                assert pool.lacking(held.owner, len(held), count) == lacking
                assert pool.grow(held, count) is not bool(lacking)
                if lacking:
                    assert (pool.num_free, held.table.rows(0, len(held))) == (before, pages)
                else:
                    assert pool.num_free == [b - n for b, n in zip(before, needs, strict=True)]
                    assert held.table.rows(0, len(pages)) == pages
                    assert len(held) == len(pages) + count
            case "release" if live:
                pool.release(live.pop(data.draw(st.integers(0, len(live) - 1), label="request")))
        for held in live:
            rule = page_holders(np.arange(len(held)), np.full(len(held), held.owner), layout, ranks)
            table = held.table.slots_cT
            assert ((table != NO_SLOT) == rule).all()
            assert pool.counts(held) == rule.sum(axis=0).tolist()
            assert [pool.lies_on(held, [rank]) for rank in range(ranks)] == rule.any(axis=0).tolist()
        for rank, size in enumerate(sizes):
            slots = [slot for held in live for slot in held.table.slots_on(rank).tolist()]
            assert len(slots) == len(set(slots)) == size - pool.num_free[rank]
            assert set(slots) <= set(range(100 * rank, 100 * rank + size))
    # A pool made from what is resident goes on where this one stands.
    twin = PagePool(layout, [np.arange(100 * rank, 100 * rank + size) for rank, size in enumerate(sizes)], live)
    assert twin.num_free == pool.num_free
    for held in live:
        twin.release(HeldPages(held.owner, ranks, held.table.slots_cT))
        pool.release(held)
        assert (len(held), held.ids, pool.counts(held)) == (0, [], [0] * ranks)
    assert twin.num_free == pool.num_free == pool.num_total == sizes


@given(layout=layouts, ranks=st.integers(1, 4), data=st.data())
def test_growing_many_at_once_is_growing_one_after_another(layout: Layout, ranks: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks), label="slots a rank")
    wanted = data.draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, 5))), label="owner, pages")
    pools = [PagePool(layout, [np.arange(size) for size in sizes]) for _ in range(2)]
    live = [[HeldPages(owner, ranks) for owner, _ in wanted] for _ in pools]
    for pool, requests in zip(pools, live, strict=True):
        for held, (_, count) in zip(requests, wanted, strict=True):
            pool.grow(held, count)
    for _ in range(data.draw(st.integers(1, 4), label="times")):
        before, pages = pools[0].num_free, [held.table.rows(0, len(held)) for held in live[0]]
        for held in live[0]:
            if data.draw(st.booleans(), label="as an array"):
                assert held.table.slots_cT.shape == (len(held), ranks)
        grown = pools[0].grow_each(live[0])
        one_by_one = [pools[1].grow(held, 1) for held in live[1]]
        assert grown == all(one_by_one)
        if not grown:
            assert (pools[0].num_free, [held.table.rows(0, len(held)) for held in live[0]]) == (before, pages)
            return
        assert pools[0].num_free == pools[1].num_free
        for mine, other in zip(*live, strict=True):
            assert mine.table.rows(0, len(mine)) == other.table.rows(0, len(other))
            assert (mine.table.slots_cT == other.table.slots_cT).all()
    ids = [id for held in live[0] for id in held.ids]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_the_last_pages_of_many_are_looked_up_once_and_not_by_rank(layout: Layout) -> None:
    pool = PagePool(layout, [np.arange(200)] * 4)
    live = [HeldPages(owner % 4, 4) for owner in range(8)]
    for held in live:
        assert pool.grow(held, 9)
        assert held.table.slots_cT.shape == (9, 4)
    with mock.patch.object(PageTable, "from_end", autospec=True, side_effect=PageTable.from_end) as from_end:
        assert pool.grow_each(live)
    assert from_end.call_count == len(live)


@given(layout=layouts, ranks=st.integers(1, 4), data=st.data())
def test_pages_go_where_the_allocator_continues_the_last_one_of_the_rank(
    layout: Layout, ranks: int, data: st.DataObject
) -> None:
    """On every rank, whether the table is kept as it came or as an array."""
    pool = PagePool(layout, [np.arange(40 + rank) for rank in range(ranks)])
    live = [HeldPages(owner % ranks, ranks) for owner in range(data.draw(st.integers(1, 4), label="requests"))]
    for _ in range(data.draw(st.integers(1, 12), label="calls")):
        held = live[data.draw(st.integers(0, len(live) - 1), label="request")]
        count = data.draw(st.integers(0, 7), label="pages")
        tables = copy.deepcopy(held.table)
        before = [tables.slots_on(rank).tolist() for rank in range(ranks)]
        allocators = copy.deepcopy(pool._allocators)
        if data.draw(st.booleans(), label="as an array"):
            assert held.table.slots_cT.shape == (len(held), ranks)
        if not pool.grow(held, count):
            break
        tables = copy.deepcopy(held.table)
        for rank, (allocator, slots) in enumerate(zip(allocators, before, strict=True)):
            after = tables.slots_on(rank).tolist()
            assert after == slots + allocator.allocate(len(after) - len(slots), slots[-1] if slots else None)


@given(layout=layouts, ranks=st.integers(1, 4), owner=st.integers(0, 3), count=st.integers(0, 40))
def test_fits_alone_is_what_an_empty_pool_can_grow(layout: Layout, ranks: int, owner: int, count: int) -> None:
    pool = PagePool(layout, [np.arange(5 + 3 * rank) for rank in range(ranks)])
    owner %= ranks
    assert pool.fits_alone(owner, count) == pool.grow(HeldPages(owner, ranks), count)


def test_pages_of_a_growing_request_are_consecutive_on_each_rank() -> None:
    pool = PagePool(DCP, [np.arange(256)] * 2)
    live = [HeldPages(0, 2) for _ in range(4)]
    for _ in range(30):
        for held in live:
            assert pool.grow(held, 1)
    assert {len(runs(held.table.slots_on(rank).tolist())) for held in live for rank in range(2)} == {1}
    assert all((np.diff(held.table.slots_on(rank)) == 1).all() for held in live for rank in range(2))


def test_resident_pages_must_lie_where_the_layout_wants_them() -> None:
    held = HeldPages(0, 2, [(3, NO_SLOT)])
    assert PagePool(DP, [np.arange(8)] * 2, [held]).num_free == [7, 8]
    with pytest.raises(AssertionError):
        PagePool(TP, [np.arange(8)] * 2, [held])


def test_pool_of_a_geometry_has_the_slots_that_the_layout_frees() -> None:
    spec = ModelSpec(
        architecture="test",
        num_layers=1,
        hidden_size=64,
        vocab_size=64,
        num_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=64,
        first_dense_layers=1,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope=RopeSpec(),
    )
    geometry = ArenaGeometry(spec, KVFormat(96), 4, 4, 2, num_slots=400)
    for layout in (DOP, DP):
        pool = PagePool.of_geometry(geometry, layout)
        assert pool.num_free == pool.num_total == [len(geometry.page_slots(layout, rank)) for rank in range(2)]
    assert sum(PagePool.of_geometry(geometry, DOP).num_free) > sum(PagePool.of_geometry(geometry, DP).num_free)
