"""Steering: when a policy is asked, when its answer is carried out, and what takes precedence over it."""

from __future__ import annotations

import math
from collections.abc import Callable

from splash.core.decision import Decision
from splash.core.layout import DP, LAYOUTS, TP, Layout
from splash.engine.steering import PATIENCE_S, Steering
from splash.scheduler.scheduler import Scheduler
from splash.scheduler.situation import Situation
from splash.switch.orders import SwitchRecord
from tests.fake_group import FakeGroup, greedy, make


class Wishes:
    """A policy that wants dp, and remembers all that it was told."""

    due_s = 100.0

    def __init__(self) -> None:
        self.cost_s: list[float] = []
        self.expected_s: float | None = None
        self.asked: list[Situation] = []
        self.told: list[tuple[str, str, float]] = []
        self.told_costs_s: list[float] = []
        self.arrivals: list[tuple[float, int]] = []

    def arrived(self, now: float, num_prompt_tokens: int) -> None:
        self.arrivals.append((now, num_prompt_tokens))

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        raise AssertionError("nothing finishes here")

    def decide(self, situation: Situation) -> Decision:
        self.asked.append(situation)
        switches = situation.layout is not DP
        return Decision(
            policy="wishes",
            layout="tp",
            target="dp",
            switches=switches,
            method="auto",
            reason="I want it",
            cost_s=self.expected_s,
        )

    def took(self, now: float, seconds: float) -> None:
        self.cost_s.append(seconds)

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        self.told.append((target.name, status, now))
        self.told_costs_s.append(cost_s)


class PendingSwitches:
    """A switcher whose switches end when a test says so."""

    def __init__(self) -> None:
        self.active: SwitchRecord | None = None
        self.made: list[SwitchRecord] = []

    def request(
        self,
        target: Layout,
        method: str,
        rebalance: bool,
        done: Callable[[SwitchRecord], None],
        decision: Decision | None = None,
    ) -> SwitchRecord:
        if self.active is not None:
            self.end("superseded")
        self.done = done
        self.active = SwitchRecord(
            id=len(self.made) + 1, source="tp", target=target.name, asked=method, decision=decision
        )
        self.made.append(self.active)
        return self.active

    def end(self, status: str) -> None:
        record, self.active = self.active, None
        assert record is not None
        record.status = status
        self.done(record)

    def abort(self) -> None:
        self.end("aborted")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def steered() -> tuple[Steering, Wishes, PendingSwitches, Scheduler, FakeGroup, Clock]:
    scheduler, group = make(TP, (20, 20), 8, 16, 24, 4, 0, False)
    policy, switcher, clock = Wishes(), PendingSwitches(), Clock()
    steering = Steering(policy, scheduler, switcher, clock)  # type: ignore[arg-type]
    return steering, policy, switcher, scheduler, group, clock


def test_an_answer_is_carried_out_before_the_next_plan_and_only_once() -> None:
    steering, policy, switcher, scheduler, _, clock = steered()
    scheduler.add(1, [1, 2, 3], greedy(max_tokens=4), 0)
    scheduler.schedule()
    assert steering.next_s == policy.due_s
    steering.ask()
    assert len(policy.asked) == 1 and not switcher.made and steering.next_s == -math.inf
    steering.act()
    assert steering.next_s == policy.due_s
    assert [record.target for record in switcher.made] == ["dp"] and switcher.made[0].decision is steering.decision
    steering.act()
    steering.ask()
    assert len(switcher.made) == len(policy.asked) == 1, "not asked while a switch is under way"
    clock.now += 1
    switcher.end("committed")
    assert policy.told == [("dp", "committed", clock.now)]


def test_nothing_is_looked_at_until_a_decision_is_due() -> None:
    steering, policy, switcher, scheduler, _, clock = steered()
    scheduler.add(1, [1, 2, 3], greedy(max_tokens=4), 0)
    scheduler.schedule()
    unseen = Steering(policy, None, switcher, clock)  # type: ignore[arg-type]  # no load to look at
    policy.due_s = clock.now + 1
    unseen.ask()
    steering.ask()
    assert not policy.asked and not policy.cost_s
    clock.now += 1
    steering.ask()
    assert len(policy.asked) == 1 and policy.cost_s == [0.0], "which takes no time on a clock that stands"


def test_a_policy_is_told_what_its_decisions_take() -> None:
    _, policy, switcher, scheduler, _, clock = steered()
    timer = iter((7.0, 7.25))
    steering = Steering(policy, scheduler, switcher, clock, lambda: next(timer))  # type: ignore[arg-type]
    scheduler.add(1, [1, 2, 3], greedy(max_tokens=4), 0)
    scheduler.schedule()
    steering.ask()
    assert policy.cost_s == [0.25]


def test_a_policy_is_told_what_its_switch_cost_expected_or_measured_whichever_is_more() -> None:
    steering, policy, switcher, scheduler, _, _ = steered()
    scheduler.add(1, [1, 2, 3], greedy(max_tokens=4), 0)
    scheduler.schedule()
    for expected_s, added_ms in ((None, 5.0), (0.02, 5.0), (0.02, 50.0)):
        policy.expected_s = expected_s
        steering.ask()
        steering.act()
        switcher.made[-1].added_ms = added_ms
        switcher.end("committed")
    assert policy.told_costs_s == [math.inf, 0.02, 0.05]


def test_a_switch_by_hand_takes_the_place_of_what_the_policy_wants() -> None:
    steering, policy, switcher, scheduler, _, _ = steered()
    scheduler.add(1, [1, 2, 3], greedy(max_tokens=4), 0)
    scheduler.schedule()
    steering.ask()
    switcher.request(LAYOUTS["cp"], "auto", False, lambda record: None)
    steering.pin()
    steering.act()
    assert [record.target for record in switcher.made] == ["cp"] and switcher.made[0].decision is None
    switcher.end("committed")
    steering.ask()
    steering.act()
    assert len(policy.asked) == 1 and len(switcher.made) == 1 and steering.pinned and steering.next_s == math.inf
    steering.release()
    steering.ask()
    steering.act()
    assert len(policy.asked) == 2 and switcher.made[-1].target == "dp"


def test_a_policy_s_switch_that_waits_too_long_is_given_up_but_not_another_s() -> None:
    steering, policy, switcher, scheduler, _, clock = steered()
    scheduler.add(1, [1, 2, 3], greedy(max_tokens=4), 0)
    scheduler.schedule()
    steering.ask()
    steering.act()
    clock.now += PATIENCE_S / 2
    steering.ask()
    assert switcher.active is not None
    clock.now += PATIENCE_S
    steering.ask()
    assert switcher.active is None and policy.told == [("dp", "aborted", clock.now)]
    switcher.request(LAYOUTS["cp"], "auto", False, lambda record: None)
    clock.now += 10 * PATIENCE_S
    steering.ask()
    assert switcher.active is not None and len(policy.told) == 1


def test_a_situation_is_the_scheduler_s_load() -> None:
    steering, policy, _, scheduler, group, _ = steered()
    steering.arrived(9)
    assert policy.arrivals == [(100.0, 9)]
    for number in range(3):
        scheduler.add(number, [1] * 10, greedy(max_tokens=5), 0)
    plan = scheduler.schedule()
    assert plan is not None
    steering.ask()
    (seen,) = policy.asked
    running = scheduler.running
    assert (seen.now, seen.layout, seen.ranks, seen.page_size) == (100.0, TP, 2, 4)
    assert seen.length_n.tolist() == [10] * len(running) and seen.outputs_n.tolist() == [0] * len(running)
    assert seen.computed_n.tolist() == [request.num_computed for request in running]
    assert seen.allowed_n.tolist() == [5] * len(running)
    assert seen.num_waiting == 3 - len(running) == len(seen.waiting) > 0
    assert list(seen.used_T) == [3 * len(running)] * 2 and seen.page_share == 1
    assert seen.largest_request() == 4 and group.layout is TP
