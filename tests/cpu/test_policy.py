"""An engine that follows a policy: the tokens of one that keeps its layout, however often it switches."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from splash.core.decision import Decision
from splash.core.layout import LAYOUTS, Layout
from splash.core.request import SamplingParams
from splash.engine.steering import Steering
from splash.llm import LLM
from splash.scheduler.policy import PolicyConfig
from splash.scheduler.situation import Situation

PROMPTS = [[7 * i % 90 + 3 for i in range(length)] for length in (5, 40, 90, 17, 64, 33)]
PARAMS = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (30, 50, 12, 40, 24, 60)]


class Restless:
    """Wants the next layout after every few steps, and new owners now and then."""

    due_s = -math.inf

    def __init__(self) -> None:
        self.targets = itertools.cycle(["dp", "tp", "cp", "dop", "dcp", "dp", "dop"])
        self.asked = 0
        self.seen: list[Situation] = []
        self.ended: list[tuple[str, str]] = []
        self.lengths: list[int] = []
        self.arrivals: list[int] = []

    def arrived(self, now: float, num_prompt_tokens: int) -> None:
        self.arrivals.append(num_prompt_tokens)

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        self.lengths.append(num_output_tokens)

    def decide(self, situation: Situation) -> Decision | None:
        self.asked += 1
        if self.asked % 3:
            return None
        layout, rebalance = situation.layout.name, self.asked % 4 == 0
        target = layout if rebalance else next(self.targets)
        return Decision(
            policy="restless",
            layout=layout,
            target=target,
            rebalance=rebalance,
            switches=rebalance or target != layout,
            method="auto",
            reason="time for another",
        )

    def took(self, now: float, seconds: float) -> None:
        assert seconds >= 0

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        self.ended.append((target.name, status))


def steer(llm: LLM, policy: Restless) -> None:
    loop = llm.engine.loop
    loop.steering = Steering(policy, loop.scheduler, loop.switcher, time.monotonic)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint("base")), ranks=2, layout="tp", kv_cache_gib=0.1, page_size=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple[int, ...]]:
    """What it says before anybody steers it."""
    return [output.tokens for output in llm.generate(PROMPTS, PARAMS)]


def test_a_restless_policy_changes_no_token(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    policy = Restless()
    llm.switch("tp")
    known = len(llm.engine.switcher.history)
    steer(llm, policy)
    outputs = llm.generate(PROMPTS, PARAMS)
    history = list(llm.engine.switcher.history)[known:]
    assert [output.tokens for output in outputs] == expected
    assert [status for _, status in policy.ended] == ["committed"] * len(policy.ended)
    assert {record.target for record in history} == set(LAYOUTS) and len(history) > 6
    assert all(record.decision is not None and record.decision.target == record.target for record in history)
    assert any(record.decision.rebalance for record in history if record.decision is not None)
    assert policy.arrivals == [len(prompt) for prompt in PROMPTS]
    assert sorted(policy.lengths) == sorted(params.max_tokens for params in PARAMS)


def test_a_switch_by_hand_pins_the_layout_until_the_policy_is_released(
    llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    policy = Restless()
    llm.switch("tp")
    steer(llm, policy)
    assert not llm.engine.pinned
    assert llm.switch("dcp").decision is None and llm.engine.pinned
    assert [output.tokens for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert policy.asked == 0 and llm.engine.layout == "dcp"
    llm.engine.follow_policy()
    llm.generate(PROMPTS, PARAMS)
    assert policy.asked > 0 and not llm.engine.pinned
    made = llm.engine.decision
    assert made is not None and made.reason == "time for another"


def test_the_cost_policy_serves_with_the_description_of_this_machine(
    tiny_checkpoint: Callable[[str], Path], expected: list[tuple[int, ...]]
) -> None:
    policy = PolicyConfig("cost", interval_ms=0, cooldown_s=0, settle_s=0, margin=0, safety=1)
    options = {"ranks": 2, "layout": "dcp", "kv_cache_gib": 0.1, "page_size": 16}
    with LLM(str(tiny_checkpoint("base")), policy=policy, **options) as llm:  # type: ignore[arg-type]
        assert [output.tokens for output in llm.generate(PROMPTS, PARAMS)] == expected
        made = llm.engine.decision
        assert made is not None and made.policy == "cost" and set(made.predictions_ms) == set(LAYOUTS)
        assert all(ms is None or ms > 0 for ms in made.predictions_ms.values()) and made.reason
        first = llm.engine.switcher.history[0]
        assert first.source == "dcp" and first.decision is not None and first.decision.gain_s > 0  # type: ignore[operator]


def test_a_policy_may_be_given_by_name(tiny_checkpoint: Callable[[str], Path]) -> None:
    with LLM(str(tiny_checkpoint("base")), policy="threshold", ranks=2, layout="dp", kv_cache_gib=0.1) as llm:
        llm.generate(PROMPTS[:1], PARAMS[:1])
        made = llm.engine.decision
        assert made is not None and (made.policy, made.target) == ("threshold", "tp")
        assert "1 live requests are few and short" in made.reason
