"""How prompts share the rows of a step: the rule by itself, what it predicts, what it does to short and long ones."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import CP, DCP, DOP, DP, KV, LAYOUTS, TP, Layout
from splash.core.pages import HeldPages
from splash.scheduler.chunks import MAX_UNFINISHED, share_rows
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from splash.scheduler.service import LOOK_AHEAD
from tests.fake_group import VOCABULARY, FakeGroup, drain, greedy, make

PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200) | st.integers(1, 8)), max_size=12)


def run(scheduler: Scheduler, group: FakeGroup) -> dict[int, int]:
    """Run a step. Rows by request."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(group.run(plan))
    return {query.request: len(query.tokens) for query in plan.queries}


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


# --- the rule ---


@given(prompts=PROMPTS, budget=st.integers(0, 300))
def test_rows_are_used_up_by_importance_and_the_oldest_has_half(prompts: list[tuple[int, int]], budget: int) -> None:
    prompts = sorted(prompts, key=lambda prompt: prompt[0])
    priorities, left = [each[0] for each in prompts], [each[1] for each in prompts]
    rows = share_rows(left, priorities, budget)
    assert all(0 <= count <= most for count, most in zip(rows, left, strict=True))
    assert sum(rows) == min(budget, sum(left)), "no row is wasted, and none is made up"
    for priority in set(priorities):
        peers = [at for at, each in enumerate(priorities) if each == priority]
        offered = budget - sum(rows[at] for at, each in enumerate(priorities) if each < priority)
        assert sum(rows[at] for at in peers) == min(offered, sum(left[at] for at in peers)), "importance is strict"
        assert rows[peers[0]] >= min(left[peers[0]], (offered + 1) // 2)
        assert sum(0 < rows[at] < left[at] for at in peers) <= 2, "few prompts are cut"
        for earlier in peers:
            passed_by = [at for at in peers if at > earlier and rows[at]]
            if rows[earlier] < left[earlier]:
                longest = {at: max(left[older] for older in peers if older < at) for at in passed_by}
                assert all(2 * left[at] < longest[at] for at in passed_by), "they are short for an older one"


@given(left=st.lists(st.integers(1, 300), min_size=1, max_size=8), budget=st.integers(1, 64))
def test_every_prompt_is_computed_and_the_oldest_in_twice_the_steps_it_would_take_alone(
    left: list[int], budget: int
) -> None:
    alone, steps = -(-left[0] // budget), 0
    while left:
        rows = share_rows(left, [0] * len(left), budget)
        steps += 1
        if rows[0] == left[0] and alone:
            assert steps <= 2 * alone
            alone = 0
        left = [most - count for most, count in zip(left, rows, strict=True) if most > count]
        assert sum(rows) >= min(budget, 1)


@pytest.mark.parametrize(
    ("left", "budget", "rows"),
    [
        ([1000, 1000], 100, [100, 0]),  # nobody gains from sharing
        ([1000, 499], 100, [50, 50]),
        ([1000, 500], 100, [100, 0]),  # the oldest would lose as much
        ([1000, 10], 100, [90, 10]),
        ([1000, 400, 10, 30], 100, [50, 10, 10, 30]),
        ([60, 25, 900, 20], 100, [55, 25, 0, 20]),
        ([30, 900, 20, 100], 100, [30, 35, 20, 15]),
        ([1000, 1], 1, [1, 0]),
        ([5, 4], 20, [5, 4]),
        ([], 5, []),
    ],
)
def test_examples(left: list[int], budget: int, rows: list[int]) -> None:
    assert share_rows(left, [0] * len(left), budget) == rows


def test_a_less_important_prompt_has_what_is_left() -> None:
    assert share_rows([30, 500, 10], [0, 1, 1], 100) == [30, 60, 10]
    assert share_rows([300, 1], [0, 1], 100) == [100, 0]


# --- by owner ---


@st.composite
def owned_prompts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], int]:
    """(tokens left, priorities, owners, rows that each rank has beside them, budget)"""
    ranks = draw(st.integers(1, 4))
    prompts = sorted(draw(PROMPTS), key=lambda prompt: prompt[0])
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(prompts), max_size=len(prompts)))
    busy = draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks))
    return [each[1] for each in prompts], [each[0] for each in prompts], owners, busy, draw(st.integers(0, 300))


@given(case=owned_prompts())
def test_by_owner_rows_are_used_up_by_importance_and_no_rank_waits_long_for_another(
    case: tuple[list[int], list[int], list[int], list[int], int],
) -> None:
    left, priorities, owners, busy, budget = case
    rows = share_rows(left, priorities, budget, owners, busy)
    assert all(0 <= count <= most for count, most in zip(rows, left, strict=True))
    assert sum(rows) == min(budget, sum(left)), "no row is wasted, and none is made up"
    work = list(busy)
    for priority in sorted(set(priorities)):
        peers = [at for at, each in enumerate(priorities) if each == priority]
        ranks = sorted({owners[at] for at in peers})
        offered = budget - sum(rows[at] for at, each in enumerate(priorities) if each < priority)
        assert sum(rows[at] for at in peers) == min(offered, sum(left[at] for at in peers)), "importance is strict"
        half_a_share = -(-offered // (2 * len(ranks)))
        first = owners[peers[0]]
        assert rows[peers[0]] >= min(left[peers[0]], (half_a_share + 1) // 2), "the oldest progresses"
        shares = {rank: sum(rows[at] for at in peers if owners[at] == rank) for rank in ranks}
        wanted = {rank: sum(left[at] for at in peers if owners[at] == rank) for rank in ranks}
        for rank in ranks:
            mine = [at for at in peers if owners[at] == rank]
            assert [rows[at] for at in mine] == share_rows([left[at] for at in mine], [0] * len(mine), shares[rank])
        for rank in ranks:  # who had rows could not have given them to a rank that has less to do
            for other in ranks:
                if shares[rank] and shares[other] < wanted[other] and (rank != first or shares[rank] > half_a_share):
                    assert work[rank] + shares[rank] <= work[other] + shares[other] + 1
        for rank in ranks:
            work[rank] += shares[rank]


@pytest.mark.parametrize(
    ("left", "owners", "busy", "budget", "rows"),
    [
        ([1000, 1000], [0, 1], [0, 0], 100, [50, 50]),
        ([1000, 1000], [0, 0], [0, 0], 100, [100, 0]),  # one owner computes one after the other
        ([1000, 20, 1000], [0, 1, 2], [0, 0, 0], 100, [40, 20, 40]),
        ([1000, 1000], [0, 1], [20, 0], 100, [40, 60]),  # decodes are work as well
        ([1000, 1000], [0, 1], [200, 0], 100, [25, 75]),  # the oldest has half of its share at least
        ([1000, 1000], [0, 1], [0, 200], 100, [100, 0]),
        ([1000, 1000, 10], [0, 1, 0], [0, 0], 100, [40, 50, 10]),
        ([9, 9, 9], [2, 1, 0], [0, 0, 0], 4, [2, 1, 1]),
    ],
)
def test_examples_by_owner(left: list[int], owners: list[int], busy: list[int], budget: int, rows: list[int]) -> None:
    assert share_rows(left, [0] * len(left), budget, owners, busy) == rows


def test_a_less_important_prompt_has_what_is_left_by_owner() -> None:
    assert share_rows([30, 500, 500], [0, 1, 1], 100, [0, 0, 1], [0, 0]) == [30, 20, 50]
    assert share_rows([300, 1], [0, 1], 100, [0, 1], [0, 0]) == [100, 0]


@given(
    left=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    owners=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    busy=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    budget=st.integers(1, 64),
)
def test_by_owner_the_oldest_takes_a_bounded_number_of_steps(
    left: list[int], owners: list[int], busy: list[int], budget: int
) -> None:
    oldest, steps, most = left[0], 0, 4 * 3
    while left:
        rows = share_rows(left, [0] * len(left), budget, owners[: len(left)], busy)
        steps += 1
        if rows[0] == left[0] and oldest:
            assert steps <= -(-most * oldest // budget) + 1
            oldest = 0
        going_on = [at for at, count in enumerate(rows) if count < left[at]]
        left, owners = [left[at] - rows[at] for at in going_on], [owners[at] for at in going_on]
        assert sum(rows) >= 1


@pytest.mark.parametrize("layout", [DP, DOP], ids=str)
def test_every_owner_has_a_long_prompt_to_compute_and_few_wait_half_done(layout: Layout) -> None:
    scheduler, group = make(layout, (400,) * 4, max_num_seqs=64, max_batched_tokens=32, max_model_len=300)
    for id in range(16):
        scheduler.add(id, prompt(200 - 7 * id, id), greedy(max_tokens=1), 0)
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        assert plan is not None
        rows = Counter[int]()
        for query in plan.queries:
            rows[query.owner] += len(query.tokens)
        assert sum(rows.values()) == 32
        assert set(rows) == {0, 1, 2, 3} or not scheduler.num_waiting, "nobody idles while a prompt waits"
        scheduler.apply(group.run(plan))
        unfinished = [request for request in scheduler.running if len(request.tokens) - request.num_computed > 1]
        assert len(unfinished) <= 4 * MAX_UNFINISHED
    drain(scheduler, group)


@pytest.mark.parametrize("layout", [TP, CP, DCP], ids=str)
def test_elsewhere_long_prompts_are_computed_one_after_the_other(layout: Layout) -> None:
    scheduler, group = make(layout, (400,) * 4, max_batched_tokens=32, max_model_len=300)
    for id in range(4):
        scheduler.add(id, prompt(200, id), greedy(max_tokens=1), 0)
    assert run(scheduler, group) == {0: 32}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_prompt_goes_where_it_has_rows_unless_it_finds_more_elsewhere(is_known: bool) -> None:
    scheduler, group = make(DP, (400,) * 2, max_batched_tokens=16, max_model_len=300, prefix_cache=True)
    scheduler.add(0, prompt(100, 0), greedy(max_tokens=90), 0)
    while run(scheduler, group) != {0: 1}:
        pass
    scheduler.add(1, prompt(60, 1), greedy(max_tokens=1), 0)
    assert run(scheduler, group) == {0: 1, 1: 15}, "on the rank that has fewer tokens, which it keeps busy"
    beginning = prompt(60, 1)[:12] if is_known else []
    scheduler.add(2, [*beginning, *prompt(50, 2)], greedy(max_tokens=1), 0)
    assert run(scheduler, group) == ({0: 1, 1: 15} if is_known else {0: 1, 1: 8, 2: 7})
    drain(scheduler, group)


def test_the_rule_follows_the_layout_of_the_step() -> None:
    """After a change of layout, of the same requests with the same owners."""
    rows = {}
    for layout in LAYOUTS.values():
        scheduler, group = make(DP, (400,) * 2, max_batched_tokens=16, max_model_len=300)
        for id in range(2):
            scheduler.add(id, prompt(200, id), greedy(max_tokens=1), 0)
        run(scheduler, group)
        pool = PrefixCache(layout, [np.arange(400)] * 2)
        held = {request.id: HeldPages(request.held.owner, 2) for request in scheduler.running if request.held}
        for request in scheduler.running:
            assert request.held is not None and pool.grow(held[request.id], len(request.held))
        scheduler.rebase(pool, held)
        plan = scheduler.schedule()
        assert plan is not None and plan.layout == layout.name
        rows[layout] = {query.request: len(query.tokens) for query in plan.queries}
    for layout, shared in rows.items():
        assert shared == ({0: 8, 1: 8} if layout.kv is KV.REQUEST else {0: 16})


# --- in the scheduler ---


def test_a_short_prompt_does_not_wait_behind_the_chunks_of_a_long_one() -> None:
    scheduler, group = make(slots=(200,), max_batched_tokens=16, page_size=4, max_model_len=500)
    scheduler.add(0, prompt(400, 0), greedy(max_tokens=1), 0)
    assert run(scheduler, group) == {0: 16}
    scheduler.add(1, prompt(6, 1), greedy(max_tokens=1), 0)
    assert run(scheduler, group) == {0: 10, 1: 6}
    scheduler.add(2, prompt(30, 2), greedy(max_tokens=1), 0)
    scheduler.add(3, prompt(5, 3), greedy(max_tokens=1), 0)
    assert run(scheduler, group) == {0: 8, 2: 3, 3: 5}, "the shortest first, in half of the rows"
    drain(scheduler, group)


def test_a_short_prompt_passes_a_long_one_that_waits_for_rows() -> None:
    scheduler, group = make(slots=(300,), max_batched_tokens=16, page_size=4, max_model_len=600)
    for id in range(3):
        scheduler.add(id, prompt(300, id), greedy(max_tokens=1), 0)
    scheduler.add(3, prompt(8, 3), greedy(max_tokens=1), 0)
    assert run(scheduler, group) == {0: 8, 3: 8}
    assert run(scheduler, group) == {0: 16}
    finished = [progress.id for step in drain(scheduler, group) for progress in step]
    assert finished == [0, 1, 2], "long ones share nothing"


def test_the_first_in_the_queue_keeps_its_pages_from_those_that_pass_it() -> None:
    slots = 300 // 4 + 1 + 300 // 4 + 1 + 3  # two long ones that can grow, and three pages
    scheduler, group = make(slots=(slots,), max_batched_tokens=16, page_size=4, max_model_len=600)
    scheduler.add(0, prompt(300, 0), greedy(max_tokens=3), 0)
    scheduler.add(1, prompt(300, 1), greedy(max_tokens=3), 0)
    scheduler.add(2, prompt(16, 2), greedy(max_tokens=200), 0)
    scheduler.add(3, prompt(8, 3), greedy(max_tokens=200), 0)
    assert run(scheduler, group) == {0: 8, 3: 8}, "2 would take four pages and room to grow"


def test_few_prompts_are_begun_before_their_turn() -> None:
    scheduler, group = make(slots=(2000,), max_num_seqs=64, max_batched_tokens=16, page_size=4, max_model_len=2000)
    scheduler.add(0, prompt(1500, 0), greedy(max_tokens=1), 0)
    run(scheduler, group)
    for id in range(1, 12):
        scheduler.add(id, prompt(400 - 10 * id, id), greedy(max_tokens=1), 0)
        run(scheduler, group)
        assert sum(len(request.tokens) - request.num_computed > 1 for request in scheduler.running) <= MAX_UNFINISHED
    scheduler.add(12, prompt(7, 12), greedy(max_tokens=1), 0)
    assert run(scheduler, group)[12] == 7, "one that is done at once is no burden"
    drain(scheduler, group)


def test_the_queue_is_looked_through_so_far_and_no_further() -> None:
    for behind in (LOOK_AHEAD - 1, LOOK_AHEAD):
        scheduler, group = make(slots=(4000,), max_num_seqs=64, max_batched_tokens=16, max_model_len=900)
        for id in range(behind + 1):
            scheduler.add(id, prompt(400, id), greedy(max_tokens=1), 0)
        scheduler.add(behind + 1, prompt(2, 99), greedy(max_tokens=1), 0)
        assert (behind + 1 in run(scheduler, group)) == (behind < LOOK_AHEAD)


def test_prompts_that_begin_alike_still_find_what_the_one_before_computed() -> None:
    """A prompt of about the same length begins after the one before it, so it finds the pages of that one."""
    scheduler, group = make(TP, (400, 400), max_batched_tokens=16, max_model_len=200, prefix_cache=True)
    beginning = prompt(80, 0)
    for id in range(4):
        scheduler.add(id, [*beginning, id, id], greedy(max_tokens=1), 0)
    cached = {progress.id: progress.num_cached for step in drain(scheduler, group) for progress in step}
    assert cached == {0: 0, 1: 80, 2: 80, 3: 80}


def test_what_is_cached_makes_a_long_prompt_short() -> None:
    scheduler, group = make(slots=(400,), max_batched_tokens=16, max_model_len=400, prefix_cache=True)
    known = prompt(120, 0)
    scheduler.add(0, known, greedy(max_tokens=1), 0)
    drain(scheduler, group)
    scheduler.add(1, prompt(200, 1), greedy(max_tokens=1), 0)
    scheduler.add(2, prompt(200, 2), greedy(max_tokens=1), 0)
    scheduler.add(3, [*known, 1, 2, 3], greedy(max_tokens=1), 0)
    group.config = scheduler.config
    assert run(scheduler, group) == {1: 13, 3: 3}
