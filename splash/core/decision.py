"""Decision: what a policy made of the load at one moment, with all that it compared. It goes out as JSON."""

from __future__ import annotations

import msgspec


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a policy.

    Attributes:
        policy: the kind of policy: "threshold" or "cost".
        layout: the layout that steps ran in.
        target: the layout to go on in; `layout` itself to stay.
        rebalance: deal the running requests out to owners anew.
        switches: whether something is to be changed now.
        method: the way to switch that was predicted to cost least; empty where none was predicted.
        predictions_ms: by layout, milliseconds a step over the outlook, with the waves that its memory needs; None
            where it cannot serve. Empty for a policy that predicts nothing.
        infeasible: by layout that cannot serve what is there, why.
        lead: time over the outlook in `layout` over that in `target`, less 1; None where nothing was predicted.
        margin: the lead that was asked for.
        gain_s: time saved over the outlook, seconds.
        cost_s: time that the switch takes from serving, seconds.
        horizon_s: how far the outlook reaches in `layout`, seconds.
        reason: all of it in one sentence.
    """

    policy: str
    layout: str
    target: str
    reason: str
    rebalance: bool = False
    switches: bool = False
    method: str = ""
    predictions_ms: dict[str, float | None] = {}
    infeasible: dict[str, str] = {}
    lead: float | None = None
    margin: float | None = None
    gain_s: float | None = None
    cost_s: float | None = None
    horizon_s: float | None = None
