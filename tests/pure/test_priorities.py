"""Priorities: who is served first, who makes way for whom, and that everything ends all the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.errors import RequestError
from splash.core.layout import DP, KV, LAYOUTS, Layout
from splash.scheduler.request import Request
from splash.scheduler.scheduler import Scheduler
from tests.fake_group import VOCABULARY, FakeGroup, check_cache, drain, greedy, make


def step(scheduler: Scheduler, group: FakeGroup) -> set[int]:
    """Run a step. The requests in it."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(group.run(plan))
    return {query.request for query in plan.queries}


def test_the_queue_is_by_priority_and_then_by_arrival() -> None:
    scheduler, group = make(max_num_seqs=1)
    for id, priority in enumerate([3, 0, -1, 0, 3]):
        scheduler.add(id, [1], greedy(max_tokens=1), 0, priority)
    assert [progress.id for step in drain(scheduler, group) for progress in step] == [2, 1, 3, 0, 4]


def test_rows_go_to_the_important_first() -> None:
    scheduler, group = make(slots=(64,), max_batched_tokens=8)
    scheduler.add(0, [1] * 30, greedy(max_tokens=1), 0, 1)
    step(scheduler, group)
    scheduler.add(1, [1] * 30, greedy(max_tokens=1), 0, 0)
    finished = [progress.id for each in drain(scheduler, group) for progress in each]
    assert finished == [1, 0] and scheduler.num_preemptions == 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_more_important_request_takes_the_room_of_a_less_important_one(layout: Layout, prefix_cache: bool) -> None:
    need = 6 if layout.kv is KV.POSITION else 12
    scheduler, group = make(layout, (need,) * 2, page_size=2, prefix_cache=prefix_cache)
    for id in range(4 if layout.kv is KV.REQUEST else 2):
        scheduler.add(id, [id + 1] * 8, greedy(max_tokens=4), 0, 5)
    while scheduler.num_waiting:
        step(scheduler, group)
    running = [request.id for request in scheduler.running]
    scheduler.add(9, [9] * 8, greedy(max_tokens=4), 0, 4)
    assert 9 in step(scheduler, group)
    assert scheduler.num_preemptions == 1
    (victim,) = set(running) - {request.id for request in scheduler.running}
    owners = {request.id: request.held.owner for request in scheduler.running}
    peers = [id for id in running if layout.kv is not KV.REQUEST or owners.get(id, owners[9]) == owners[9]]
    assert victim == max(peers), "the youngest of those whose room it is"
    assert victim == running[-1]
    drain(scheduler, group)


def test_requests_as_important_make_no_way() -> None:
    scheduler, group = make(slots=(12,), page_size=2)
    for id in range(3):
        scheduler.add(id, [id + 1] * 8, greedy(max_tokens=4), 0, 5)
    finished = [progress.id for each in drain(scheduler, group) for progress in each if progress.finish_reason]
    assert finished == [0, 1, 2] and scheduler.num_preemptions == 0


def test_the_least_important_makes_way_and_then_the_youngest() -> None:
    scheduler, group = make(max_num_seqs=4)
    for id, priority in enumerate([3, 7, 7, 1]):
        scheduler.add(id, [1], greedy(max_tokens=9), 0, priority)
    step(scheduler, group)
    for id, priority in ((4, 2), (5, 2), (6, 2), (7, 2)):
        scheduler.add(id, [1], greedy(max_tokens=9), 0, priority)
    step(scheduler, group)
    assert [request.id for request in scheduler.running] == [3, 4, 5, 6]
    assert scheduler.num_preemptions == 3


def test_nobody_is_preempted_in_vain() -> None:
    """The room of all that is less important would not be enough, so they go on."""
    scheduler, group = make(slots=(12,), page_size=2)
    scheduler.add(0, [1] * 10, greedy(max_tokens=3), 0, 0)
    scheduler.add(1, [1] * 8, greedy(max_tokens=3), 0, 5)
    step(scheduler, group)
    scheduler.add(2, [1] * 16, greedy(max_tokens=3), 0, 1)
    assert step(scheduler, group) == {0, 1} and scheduler.num_preemptions == 0
    drain(scheduler, group)


def test_pages_that_an_important_request_shares_are_no_room() -> None:
    """The victim's pages stay, as another holds them: they count neither as free nor as taken twice."""
    scheduler, group = make(slots=(10,), page_size=2, prefix_cache=True)
    scheduler.add(0, [1] * 10, greedy(max_tokens=9), 0, 0)
    step(scheduler, group)
    scheduler.add(1, [1] * 12, greedy(max_tokens=2), 0, 5)
    step(scheduler, group)
    assert [len(request.held) for request in scheduler.running] == [6, 6] and scheduler.pool.num_free == [3]
    scheduler.add(2, [2] * 10, greedy(max_tokens=1), 0, 1)
    assert 2 not in step(scheduler, group) and scheduler.num_preemptions == 0
    drain(scheduler, group)


def test_requests_that_share_pages_make_way_together() -> None:
    scheduler, group = make(slots=(12,), page_size=2, max_num_seqs=8, prefix_cache=True)
    scheduler.add(0, [1] * 16, greedy(max_tokens=5), 0, 5)
    step(scheduler, group)
    scheduler.add(1, [1] * 16, greedy(max_tokens=5), 0, 5)
    step(scheduler, group)
    assert len(scheduler.running) == 2
    scheduler.add(2, [2] * 15, greedy(max_tokens=2), 0, 1)
    assert step(scheduler, group) == {2} and scheduler.num_preemptions == 2
    drain(scheduler, group)


def test_no_room_is_made_while_admission_is_held() -> None:
    scheduler, group = make(max_num_seqs=1)
    scheduler.add(0, [1], greedy(max_tokens=9), 0, 1)
    step(scheduler, group)
    scheduler.add(1, [1], greedy(max_tokens=9), 0, 0)
    scheduler.holds_admission = True
    assert step(scheduler, group) == {0}
    scheduler.holds_admission = False
    assert step(scheduler, group) == {1}


def test_the_owner_whose_requests_matter_least_makes_way() -> None:
    scheduler, group = make(DP, (6, 6), page_size=2)
    for id, priority in enumerate([5, 7]):
        scheduler.add(id, [id + 1] * 8, greedy(max_tokens=4), 0, priority)
    step(scheduler, group)
    scheduler.add(2, [3] * 8, greedy(max_tokens=4), 0, 1)
    assert step(scheduler, group) == {0, 2}


def test_who_takes_the_room_of_others_belongs_to_the_rank_with_the_least_to_do() -> None:
    scheduler, group = make(max_num_seqs=3, max_batched_tokens=64)
    for id, length in enumerate([12, 2, 3]):
        scheduler.add(id, [id + 1] * length, greedy(max_tokens=9), 0, 5)
    step(scheduler, group)
    assert [request.held.owner for request in scheduler.running] == [0, 1, 1]
    scheduler.add(3, [4] * 4, greedy(max_tokens=9), 0, 1)
    step(scheduler, group)
    assert {request.id: request.held.owner for request in scheduler.running} == {0: 0, 1: 1, 3: 1}


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 1.0, None])
def test_priorities_are_64_bit_integers(priority: object) -> None:
    scheduler, _ = make()
    with pytest.raises(RequestError, match="64-bit") as error:
        scheduler.add(0, [1], greedy(), 0, priority)
    assert error.value.field == "priority"
    scheduler.add(0, [1], greedy(), 0, -(2**63))


@settings(max_examples=100)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__),
    slots=st.lists(st.integers(2, 10), min_size=1, max_size=3).map(tuple),
    page_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 6),
    max_batched_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(2, 16),
    prefix_cache=st.booleans(),
)
def test_whoever_makes_way_does_it_for_one_before_and_the_first_progresses(
    layout: Layout,
    slots: tuple[int, ...],
    page_size: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    seed: int,
    num_requests: int,
    prefix_cache: bool,
) -> None:
    """The invariant that excludes live-lock, and that everything ends: requests come with priorities at random."""
    scheduler, group = make(layout, slots, max_num_seqs, max_batched_tokens, 24, page_size, seed, prefix_cache)
    rng = random.Random(seed + 1)
    preempted: list[Request] = []
    helpless: set[int] = set()  # those of them that could not get another page themselves
    lacked: dict[int, int] = {}  # request -> pages that it had then
    preempt = scheduler._preempt

    def recorded(index: int) -> None:
        victim = scheduler.running[index]
        num_pages = len(victim.held or ())
        if victim.num_computed == len(victim.tokens) - 1 == num_pages * page_size:
            assert lacked.get(victim.id, 0) < num_pages, "a page more each time"
            lacked[victim.id] = num_pages
            helpless.add(victim.id)
        preempted.append(victim)
        preempt(index)

    scheduler._preempt = recorded  # type: ignore[method-assign]
    arrivals = list(range(num_requests))
    outputs = dict.fromkeys(arrivals, 0)
    asked: dict[int, int] = {}
    steps = 0
    while arrivals or scheduler.has_work:
        while arrivals and rng.random() < 0.4:
            id = arrivals.pop(0)
            prompt = [rng.randrange(VOCABULARY) if rng.random() < 0.3 else 1 for _ in range(rng.randint(1, 16))]
            count = rng.randint(1, 8)
            try:
                scheduler.add(id, prompt, greedy(max_tokens=count), 0, rng.randrange(4))
                asked[id] = min(count, 24 - len(prompt))
            except RequestError:
                continue
        preempted.clear()
        helpless.clear()
        first = min(scheduler.requests, key=lambda request: request.order, default=None)
        was_running = {request.id: len(request.held or ()) for request in scheduler.running}
        waited = first is not None and first.id not in was_running
        plan = scheduler.schedule()
        if plan is None:
            continue
        in_step = {query.request for query in plan.queries}
        running = scheduler.running
        began = [request for request in running if request.id not in was_running or request in preempted]
        grew = [request for request in running if len(request.held or ()) > was_running.get(request.id, 0)]
        for victim in preempted:
            makes_way = any(request.order < victim.order for request in grew)
            assert makes_way or victim.id in helpless, "room is made for those before, or not found"
            assert victim is not first, "nobody takes the first one's room"
        assert all(request.id in in_step for request in began), "who is admitted runs at once"
        assert running[0].id in in_step, "the first that runs has rows"
        assert first is not None
        if waited and first.id not in in_step:
            assert not began, "nobody overtakes the first of all"
            assert all(request.priority <= first.priority for request in running), "or it would have made way"
        for progress in scheduler.apply(group.run(plan)):
            outputs[progress.id] += 1
        check_cache(scheduler)
        steps += 1
        assert steps < 3000, "livelock"
    assert {id: outputs[id] for id in asked} == asked
