"""What is expected of requests, against what the same requests really do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import DCP, DP, KV, TP, Layout
from splash.core.request import SamplingParams
from splash.core.step import StepOutput
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from splash.scheduler.traffic import UNKNOWN_TOKENS, WINDOW_S, Arrivals, Outputs, unevenness


def ages(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("name", ["uniform", "lognormal", "two kinds"])
def test_remaining_tokens_are_the_mean_of_what_longer_requests_had(name: str) -> None:
    random = np.random.default_rng(3)
    lengths = {
        "uniform": random.integers(1, 2000, 800),
        "lognormal": np.exp(random.normal(5.5, 0.8, 800)).astype(int) + 1,
        "two kinds": np.where(random.random(800) < 0.7, random.integers(10, 30, 800), random.integers(1500, 2500, 800)),
    }[name]
    outputs = Outputs()
    for length in lengths.tolist():
        outputs.add(length)
    for age in (0, 10, 100, 400):
        left, new = outputs.remaining(ages(age))
        expected = (lengths[lengths > age] - age).mean()
        assert left[0] == pytest.approx(expected, rel=0.25), age
        assert new == pytest.approx(lengths.mean(), rel=0.15)


def test_running_requests_correct_the_bias_of_those_that_have_finished() -> None:
    """Long outputs finish later: soon after the start, finished ones are the short ones."""
    random = np.random.default_rng(4)
    lives, elapsed = random.exponential(1000, 400), random.uniform(0, 1500, 400)
    outputs = Outputs()
    for life in lives[lives < elapsed]:
        outputs.add(int(life))
    naive = lives[lives < elapsed].mean()
    _, new = outputs.remaining(elapsed[lives >= elapsed].astype(np.int64))
    assert naive < 600 and new == pytest.approx(1000, rel=0.25)


def test_requests_that_are_cut_off_say_that_outputs_are_longer() -> None:
    lives = np.random.default_rng(6).exponential(1000, 800)
    outputs, naive = Outputs(), Outputs()
    for life in lives.tolist():
        outputs.add(int(min(life, 1500)) + 1, cut_off=life > 1500)
        naive.add(int(min(life, 1500)) + 1)
    assert naive.remaining(ages())[1] < 850 < 1000 < outputs.remaining(ages())[1]
    outputs = Outputs()
    for _ in range(100):
        outputs.add(24, cut_off=True)
    left, new = outputs.remaining(ages(30))
    assert left[0] >= UNKNOWN_TOKENS and new >= UNKNOWN_TOKENS, "nothing has ended by itself"


def test_beyond_what_has_been_seen_a_request_goes_on_for_as_long_as_it_has() -> None:
    outputs = Outputs()
    assert outputs.remaining(ages(0, 5000))[0].tolist() == pytest.approx([UNKNOWN_TOKENS, 5000], rel=0.02)
    outputs = Outputs()
    for _ in range(100):
        outputs.add(300)
    left, new = outputs.remaining(ages(100, 4000, 9000))
    assert left.tolist() == pytest.approx([200, 4000, 9000], rel=0.2) and new == pytest.approx(300, rel=0.1)


@given(
    finished=st.lists(st.integers(1, 1 << 20), max_size=40),
    running=st.lists(st.integers(0, 1 << 20), max_size=40),
)
def test_expectations_are_positive_and_finite(finished: list[int], running: list[int]) -> None:
    outputs = Outputs()
    for length in finished:
        outputs.add(length)
    left, new = outputs.remaining(ages(*running))
    assert len(left) == len(running) and np.isfinite(left).all() and (left >= 1).all() and 1 <= new < 1 << 24


def test_the_rate_of_steady_arrivals_is_found() -> None:
    random, arrivals, now = np.random.default_rng(5), Arrivals(), 0.0
    for gap in random.exponential(1 / 20, 2000).tolist():
        now += gap
        arrivals.add(now, 700)
    assert arrivals.rate(now) == pytest.approx(20, rel=0.25)
    assert arrivals.prompt_tokens == pytest.approx(700)


def test_a_rate_is_known_soon_and_anew_once_the_past_is_forgotten() -> None:
    arrivals = Arrivals()
    for start in (0.0, 300.0):
        for tick in range(1, 21):
            arrivals.add(start + tick / 10, 100)
            if tick > 5:
                assert arrivals.rate(start + tick / 10) == pytest.approx(10, rel=0.1)


def test_a_lull_does_not_make_what_came_before_unknown() -> None:
    arrivals = Arrivals()
    for tick in range(200):
        arrivals.add(tick / 10, 100)
    arrivals.add(22.0, 100)
    assert arrivals.lasting_s(22.1) == pytest.approx(0.1)
    assert 5 < arrivals.rate(22.0) < 10


def test_arrivals_are_expected_for_as_long_as_they_have_come() -> None:
    arrivals = Arrivals()
    assert arrivals.lasting_s(3.0) == 0
    for tick in range(50):
        arrivals.add(10 + tick / 10, 100)
    assert arrivals.lasting_s(15.0) == pytest.approx(5.0)
    arrivals.add(90.0, 100)  # after a lull
    assert arrivals.lasting_s(91.0) == pytest.approx(1.0)


def test_the_share_of_prompts_that_is_found_follows_the_last_ones() -> None:
    arrivals, queried, hit = Arrivals(), 0, 0
    assert arrivals.found_share == 0
    for turn in range(400):
        arrivals.add(float(turn), 1000)
        queried, hit = queried + 1000, hit + (900 if turn >= 200 else 100)
        arrivals.found(queried, hit)
        arrivals.found(queried, hit)  # asked again, nothing new
        if turn == 199:
            assert arrivals.found_share == pytest.approx(0.1)
    assert arrivals.found_share == pytest.approx(0.9, abs=0.05)


def test_prompts_are_as_uneven_as_what_is_left_to_compute_of_them() -> None:
    arrivals = Arrivals()
    for turn in range(64):
        arrivals.add(float(turn), 10_000)
    assert arrivals.unevenness(2, 8) == pytest.approx(1)
    arrivals = Arrivals()
    for turn in range(64):
        arrivals.add(float(turn), 10_000)
    arrivals.began(3, [100, 900, 100])
    assert arrivals.unevenness(2, 8) == pytest.approx(1), "too few to tell"
    arrivals.began(67, [100, 900] * 32)
    assert arrivals.unevenness(2, 8) == pytest.approx(1.8)  # 900 where equal ones would be 500


def test_unevenness_is_the_rows_of_the_busiest_rank_over_those_of_equal_prompts() -> None:
    assert unevenness([100] * 64, 8, 8) == unevenness([100] * 64, 12, 8) == pytest.approx(1)
    assert unevenness([100, 300] * 32, 2, 8) == pytest.approx(1.5)  # 300 where equal prompts would be 200
    assert unevenness([1, 3, 1, 1], 4, 2) == pytest.approx(4 / 3)  # 2 and 4 rows where equal ones would be 3
    assert unevenness([100], 8, 8) == 1  # too few to tell


def test_a_burst_is_no_rate_once_it_is_over() -> None:
    arrivals = Arrivals()
    assert arrivals.rate(5.0) == 0 and arrivals.prompt_tokens == 0
    for _ in range(1000):
        arrivals.add(10.0, 100)
    assert arrivals.rate(10.0) == pytest.approx(1000 / WINDOW_S)
    assert arrivals.rate(11.0) == pytest.approx(3.0)
    assert arrivals.rate(1000.0) < 0.01


@pytest.mark.parametrize("layout", [TP, DP, DCP], ids=str)
def test_a_token_that_is_generated_in_full_memory_costs_one_that_is_computed_again(layout: Layout) -> None:
    """As the outlook reckons: what an ended request leaves is taken by one that waits, so growth takes from others."""
    random = np.random.default_rng(5)
    config = SchedulerConfig(
        max_num_seqs=1000, max_batched_tokens=2000, max_model_len=4000, page_size=4, eos_token_ids=frozenset({0})
    )
    slots = 2000 if layout.kv is KV.REPLICATED else 500
    scheduler = Scheduler(config, PrefixCache(layout, [np.arange(slots)] * 4))
    for id, length in enumerate(np.exp(random.normal(5.5, 0.8, 400)).astype(int) + 1):
        params = SamplingParams(max_tokens=min(1500, int(length)), ignore_eos=True)
        scheduler.add(id, [1] * int(random.integers(10, 60)), params, seed=0)
    computed: dict[int, int] = {}
    generated = lost = 0
    while scheduler.num_waiting > 100:
        plan = scheduler.schedule()
        assert plan is not None
        lost += sum(computed.pop(id) for id in plan.released if id not in plan.finished)
        for query in plan.queries:
            computed[query.request] = query.start + len(query.tokens)
        sampled = tuple(query.request for query in plan.queries if query.sample)
        generated += len(sampled) if scheduler.num_preemptions else 0
        scheduler.apply(StepOutput(plan.step, plan.epoch, sampled, (1,) * len(sampled), (None,) * len(sampled)))
    assert generated > 10_000 and lost == pytest.approx(generated, rel=0.3)
