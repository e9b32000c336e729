"""Steering: between a policy, which chooses layouts, and the switcher, which changes them.

The policy is asked right after a step has been submitted, while the ranks work, and what it wants begins with the next
plan. A switch that somebody asks for pins its layout: the policy is not asked again until it is released.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from splash.core.decision import Decision
from splash.core.layout import parse_layout
from splash.engine.switching import Switcher
from splash.scheduler.policy import Policy
from splash.scheduler.scheduler import Scheduler
from splash.scheduler.situation import Situation
from splash.switch.orders import SwitchRecord

PATIENCE_S = 2.0  # a switch that the policy wants and that still waits for room is given up


class Steering:
    """Asks a policy and acts on its answers.

    Args:
        policy: chooses layouts.
        scheduler: whose load it looks at.
        switcher: carries out what it wants.
        clock: the time in seconds, from any origin; the policy's as well.
        timer: what decisions take is told by this, in seconds. None takes the clock: on a virtual one they take none.

    Attributes:
        pinned: whether the layout was chosen by hand, and the policy is not asked.
        decision: its last answer.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        switcher: Switcher,
        clock: Callable[[], float],
        timer: Callable[[], float] | None = None,
    ) -> None:
        self._policy = policy
        self._scheduler = scheduler
        self._switcher = switcher
        self._clock = clock
        self._timer = timer or clock
        self._own: SwitchRecord | None = None  # the switch under way, where the policy wanted it
        self._began_s = 0.0
        self._wanted: Decision | None = None
        self.pinned = False
        self.decision: Decision | None = None

    def arrived(self, num_prompt_tokens: int) -> None:
        """A request has come."""
        self._policy.arrived(self._clock(), num_prompt_tokens)

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        """A request has ended, by itself or cut off at the most tokens that it may have."""
        self._policy.finished(num_output_tokens, cut_off)

    def pin(self) -> None:
        """Leave the layout to whoever asks for switches."""
        self.pinned, self._wanted = True, None

    def release(self) -> None:
        """Let the policy choose again."""
        self.pinned = False

    @property
    def wants_switch(self) -> bool:
        """Whether a switch will begin with the next plan."""
        return self._wanted is not None

    @property
    def next_s(self) -> float:
        """The time from which there is something to do here: to ask the policy, or to begin what it wants."""
        if self.wants_switch:
            return -math.inf
        return math.inf if self.pinned else self._policy.due_s

    def ask(self) -> None:
        """Ask the policy, if a decision is due. Call when a step has been submitted."""
        if self._switcher.active is not None:
            waits = self._own is not None and self._own.status == "waiting"
            if waits and self._clock() - self._began_s > PATIENCE_S:
                self._switcher.abort()
            return
        if self.pinned or (now := self._clock()) < self._policy.due_s:
            return
        began = self._timer()
        decision = self._policy.decide(Situation.of_scheduler(self._scheduler, now))
        self._policy.took(now, self._timer() - began)
        if decision is not None:
            self.decision = decision
            self._wanted = decision if decision.switches else None

    def act(self) -> None:
        """Begin what the policy wants, unless another switch has begun meanwhile. Call before a step is planned."""
        wanted, self._wanted = self._wanted, None
        if wanted is None or self._switcher.active is not None:
            return
        self._began_s = self._clock()
        target = parse_layout(wanted.target)
        record = self._switcher.request(target, wanted.method, wanted.rebalance, self._ended, wanted)
        self._own = record if self._switcher.active is record else None

    def _ended(self, record: SwitchRecord) -> None:
        self._own = None
        rebalance = record.source == record.target
        expected_s = record.decision.cost_s if record.decision is not None else None
        cost_s = math.inf if expected_s is None else max(expected_s, record.added_ms / 1e3)
        self._policy.switched(parse_layout(record.target), record.status, self._clock(), rebalance, cost_s)
