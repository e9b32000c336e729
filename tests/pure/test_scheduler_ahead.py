"""The scheduler with two steps in flight: each is planned before it is known what the one before has sampled."""

from __future__ import annotations

import dataclasses
import random
from collections import deque

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.layout import LAYOUTS, TP, Layout
from splash.core.request import SamplingParams
from splash.core.step import PENDING_TOKEN, StepOutput, StepPlan
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler
from tests.fake_group import EOS, VOCABULARY, FakeGroup, check_cache, greedy

MAX_MODEL_LEN = 24


class InOrder(FakeGroup):
    """Carries plans out in order, when they are sent. A request's tokens depend on it and their place alone."""

    last: frozenset[int] = frozenset()  # sampled by the plan before

    def token(self, id: int) -> int:
        return random.Random(f"{id} {len(self.history[id])}").randrange(VOCABULARY)

    def run(self, plan: StepPlan) -> StepOutput:
        queries = []
        for query in plan.queries:
            assert PENDING_TOKEN not in query.tokens[:-1]
            if query.tokens[-1] == PENDING_TOKEN:
                assert query.request in self.last, "only the step before has tokens that are not known"
                tokens = (*query.tokens[:-1], self.history[query.request][-1])
                query = msgspec.structs.replace(query, tokens=tokens)
            queries.append(query)
        output = super().run(msgspec.structs.replace(plan, queries=tuple(queries)))
        self.last = frozenset(output.requests)
        return output


@dataclasses.dataclass
class Served:
    """A scheduler and its group, and what came of each request."""

    scheduler: Scheduler
    group: InOrder
    ahead: bool
    progress: dict[int, list[Progress]] = dataclasses.field(default_factory=dict)
    plans: list[StepPlan] = dataclasses.field(default_factory=list)
    in_flight: deque[StepOutput] = dataclasses.field(default_factory=deque)

    def add(self, id: int, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
        self.scheduler.add(id, prompt, params, id, priority)
        self.progress[id] = []

    def send(self) -> None:
        """Plan a step and send it, where that is possible."""
        if self.in_flight:
            self.scheduler.foresee()
        plan = self.scheduler.schedule()
        if plan is not None:
            assert plan.greedy == all(request.params.is_greedy for request in self.scheduler.running)
            self.plans.append(plan)
            self.in_flight.append(self.group.run(plan))
        check_cache(self.scheduler)

    def step(self) -> None:
        """What `Loop.step` does."""
        if self.in_flight and self.ahead:
            self.send()
        if self.in_flight:
            for item in self.scheduler.apply(self.in_flight.popleft()):
                self.progress[item.id].append(item)
        if not self.in_flight:
            self.send()

    def start_over(self) -> None:
        """All ranks die, whatever is in flight."""
        self.in_flight.clear()
        self.scheduler.start_over()
        group = self.group
        self.group = InOrder(group.config, group.layout, group.slots, group.rng, next_step=group.next_step)

    def drain(self) -> None:
        for _ in range(5000):
            if not (self.in_flight or self.scheduler.has_work):
                return
            self.step()
        raise AssertionError("livelock")

    def tokens(self) -> dict[int, list[tuple[int, str | None, int | str | None, int]]]:
        return {
            id: [(item.token, item.finish_reason, item.stop_reason, item.num_output) for item in items]
            for id, items in self.progress.items()
        }


def serving(
    ahead: bool,
    layout: Layout = TP,
    slots: tuple[int, ...] = (64, 64),
    max_num_seqs: int = 8,
    max_batched_tokens: int = 16,
    page_size: int = 4,
    prefix_cache: bool = True,
) -> Served:
    config = SchedulerConfig(max_num_seqs, max_batched_tokens, MAX_MODEL_LEN, frozenset({EOS}), page_size, prefix_cache)
    pool = PrefixCache(layout, [np.arange(count) for count in slots])
    return Served(Scheduler(config, pool), InOrder(config, layout, list(slots), random.Random(0)), ahead)


@settings(max_examples=90)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__),
    slots=st.lists(st.integers(2, 12), min_size=1, max_size=4).map(tuple),
    page_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 6),
    max_batched_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 14),
    abort_rate=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    death_rate=st.sampled_from([0.0, 0.0, 0.1]),
    prefix_cache=st.booleans(),
)
def test_no_token_is_lost_or_repeated_and_no_page_has_two_users(
    layout: Layout,
    slots: tuple[int, ...],
    page_size: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    seed: int,
    num_requests: int,
    abort_rate: float,
    death_rate: float,
    prefix_cache: bool,
) -> None:
    """Under page pressure, with stops, aborts and deaths, as a scheduler that always knows would have it."""
    limits = (layout, slots, max_num_seqs, max_batched_tokens, page_size, prefix_cache)
    ahead, plain = serving(True, *limits), serving(False, *limits)
    rng = random.Random(seed)
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(16)] for _ in range(2)]
    longest = max(
        count
        for count in range(MAX_MODEL_LEN)
        if not count or any(plain.scheduler.pool.fits_alone(o, -(-count // page_size)) for o in range(len(slots)))
    )
    aborted: set[int] = set()
    arrivals = list(range(num_requests))

    def maybe_abort() -> None:
        if ahead.progress and rng.random() < abort_rate:
            id = rng.choice(sorted(ahead.progress))
            ahead.scheduler.abort(id)
            aborted.add(id)

    while arrivals or ahead.scheduler.has_work or ahead.in_flight:
        while arrivals and rng.random() < 0.6:
            id = arrivals.pop(0)
            own = rng.randint(1, max(1, longest - 1))
            prompt = rng.choice(beginnings)[: rng.randint(0, own - 1)] if rng.random() < 0.7 else []
            prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(own - len(prompt))]
            max_tokens = rng.randint(1, max(1, longest - own + 1))
            is_plain = rng.random() < 0.6
            params = SamplingParams(
                temperature=0.0 if is_plain else 1.0,
                max_tokens=max_tokens,
                min_tokens=0 if is_plain else rng.randint(0, max_tokens),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=tuple(rng.sample(range(1, VOCABULARY), rng.randint(0, 9))),
            )
            if own + max_tokens - 1 <= longest:
                priority = rng.randrange(2)
                ahead.add(id, prompt, params, priority)
                plain.add(id, prompt, params, priority)
        maybe_abort()
        if not rng.random() < death_rate:
            ahead.step()
            continue
        if ahead.in_flight:  # dies before or after the next step has been sent
            if rng.random() < 0.5:
                ahead.send()
            maybe_abort()
        ahead.start_over()
    plain.drain()
    for id, got in ahead.tokens().items():
        want = plain.tokens()[id]
        if id in aborted:
            assert got == want[: len(got)]
        else:
            assert got == want
    assert ahead.scheduler.pool.num_free == list(slots)
    assert ahead.scheduler._tokens == [0] * len(slots)
    ahead.add(num_requests, [1], greedy(max_tokens=1))
    ahead.drain()
    assert set(ahead.group.history) == set(ahead.group.tables) == {num_requests}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_where_no_token_ends_a_request_the_plans_are_the_same(layout: Layout) -> None:
    """Preemptions, admissions and what the cache has included: only tokens are not known."""
    served = [serving(ahead, layout, (12, 13), max_num_seqs=5, page_size=2) for ahead in (True, False)]
    for one in served:
        for id in range(9):
            one.add(id, [7] * (id % 4) + [id + 1] * 5, greedy(max_tokens=4 + id), id % 2)
        one.drain()
    ahead, plain = served
    assert ahead.scheduler.num_preemptions == plain.scheduler.num_preemptions > 0
    num_pending = 0
    for got, want in zip(ahead.plans, plain.plans, strict=True):
        queries = []
        for query, known in zip(got.queries, want.queries, strict=True):
            num_pending += query.tokens[-1] == PENDING_TOKEN
            is_pending = query.tokens == (*known.tokens[:-1], PENDING_TOKEN)
            queries.append(known if is_pending else query)
        assert msgspec.structs.replace(got, queries=tuple(queries)) == want
    assert num_pending > 40


def test_a_request_that_ends_by_its_token_has_one_row_in_vain() -> None:
    served = serving(True)
    stop = InOrder(served.group.config, TP, [64, 64], random.Random(0), history={0: [1, 1]}).token(0)
    served.add(0, [1], greedy(max_tokens=9, stop_token_ids=(stop,)))
    served.drain()
    assert [[query.tokens for query in plan.queries] for plan in served.plans] == [
        [(1,)],
        [(PENDING_TOKEN,)],
        [(PENDING_TOKEN,)],
    ]
    assert [item.finish_reason for item in served.progress[0]] == [None, "stop"]


def test_nothing_is_planned_for_a_request_that_gets_its_last_token() -> None:
    served = serving(True, slots=(3,), page_size=4)
    served.add(0, [1] * 8, greedy(max_tokens=2))
    served.add(1, [2] * 8, greedy(max_tokens=2))
    served.drain()
    plans = [(plan.released, plan.finished, [query.request for query in plan.queries]) for plan in served.plans]
    assert plans == [((), (), [0]), ((), (), [0]), ((0,), (0,), [1]), ((), (), [1])]


def test_a_step_is_foreseen_once_and_before_the_next_is_planned() -> None:
    served = serving(True)
    served.add(0, [1], greedy(max_tokens=9))
    served.send()
    with pytest.raises(AssertionError, match="in flight"):
        served.scheduler.schedule()
    served.scheduler.foresee()
    with pytest.raises(AssertionError):
        served.scheduler.foresee()
    assert served.scheduler.schedule() is not None
    with pytest.raises(AssertionError, match="in flight"):
        served.scheduler.schedule()
