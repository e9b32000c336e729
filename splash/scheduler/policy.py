"""Policy: which layout to go on in. Asked after steps have been submitted, so that ranks work while it decides.

    static      never changes anything
    threshold   plain rules on the load (`splash.scheduler.threshold`)
    cost        predicted time over an outlook (`splash.scheduler.cost_policy`)

What both of the latter share is here: how often to decide, and what keeps them from switching too often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from splash.core.decision import Decision
from splash.core.errors import ConfigError
from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.scheduler.situation import Situation

Kind = Literal["static", "threshold", "cost"]
KINDS: tuple[Kind, ...] = ("static", "threshold", "cost")
BACKOFF_DOUBLINGS = 7
REMEMBERED_COSTS = 8  # what a decision takes is an average over about so many


@dataclass(frozen=True)
class PolicyConfig:
    """How the layout is chosen while serving. conf/policy has the fields that each kind reads.

    Attributes:
        kind: "static", "threshold" or "cost".
        interval_ms: decide at most this often, milliseconds; the cost policy also waits for a hundredth of its outlook.
        max_share: decisions take at most this share of the time: where they take longer, they become fewer. So do
            switches whose cost is known.
        cooldown_s: after a switch, the most that the next has to wait for that, seconds; as long where its cost is not
            known.
        backoff_s: after a switch that was refused or failed, the time until the same is tried again, seconds; doubled
            each further time.
        margin: cost: switch only if the present layout takes longer by more than this share.
        settle_s: cost: leads are averaged over about so long before they count, seconds.
        horizon_s: cost: how far ahead to look at most, seconds.
        safety: cost: switch only if it gains this many times what it costs.
        few_requests: threshold: up to so many live requests are few.
        long_prompt_tokens: threshold: requests of so many tokens are long.
        kv_full: threshold: share of the pages of `dp` from which memory counts as full.
        hysteresis: threshold: a rule that holds lets go only this share beyond its bound.

    Raises:
        ConfigError: naming the field that is out of range.
    """

    kind: Kind = "static"
    interval_ms: float = 50.0
    max_share: float = 0.01
    cooldown_s: float = 2.0
    backoff_s: float = 5.0
    margin: float = 0.05
    settle_s: float = 0.25
    horizon_s: float = 30.0
    safety: float = 2.0
    few_requests: int = 4
    long_prompt_tokens: int = 32768
    kv_full: float = 0.9
    hysteresis: float = 0.25

    def __post_init__(self) -> None:
        for name, ok, accepted in (
            ("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("interval_ms", 0 <= self.interval_ms < math.inf, "at least 0"),
            ("max_share", 0 < self.max_share <= 1, "above 0 and at most 1"),
            ("cooldown_s", 0 <= self.cooldown_s < math.inf, "at least 0"),
            ("backoff_s", 0 < self.backoff_s < math.inf, "above 0"),
            ("margin", 0 <= self.margin < math.inf, "at least 0"),
            ("settle_s", 0 <= self.settle_s < math.inf, "at least 0"),
            ("horizon_s", 0 < self.horizon_s < math.inf, "above 0"),
            ("safety", 1 <= self.safety < math.inf, "at least 1"),
            ("few_requests", self.few_requests >= 0, "at least 0"),
            ("long_prompt_tokens", self.long_prompt_tokens >= 1, "at least 1"),
            ("kv_full", 0 < self.kv_full <= 1, "above 0 and at most 1"),
            ("hysteresis", 0 <= self.hysteresis < 1, "at least 0 and below 1"),
        ):
            if not ok:
                raise ConfigError(f"policy.{name}", f"must be {accepted}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Limits:
    """What a policy knows of the engine.

    Attributes:
        geometry: of the arenas.
        max_num_seqs: most requests that run at once.
        max_batched_tokens: most rows a step.
        staging_bytes: most that a rank may stage for one layer of a switch.
        copy_bytes: most that a rank copies ahead of a switch after one step.
        mem_fraction: share of the device's memory that may be used.
    """

    geometry: ArenaGeometry
    max_num_seqs: int
    max_batched_tokens: int
    staging_bytes: int
    copy_bytes: int
    mem_fraction: float = 1.0


class Policy(Protocol):
    """Chooses layouts. All times are seconds on the clock of the loop that asks."""

    @property
    def due_s(self) -> float:
        """The time from which it decides again. There is no need to look at the load before."""

    def arrived(self, now: float, num_prompt_tokens: int) -> None:
        """A request has come."""

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        """A request has ended with so many tokens: by itself, or cut off where it might have gone on."""

    def decide(self, situation: Situation) -> Decision | None:
        """What to do now, asked from `due_s` on. None where there is nothing to decide on."""

    def took(self, now: float, seconds: float) -> None:
        """The decision at `now` took so many seconds of the loop's time."""

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        """A switch to `target`, or a rebalance in it, has ended with a status of `SwitchRecord`.

        `cost_s` is what it cost those who were served, seconds; infinite where that is not known.
        """


class StaticPolicy:
    """Keeps the layout."""

    due_s = math.inf

    def arrived(self, now: float, num_prompt_tokens: int) -> None:
        """Nothing to learn."""

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        """Nothing to learn."""

    def decide(self, situation: Situation) -> Decision | None:
        """Never anything."""
        return None

    def took(self, now: float, seconds: float) -> None:
        """Nothing to learn."""

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        """Nothing to learn."""


@dataclass(eq=False)
class Restraint:
    """Keeps a policy from deciding too often and from trying again what has just failed.

    Attributes:
        config: the times.
        due_s: when the next decision is due.
    """

    config: PolicyConfig
    due_s: float = -math.inf
    _cost_s: float = 0.0  # of a decision, averaged
    _cool_until_s: float = -math.inf
    _rebalance_until_s: float = -math.inf
    _tries: dict[Layout, int] = field(default_factory=dict)  # that came to nothing, one after another
    _blocked_until_s: dict[Layout, float] = field(default_factory=dict)

    def decides(self, now: float, rest_s: float = 0.0) -> None:
        """A decision is made at `now`: the next is due after the interval, or after `rest_s` where that is longer."""
        self.due_s = now + max(self.config.interval_ms / 1e3, rest_s)

    def took(self, now: float, seconds: float) -> None:
        """The decision at `now` took so many seconds: the next is due when the average has become the share allowed.

        The weights with which one decision counts in this and all later averages add up to 1, so every second of
        deciding is followed by 1 / `max_share` seconds of rest, if not at once. The first decisions, which predict what
        later ones remember, do not put off the next for long.
        """
        self._cost_s += (seconds - self._cost_s) / REMEMBERED_COSTS
        self.due_s = max(self.due_s, now + self._cost_s / self.config.max_share)

    def held_back(self, target: Layout, now: float, rebalance: bool = False) -> str:
        """Why a switch to `target`, or new owners in it, has to wait, or an empty string.

        New owners are no reason to keep a layout: only another switch or rebalance makes the next of its kind wait.
        """
        if now < self._cool_until_s:
            return f"the last switch was just now, and the next may come in {self._cool_until_s - now:.1f} s"
        if rebalance and now < self._rebalance_until_s:
            return f"owners were dealt out just now, and may be again in {self._rebalance_until_s - now:.1f} s"
        until = self._blocked_until_s.get(target, -math.inf)
        if now < until:
            return f"the last try came to nothing, and the next is due in {until - now:.1f} s"
        return ""

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        """See `Policy.switched`. What cost little need not be followed by a long pause to cost little in all."""
        if status == "committed":
            pause_s = min(self.config.cooldown_s, cost_s / self.config.max_share)
            if rebalance:
                self._rebalance_until_s = now + pause_s
            else:
                self._cool_until_s = now + pause_s
            self._tries.pop(target, None)
            self._blocked_until_s.pop(target, None)
        elif status in ("refused", "failed", "aborted"):
            tries = self._tries.get(target, 0)
            self._tries[target] = min(tries + 1, BACKOFF_DOUBLINGS)
            self._blocked_until_s[target] = now + self.config.backoff_s * 2**tries
