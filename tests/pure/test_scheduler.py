"""The scheduler against a fake group that checks every plan as ranks would, and answers with random tokens."""

from __future__ import annotations

import random
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.errors import RequestError
from splash.core.layout import DP, KV, LAYOUTS, TP, Layout
from splash.core.request import SamplingParams
from splash.core.step import StepOutput
from splash.scheduler.owners import owners_with_room
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import MANY_FILLED
from tests.fake_group import EOS, VOCABULARY, check_cache, check_counts, drain, greedy, make


@mock.patch("splash.scheduler.chunks.MAX_SCORED_ROWS", 3)
@settings(max_examples=150)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__),
    slots=st.lists(st.integers(2, 12), min_size=1, max_size=4).map(tuple),
    page_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 6),
    max_batched_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 14),
    abort_rate=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    prefix_cache=st.booleans(),
    num_priorities=st.integers(1, 3),
)
def test_every_request_gets_what_it_asked_for(
    layout: Layout,
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
    max_model_len = 24
    scheduler, group = make(
        layout, slots, max_num_seqs, max_batched_tokens, max_model_len, page_size, seed, prefix_cache
    )
    rng = random.Random(seed + 1)
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(16)] for _ in range(2)]
    asked: dict[int, tuple[int, SamplingParams]] = {}
    outputs: dict[int, list[Progress]] = {}
    aborted: set[int] = set()
    arrivals = list(range(num_requests))
    num_steps = 0

    def maybe_abort() -> None:
        if asked and rng.random() < abort_rate:
            id = rng.choice(sorted(asked))
            scheduler.abort(id)
            if not (outputs[id] and outputs[id][-1].finish_reason):
                aborted.add(id)

    while arrivals or scheduler.has_work:
        while arrivals and rng.random() < 0.6:
            id = arrivals.pop(0)
            prompt = rng.choice(beginnings)[: rng.randint(0, 16)] if rng.random() < 0.7 else []
            prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20 - len(prompt)))]
            max_tokens = rng.randint(1, 30)
            is_plain = rng.random() < 0.6
            params = SamplingParams(
                temperature=0.0 if is_plain else 1.0,
                max_tokens=max_tokens,
                min_tokens=0 if is_plain else rng.randint(0, max_tokens),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=tuple(rng.sample(range(1, VOCABULARY), rng.randint(0, 2))),
                prompt_logprobs=0 if not is_plain and rng.random() < 0.7 else None,
            )
            try:
                scheduler.add(id, prompt, params, id, rng.randrange(num_priorities))
            except RequestError as error:
                assert error.field in ("prompt", "max_tokens")
                continue
            asked[id] = (len(prompt), params)
            outputs[id] = []
        maybe_abort()
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            continue
        running = scheduler.running
        assert len(running) <= max_num_seqs
        assert running[0].id in {query.request for query in plan.queries}, "the first progresses"
        assert [request.order for request in running] == sorted(request.order for request in running)
        assert plan.greedy == all(asked[request.id][1].is_greedy for request in running)
        check_counts(scheduler)
        scored = [len(query.tokens) for query in plan.queries if query.score]
        assert not scored or sum(scored) < 3 + len(scored)
        maybe_abort()
        for progress in scheduler.apply(group.run(plan)):
            assert progress.id not in aborted
            outputs[progress.id].append(progress)
        if rng.random() < 0.5:  # it looks for every page, which until then may wait to be entered
            check_cache(scheduler)
        assert scheduler.num_running + scheduler.num_waiting == len(
            [id for id in asked if id not in aborted and not (outputs[id] and outputs[id][-1].finish_reason)]
        )
        num_steps += 1
        assert num_steps < 5000, "livelock"

    for id, (num_prompt, params) in asked.items():
        got = outputs[id]
        if id in aborted:
            assert all(progress.finish_reason is None for progress in got)
            continue
        *early, last = got
        wanted = range(1, num_prompt) if params.prompt_logprobs is not None else ()
        assert [entry.logprob for entry in got[0].prompt_logprobs] == [-position for position in wanted]
        assert not any(progress.prompt_logprobs for progress in got[1:])
        max_tokens = min(params.max_tokens, max_model_len - num_prompt)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        assert all(progress.finish_reason is None for progress in early)
        assert not any(progress.token in stops for progress in early[params.min_tokens :])
        if last.token in stops and len(got) > params.min_tokens:
            assert last.finish_reason == "stop"
            assert last.stop_reason == (last.token if last.token != EOS else None)
        else:
            assert (last.finish_reason, last.stop_reason, len(got)) == ("length", None, max_tokens)
    assert scheduler.pool.num_free == list(slots)
    assert scheduler._tokens == [0] * len(slots)
    # The next plan tells the ranks to forget whatever they still know.
    scheduler.add(num_requests, [1], greedy(max_tokens=1), 0)
    drain(scheduler, group)
    assert set(group.history) == set(group.tables) == {num_requests}


@pytest.mark.parametrize(
    ("num_lengths", "most_waiting"), [(1, 64), (2, 58), (32, 0)], ids=["together", "in two halves", "at odds"]
)
def test_full_pages_wait_to_be_entered_until_a_step_has_less_to_do(num_lengths: int, most_waiting: int) -> None:
    num, size = 64, 32
    usual = num // size + 1
    scheduler, group = make(TP, (1000,), num, 100 * num, 200, size, prefix_cache=True)
    for id in range(num):
        scheduler.add(id, [1 + id] * (40 + id % num_lengths), greedy(max_tokens=115), id)
    scheduler.apply(group.run(scheduler.schedule()))  # enters the pages of the prompts
    waiting, filled = [0], [0]
    while (plan := scheduler.schedule()) is not None:
        positions = [query.start for query in plan.queries]
        scheduler.apply(group.run(plan))
        if scheduler.num_running < num:  # the pages of those that end are entered at once
            break
        filled.append(sum(start % size == size - 1 for start in positions))
        waiting.append(sum(map(len, scheduler.pool._full.values())))
        to_enter = waiting[-2] + filled[-1]
        has_enough_to_do = max(filled[-2:]) >= MANY_FILLED * usual
        assert waiting[-1] == (to_enter if has_enough_to_do else max(0, to_enter - usual))
    assert sum(filled) > 2 * num and max(filled) == num // num_lengths
    assert max(waiting) == most_waiting, "no page waits for longer than until the next is full"
    assert waiting[-1] == 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_preemption_recomputes_and_loses_nothing(layout: Layout) -> None:
    ranks = 2
    need = 4 * ranks if layout.kv is KV.POSITION else 8
    scheduler, group = make(layout, (need + 2,) * ranks, page_size=2, max_model_len=20)
    for id in range(6):
        scheduler.add(id, [id + 1] * 4, greedy(max_tokens=12), id)
    count = Counter(progress.id for step in drain(scheduler, group) for progress in step)
    assert count == dict.fromkeys(range(6), 12)
    assert scheduler.num_preemptions > 0
    assert scheduler.pool.num_free == [need + 2] * ranks


def test_requests_finish_in_order_of_arrival_under_pressure() -> None:
    scheduler, group = make(slots=(6, 6), page_size=2, max_model_len=12)
    for id in range(5):
        scheduler.add(id, [1, 2, 3, 4], greedy(max_tokens=8), id)
    finished = [progress.id for step in drain(scheduler, group) for progress in step if progress.finish_reason]
    assert finished == sorted(finished)


def test_victim_is_the_youngest_on_the_rank_that_lacks_a_page() -> None:
    scheduler, group = make(DP, (3, 20), page_size=2, max_model_len=16)
    scheduler.add(0, [1], greedy(max_tokens=5), 0)  # rank 1, which has more free pages
    scheduler.add(1, [1, 1], greedy(max_tokens=5), 0)  # rank 0
    scheduler.add(2, [1] * 3, greedy(max_tokens=9), 0)
    scheduler.add(3, [1], greedy(max_tokens=5), 0)
    scheduler.add(4, [1] * 3, greedy(max_tokens=9), 0)  # rank 1: rank 0 has a page left, and two must be free
    owners: dict[int, int] = {}
    while scheduler.num_preemptions == 0:
        plan = scheduler.schedule()
        owners = owners or {query.request: query.owner for query in plan.queries}
        scheduler.apply(group.run(plan))
    assert owners == {0: 1, 1: 0, 2: 1, 3: 0, 4: 1}
    assert plan.released == (3,)


def test_prompts_are_prefilled_in_chunks_behind_decodes_in_order_of_arrival() -> None:
    scheduler, group = make(max_batched_tokens=8, page_size=4, max_model_len=40)
    plans = []
    scheduler.add(0, [1, 2], greedy(max_tokens=20), 0)
    for _ in range(4):
        plans.append(scheduler.schedule())
        scheduler.apply(group.run(plans[-1]))
        if len(plans) == 1:
            scheduler.add(1, list(range(1, 11)), greedy(max_tokens=20), 0)
            scheduler.add(2, list(range(1, 8)), greedy(max_tokens=20), 0)
    rows = [{query.request: (query.start, len(query.tokens), query.sample) for query in plan.queries} for plan in plans]
    assert rows == [
        {0: (0, 2, True)},
        {0: (2, 1, True), 1: (0, 7, False)},
        {0: (3, 1, True), 1: (7, 3, True), 2: (0, 4, False)},
        {0: (4, 1, True), 1: (10, 1, True), 2: (4, 3, True)},
    ]
    assert [len(query.new_pages) for query in plans[1].queries if query.request == 1] == [2]
    assert [[new.id for new in plan.new] for plan in plans] == [[0], [1], [2], []]


def test_admission_waits_for_a_page_beyond_the_prompt() -> None:
    scheduler, group = make(slots=(5,), page_size=4)
    scheduler.add(0, [1] * 8, greedy(max_tokens=5), 0)
    scheduler.add(1, [1] * 8, greedy(max_tokens=5), 0)
    plan = scheduler.schedule()
    assert [query.request for query in plan.queries] == [0, 1] and scheduler.pool.num_free == [1]
    scheduler, group = make(slots=(4,), page_size=4)
    scheduler.add(0, [1] * 8, greedy(max_tokens=5), 0)
    scheduler.add(1, [1] * 8, greedy(max_tokens=5), 0)
    plan = scheduler.schedule()
    assert [query.request for query in plan.queries] == [0] and scheduler.num_waiting == 1
    scheduler.apply(group.run(plan))
    assert len(drain(scheduler, group)) == 9


def test_request_that_fills_the_pool_to_the_last_page_runs() -> None:
    scheduler, group = make(slots=(4,), page_size=4, max_model_len=100)
    scheduler.add(0, [1] * 10, greedy(max_tokens=7), 0)
    assert len(drain(scheduler, group)) == 7
    with pytest.raises(RequestError, match="is 8, which with a prompt of 10 tokens") as error:
        scheduler.add(1, [1] * 10, greedy(max_tokens=8), 0)
    assert error.value.field == "max_tokens"
    with pytest.raises(RequestError, match="has 17 tokens") as error:
        scheduler.add(2, [1] * 17, greedy(max_tokens=1), 0)
    assert error.value.field == "prompt"
    assert not scheduler.has_work


@pytest.mark.parametrize("length", [0, 64, 100])
def test_prompts_that_cannot_be_served_are_refused(length: int) -> None:
    scheduler, _ = make()
    with pytest.raises(RequestError) as error:
        scheduler.add(0, [1] * length, greedy(), 0)
    assert error.value.field == "prompt"
    assert scheduler.schedule() is None


def test_output_is_clipped_to_the_length_of_the_model() -> None:
    scheduler, group = make()
    scheduler.add(0, [1] * 60, greedy(max_tokens=1000, min_tokens=1000), 0)
    progress = [progress for step in drain(scheduler, group) for progress in step]
    assert [p.finish_reason for p in progress] == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        (SamplingParams(max_tokens=9), [5, EOS], ("stop", None)),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(7,)), [EOS, 7], ("stop", 7)),
        (SamplingParams(max_tokens=9, stop_token_ids=(EOS,)), [EOS], ("stop", None)),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(EOS,)), [EOS], ("stop", EOS)),
        (SamplingParams(max_tokens=9, min_tokens=2), [EOS, EOS, EOS], ("stop", None)),
        (SamplingParams(max_tokens=2, min_tokens=2), [EOS, EOS], ("length", None)),
        (SamplingParams(max_tokens=2), [5, EOS], ("stop", None)),
        (SamplingParams(max_tokens=2), [5, 5], ("length", None)),
    ],
)
def test_finish_reasons(params: SamplingParams, tokens: list[int], reason: tuple[str, int | None]) -> None:
    scheduler, _ = make()
    scheduler.add(0, [1], params, 0)
    for position, token in enumerate(tokens):
        plan = scheduler.schedule()
        (progress,) = scheduler.apply(StepOutput(plan.step, plan.epoch, (0,), (token,), (None,)))
        last = position == len(tokens) - 1
        assert (progress.finish_reason, progress.stop_reason) == (reason if last else (None, None))
    assert scheduler.schedule() is None


def test_abort_in_flight_frees_pages_only_when_the_step_is_over() -> None:
    scheduler, group = make(slots=(8,), page_size=4)
    scheduler.add(0, [1] * 8, greedy(), 0)
    plan = scheduler.schedule()
    scheduler.abort(0)
    scheduler.abort(0)
    assert (scheduler.pool.num_free, scheduler.num_running, scheduler.has_work) == ([6], 0, False)
    assert scheduler.apply(group.run(plan)) == []
    assert (scheduler.pool.num_free, scheduler.num_running) == ([8], 0)
    assert scheduler.schedule() is None
    scheduler.add(1, [1], greedy(), 0)
    plan = scheduler.schedule()
    assert (plan.released, plan.finished) == ((0,), (0,))


def test_abort_of_what_the_ranks_never_heard_of_is_not_announced() -> None:
    scheduler, _ = make()
    scheduler.add(0, [1], greedy(), 0)
    scheduler.abort(0)
    scheduler.abort(99)
    scheduler.add(1, [1], greedy(), 0)
    plan = scheduler.schedule()
    assert (plan.released, plan.finished, [new.id for new in plan.new]) == ((), (), [1])


def test_one_step_in_flight() -> None:
    scheduler, group = make()
    scheduler.epoch = 3
    scheduler.add(0, [1], greedy(), 0)
    plan = scheduler.schedule()
    assert plan.epoch == 3
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.schedule()
    output = group.run(plan)
    with pytest.raises(AssertionError, match="not the step in flight"):
        scheduler.apply(StepOutput(output.step, 4, output.requests, output.tokens, output.logprobs))
    scheduler.apply(output)
    with pytest.raises(AssertionError, match="not the step in flight"):
        scheduler.apply(output)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_owners_are_balanced_in_every_layout(layout: Layout) -> None:
    scheduler, group = make(layout, (64,) * 4, max_num_seqs=32, max_batched_tokens=128)
    for id in range(16):
        scheduler.add(id, [1] * 6, greedy(max_tokens=4), 0)
    group.run(scheduler.schedule())
    assert Counter(group.owners.values()) == dict.fromkeys(range(4), 4)


def test_owner_is_the_least_loaded_rank_that_has_room() -> None:
    pool = PrefixCache(DP, [np.arange(4), np.arange(9), np.arange(9), np.arange(7)])
    assert next(owners_with_room(pool, [0, 5, 5, 9], 3, 4))[0] == 0
    assert next(owners_with_room(pool, [0, 5, 5, 9], 3, 5))[0] == 1
    assert next(owners_with_room(pool, [9, 9, 9, 9], 3, 4))[0] == 1
    assert next(owners_with_room(pool, [9, 9, 9, 9], 3, 10), None) is None
