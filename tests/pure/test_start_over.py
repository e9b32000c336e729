"""Ranks that die at any moment: others take their place, and requests get the tokens of a quiet run, each once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from splash.core.layout import LAYOUTS, Layout
from splash.core.request import SamplingParams
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler
from tests.fake_group import EOS, VOCABULARY, FakeGroup, check_cache

NUM_RANKS, SLOTS, PAGE_SIZE, MAX_MODEL_LEN = 2, 14, 2, 24


class Group(FakeGroup):
    """Its tokens depend on the request and what it has so far, as with one seed, and not on when they are asked for."""

    def token(self, id: int) -> int:
        return random.Random(f"{id} {self.history[id]}").randrange(VOCABULARY)


@dataclass
class Asked:
    """One request, and the step before which it arrives."""

    step: int
    prompt: list[int]
    params: SamplingParams
    priority: int


REQUESTS = st.lists(
    st.builds(
        Asked,
        step=st.integers(0, 12),
        prompt=st.lists(st.integers(1, 3), min_size=1, max_size=10),
        params=st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 10),
            ignore_eos=st.booleans(),
            prompt_logprobs=st.none() | st.just(0),
        ),
        priority=st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
)
# Step, and whether the ranks die with that step in flight or before it is planned.
DEATHS = st.sets(st.tuples(st.integers(0, 30), st.booleans()), max_size=6)
ABORTS = st.dictionaries(st.integers(0, 20), st.integers(0, 7), max_size=3)  # step -> request


@dataclass
class Run:
    """Serves requests to their end, through deaths and aborts."""

    layout: Layout
    prefix_cache: bool
    requests: list[Asked]
    outputs: dict[int, list[Progress]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.config = SchedulerConfig(4, 8, MAX_MODEL_LEN, frozenset({EOS}), PAGE_SIZE, self.prefix_cache)
        pool = PrefixCache(self.layout, [range(SLOTS)] * NUM_RANKS)
        self.scheduler = Scheduler(self.config, pool)
        self.replace_ranks(next_step=0)

    def replace_ranks(self, next_step: int) -> None:
        self.group = Group(self.config, self.layout, [SLOTS] * NUM_RANKS, random.Random(0), next_step=next_step)

    def die(self, next_step: int) -> None:
        self.scheduler.start_over()
        self.replace_ranks(next_step)
        assert self.scheduler.num_running == 0 and self.scheduler._tokens == [0] * NUM_RANKS
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_total == [SLOTS] * NUM_RANKS

    def abort(self, id: int) -> None:
        if id in self.outputs and not (self.outputs[id] and self.outputs[id][-1].finish_reason):
            self.scheduler.abort(id)
            self.aborted.add(id)

    def serve(self, deaths: set[tuple[int, bool]], aborts: dict[int, int]) -> None:
        scheduler, num_plans = self.scheduler, 0
        for step in range(1000):
            for id, asked in enumerate(self.requests):
                if asked.step == step:
                    scheduler.add(id, asked.prompt, asked.params, id, asked.priority)
                    self.outputs[id] = []
            if (step, False) in deaths:
                self.die(num_plans)
            plan = scheduler.schedule()
            num_plans += plan is not None
            if step in aborts:
                self.abort(aborts[step])
            if plan is not None and (step, True) in deaths:
                self.die(num_plans)
            elif plan is not None:
                for progress in scheduler.apply(self.group.run(plan)):
                    assert progress.id not in self.aborted
                    self.outputs[progress.id].append(progress)
                check_cache(scheduler)
            if step > 12 and not scheduler.has_work:
                return
        raise AssertionError("it does not end")


@settings(max_examples=150)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__),
    prefix_cache=st.booleans(),
    requests=REQUESTS,
    deaths=DEATHS,
    aborts=ABORTS,
)
@example(
    layout=LAYOUTS["dcp"],
    prefix_cache=True,
    requests=[Asked(0, [1] * 10, SamplingParams(max_tokens=10, ignore_eos=True, prompt_logprobs=0), 0)] * 6,
    deaths={(0, True), (3, False), (3, True), (9, True)},
    aborts={3: 1, 9: 2},
)
def test_nobody_sees_that_ranks_have_died(
    layout: Layout,
    prefix_cache: bool,
    requests: list[Asked],
    deaths: set[tuple[int, bool]],
    aborts: dict[int, int],
) -> None:
    quiet, run = Run(layout, prefix_cache, requests), Run(layout, prefix_cache, requests)
    quiet.serve(set(), {})
    run.serve(deaths, aborts)
    for id, expected in quiet.outputs.items():
        got = [(item.token, item.finish_reason, item.num_output, item.prompt_logprobs) for item in run.outputs[id]]
        whole = [(item.token, item.finish_reason, item.num_output, item.prompt_logprobs) for item in expected]
        assert got == (whole[: len(got)] if id in run.aborted else whole)
    assert run.scheduler.pool.num_free == [SLOTS] * NUM_RANKS
    # Ranks that took over know of nobody in the end, once the next plan has told them.
    last = len(requests)
    run.scheduler.add(last, [1], SamplingParams(max_tokens=1), 0)
    plan = run.scheduler.schedule()
    assert plan is not None and [new.id for new in plan.new] == [last]
    run.scheduler.apply(run.group.run(plan))
    assert set(run.group.history) == set(run.group.tables) == {last}
