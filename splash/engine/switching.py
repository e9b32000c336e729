"""Switcher: takes one switch at a time from its request to its record, a step boundary at a time.

waiting     the target has no room yet, or its staging would be too large: admission is held until it fits
copying     pages and weights are copied after ordinary steps, at most so many bytes a step
committing  the step in flight runs in the target state if its switch succeeds, and has not run otherwise
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splash.core.decision import Decision
from splash.core.errors import CapacityError, ConfigError
from splash.core.layout import KV, Layout, Projections, check_layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import HeldPages, HolderTable, PageTable
from splash.core.step import NO_SLOT, StepPlan
from splash.engine.ahead import MANY_PAGES, AheadCopies
from splash.engine.messages import Run
from splash.scheduler.idle_pages import Chain
from splash.scheduler.owners import balance_owners
from splash.scheduler.prefix_cache import MOST_TAKEN_ALONG, PrefixCache
from splash.scheduler.request import Rebase
from splash.scheduler.scheduler import Scheduler
from splash.switch.checks import validate
from splash.switch.manifest import Occupancy, Planned, count, page_flags, plan_switch, rank_copies
from splash.switch.orders import METHODS, CopyAhead, SwitchOrder, SwitchOutcome, SwitchRecord

HISTORY = 1000


@dataclass(frozen=True, eq=False)
class Moved:
    """What a switch moves.

    Attributes:
        occupancy: the running requests, then the chains, which stand for requests of negative ids.
        owners: owner after the switch of each.
        chains: idle pages of the cache.
    """

    occupancy: Occupancy
    owners: tuple[int, ...]
    chains: tuple[Chain, ...]


@dataclass(eq=False)
class _Active:
    """The switch under way."""

    record: SwitchRecord
    target: Layout
    rebalance: bool
    done: Callable[[SwitchRecord], None]
    owners: dict[int, int] = field(default_factory=dict)  # chosen so far, where the switch chooses them
    may_copy_ahead: bool = True
    takes_cache: bool = True  # whether idle pages of the cache are taken along
    chains: tuple[Chain, ...] = ()  # that the last plan takes along
    ahead: AheadCopies | None = None
    commit_next: bool = False
    ordered: tuple[CopyAhead | None, bool] | None = None  # what the next step copies, and whether the one after commits
    before: Rebase | None = None
    planned: Planned | None = None
    asked_at: float = 0.0


class Switcher:
    """Carries out switches on behalf of an engine.

    Args:
        scheduler: whose requests and pages are switched.
        geometry: of the arenas.
        staging_bytes: most that a rank may stage for one layer.
        step_bytes: most that a rank copies ahead after one step.
        clock: the time in seconds, from any origin.

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
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._geometry = geometry
        self._staging_bytes = staging_bytes
        self.step_bytes = step_bytes
        self._active: _Active | None = None
        self._queued: _Active | None = None  # asked for while another was committing
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
        active = _Active(record, target, rebalance, done, asked_at=self._clock())
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

    def _begin(self, active: _Active) -> None:
        active.record.source = self.layout.name
        self._active = active
        if active.target == self.layout and not active.rebalance:
            self._end("committed", "this is the layout already")

    @property
    def committing(self) -> bool:
        """Whether the step in flight carries a switch."""
        return self._active is not None and self._active.before is not None

    def abort(self) -> None:
        """Give up the switch under way, and what was asked for after it. One that is committing ends by itself."""
        if self._queued is not None:
            queued, self._queued = self._queued, None
            self._close(queued, "aborted", "")
        if self._active is not None and not self.committing:
            self._end("aborted", "")

    def next_run(self) -> Run | None:
        """Plan the next step, with whatever the switch under way does in it. None where there is nothing to run."""
        active = self._active
        if active is not None and active.ahead is None:
            self._start(active)
            active = self._active
        if active is None:
            plan = self._scheduler.schedule()
            return None if plan is None else Run(plan)
        if active.commit_next or (active.ahead is not None and not self._scheduler.running):
            run = self._commit(active)
            if run is not None:
                return run
            active = self._active
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        if active is None or active.ahead is None:
            return Run(plan)
        return self._copy_ahead(active, active.ahead, Run(plan))

    def _occupancy(self, target: Layout) -> Occupancy:
        running = self._scheduler.running
        held = [request.held for request in running]
        return Occupancy(
            layout=self.layout,
            requests=tuple(request.id for request in running),
            owners=tuple(pages.owner for pages in held if pages is not None),
            written=tuple(request.num_computed for request in running),
            tables=tuple(pages.table for pages in held if pages is not None),
            pages=tuple(pages.ids for pages in held if pages is not None),
            idle=self._scheduler.pool.idle_slots(target),
        )

    def _with_chains(self, active: _Active, occupancy: Occupancy, owners: Sequence[int]) -> Moved:
        """What moves: running requests, and of the idle pages of the cache what there is room for."""
        cache, ranks = self._scheduler.pool, self._geometry.ranks
        if not (active.takes_cache and any(cache.num_idle)):
            return Moved(occupancy, tuple(owners), ())
        # What is copied ahead fills slots of the pool as well, and those are counted as wanted.
        held = occupancy.pages_wanted(self.layout, occupancy.owners, ranks)
        wanted = occupancy.pages_wanted(active.target, owners, ranks)
        slots = [len(self._geometry.page_slots(active.target, rank)) for rank in range(ranks)]
        room = [
            min(own, total) - before - after
            for own, total, before, after in zip(slots, cache.num_total, held, wanted, strict=True)
        ]
        chains = tuple(cache.chains(active.target, room, MOST_TAKEN_ALONG))
        if not chains:
            return Moved(occupancy, tuple(owners), ())
        page_size = self._geometry.page_size
        along = {page for chain in chains for page in chain.pages}
        extended = Occupancy(
            layout=occupancy.layout,
            requests=occupancy.requests + tuple(range(-1, -1 - len(chains), -1)),
            owners=occupancy.owners + tuple(chain.pages[-1].place for chain in chains),
            written=occupancy.written + tuple(len(chain.pages) * page_size for chain in chains),
            tables=occupancy.tables + tuple(PageTable(ranks, [page.slots for page in chain.pages]) for chain in chains),
            pages=(occupancy.pages or ()) + tuple([page.id for page in chain.pages] for chain in chains),
            idle=cache.idle_slots(active.target, along),
        )
        return Moved(extended, (*owners, *(chain.owner for chain in chains)), chains)

    def _owners(self, active: _Active, occupancy: Occupancy) -> tuple[int, ...]:
        """Owners after the switch: the same where pages are with their owner already, else balanced anew."""
        if not active.rebalance and (self.layout.kv is KV.REQUEST or active.target.kv is not KV.REQUEST):
            return occupancy.owners
        room = [len(self._geometry.page_slots(active.target, rank)) for rank in range(self._geometry.ranks)]
        # What was copied ahead lies with the owner that was chosen then.
        chosen = [active.owners.get(request) for request in occupancy.requests] if active.ahead is not None else None
        owners = balance_owners([len(table) for table in occupancy.tables], room, chosen)
        active.owners = dict(zip(occupancy.requests, owners, strict=True))
        return tuple(owners)

    def _plan(self, active: _Active) -> Planned:
        """Plan what is to move now, without the idle pages of the cache where they would be in the way."""
        started = self._clock()
        occupancy = self._occupancy(active.target)
        owners = self._owners(active, occupancy)
        moved = self._with_chains(active, occupancy, owners)
        try:
            planned = self._plan_moved(active, moved)
            in_the_way = bool(moved.chains) and not planned.manifest.abandonable
        except CapacityError:
            if not moved.chains:
                raise
            in_the_way = True
        if in_the_way:
            active.takes_cache = False
            moved = Moved(occupancy, owners, ())
            planned = self._plan_moved(active, moved)
        active.chains = moved.chains
        active.record.planning_ms = (self._clock() - started) * 1e3
        return planned

    def _plan_moved(self, active: _Active, moved: Moved) -> Planned:
        epoch = self._scheduler.epoch
        if active.ahead is not None:
            return active.ahead.plan(moved.occupancy, moved.owners, epoch)
        return plan_switch(moved.occupancy, active.target, moved.owners, self._geometry, epoch)

    def _start(self, active: _Active) -> None:
        """Choose the method, or see whether a switch that waits for room has it now."""
        record = active.record
        if reason := self._never_fits(active):
            self._end("refused", reason)
            return
        try:
            planned = self._plan(active)
        except CapacityError as error:
            self._wait(active, str(error))
            return
        counts = count(planned.manifest, self._geometry)
        moves_bytes = any(counts.kv_bytes) or any(counts.weight_bytes) or any(counts.moved)
        is_work = moves_bytes or len(planned.pages) > MANY_PAGES
        if record.asked in ("auto", "precopy") and active.may_copy_ahead and is_work and self._scheduler.running:
            ahead = AheadCopies(record.id, active.target, self._geometry, self._scheduler.pool)
            record.reason = ahead.begin(planned)
            if not record.reason:
                record.method, record.status = "precopy", "copying"
                self._scheduler.holds_admission = False
                active.ahead = ahead
                return
        record.method = record.asked if record.asked in ("layerwise", "blocking") else "layerwise"
        if shortage := self._staging_shortage(planned):
            self._wait(active, shortage)
            return
        active.planned = planned  # it is committed at this very boundary
        active.commit_next = True

    def _wait(self, active: _Active, reason: str) -> None:
        """Let running requests end, and none begin, until the switch fits. What was copied ahead is given up."""
        if active.ahead is not None:
            active.ahead.abandon()
            active.ahead, active.ordered, active.may_copy_ahead = None, None, False
        active.commit_next = False
        active.record.status, active.record.reason = "waiting", f"{reason}; admission is held"
        active.record.waited_steps += 1
        self._scheduler.holds_admission = True

    def _staging_shortage(self, planned: Planned) -> str:
        """Why a rank cannot stage a layer of the switch, or an empty string."""
        geometry = self._geometry
        group_bytes = geometry.attention_bytes // geometry.ranks
        needs = []
        for rank in range(geometry.ranks):
            copies = rank_copies(planned.manifest, geometry, rank)
            needs.append(
                copies.num_staged * geometry.slot_bytes + copies.weights_staged * len(copies.weights) * group_bytes
            )
        if max(needs) <= self._staging_bytes:
            return ""
        return f"it would stage {max(needs)} bytes a layer, and a rank has {self._staging_bytes}"

    def _never_fits(self, active: _Active) -> str:
        """Why a live request could never run to its end in the target, even alone, or an empty string."""
        ranks, page_size = self._geometry.ranks, self._geometry.page_size
        room = [len(self._geometry.page_slots(active.target, rank)) for rank in range(ranks)]
        holders = [HolderTable(active.target, owner, ranks) for owner in range(ranks)]
        for request in self._scheduler.requests:
            num_pages = -(-request.max_positions // page_size)
            needs = (table.needs(0, num_pages) for table in holders)
            if not any(all(num <= most for num, most in zip(own, room, strict=True)) for own in needs):
                return (
                    f"layout {active.target} has room for {room} pages on the ranks, and a live request may "
                    f"grow to {num_pages} pages of {page_size} tokens"
                )
        return ""

    def look_ahead(self, plan: StepPlan) -> None:
        """While `plan` is in flight, and no other step: do what the next one needs of the switch under way."""
        active = self._active
        if active is None:
            return
        if active.before is not None:
            self._describe(active)
        elif active.ahead is not None and active.ordered is None and not active.commit_next:
            active.ordered = self._order(active, active.ahead, plan)

    def _order(self, active: _Active, ahead: AheadCopies, plan: StepPlan) -> tuple[CopyAhead | None, bool]:
        """What to copy next, once the step of `plan` is over, and whether the step after may commit."""
        occupancy = self._occupancy(active.target)
        moved = self._with_chains(active, occupancy, self._owners(active, occupancy))
        before = {query.request: query.start for query in plan.queries}
        positions = [before.get(request.id, request.num_computed) for request in self._scheduler.running]
        full = [num // self._geometry.page_size for num in positions]
        try:
            return ahead.next(moved.occupancy, moved.owners, full, self._scheduler.epoch, self.step_bytes)
        except CapacityError:
            return None, True

    def _copy_ahead(self, active: _Active, ahead: AheadCopies, run: Run) -> Run:
        """Add to a step what is copied after it."""
        order, done = active.ordered or self._order(active, ahead, run.plan)
        active.ordered = None
        active.commit_next = done or order is None
        if order is None:
            active.record.reason = "room to copy ahead ran out; the rest moves with the commit"
            return run
        active.record.background_steps += 1
        return Run(run.plan, ahead=order)

    def _commit(self, active: _Active) -> Run | None:
        """Plan the first step in the target state. None, with the switch ended, where it does not fit any more."""
        record = active.record
        if active.ahead is not None and active.ordered is not None and active.ordered[0] is not None:
            active.ahead.take_back(active.ordered[0])  # all requests ended in the step that it was to follow
        active.ordered = None
        if reason := self._never_fits(active):  # a request that came since
            self._end("refused", reason)
            return None
        try:
            planned, active.planned = active.planned or self._plan(active), None
            validate(planned.manifest, self._geometry, planned.prepared)
        except CapacityError as error:
            self._wait(active, str(error))
            return None
        except ValueError as error:
            self._end("failed", str(error))
            return None
        if shortage := self._staging_shortage(planned):
            self._wait(active, shortage)
            return None
        active.before = self._scheduler.rebase(*self._target_pages(active.target, planned, active.chains))
        active.planned = planned
        self._scheduler.holds_admission = False
        record.status = "committing"
        plan = self._scheduler.schedule() or self._scheduler.schedule_empty()
        return Run(plan, switch=SwitchOrder(record.id, planned.manifest, layerwise=record.method == "layerwise"))

    def _describe(self, active: _Active) -> None:
        """Say in the record what the committing step does."""
        record, planned = active.record, active.planned
        if planned is None or record.pages_kept:
            return
        counts = count(planned.manifest, self._geometry) if active.ahead is None else active.ahead.count(planned)
        record.kv_bytes_planned, record.weight_bytes_planned = list(counts.kv_bytes), list(counts.weight_bytes)
        record.pages_kept, record.pages_fetched = list(counts.kept), list(counts.fetched)
        record.pages_moved, record.pages_dropped = list(counts.moved), list(counts.dropped)

    def _target_pages(
        self, target: Layout, planned: Planned, chains: Sequence[Chain]
    ) -> tuple[PrefixCache, dict[int, HeldPages]]:
        """The pages after a switch, with all of the cache that can be kept, and those of each running request."""
        geometry, cache, manifest = self._geometry, self._scheduler.pool, planned.manifest
        before = {request.id: request.held for request in self._scheduler.running if request.held is not None}
        held = {
            id: HeldPages(owner, geometry.ranks, planned.tables[id], before[id].ids)
            for id, owner in zip(manifest.requests, manifest.owners, strict=True)
            if id >= 0
        }
        along = [(chain, planned.tables[-1 - number]) for number, chain in enumerate(chains)]
        usable = [page_flags(geometry, target, rank) for rank in range(geometry.ranks)]
        for rank, flags in enumerate(usable):
            for table in (*(pages.table.slots_cT for pages in held.values()), *(table for _, table in along)):
                flags[table[table[:, rank] != NO_SLOT, rank]] = False
        owners = [(before[id], pages.owner) for id, pages in held.items()]
        survivors = cache.survivors(target, owners, usable, cache.arrived(target, along))
        withheld = [slots.tolist() for slots in planned.withheld]
        for page in survivors:
            for rank, slot in enumerate(page.slots):
                if slot != NO_SLOT:
                    withheld[rank].append(slot)
        pool = PrefixCache.of_geometry(geometry, target, held.values(), withheld)
        pool.inherit(cache, [(before[id], pages) for id, pages in held.items()], survivors)
        return pool, held

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
        ahead_kv = ahead.kv_bytes if ahead is not None else [0] * self._geometry.ranks
        ahead_weights = ahead.weight_bytes if ahead is not None else [0] * self._geometry.ranks
        record.kv_bytes_received = [a + b for a, b in zip(ahead_kv, outcome.kv_bytes, strict=True)]
        record.weight_bytes_received = [a + b for a, b in zip(ahead_weights, outcome.weight_bytes, strict=True)]
        record.added_ms = outcome.exposed_s * 1e3
        self.layout = active.target
        active.ahead = None  # what it claimed belongs to the pool that has been replaced
        self._end("committed", record.reason)
        return True

    def lose(self, reason: str) -> None:
        """The ranks have died, whose memory is lost: the switch under way has failed, and `layout` is as before it."""
        active = self._active
        if active is None:
            return
        if active.before is not None:
            self._scheduler.retract(active.before)
            active.before = None
        self._end("failed", reason)

    def _recompute(self, active: _Active) -> None:
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

    def _close(self, active: _Active, status: str, reason: str) -> None:
        active.record.status, active.record.reason = status, reason
        self.history.append(active.record)
        self.on_end(active.record, self._clock() - active.asked_at)
        active.done(active.record)
