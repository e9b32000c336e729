"""Policies that need no predictions, and what keeps every policy from switching too often."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.errors import ConfigError
from splash.core.layout import CP, DOP, DP, LAYOUTS, TP, Layout
from splash.scheduler.policies import make_policy
from splash.scheduler.policy import REMEMBERED_COSTS, Policy, PolicyConfig, Restraint
from splash.scheduler.threshold import ThresholdPolicy
from tests.policy_loads import decoding, limits, request, situation
from tests.pure.test_cost_model import H200, shipped

GEOMETRY = H200.planned_geometry(0.85)
LIMITS = limits(GEOMETRY)


def threshold(**options: object) -> Policy:
    return make_policy(PolicyConfig("threshold", interval_ms=0, cooldown_s=0, **options), LIMITS, None)  # type: ignore[arg-type]


def target(policy: Policy, layout: Layout, running: list, waiting: list | None = None, now: float = 0.0) -> str:
    decision = policy.decide(situation(now, layout, running, waiting or []))
    assert decision is not None
    assert decision.switches == (decision.target != layout.name)
    return decision.target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "best"),
        ("interval_ms", -1.0),
        ("max_share", 0.0),
        ("cooldown_s", -1.0),
        ("backoff_s", 0.0),
        ("margin", -0.1),
        ("settle_s", float("nan")),
        ("horizon_s", 0.0),
        ("safety", 0.5),
        ("few_requests", -1),
        ("long_prompt_tokens", 0),
        ("kv_full", 1.5),
        ("hysteresis", 1.0),
    ],
)
def test_a_policy_says_which_field_is_out_of_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.{field}: must be .*, not {value!r}"):
        dataclasses.replace(PolicyConfig(), **{field: value})  # type: ignore[arg-type]


def test_a_static_policy_never_decides() -> None:
    policy = make_policy(PolicyConfig(), LIMITS, None)
    policy.arrived(0.0, 10)
    assert policy.decide(situation(0.0, TP, decoding(512, 1000))) is None and policy.due_s == math.inf


def test_the_cost_policy_needs_costs() -> None:
    with pytest.raises(ConfigError, match="policy: cost needs the costs of the hardware"):
        make_policy(PolicyConfig("cost"), LIMITS, None)


# --- rules ---


def test_rules_follow_the_load() -> None:
    assert target(threshold(), DP, decoding(2, 2000)) == "tp"
    assert target(threshold(), TP, decoding(2, 40_000, output=10)) == "cp"
    assert target(threshold(), TP, [], [request(0, None, 50_000, 0)]) == "cp"
    assert target(threshold(), TP, decoding(64, 2000)) == "dp"
    assert target(threshold(), DP, decoding(64, 2000)) == "dp"
    assert target(threshold(), TP, decoding(2, 2000), [request(9 + i, None, 100, 0) for i in range(60)]) == "dp"
    nearly_full = GEOMETRY.page_slots(DP, 0).size * 95 // 100 // 8 * 64
    assert target(threshold(), DP, decoding(64, nearly_full)) == "dop"
    assert (
        target(threshold(), DP, decoding(64, nearly_full // 2), [request(i, None, nearly_full, 0) for i in range(30)])
        == "dop"
    )


def test_a_layout_whose_pages_would_be_full_is_passed_over() -> None:
    """Three long requests fit in tp one by one, but fill it; dp has eight times its room."""
    long = decoding(3, GEOMETRY.num_slots * 64 // 4)
    decision = threshold(long_prompt_tokens=1 << 30).decide(situation(0.0, CP, long))
    assert decision is not None and decision.target == "dp"
    assert "full" in decision.infeasible["tp"] or "pages" in decision.infeasible["tp"]
    assert decision.reason == "3 live requests need more room than tp has, so dp"


def test_heads_that_cannot_be_shared_leave_dp_and_cp() -> None:
    model = shipped("glm_4_7_flash", "h200")
    policy = make_policy(PolicyConfig("threshold"), limits(model.planned_geometry(0.85)), None)
    decision = policy.decide(situation(0.0, CP, decoding(2, 2000)))
    assert decision is not None and decision.target == "dp"
    assert decision.infeasible["tp"] == "the ranks do not divide the heads"


@given(counts=st.lists(st.sampled_from([4, 5]), min_size=2, max_size=60))
def test_rules_do_not_flap_at_their_bound(counts: list[int]) -> None:
    policy, layout, switches = threshold(), DP, 0
    for step, count in enumerate(counts):
        chosen = target(policy, layout, decoding(count, 500), now=float(step))
        switches += chosen != layout.name
        layout = LAYOUTS[chosen]
    assert switches <= 1


def test_the_threshold_policy_never_predicts() -> None:
    decision = threshold().decide(situation(0.0, TP, decoding(64, 2000)))
    assert decision is not None and decision.predictions_ms == {} and decision.lead is None
    assert decision.policy == "threshold" and decision.method == "auto"


def test_what_cannot_be_held_is_passed_over() -> None:
    """dop holds what dp has no room for: a policy that comes from it stays."""
    room = GEOMETRY.page_slots(DP, 0).size
    owners = [0] * 10
    running = decoding(10, room * 64 // 10 + 200, owners=owners, max_tokens=100)
    assert target(threshold(), DOP, running) == "dop"


# --- restraint ---


def test_decisions_keep_their_interval() -> None:
    restraint = Restraint(PolicyConfig(interval_ms=100))
    restraint.decides(3.0)
    assert restraint.due_s == pytest.approx(3.1)
    restraint.decides(4.0, rest_s=0.5)
    assert restraint.due_s == pytest.approx(4.5)
    restraint.took(4.0, 1e-6)
    assert restraint.due_s == pytest.approx(4.5), "longer than what so short a decision asks for"


@given(
    took=st.lists(st.floats(0, 0.1), min_size=1, max_size=100),
    max_share=st.floats(0.001, 1),
    interval_ms=st.sampled_from([0.0, 1.0, 50.0]),
)
def test_decisions_take_no_more_than_their_share_of_the_time(
    took: list[float], max_share: float, interval_ms: float
) -> None:
    restraint, now = Restraint(PolicyConfig(max_share=max_share, interval_ms=interval_ms)), 0.0
    for seconds in took:
        restraint.decides(now)
        restraint.took(now, seconds)
        assert restraint.due_s >= now + interval_ms / 1e3
        now = restraint.due_s
    # What the average has not seen yet is still to be rested for.
    unseen = max(took) * REMEMBERED_COSTS
    assert sum(took) - unseen <= max_share * now * (1 + 1e-9)


def test_one_slow_decision_puts_the_next_off_a_little_and_many_put_it_off_wholly() -> None:
    restraint = Restraint(PolicyConfig(max_share=0.01, interval_ms=50))
    restraint.decides(0.0)
    restraint.took(0.0, 0.008)
    assert restraint.due_s == pytest.approx(0.1), "and not 0.8"
    for _ in range(200):
        restraint.took(0.0, 0.008)
    assert restraint.due_s == pytest.approx(0.8)


def test_a_switch_is_followed_by_a_pause() -> None:
    restraint = Restraint(PolicyConfig(cooldown_s=2))
    assert not restraint.held_back(TP, 0.0)
    restraint.switched(DP, "committed", 1.0)
    assert restraint.held_back(TP, 2.9) == "the last switch was just now, and the next may come in 0.1 s"
    assert not restraint.held_back(TP, 3.0)
    assert restraint.held_back(DP, 2.9, rebalance=True) and not restraint.held_back(DP, 3.0, rebalance=True)


def test_new_owners_make_nobody_wait_but_the_next_new_owners() -> None:
    restraint = Restraint(PolicyConfig(cooldown_s=2))
    restraint.switched(DP, "committed", 1.0, rebalance=True)
    assert restraint.held_back(DP, 2.9, rebalance=True) == "owners were dealt out just now, and may be again in 0.1 s"
    assert not restraint.held_back(DP, 3.0, rebalance=True) and not restraint.held_back(TP, 1.0)


@given(
    costs_s=st.lists(st.floats(0, 0.1), min_size=1, max_size=50), rebalance=st.booleans(), cooldown_s=st.floats(0.5, 20)
)
def test_cheap_switches_follow_sooner_and_take_no_more_than_their_share(
    costs_s: list[float], rebalance: bool, cooldown_s: float
) -> None:
    restraint, now = Restraint(PolicyConfig(max_share=0.01, cooldown_s=cooldown_s)), 0.0
    for cost_s in costs_s:
        restraint.switched(DP, "committed", now, rebalance, cost_s)
        pause_s = min(cooldown_s, 100 * cost_s)
        assert not restraint.held_back(DP, now + pause_s, rebalance)
        assert pause_s < 1e-6 or restraint.held_back(DP, now + 0.99 * pause_s, rebalance)
        assert rebalance <= (not restraint.held_back(TP, now)), "new owners hold back no switch"
        now += pause_s
    allowed = [min(cost_s, cooldown_s / 100) for cost_s in costs_s]
    assert sum(allowed) <= 0.01 * now * (1 + 1e-9) + 1e-12


def test_vain_tries_are_repeated_less_and_less_often() -> None:
    restraint, now, gaps = Restraint(PolicyConfig(backoff_s=1, cooldown_s=0)), 0.0, []
    for status in ("refused", "failed", "aborted", "refused"):
        restraint.switched(DP, status, now)
        assert "the last try came to nothing" in restraint.held_back(DP, now) and not restraint.held_back(TP, now)
        gap = next(gap for gap in range(100) if not restraint.held_back(DP, now + gap))
        gaps.append(gap)
        now += gap
    assert gaps == [1, 2, 4, 8]
    restraint.switched(DP, "superseded", now)
    assert not restraint.held_back(DP, now)
    restraint.switched(DP, "committed", now)
    restraint.switched(DP, "failed", now + 100)
    assert not restraint.held_back(DP, now + 101)


def test_an_idle_engine_is_left_alone() -> None:
    policy = threshold()
    assert isinstance(policy, ThresholdPolicy) and policy.decide(situation(0.0, TP, [])) is None
