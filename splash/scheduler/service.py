"""Service: which requests hold pages and which wait, in which order, and who makes room for whom.

The order of service is by priority, the lower number first, then by arrival. A request is admitted with the pages of
all tokens that it has, so a prefill never stalls half-way. Where a request cannot grow by a page, the last in the order
of service on the ranks that lack one gives up its pages and waits, to be computed again from its prompt and output; so
does a less important one for a waiting request that has no room. With a prefix cache a request begins behind those of
its full pages that are in the cache, its own of before included.

Why everything ends. Requests make room only for those before them in the order of service, for one that waits only if
they are of another priority, and only if it then runs in the same step. So each is preempted at most as often as those
before it are admitted or get a page, and as often as it needs a page that only they could give, each time one more: a
bounded number of times, by induction from the first, which never is. And the first always progresses: it runs with rows
in every step, or nobody is admitted before it and it waits for requests as important as itself, the first of which
progresses. Nobody overtakes the first in the queue but short prompts and, in layouts whose owners compute what is
theirs, prompts of other owners, as long as older prompts have all the rows that it would need; and they leave it its
pages. While it waits for pages that a running request is computing (`splash.scheduler.leaders`), others go on, for as
many steps as those pages take. A stream of more important requests that never ends does keep others waiting: that is
what priorities ask for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from splash.core.pages import HeldPages
from splash.scheduler.admission import Admission, Place, is_stuck
from splash.scheduler.chunks import Batch, Prompt
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.leaders import Leaders
from splash.scheduler.page_keys import Keys
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.queries import Following
from splash.scheduler.queue import WaitingQueue
from splash.scheduler.request import Request, held_pages
from splash.scheduler.traffic import PROMPTS

LOOK_AHEAD = 16  # requests behind the first in the queue that may be short enough to begin before it
MOST_HELD = 1024  # requests that wait for a leader and are passed over in one step
FEW = 32  # where less than one of so many ends, each that does is looked for, else all are looked at

_by_order = attrgetter("order")


class Service:
    """The requests that hold pages and those that wait for some.

    Args:
        config: limits.
        pool: the group's pages, in the layout to serve in.

    Attributes:
        num_preemptions: how often a request lost its pages to another.
        num_queried, num_hit: tokens of prompts that were looked for in the cache, and those of them that were there.
        rows_begun: rows that the last prompts had to compute when they began for the first time, or again after all
            was lost, the last one last.
        num_begun: how many such prompts there have been.
        holds_admission: while set, waiting requests stay where they are.
    """

    def __init__(self, config: SchedulerConfig, pool: PrefixCache) -> None:
        self.config = config
        self.pool = pool
        self.num_preemptions = 0
        self.num_queried = 0
        self.num_hit = 0
        self.rows_begun: deque[int] = deque(maxlen=PROMPTS)
        self.num_begun = 0
        self.holds_admission = False
        self._max_running = min(config.max_num_seqs, config.max_batched_tokens)
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in order of service
        # Of the last step, and whether requests in it have lost their pages since. None where it is not known.
        self._following: Following | None = None
        self._has_released = False
        self._tokens = [0] * pool.ranks  # of running requests, by owner
        self._owned = [0] * pool.ranks  # running requests, by owner
        self._num_not_greedy = 0  # running requests that are not greedy
        self._released: list[int] = []  # for the next plan, as the following one
        self._finished: list[int] = []

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold pages, in order of service, those aborted in flight included."""
        return tuple(self._running)

    def first_waiting(self, limit: int) -> list[Request]:
        """Some of the waiting requests, the first ones among them, in no particular order."""
        return self._waiting.sample(limit)

    def first_is_stuck(self) -> tuple[bool, Keys]:
        """Where all that run decode: whether nobody who waits could begin, and the keys of pages whose entry into the
        cache may change that."""
        request = self._waiting.first
        if request is None or self.holds_admission:
            return True, ()
        return is_stuck(request, self.config, self.pool, self._running, self._tokens), request.keys

    def admit(self, chunks: list[Prompt]) -> Batch | None:
        """Let waiting requests begin in a step without a plan, in which all that run but those of `chunks` decode.

        Returns:
            the step; None where others may have to make way for the first that waits, or nobody runs.
        """
        first = self._waiting.first
        if first is not None and self._running and self._running[-1].priority > first.priority:
            return None
        batch = Batch.of_step(self.pool.layout, self.config.max_batched_tokens, self._owned, chunks)
        batch = self._admit_waiting(batch)
        return batch if self._running else None

    def _grow_decoding(self) -> tuple[list[list[Request]], Batch]:
        """Give each running request with one token to compute the page that it needs.

        Returns:
            by owner, the requests that decode, those included that have lost their pages since the last step; and the
            step so far.
        """
        if self._following is None:
            self._following = Following.of(self._running, self.pool.ranks, self.config.page_size)
        _, beginning, unfinished = self._following
        decoding = self._following.decoding.copy()
        chunks: list[Prompt] = []
        for request in unfinished:
            left, held = len(request.tokens) - request.num_computed, request.held
            if held is None:
                continue
            if left > 1:
                chunks.append(Prompt(request.order, left, request, held.owner))
            else:
                decoding[held.owner] = sorted([*decoding[held.owner], request], key=_by_order)
        growing = [request.held for request in beginning if request.held is not None]
        if growing and not self.pool.grow_each(growing):
            wanting = set(growing)
            for request in [request for request in self._running if request.held in wanting]:
                if request.held is not None:  # else preempted for one before it
                    self._grow(self._running.index(request))
            chunks = [chunk for chunk in chunks if chunk.request.held is not None]
        return decoding, Batch.of_step(self.pool.layout, self.config.max_batched_tokens, self._owned, chunks)

    def _admit_waiting(self, batch: Batch) -> Batch:
        """Let waiting requests begin, in order of service, as long as there are rows and pages for them."""
        held: list[Request] = []
        leaders = self._leaders(batch)
        while not self.holds_admission and (request := self._waiting.first) is not None:
            if leaders.hold(request):
                if len(held) == MOST_HELD:
                    break
                held.append(request)
                self._waiting.pop()
                continue
            may_join = len(self._running) < self._max_running  # then there is a row for it as well
            others_make_way = bool(self._running) and self._running[-1].priority > request.priority
            if not may_join and not others_make_way:
                break
            admission = Admission(self.config, self.pool, request)
            place, begins = admission.place_with_rows(self._tokens, batch) if may_join else (None, False)
            if place is None:
                found = admission.place_of_others(self._tokens, self._running) if others_make_way else None
                if found is None:
                    break
                place, victims = found
                after = batch.without(victims)
                if not after.admits(request, admission.left(place.owner), place.owner):
                    break
                batch = after
                for victim in victims:
                    self._preempt(self._running.index(victim))
                leaders = self._leaders(batch)
            elif not begins:
                self._admit_short(batch, place, leaders)
                break
            self._waiting.pop()
            self._begin(request, admission, place)
            batch.add(request, admission.left(place.owner), place.owner)
            leaders.add(request)
        for request in held:
            self._waiting.push(request)
        return batch

    def _leaders(self, batch: Batch) -> Leaders:
        """Of a step so far."""
        chunks = batch.chunks if self.config.prefix_cache else ()
        return Leaders(self.pool, self.config.page_size, [chunk.request for chunk in chunks])

    def _admit_short(self, batch: Batch, reserved: Place, leaders: Leaders) -> None:
        """Let short prompts begin before the first in the queue, which has to wait for rows, and leave it its place."""
        passed: list[Request] = []
        while len(passed) < LOOK_AHEAD and len(self._running) + 1 < self._max_running:
            request = self._waiting.pop()
            if request is None:
                break
            passed.append(request)
            if len(passed) == 1 or leaders.hold(request):
                continue
            admission = Admission(self.config, self.pool, request)
            if not any(batch.admits(request, admission.left(rank), rank) for rank in range(self.pool.ranks)):
                continue
            place, begins = admission.place_with_rows(self._tokens, batch, reserved.takes)
            if place is None or not begins:
                continue
            passed.pop()
            self._begin(request, admission, place)
            batch.add(request, admission.left(place.owner), place.owner)
            leaders.add(request)
        for request in passed:
            self._waiting.push(request)

    def _begin(self, request: Request, admission: Admission, place: Place) -> None:
        """Give a waiting request its pages and let it run."""
        request.held = HeldPages(place.owner, self.pool.ranks)
        if not request.announced:
            self.rows_begun.append(admission.left(place.owner))
            self.num_begun += 1
        if self.config.prefix_cache:
            self.pool.share(request.held, place.shared)
            request.num_computed = len(place.shared) * self.config.page_size
            if not request.announced:
                request.num_cached = min(request.num_computed, request.num_prompt)
                self._count_found(request, 1)
        grown = self.pool.grow(request.held, admission.num_pages - len(request.held))
        assert grown
        if self._running and request.order < self._running[-1].order:
            insort(self._running, request, key=_by_order)
        else:
            self._running.append(request)
        self._tokens[place.owner] += len(request.tokens)
        self._owned[place.owner] += 1
        self._num_not_greedy += not request.is_greedy

    def _count_found(self, request: Request, times: int) -> None:
        if self.config.prefix_cache:
            self.num_queried += times * request.num_prompt
            self.num_hit += times * request.num_cached

    def _grow(self, index: int) -> None:
        """Add a page to the running request at `index`, making room by preemption, in the end its own."""
        running = self._running
        held = held_pages(running[index])
        while not self.pool.grow(held, 1):
            lacking = self.pool.lacking(held.owner, len(held), 1)
            victim = len(running) - 1
            while victim > index and not self.pool.lies_on(held_pages(running[victim]), lacking):
                victim -= 1
            self._preempt(victim)
            if victim == index:
                return

    def _preempt(self, index: int) -> None:
        """Take the pages of the running request at `index` and let it wait, in its place in the order of service."""
        request = self._running.pop(index)
        self._release([request])
        request.num_computed = 0
        self._waiting.push(request)
        self.num_preemptions += 1

    def _release(self, requests: Sequence[Request]) -> None:
        """Free the pages of running requests. The next plan tells the ranks."""
        self._has_released = True
        self.pool.release(*[held_pages(request) for request in requests])
        for request in requests:
            owner = held_pages(request).owner
            self._tokens[owner] -= len(request.tokens)
            self._owned[owner] -= 1
            self._num_not_greedy -= not request.is_greedy
            self._released.append(request.id)
            request.held = None

    def _retire_all(self, requests: Sequence[Request]) -> None:
        """Let requests that ran be over."""
        if requests:
            self._release(requests)
            self._finished += [request.id for request in requests]
            running = self._running
            if len(requests) * FEW < len(running):
                for request in requests:
                    del running[bisect_left(running, request.order, key=_by_order)]
            else:
                self._running = [request for request in running if request.held is not None]

    def _count_running(self) -> None:
        """Count anew what is counted of running requests, after they have got other pages."""
        self._following = None
        self._tokens, self._owned, self._num_not_greedy = [0] * self.pool.ranks, [0] * self.pool.ranks, 0
        for request in self._running:
            self._tokens[held_pages(request).owner] += len(request.tokens)
            self._owned[held_pages(request).owner] += 1
            self._num_not_greedy += not request.is_greedy
