"""The threshold policy: four rules that an operator can read, in this order.

    1. few live requests, one of them long   -> cp
    2. few live requests                     -> tp
    3. any                                   -> dp
    4. no room above                         -> dop

A layout is passed over where the ranks do not divide the heads, or where the live requests would fill its pages beyond
`kv_full`. Every bound gives way by `hysteresis` for the layout that serves already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from splash.core.decision import Decision
from splash.core.layout import CP, DOP, DP, TP, Layout
from splash.scheduler.policy import Limits, PolicyConfig, Restraint
from splash.scheduler.room import Room
from splash.scheduler.situation import Situation


class ThresholdPolicy:
    """See the module.

    Args:
        config: the bounds.
        layouts: those that the ranks can serve in.
        limits: of the engine.
    """

    def __init__(self, config: PolicyConfig, layouts: Sequence[Layout], limits: Limits) -> None:
        self.config = config
        self._limits = limits
        self._room = Room(limits.geometry, layouts, limits.staging_bytes)
        self._restraint = Restraint(config)

    @property
    def due_s(self) -> float:
        """See `Policy`."""
        return self._restraint.due_s

    def arrived(self, now: float, num_prompt_tokens: int) -> None:
        """Nothing to learn."""

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        """Nothing to learn."""

    def took(self, now: float, seconds: float) -> None:
        """See `Policy`."""
        self._restraint.took(now, seconds)

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        """See `Policy`."""
        self._restraint.switched(target, status, now, rebalance, cost_s)

    def decide(self, situation: Situation) -> Decision | None:
        """See `Policy`."""
        if not (situation.running or situation.num_waiting):
            return None
        self._restraint.decides(situation.now)
        layout, infeasible = situation.layout, dict[str, str]()
        target, rule = layout, "no layout has room for more"
        for candidate, why in self._rules(situation):
            obstacle = self._obstacle(situation, candidate)
            if not obstacle:
                target, rule = candidate, why
                break
            infeasible[candidate.name] = obstacle
        held_back = self._restraint.held_back(target, situation.now) if target != layout else ""
        reason = f"{rule}, so {target}"
        if held_back:
            reason = f"{layout} stays for now: {reason}, but {held_back}"
        return Decision(
            policy="threshold",
            layout=layout.name,
            target=layout.name if held_back else target.name,
            switches=target != layout and not held_back,
            method="auto",
            infeasible=infeasible,
            reason=reason,
        )

    def _rules(self, situation: Situation) -> Iterator[tuple[Layout, str]]:
        """The layouts that the load asks for, the one that is preferred first, and why."""
        config, layout = self.config, situation.layout
        live = len(situation.running) + situation.num_waiting
        longest = max(int(situation.length_n.max(initial=0)), *(len(each.tokens) for each in situation.waiting), 0)
        few = config.few_requests * (1 + config.hysteresis) if layout in (TP, CP) else config.few_requests
        long = config.long_prompt_tokens * (1 - config.hysteresis) if layout == CP else config.long_prompt_tokens
        if live <= few:
            if longest >= long:
                yield CP, f"{live} live requests are few, and one has {longest} tokens"
            yield TP, f"{live} live requests are few and short"
        else:
            yield DP, f"{live} live requests are many"
        yield DP, f"{live} live requests need more room than {TP} has"
        yield DOP, f"{live} live requests need more room than {DP} has"

    def _obstacle(self, situation: Situation, target: Layout) -> str:
        """Why `target` is passed over, or an empty string."""
        room, config = self._room, self.config
        if target not in room.layouts:
            return "the ranks do not divide the heads"
        if target != situation.layout:
            if shortage := room.shortage(situation, target):
                return shortage
            if not room.fits_alone(target, pages := situation.largest_request()):
                return f"a live request may grow to {pages} pages"
        if target == DOP:
            return ""  # nothing has more room
        full = config.kv_full * (1 if target == situation.layout else 1 - config.hysteresis)
        share = room.used_share(target, situation.wanted_pages(self._limits.max_num_seqs))
        return f"its pages would be {share:.0%} full" if share >= full else ""
