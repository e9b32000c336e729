"""What is known of a switch while it is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from splash.core.layout import Layout
from splash.engine.ahead import AheadCopies
from splash.scheduler.idle_pages import Chain
from splash.scheduler.request import Rebase
from splash.switch.manifest import Planned
from splash.switch.orders import SwitchRecord


@dataclass(eq=False)
class ActiveSwitch:
    """The switch under way, or one that was asked for while another was committing.

    Attributes:
        record: what callers see of it.
        target: the layout to switch to.
        rebalance: whether the owners of all requests are chosen anew.
        done: called once with the final record.
        owners: chosen so far, by request, where the switch chooses them.
        may_copy_ahead: whether what was copied ahead has not been given up.
        takes_cache: whether idle pages of the cache are taken along.
        chains: those that the last plan takes along.
        ahead: what is copied ahead.
        commit_next: it commits with a manifest at the next boundary.
        before: the state before, once the engine's books are those of the target.
        planned: what commits then.
        is_prepared: what commits is what the ranks vote on.
        told: its digest, until the step that commits is sent.
        asked_at: when it was asked for, in seconds of the switcher's clock.
    """

    record: SwitchRecord
    target: Layout
    rebalance: bool
    done: Callable[[SwitchRecord], None]
    owners: dict[int, int] = field(default_factory=dict)
    may_copy_ahead: bool = True
    takes_cache: bool = True
    chains: tuple[Chain, ...] = ()
    ahead: AheadCopies | None = None
    commit_next: bool = False
    before: Rebase | None = None
    planned: Planned | None = None
    is_prepared: bool = False
    told: int | None = None
    asked_at: float = 0.0
