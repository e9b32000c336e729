"""The prefix cache as a pool: what is found, what counts as free, and what is evicted first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.layout import CP, DP, LAYOUTS, TP, Layout
from splash.core.pages import HeldPages
from splash.core.request import SamplingParams
from splash.core.step import StepOutput
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.heritage import as_they_arrive
from splash.scheduler.idle_pages import CachedPage
from splash.scheduler.owners import COMPUTE_WEIGHT, owners_with_room
from splash.scheduler.page_keys import extend_keys
from splash.scheduler.prefix_cache import Found, PrefixCache
from splash.scheduler.scheduler import Scheduler

SIZE = 4


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, SIZE, len(tokens) // SIZE)
    return keys


def pool_of(layout: Layout, slots: int = 8, ranks: int = 2) -> PrefixCache:
    return PrefixCache(layout, [np.arange(slots)] * ranks)


def write(pool: PrefixCache, owner: int, tokens: list[int]) -> HeldPages:
    """A request of `owner` that has computed `tokens`, which are full pages."""
    held, keys = HeldPages(owner, pool.ranks), keys_of(tokens)
    assert pool.grow(held, len(keys))
    pool.enter(held, 0, len(keys), keys)
    return held


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40), cut=st.integers(0, 40), other=st.integers(0, 40))
def test_keys_are_those_of_all_tokens_so_far(tokens: list[int], cut: int, other: int) -> None:
    keys = keys_of(tokens)
    assert len(set(keys)) == len(keys) == len(tokens) // SIZE
    grown = keys_of(tokens[:cut])
    extend_keys(grown, tokens, SIZE, len(tokens) // SIZE)
    assert grown == keys
    if other < len(tokens):
        changed = keys_of([*tokens[:other], tokens[other] ^ 1, *tokens[other + 1 :]])
        same = [a == b for a, b in zip(keys, changed, strict=True)]
        assert same == [number < other // SIZE for number in range(len(keys))]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_what_a_request_leaves_is_found_again_and_counts_as_free(layout: Layout) -> None:
    pool, tokens = pool_of(layout), list(range(12))
    held = write(pool, 1, tokens)
    rows = held.table.rows(0, 3)
    pool.release(held)
    assert pool.num_free == pool.num_total
    found = pool.match(keys_of([*tokens[:8], 99, 99, 99, 99]))
    assert [page.slots for page in found.pages(1)] == list(rows[:2])
    assert (found.counts[1], len(found.pages(1))) == (2, 2)
    assert found.counts[0] == len(found.pages(0)) == (0 if layout is DP or layout.name == "dop" else 2)
    again = HeldPages(1, 2)
    pool.share(again, found.pages(1))
    assert again.table.rows(0, 2) == rows[:2]
    assert pool.num_free != pool.num_total
    pool.release(again)
    assert pool.num_free == pool.num_total


def test_the_same_computed_twice_stays_private_the_second_time() -> None:
    pool, tokens = pool_of(TP), list(range(8))
    first, second = write(pool, 0, tokens), write(pool, 1, tokens)
    assert pool.num_free == [4, 4]
    assert [page.slots for page in pool.match(keys_of(tokens)).pages(0)] == list(first.table.rows(0, 2))
    pool.release(second)
    assert (pool.num_free, [len(own) for own in pool.idle_slots()]) == ([6, 6], [0, 0])
    pool.release(first)
    assert [len(own) for own in pool.idle_slots()] == [2, 2]


def test_copies_on_two_ranks_are_two_pages_of_one_number() -> None:
    pool, tokens = pool_of(DP), list(range(8))
    first, second = write(pool, 0, tokens), write(pool, 1, tokens)
    assert first.ids == second.ids
    assert pool.match(keys_of(tokens)).counts == [2, 2]


@dataclass
class Twins:
    """A request in each of two pools: its tokens, its pages, how many are written, and its keys in the second pool."""

    tokens: list[int]
    held: list[HeldPages]
    written: int
    keys: list[bytes] = field(default_factory=list)


@settings(max_examples=200)
@given(layout=st.sampled_from([TP, DP]), slots=st.integers(3, 10), data=st.data())
def test_pages_that_are_entered_later_are_as_if_they_had_been_at_once(
    layout: Layout, slots: int, data: st.DataObject
) -> None:
    pools = [pool_of(layout, slots), pool_of(layout, slots)]
    requests: list[Twins] = []
    prompts = st.sampled_from([[7, 7, 7], [7, 7, 8], [7, 8]])
    for _ in range(data.draw(st.integers(10, 40), label="calls")):
        match data.draw(st.sampled_from(["new", "new", "write", "write", "write", "later", "end"]), label="call"):
            case "new":
                tokens = [token for token in data.draw(prompts, label="prompt") for _ in range(SIZE)]
                owner = data.draw(st.sampled_from([0, 0, 1]), label="owner")
                keys = keys_of(tokens)
                held = [HeldPages(owner, 2), HeldPages(owner, 2)]
                found = [pool.match(keys).pages(owner) for pool in pools]
                assert [page.slots for page in found[0]] == [page.slots for page in found[1]]
                if any(pools[0].takes(owner, found[0], len(keys))[rank] > pools[0].num_free[rank] for rank in (0, 1)):
                    continue
                for pool, own, shared in zip(pools, held, found, strict=True):
                    pool.share(own, shared)
                    assert pool.grow(own, len(keys) - len(shared))
                requests.append(Twins(tokens, held, len(found[0])))
            case "write" if requests:
                twins = data.draw(st.sampled_from(requests), label="request")
                number = twins.written
                if number < len(twins.held[0]):
                    pools[0].enter(twins.held[0], number, number + 1, keys_of(twins.tokens))
                    if data.draw(st.booleans(), label="at once"):
                        pools[1].enter(twins.held[1], number, number + 1, keys_of(twins.tokens))
                    else:
                        pools[1].fill(twins.held[1], number, twins.tokens, SIZE, twins.keys)
                    twins.written += 1
            case "later":
                pools[1].enter_full(data.draw(st.integers(0, 3), label="at most"))
            case "end" if requests:
                twins = requests.pop(data.draw(st.integers(0, len(requests) - 1), label="request"))
                if data.draw(st.booleans(), label="ask before"):
                    freed = [pool.freed(own, Counter()) for pool, own in zip(pools, twins.held, strict=True)]
                    assert freed[0] == freed[1]
                for pool, own in zip(pools, twins.held, strict=True):
                    pool.release(own)
        assert pools[0].num_free == pools[1].num_free and pools[0].num_idle == pools[1].num_idle
        assert [own.tolist() for own in pools[0].idle_slots()] == [own.tolist() for own in pools[1].idle_slots()]
    pools[1].enter_full()
    for first, second in [twins.held for twins in requests]:
        assert first.ids == second.ids and first.table.rows(0, 3) == second.table.rows(0, 3)
    assert pools[0]._by_id.keys() == pools[1]._by_id.keys()


def test_a_page_that_waits_to_be_entered_does_not_take_the_place_of_one_that_is_evicted() -> None:
    pool, tokens = pool_of(TP, slots=3, ranks=1), list(range(SIZE))
    first, second, third = (HeldPages(0, 1) for _ in range(3))
    assert pool.grow(first, 1) and pool.grow(second, 1)
    pool.enter(first, 0, 1, keys_of(tokens))
    pool.fill(second, 0, tokens, SIZE, [])
    pool.release(first)
    assert pool.grow(third, 2)
    assert pool.match(keys_of(tokens)).counts == [0]


def test_the_longest_unused_goes_first_and_the_end_before_the_beginning() -> None:
    pool = pool_of(TP, slots=6, ranks=1)
    old, new = list(range(12)), list(range(50, 62))
    for tokens in (old, new):
        pool.release(write(pool, 0, tokens))
    one = HeldPages(0, 1)
    for left in ((2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)):
        assert pool.grow(one, 1)
        assert tuple(pool.match(keys_of(tokens)).counts[0] for tokens in (old, new)) == left
    assert not pool.grow(one, 1)


def test_only_ranks_that_lack_room_evict() -> None:
    pool = pool_of(CP, slots=4)
    pool.release(write(pool, 0, list(range(16))))  # two pages a rank
    held = HeldPages(0, 2)
    assert pool.grow(held, 5)  # three on rank 0, two on rank 1
    assert [len(own) for own in pool.idle_slots()] == [1, 2]
    pool.release(held)
    assert pool.num_free == [4, 4]


def test_growing_many_evicts_as_much_as_they_need() -> None:
    pool = pool_of(CP, slots=4)
    pool.release(write(pool, 0, list(range(24))))  # three pages a rank
    requests = [HeldPages(0, 2) for _ in range(3)]
    assert pool.grow_each(requests)  # their first pages are all on rank 0
    assert pool.num_free == [1, 4] and [len(own) for own in pool.idle_slots()] == [1, 3]
    assert pool.grow_each(requests)
    assert pool.num_free == [1, 1] and [len(own) for own in pool.idle_slots()] == [1, 1]
    assert not pool.grow_each(requests)
    assert [len(held) for held in requests] == [2, 2, 2]


def test_what_is_shared_is_no_room_for_the_rest() -> None:
    pool = pool_of(TP, slots=4, ranks=1)
    pool.release(write(pool, 0, list(range(12))))
    found = pool.match(keys_of(list(range(12)))).pages(0)
    assert pool.num_free == [4]
    assert pool.takes(0, found, 4) == [4] and pool.takes(0, found, 5) == [5]
    assert pool.takes(0, (), 4) == [4]


def test_an_owner_is_chosen_by_load_less_what_it_has_cached() -> None:
    pool = pool_of(DP, slots=16)
    page = CachedPage(b"", b"", 0, 0, 1, (-1, 0), (1,), refs=1)
    saved = 4 * COMPUTE_WEIGHT
    loads = [10, 11 + saved]
    assert next(owners_with_room(pool, loads, 3, 3, Found([0, 1], [{1: page}], True), page_size=4))[0] == 0
    assert next(owners_with_room(pool, loads, 4, 4, Found([0, 3], [{1: page}] * 3, True), page_size=4))[0] == 1


def test_a_page_is_found_once_its_step_is_over_and_the_last_token_is_computed_again() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 64, 64, frozenset(), SIZE, True), pool_of(TP, ranks=1))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    scheduler.add(0, list(range(1, 9)), params, 0)
    scheduler.add(1, list(range(2, 10)), params, 0)
    plan = scheduler.schedule()
    assert plan is not None and [query.start for query in plan.queries] == [0, 0]
    scheduler.apply(StepOutput(plan.step, plan.epoch, (0, 1), (5, 6), (None, None)))
    scheduler.add(2, list(range(1, 9)), params, 0)
    plan = scheduler.schedule()
    assert plan is not None
    (query,) = (query for query in plan.queries if query.request == 2)
    assert (query.start, query.tokens) == (4, (5, 6, 7, 8))
    assert len(query.new_pages) == 2, "ranks hear of the page that was found as well"
    assert (scheduler.num_queried, scheduler.num_hit) == (24, 4)
    assert (scheduler.num_begun, list(scheduler.rows_begun)) == (3, [8, 8, 4])


@pytest.mark.parametrize("target", LAYOUTS.values(), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_a_switch_takes_whole_prompts_along_the_last_released_first_as_far_as_there_is_room(
    layout: Layout, target: Layout
) -> None:
    pool = pool_of(layout, slots=16)
    prompts = [[turn, *range(1, 12)] for turn in range(3)]
    for tokens in prompts:
        pool.release(write(pool, 1, tokens))
    everything = pool.chains(target, [100, 100], 100)
    assert [[page.key for page in chain.pages] for chain in everything] == [keys_of(one) for one in prompts[::-1]]
    assert len(pool.chains(target, [100, 100], 6)) == 2 and not pool.chains(target, [0, 0], 100)
    slots = [(chain, np.full((len(chain.pages), 2), number)) for number, chain in enumerate(everything)]
    arrived = as_they_arrive(target, slots)
    assert {key for key, _ in arrived} == {key for one in prompts for key in keys_of(one)}
    assert all(page.refs == 0 and page.place == place for (_, place), page in arrived.items())
