"""Leaders: pages that prompts begin with alike are computed by one request, and the others wait no longer than that."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import CP, DP, LAYOUTS, TP, Layout
from splash.core.request import SamplingParams
from splash.core.step import StepOutput, StepPlan
from splash.scheduler import service
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.page_keys import extend_keys
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler

SIZE = 4
SHARED = list(range(1, 18))  # four full pages and one token


def scheduler_of(layout: Layout = TP, ranks: int = 1, budget: int = 64, slots: int = 400) -> Scheduler:
    config = SchedulerConfig(64, budget, 400, frozenset(), SIZE, True)
    return Scheduler(config, PrefixCache(layout, [np.arange(slots)] * ranks))


def add(scheduler: Scheduler, id: int, prompt: list[int], priority: int = 0) -> None:
    scheduler.add(id, prompt, SamplingParams(max_tokens=3, ignore_eos=True), 0, priority)


def step(scheduler: Scheduler) -> StepPlan:
    """Plan a step and let it be over."""
    plan = scheduler.schedule()
    assert plan is not None
    ids = tuple(query.request for query in plan.queries if query.sample)
    scheduler.apply(StepOutput(plan.step, plan.epoch, ids, (7,) * len(ids), (None,) * len(ids)))
    return plan


def starts(plan: StepPlan) -> dict[int, int]:
    """The first position that each request computes."""
    return {query.request: query.start for query in plan.queries}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_one_computes_what_all_begin_with_and_others_pass(layout: Layout) -> None:
    scheduler = scheduler_of(layout, ranks=2)
    for id in range(3):
        add(scheduler, id, SHARED)
    add(scheduler, 3, [90, *SHARED])
    assert starts(step(scheduler)) == {0: 0, 3: 0}
    later = starts(step(scheduler))
    assert later[1] == later[2] == 16 and set(later) == {0, 1, 2, 3}


def test_they_wait_as_long_as_the_pages_that_they_share_take() -> None:
    scheduler = scheduler_of(budget=8)
    add(scheduler, 0, [*SHARED[:12], *range(100, 140)])
    add(scheduler, 1, [*SHARED[:12], *range(200, 204)])
    assert [starts(step(scheduler)) for _ in range(2)] == [{0: 0}, {0: 8}]
    assert starts(step(scheduler)) == {0: 16, 1: 12}, "the leader has gone on to pages that are its own"


def test_who_is_more_important_waits_for_nobody_less() -> None:
    scheduler = scheduler_of(budget=8)
    add(scheduler, 0, SHARED, priority=1)
    assert starts(step(scheduler)) == {0: 0}
    add(scheduler, 1, [*SHARED, 50], priority=0)
    add(scheduler, 2, [*SHARED, 60], priority=1)
    assert starts(step(scheduler)) == {1: 8}


def test_a_leader_that_is_dropped_is_waited_for_no_longer() -> None:
    scheduler = scheduler_of(budget=8)
    for id in (0, 1):
        add(scheduler, id, SHARED)
    assert starts(step(scheduler)) == {0: 0}
    scheduler.abort(0)
    assert starts(step(scheduler)) == {1: 8}, "what it had computed is there"


def test_a_leader_that_has_to_make_way_leads_nobody_and_is_not_overtaken() -> None:
    scheduler = scheduler_of(budget=8, slots=22)
    add(scheduler, 0, list(range(1, 82)), priority=1)
    for _ in range(2):
        step(scheduler)
    add(scheduler, 1, list(range(200, 205)), priority=0)
    scheduler.add(2, [300, 301, 302], SamplingParams(max_tokens=60, ignore_eos=True), 0, 1)
    assert set(starts(step(scheduler))) == {1}, "the first in the queue needs the room that is left"
    assert scheduler.num_preemptions == 1
    while scheduler.num_waiting > 1:
        step(scheduler)
    assert [request.id for request in scheduler.running if request.held] == [0]


def test_who_waits_for_too_many_to_pass_stops_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_HELD", 2)
    scheduler = scheduler_of()
    for id in range(4):
        add(scheduler, id, SHARED)
    add(scheduler, 4, [90, *SHARED])
    assert starts(step(scheduler)) == {0: 0}
    assert set(starts(step(scheduler))) == {0, 1, 2, 3, 4}


def test_nobody_waits_for_the_page_of_its_own_last_token() -> None:
    scheduler = scheduler_of(budget=14)
    for id in (0, 1):
        keys: list[bytes] = []
        extend_keys(keys, SHARED[:16] + [7] * 4, SIZE, 5)  # as far as a simulation knows them
        scheduler.add(id, SHARED[:16], SamplingParams(max_tokens=3, ignore_eos=True), 0, 0, keys)
    assert starts(step(scheduler)) == {0: 0}
    assert starts(step(scheduler)) == {0: 14, 1: 12}


def test_whose_prompt_is_scored_neither_waits_nor_finds() -> None:
    scheduler = scheduler_of()
    add(scheduler, 0, SHARED)
    scheduler.add(1, SHARED, SamplingParams(max_tokens=3, prompt_logprobs=1), 0)
    plan = scheduler.schedule()
    assert plan is not None and starts(plan) == {0: 0, 1: 0}


@given(
    # Not of full pages alone, of which the last one's last token is computed by everybody.
    prompts=st.lists(
        st.lists(st.integers(1, 2), min_size=1, max_size=40).filter(lambda prompt: len(prompt) % SIZE),
        min_size=2,
        max_size=12,
    ),
    arrivals=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    budget=st.integers(12, 80),
    layout=st.sampled_from([TP, CP]),
)
def test_no_page_of_a_prompt_is_computed_twice(
    prompts: list[list[int]], arrivals: list[int], budget: int, layout: Layout
) -> None:
    """Where there is room, and requests of all owners find the same pages."""
    scheduler = scheduler_of(layout, ranks=2, budget=budget)
    keys: list[list[bytes]] = []
    for prompt in prompts:
        keys.append([])
        extend_keys(keys[-1], prompt, SIZE, (len(prompt) - 1) // SIZE)
    waiting = sorted(range(len(prompts)), key=arrivals.__getitem__)
    computed: Counter[bytes] = Counter()
    now = 0
    while waiting or scheduler.has_work:
        while waiting and arrivals[waiting[0]] <= now:
            add(scheduler, waiting[0], prompts[waiting.pop(0)])
        now += 1
        if not scheduler.has_work:
            continue
        for query in step(scheduler).queries:
            end = query.start + len(query.tokens)
            computed.update(
                key for page, key in enumerate(keys[query.request]) if query.start <= page * SIZE + SIZE - 1 < end
            )
    assert set(computed.values()) <= {1} and set(computed) == {key for own in keys for key in own}


def test_samples_of_a_prompt_go_to_the_owner_that_has_it() -> None:
    scheduler = scheduler_of(DP, ranks=4, budget=256)
    for id in range(16):
        add(scheduler, id, [*range(1 + id // 4 * 100, 41 + id // 4 * 100)])
    first = step(scheduler)
    assert sorted(query.owner for query in first.queries) == [0, 1, 2, 3], "a prompt each"
    owners = {query.request: query.owner for query in (*first.queries, *step(scheduler).queries)}
    assert len(owners) == 16
    for id, owner in owners.items():
        assert owner == owners[id // 4 * 4]
