"""Switcher: takes one switch at a time from its request to its record, a step boundary at a time.

waiting     the target has no room yet, or its staging would be too large: admission is held until it fits
copying     pages and weights are copied behind ordinary steps, at most so many bytes a step
committing  the next step, or the one in flight, runs in the target state

Where everything was copied ahead a commit has two phases. Behind a step the ranks are told the last pages, and vote for
the target state while that step runs, in which the engine goes over to it in its books. The next step is then in that
state: no rank has anything to do for it but to take other tables, and it cannot fail. Any other commit comes with a
manifest, whose copies the ranks agree on in the step; it has not run where one fails.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from splash.core.decision import Decision
from splash.core.errors import CapacityError, ConfigError
from splash.core.layout import KV, Layout, Projections, check_layout
from splash.core.memory import ArenaGeometry
from splash.core.step import StepPlan
from splash.engine.active import ActiveSwitch
from splash.engine.ahead import MANY_PAGES, AheadCopies
from splash.engine.messages import Run
from splash.engine.target import (
    Moved,
    check_room,
    never_fits,
    page_room,
    pages_after,
    running_pages,
    staging_shortage,
    with_chains,
)
from splash.engine.windows import layers_ahead
from splash.scheduler.owners import balance_owners
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from splash.switch.checks import validate
from splash.switch.counts import count
from splash.switch.manifest import Occupancy, Planned, plan_switch
from splash.switch.orders import (
    METHODS,
    CopyAhead,
    PreparedCommit,
    PreparedPages,
    SwitchOrder,
    SwitchOutcome,
    SwitchRecord,
    Vote,
)
from splash.switch.prepared import last_pages

HISTORY = 1000


class Switcher:
    """Carries out switches on behalf of an engine.

    Args:
        scheduler: whose requests and pages are switched.
        geometry: of the arenas.
        staging_bytes: most that a rank may stage for one layer.
        step_bytes: most that a rank copies ahead after one step.
        clock: the time in seconds, from any origin.
        streams: copies are queued on devices, so that a commit layer by layer can be prepared: it cannot fail.

    Attributes:
        layout: the layout that steps run in.
        step_bytes: most that a rank copies ahead after one step.
        history: the switches that have ended, oldest first.
        on_end: called with the record of each that ends, and the seconds since it was asked for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        geometry: ArenaGeometry,
        staging_bytes: int,
        step_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        streams: bool = False,
    ) -> None:
        self._clock = clock
        self._streams = streams
        self._scheduler = scheduler
        self._geometry = geometry
        self._staging_bytes = staging_bytes
        self.step_bytes = step_bytes
        self._active: ActiveSwitch | None = None
        self._queued: ActiveSwitch | None = None  # asked for while another was committing
        self._num_switches = 0
        self.layout = scheduler.pool.layout
        self.history: deque[SwitchRecord] = deque(maxlen=HISTORY)
        self.on_end: Callable[[SwitchRecord, float], None] = lambda record, seconds: None

    @property
    def active(self) -> SwitchRecord | None:
        """The switch under way."""
        return None if self._active is None else self._active.record

    def request(
        self,
        target: Layout,
        method: str,
        rebalance: bool,
        done: Callable[[SwitchRecord], None],
        decision: Decision | None = None,
    ) -> SwitchRecord:
        """Ask for a switch. One under way is superseded, unless it is committing: that one ends first.

        Args:
            target: the layout wanted.
            method: one of `METHODS`.
            rebalance: choose the owners of all requests anew, also where the target keeps pages where they are.
            done: called once with the final record.
            decision: what made a policy ask.

        Raises:
            ConfigError: the method is unknown, or the layout cannot work with this model and group.
        """
        if method not in METHODS:
            raise ConfigError("method", f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        check_layout(target, self._geometry.spec.num_heads, self._geometry.ranks)
        self._num_switches += 1
        record = SwitchRecord(
            id=self._num_switches, source=self.layout.name, target=target.name, asked=method, decision=decision
        )
        active = ActiveSwitch(record, target, rebalance, done, asked_at=self._clock())
        reason = f"by switch {record.id}, to {target}"
        if self.committing:
            if self._queued is not None:
                self._close(self._queued, "superseded", reason)
            self._queued = active
            return record
        if self._active is not None:
            self._end("superseded", reason)
        self._begin(active)
        return record

    def _begin(self, active: ActiveSwitch) -> None:
        active.record.source = self.layout.name
        self._active = active
        if active.target == self.layout and not active.rebalance:
            self._end("committed", "this is the layout already")

    @property
    def committing(self) -> bool:
        """Whether the switch under way will commit with the next step, if the ranks agree, or with one in flight."""
        return self._active is not None and self._active.before is not None

    @property
    def awaits_votes(self) -> bool:
        """Whether the ranks have been asked to vote: `decide` comes before the next plan."""
        return self.committing and self._active is not None and self._active.told is not None

    @property
    def commits_next(self) -> bool:
        """Whether the switch under way commits with the first step that is planned when no other is in flight."""
        active = self._active
        return self.awaits_votes or (active is not None and active.before is None and self._is_due(active))

    @property
    def lets_run_ahead(self) -> bool:
        """Whether the next step may be planned while one is in flight."""
        active = self._active
        return active is None or active.is_prepared or (active.before is None and not self._is_due(active))

    def abort(self) -> None:
        """Give up the switch under way, and what was asked for after it. One that is committing ends by itself."""
        if self._queued is not None:
            queued, self._queued = self._queued, None
            self._close(queued, "aborted", "")
        if self._active is not None and not self.committing:
            self._end("aborted", "")

    def next_run(self, at_boundary: bool = True) -> Run | None:
        """Plan the next step, with whatever the switch under way does in it. None where there is nothing to run.

        `at_boundary`: no step is in flight, so that a switch may commit with a manifest.
        """
        active = self._active
        if active is not None and active.told is not None:
            return self._commit_prepared(active)
        if active is not None and active.before is None and at_boundary and self._is_due(active):
            run = self._commit(active)
            if run is not None:
                return run
            active = self._active
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        return Run(plan, copying=active.record.id if active is not None and active.ahead is not None else 0)

    def _is_due(self, active: ActiveSwitch) -> bool:
        """Whether nothing is left to do but to commit with a manifest."""
        return active.commit_next or not self._scheduler.running or not self._may_copy_ahead(active)

    def _may_copy_ahead(self, active: ActiveSwitch) -> bool:
        asked = active.record.asked
        return active.may_copy_ahead and (asked in ("auto", "precopy") or (asked == "layerwise" and self._streams))

    def _owners(self, active: ActiveSwitch, occupancy: Occupancy) -> tuple[int, ...]:
        """Owners after the switch: the same where pages are with their owner already, else balanced anew."""
        if not active.rebalance and (self.layout.kv is KV.REQUEST or active.target.kv is not KV.REQUEST):
            return occupancy.owners
        # What was copied ahead lies with the owner that was chosen then.
        chosen = [active.owners.get(request) for request in occupancy.requests] if active.ahead is not None else None
        lengths = [len(table) for table in occupancy.tables]
        owners = balance_owners(lengths, page_room(self._geometry, active.target), chosen)
        active.owners = dict(zip(occupancy.requests, owners, strict=True))
        return tuple(owners)

    def _moved(self, active: ActiveSwitch) -> tuple[Moved, Moved]:
        """What moves, and the same without idle pages of the cache."""
        occupancy = running_pages(self._scheduler, active.target)
        alone = Moved(occupancy, self._owners(active, occupancy), ())
        if not active.takes_cache:
            return alone, alone
        return with_chains(self._scheduler.pool, self._geometry, active.target, occupancy, alone.owners), alone

    def _plan(self, active: ActiveSwitch) -> Planned:
        """Plan the commit."""
        started, epoch = self._clock(), self._scheduler.epoch
        planned = self._plan_by(
            active,
            lambda occupancy, owners: (
                plan_switch(occupancy, active.target, owners, self._geometry, epoch)
                if active.ahead is None
                else active.ahead.plan(occupancy, owners, epoch)
            ),
        )
        active.record.planning_ms = (self._clock() - started) * 1e3
        return planned

    def _plan_by(self, active: ActiveSwitch, plan: Callable[[Occupancy, tuple[int, ...]], Planned]) -> Planned:
        """Plan what is to move now, without the idle pages of the cache where they would be in the way."""
        moved, alone = self._moved(active)
        try:
            planned = plan(moved.occupancy, moved.owners)
            in_the_way = bool(moved.chains) and not planned.manifest.abandonable
        except CapacityError:
            if not moved.chains:
                raise
            in_the_way = True
        if in_the_way:
            active.takes_cache = False
            moved, planned = alone, plan(alone.occupancy, alone.owners)
        active.chains = moved.chains
        return planned

    def _wait(self, active: ActiveSwitch, reason: str) -> None:
        """Let running requests end, and none begin, until the switch fits. What was copied ahead is given up."""
        self._give_up_ahead(active)
        active.commit_next = False
        active.record.status, active.record.reason = "waiting", f"{reason}; admission is held"
        active.record.waited_steps += 1
        self._scheduler.holds_admission = True

    def _give_up_ahead(self, active: ActiveSwitch) -> None:
        """Go on without what was copied ahead, if anything was."""
        if active.ahead is not None:
            active.ahead.abandon()
            active.ahead, active.may_copy_ahead = None, False

    def look_ahead(self, plan: StepPlan) -> CopyAhead | None:
        """Once the step of `plan` has been sent: do what the switch under way needs, while that step runs.

        Returns:
            what the ranks are to do behind that step.
        """
        active = self._active
        if active is None:
            return None
        if active.before is not None:
            self._describe(active)
        elif active.ahead is not None and not active.commit_next:
            return self._copy_ahead(active, active.ahead, plan)
        elif not self._is_due(active):
            self._begin_ahead(active)
        return None

    def _begin_ahead(self, active: ActiveSwitch) -> None:
        """See whether the switch can be copied ahead now. Where it cannot, it is due at the next boundary."""
        record = active.record
        if reason := never_fits(self._scheduler, self._geometry, active.target):
            self._end("refused", reason)
            return
        ahead = AheadCopies(record.id, active.target, self._geometry, self._scheduler.pool)

        def plan(occupancy: Occupancy, owners: tuple[int, ...]) -> Planned:
            check_room(occupancy, active.target, owners, self._geometry)
            return ahead.plan_window(occupancy, owners, self._scheduler.epoch)

        try:
            planned = self._plan_by(active, plan)
        except CapacityError as error:
            self._wait(active, str(error))
            return
        layers = self._geometry.spec.num_layers
        if record.asked == "layerwise":
            page_size = self._geometry.page_size
            num_pages = sum(-(-request.num_computed // page_size) for request in self._scheduler.running)
            layers = layers_ahead(planned.manifest, self._geometry, num_pages, MANY_PAGES, self.step_bytes)
        record.reason = ahead.begin(planned, layers)
        if record.reason:
            active.commit_next = True
            return
        record.method, record.status = "layerwise" if ahead.streamed else "precopy", "copying"
        self._scheduler.holds_admission = False
        active.ahead = ahead

    def _copy_ahead(self, active: ActiveSwitch, ahead: AheadCopies, plan: StepPlan) -> CopyAhead | None:
        """What to copy behind the step of `plan`. Where that is the last of it, the ranks are asked for their votes."""
        moved, _ = self._moved(active)
        before = {query.request: query.start for query in plan.queries}
        positions = [before.get(request.id, request.num_computed) for request in self._scheduler.running]
        full = [num // self._geometry.page_size for num in positions]
        try:
            order, may_commit = ahead.next(moved.occupancy, moved.owners, full, self._scheduler.epoch, self.step_bytes)
        except CapacityError:
            order, may_commit = None, False
        if order is None:
            active.commit_next = True
            active.record.reason = "room to copy ahead ran out; the rest moves with the commit"
            return None
        active.record.background_steps += 1
        if not may_commit:
            return order
        rest = self._go_over(active, ahead)
        return order if rest is None else msgspec.structs.replace(order, rest=rest, streamed=ahead.streamed)

    def _go_over(self, active: ActiveSwitch, ahead: AheadCopies) -> tuple[PreparedPages, ...] | None:
        """Go over to the target state in the books, once the order on its way has been carried out.

        Returns:
            the pages of that state that the ranks do not know yet, or None where it takes a commit with a manifest.
        """
        if self._is_refused(active):
            return None
        try:
            planned = self._plan(active)
            validate(planned.manifest, self._geometry, planned.prepared)
        except (CapacityError, ValueError):
            planned = None  # the commit says so
        if planned is None or not ahead.is_settled(planned.manifest):
            active.commit_next = True
            return None
        rest = last_pages(planned.manifest, with_cached=bool(ahead.streamed))
        active.is_prepared, active.told = True, ahead.digest_with(rest)
        self._rebase(active, planned)
        return rest

    def _is_refused(self, active: ActiveSwitch) -> bool:
        """Whether a request that came since could never be served after the switch, which has then ended."""
        reason = never_fits(self._scheduler, self._geometry, active.target)
        if reason:
            self._end("refused", reason)
        return bool(reason)

    def _rebase(self, active: ActiveSwitch, planned: Planned) -> None:
        after = pages_after(self._scheduler, self._geometry, active.target, planned, active.chains, active.ahead)
        active.planned, active.before = planned, self._scheduler.rebase(*after)
        active.record.status = "committing"

    def decide(self, votes: Sequence[Vote]) -> None:
        """Take in what the ranks have voted: the next step commits, or the switch has failed."""
        active = self._active
        assert active is not None and active.before is not None and active.told is not None
        for vote in sorted(votes, key=lambda vote: vote.rank):
            error = vote.error
            if not error and (vote.switch, vote.digest) != (active.record.id, active.told):
                error = "was told of another target state than its peers"
            if error:
                self._scheduler.go_back(active.before)
                active.before = None
                self._end("failed", f"rank {vote.rank} {error}")
                return

    def _commit_prepared(self, active: ActiveSwitch) -> Run:
        """The first step in the target state. From here on the switch is committed, whatever becomes of the ranks."""
        assert active.told is not None
        commit, active.told = PreparedCommit(active.record.id, active.told), None
        self.layout = active.target
        return Run(self._scheduler.schedule() or self._scheduler.schedule_empty(), commit=commit)

    def _commit(self, active: ActiveSwitch) -> Run | None:
        """Plan the first step in the target state, with a manifest. None, with the switch ended, where it does not fit
        any more."""
        record = active.record
        if self._is_refused(active):
            return None
        if active.ahead is not None and active.ahead.streamed:
            self._give_up_ahead(active)  # only the first layers were copied, and a manifest is for all of them alike
        try:
            planned = self._plan(active)
            validate(planned.manifest, self._geometry, planned.prepared)
        except CapacityError as error:
            self._wait(active, str(error))
            return None
        except ValueError as error:
            self._end("failed", str(error))
            return None
        if shortage := staging_shortage(planned, self._geometry, self._staging_bytes):
            self._wait(active, shortage)
            return None
        if active.ahead is None:
            record.method = record.asked if record.asked in ("layerwise", "blocking") else "layerwise"
        self._rebase(active, planned)
        self._scheduler.holds_admission = False
        plan = self._scheduler.schedule() or self._scheduler.schedule_empty()
        return Run(plan, switch=SwitchOrder(record.id, planned.manifest, layerwise=record.method == "layerwise"))

    def _describe(self, active: ActiveSwitch) -> None:
        """Say in the record what the committing step does."""
        record, planned = active.record, active.planned
        if planned is None or record.pages_kept:
            return
        record.describe(
            count(planned.manifest, self._geometry) if active.ahead is None else active.ahead.count(planned)
        )

    def settle(self, outcome: SwitchOutcome) -> bool:
        """Take in the outcome of the step in flight. Returns whether the step has run; if not, it is retracted here."""
        active = self._active
        assert active is not None and active.before is not None and active.planned is not None
        record, ahead = active.record, active.ahead
        self._describe(active)
        if outcome.error:
            self._scheduler.retract(active.before)
            active.before = None
            reason = outcome.error
            if not outcome.recoverable:
                self._recompute(active)
                reason += "; the cache is lost, and what ran is computed again"
            self._end("failed", reason)
            return False
        self._scheduler.pool.free(active.planned.withheld)
        none = [0] * self._geometry.ranks
        kv, weights = (none, none) if ahead is None else (ahead.kv_bytes, ahead.weight_bytes)
        record.kv_bytes_received = [a + b for a, b in zip(kv, outcome.kv_bytes or none, strict=True)]
        record.weight_bytes_received = [a + b for a, b in zip(weights, outcome.weight_bytes or none, strict=True)]
        record.added_ms = outcome.exposed_s * 1e3
        self.layout = active.target
        active.ahead = None  # what it claimed belongs to the pool that has been replaced
        self._end("committed", record.reason)
        return True

    def lose(self, reason: str) -> None:
        """The ranks have died, whose memory is lost: the switch under way has failed, and `layout` is as before it.

        Only where a prepared switch was sent is it committed, and the ranks begin anew in its target.
        """
        active = self._active
        if active is None:
            return
        before, active.before = active.before, None
        if active.is_prepared and active.told is None:
            assert active.planned is not None
            self._scheduler.pool.free(active.planned.withheld)
            active.ahead = None
            self._end("committed", reason)
            return
        if before is not None and active.is_prepared:
            self._scheduler.go_back(before)
        elif before is not None:
            self._scheduler.retract(before)
        self._end("failed", reason)

    def _recompute(self, active: ActiveSwitch) -> None:
        """The cache is lost. Go on in a layout whose weights are sure to be whole, and compute all requests again."""
        self._scheduler.preempt_all()
        if self.layout.projections is Projections.REPLICATED and active.target.projections is Projections.SHARDED:
            # Pages may have been written over weights that the source needs; a rank's own share is never touched.
            self.layout = active.target
            self._scheduler.rebase(PrefixCache.of_geometry(self._geometry, active.target), {})

    def _end(self, status: str, reason: str) -> None:
        active = self._active
        assert active is not None
        if active.ahead is not None:
            active.ahead.abandon()
        self._scheduler.holds_admission = False
        self._active = None
        self._close(active, status, reason)
        if self._queued is not None:
            queued, self._queued = self._queued, None
            self._begin(queued)

    def _close(self, active: ActiveSwitch, status: str, reason: str) -> None:
        active.record.status, active.record.reason = status, reason
        self.history.append(active.record)
        self.on_end(active.record, self._clock() - active.asked_at)
        active.done(active.record)
