"""The scheduler across switches, against a fake group: what a switch does to it, and how a failed one is undone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.errors import RequestError
from splash.core.layout import DOP, KV, LAYOUTS, TP, Layout
from splash.core.pages import HeldPages, PagePool
from splash.core.request import SamplingParams
from splash.core.step import NO_SLOT, StepPlan
from splash.scheduler.heritage import Heritage
from splash.scheduler.idle_pages import CachedPage
from splash.scheduler.owners import balance_owners
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Rebase
from splash.scheduler.scheduler import Scheduler
from tests.fake_group import VOCABULARY, FakeGroup, check_cache, drain, greedy, make


def target_state(
    scheduler: Scheduler, layout: Layout, slots: Sequence[int], rng: random.Random, withheld: int
) -> tuple[PrefixCache, dict[int, HeldPages], list[list[int]]] | None:
    """The pages of the running requests in another layout, of owners at random, and slots withheld until the commit.

    None where they do not fit.
    """
    cache = scheduler.pool
    pool = PrefixCache(layout, [np.arange(count) for count in slots])
    held = {}
    known: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, place) -> its slots there
    for request in scheduler.running:
        assert request.held is not None
        owner = rng.randrange(pool.ranks)
        place = owner if layout.kv is KV.REQUEST else 0
        rows = []
        for number, page in enumerate(request.held.ids):
            if (page, place) not in known:
                one = HeldPages(owner, pool.ranks)
                pool.share(
                    one, [CachedPage(b"", b"", at, -1, place, (NO_SLOT,) * pool.ranks, (), 1) for at in range(number)]
                )
                if not pool.grow(one, 1):
                    return None
                known[page, place] = one.table.rows(number, number + 1)[0]
            rows.append(known[page, place])
        held[request.id] = HeldPages(owner, pool.ranks, rows, request.held.ids)
    used = [{row[rank] for row in known.values()} for rank in range(pool.ranks)]
    usable = [np.array([slot not in used[rank] for slot in range(count)]) for rank, count in enumerate(slots)]
    heritage, moved = Heritage(cache, layout), []  # some of it ahead of the switch, and some of that given up again
    for request in scheduler.running:
        assert request.held is not None
        old, new = request.held, held[request.id]
        first = rng.randint(0, len(new))
        known = heritage.add(old.owner, new.owner, 0, new.ids[:first], new.table)
        if rng.random() < 0.3:
            heritage.remove(new.owner, known)
            first = 0
        moved.append((old, new, first))
    target = PrefixCache(layout, [np.arange(count) for count in slots], held.values())
    target.inherit(cache, moved, heritage)
    survivors = cache.survivors(target, usable, {})
    target.adopt(survivors)
    free = []
    for rank, count in enumerate(slots):
        kept = {page.slots[rank] for page in survivors}
        free.append([slot for slot in range(count) if slot not in used[rank] and slot not in kept][:withheld])
    PagePool.claim(target, free)
    return target, held, free


def tables_of(held: Mapping[int, HeldPages]) -> dict[int, np.ndarray]:
    """Page tables as they are now."""
    return {id: pages.table.slots_cT.copy() for id, pages in held.items()}


def copied(group: FakeGroup, before: Rebase, tables: Mapping[int, np.ndarray]) -> dict[tuple[int, int, int], tuple]:
    """What a switch writes: the pages that requests held, where they were to lie in the target."""
    writes = {}
    for request, old_held, computed in before.requests:
        assert old_held is not None
        for page, (old, new) in enumerate(
            zip(old_held.table.slots_cT.tolist(), tables[request.id].tolist(), strict=True)
        ):
            source = next((rank, slot) for rank, slot in enumerate(old) if slot != NO_SLOT)
            for offset in range(group.config.page_size):
                content = group.memory.get((*source, offset))
                if content is not None and page * group.config.page_size + offset < computed:
                    writes |= {(rank, slot, offset): content for rank, slot in enumerate(new) if slot != NO_SLOT}
    return writes


def spoil(group: FakeGroup, scheduler: Scheduler, before: Rebase) -> None:
    """What a failed switch, and the step that came with it, may have written over.

    That is all but what still runs, and what both pools know by the same key in the same slot.
    """
    running = {request.id for request in scheduler.running}
    held = [held for request, held, _ in before.requests if held is not None and request.id in running]
    alive = {at for pages in held for row in pages.table.slots_cT.tolist() for at in enumerate(row)}
    known = [
        {(page.key, *at) for page in pool._by_id.values() for at in enumerate(page.slots)}
        for pool in (before.pool, scheduler.pool)
    ]
    alive |= {(rank, slot) for _, rank, slot in known[0] & known[1]}
    for rank, slot, offset in list(group.memory):
        if (rank, slot) not in alive:
            group.memory[rank, slot, offset] = ()


def commit(
    scheduler: Scheduler, group: FakeGroup, layout: Layout, held: dict[int, HeldPages], released: Sequence[int]
) -> None:
    """Let the fake group hold what it would hold after a switch. Those to be released may be unknown to it by now."""
    size = scheduler.config.page_size
    group.layout = layout
    group.tables = {id: list(pages.table.rows(0, -(-group.computed.get(id, 0) // size))) for id, pages in held.items()}
    group.computed = {id: group.computed.get(id, 0) for id in held}
    group.owners = {id: pages.owner for id, pages in held.items()}
    for id in released:
        for kept, nothing in ((group.tables, []), (group.computed, 0), (group.owners, 0)):
            kept.setdefault(id, nothing)


@settings(max_examples=200)
@given(
    layouts=st.lists(st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__), min_size=2, max_size=4),
    slots=st.lists(st.integers(3, 12), min_size=1, max_size=4).map(tuple),
    page_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 6),
    max_batched_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 12),
    abort_rate=st.sampled_from([0.0, 0.1, 0.3]),
    prefix_cache=st.booleans(),
    num_priorities=st.integers(1, 3),
)
def test_switches_that_commit_or_fail_lose_nothing(
    layouts: list[Layout],
    slots: tuple[int, ...],
    page_size: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    seed: int,
    num_requests: int,
    abort_rate: float,
    prefix_cache: bool,
    num_priorities: int,
) -> None:
    scheduler, group = make(layouts[0], slots, max_num_seqs, max_batched_tokens, 24, page_size, seed, prefix_cache)
    rng = random.Random(seed + 1)
    beginning = [rng.randrange(1, VOCABULARY) for _ in range(12)]
    asked: dict[int, int] = {}
    outputs: dict[int, int] = {}
    live: set[int] = set()
    next_id = 0

    def arrive() -> None:
        nonlocal next_id
        prompt = beginning[: rng.randint(0, 11)] if rng.random() < 0.7 else []
        prompt += [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 12 - len(prompt)))]
        count = rng.randint(1, 10)
        try:
            params = SamplingParams(temperature=rng.choice([0.0, 0.0, 1.0]), max_tokens=count, ignore_eos=True)
            scheduler.add(next_id, prompt, params, 0, rng.randrange(num_priorities))
        except RequestError:
            pass
        else:
            asked[next_id], outputs[next_id] = count, 0
            live.add(next_id)
        next_id += 1

    def maybe_abort() -> None:
        if live and rng.random() < abort_rate:
            id = rng.choice(sorted(live))
            scheduler.abort(id)
            live.discard(id)

    def fits(layout: Layout) -> bool:
        pool = PrefixCache(layout, [np.arange(count) for count in slots])
        needs = [-(-request.max_positions // page_size) for request in scheduler.requests]
        return all(any(pool.fits_alone(rank, need) for rank in range(pool.ranks)) for need in needs)

    for _ in range(4000):
        if next_id < num_requests and rng.random() < 0.6:
            arrive()
        if next_id == num_requests and not scheduler.has_work:
            break
        maybe_abort()
        state, before = None, None
        layout = rng.choice(layouts)
        if rng.random() < 0.4 and fits(layout):
            state = target_state(scheduler, layout, slots, rng, rng.choice([0, 0, 2]))
        if state is not None:
            source = scheduler.pool, scheduler.epoch
            before = scheduler.rebase(*state[:2])
            writes = copied(group, before, tables_of(state[1]))
            assert scheduler.epoch == source[1] + 1
            plan = scheduler.schedule() or scheduler.schedule_empty()
        else:
            plan = scheduler.schedule()
            if plan is None:
                continue
        maybe_abort()
        if rng.random() < 0.3 and next_id < num_requests:
            arrive()
        if before is not None and (rng.random() < 0.6 or not plan.queries):
            spoil(group, scheduler, before)
            scheduler.retract(before)
            check_cache(scheduler)
            group.next_step += 1
            assert (scheduler.pool, scheduler.epoch) == source
            continue
        if state is not None:
            commit(scheduler, group, layout, state[1], plan.released)
            group.memory |= writes
            scheduler.pool.free(state[2])
        for progress in scheduler.apply(group.run(plan)):
            outputs[progress.id] += 1
            if progress.finish_reason is not None:
                live.discard(progress.id)
                assert outputs[progress.id] == asked[progress.id]
        check_cache(scheduler)
    else:
        raise AssertionError("livelock")
    assert not live
    assert scheduler.pool.num_free == list(slots)
    assert scheduler._tokens == [0] * len(slots)
    scheduler.add(num_requests, [1], greedy(max_tokens=1), 0)
    drain(scheduler, group)
    assert set(group.history) == set(group.tables) == {num_requests}, "the ranks were not told to forget the others"


@settings(max_examples=150)
@given(
    layouts=st.lists(st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__), min_size=2, max_size=3),
    slots=st.lists(st.integers(4, 12), min_size=1, max_size=3).map(tuple),
    page_size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 10),
    prefix_cache=st.booleans(),
)
def test_a_prepared_switch_begins_while_a_step_is_in_flight(
    layouts: list[Layout], slots: tuple[int, ...], page_size: int, seed: int, num_requests: int, prefix_cache: bool
) -> None:
    """The step ends in the state before; requests end and are dropped meanwhile; then all goes on there, or here."""
    scheduler, group = make(layouts[0], slots, 5, 10, 24, page_size, seed, prefix_cache)
    rng = random.Random(seed + 1)
    beginning = [rng.randrange(1, VOCABULARY) for _ in range(8)]
    live: dict[int, int] = {}

    def run(plan: StepPlan) -> None:
        for progress in scheduler.apply(group.run(plan)):
            live[progress.id] -= 1
            if progress.finish_reason is not None:
                assert not live.pop(progress.id)
        check_cache(scheduler)

    def fits(layout: Layout) -> bool:
        pool = PrefixCache(layout, [np.arange(count) for count in slots])
        needs = [-(-request.max_positions // page_size) for request in scheduler.requests]
        return all(any(pool.fits_alone(rank, need) for rank in range(pool.ranks)) for need in needs)

    next_id = 0
    for _ in range(3000):
        if next_id < num_requests and rng.random() < 0.6:
            count = rng.randint(1, 8)
            try:
                params = SamplingParams(temperature=rng.choice([0.0, 0.0, 1.0]), max_tokens=count, ignore_eos=True)
                scheduler.add(next_id, beginning[: rng.randint(1, 8)], params, 0)
                live[next_id] = count
            except RequestError:
                pass
            next_id += 1
        plan = scheduler.schedule()
        if plan is None:
            if next_id == num_requests and not scheduler.has_work:
                break
            continue
        layout, source = rng.choice(layouts), (scheduler.pool, scheduler.epoch)
        state = target_state(scheduler, layout, slots, rng, 0) if rng.random() < 0.5 and fits(layout) else None
        if state is None:
            run(plan)
            continue
        before, tables = scheduler.rebase(*state[:2]), tables_of(state[1])
        if live and rng.random() < 0.2:
            dropped = rng.choice(sorted(live))
            scheduler.abort(dropped)
            del live[dropped]
        if rng.random() < 0.5:
            scheduler.foresee()
        run(plan)
        if rng.random() < 0.3:
            scheduler.go_back(before)
            check_cache(scheduler)
            assert (scheduler.pool, scheduler.epoch) == source
            continue
        next_plan = scheduler.schedule()
        writes = copied(group, before, tables)
        commit(scheduler, group, layout, state[1], () if next_plan is None else next_plan.released)
        group.memory |= writes
        if next_plan is not None:
            run(next_plan)
    else:
        raise AssertionError("livelock")
    assert not live and scheduler.pool.num_free == list(slots)


def test_a_request_must_fit_before_and_after_while_a_switch_is_in_flight() -> None:
    """The step may be retracted: a request that came meanwhile would wait for ever where it never fits."""
    scheduler, group = make(DOP, (4, 4), page_size=4)
    scheduler.add(0, [1, 2], greedy(max_tokens=4), 0)
    scheduler.apply(group.run(scheduler.schedule()))
    state = target_state(scheduler, TP, (8, 8), random.Random(0), 0)
    assert state is not None
    before = scheduler.rebase(*state[:2])
    scheduler.schedule()
    with pytest.raises(RequestError, match="in layout dop"):
        scheduler.add(1, [1] * 20, greedy(max_tokens=4), 0)
    scheduler.retract(before)
    group.next_step += 1
    drain(scheduler, group)
    assert scheduler.pool.num_free == [4, 4]


def test_a_request_waits_for_pages_that_a_switch_withholds() -> None:
    """All that runs has ended when a switch withholds slots: the next request waits for them, and that is no error."""
    scheduler, group = make(DOP, (6,), page_size=4)
    scheduler.add(0, [1] * 20, greedy(max_tokens=4), 0)
    pool = PrefixCache(TP, [np.arange(6)], (), [[0, 1, 2]])
    scheduler.rebase(pool, {})
    assert scheduler.schedule() is None
    pool.free([[0, 1, 2]])
    group.layout = TP
    drain(scheduler, group)


def test_owners_chosen_before_stand_as_long_as_they_have_room() -> None:
    assert balance_owners([3, 2, 2, 1], [9, 9]) == [0, 1, 1, 0]
    assert balance_owners([3, 2, 2, 1], [9, 9], [1, None, 1, None]) == [1, 0, 1, 0]
    assert balance_owners([3, 2, 2, 1], [9, 4], [1, None, 1, None]) == [1, 0, 0, 1]
    assert balance_owners([3, 4], [9, 4], [1, 1]) == [1, 0]
