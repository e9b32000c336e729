"""Continuous batching with chunked prefill (Orca, OSDI '22; Sarathi-Serve, OSDI '24) over paged KV.

The order of service is by priority, the lower number first, then by arrival. Every step takes one row of each running
request that has one token left to compute, then chunks of longer ones as `splash.scheduler.chunks` shares them out,
then admits waiting requests, within one budget of rows. A request is admitted with the pages of all tokens that it has,
so a prefill never stalls half-way. Where a request cannot grow by a page, the last in the order of service on the ranks
that lack one gives up its pages and waits, to be computed again from its prompt and output; so does a less important
one for a waiting request that has no room. With a prefix cache a request begins behind those of its full pages that are
in the cache, its own of before included.

Why everything ends. Requests make room only for those before them in the order of service, for one that waits only if
they are of another priority, and only if it then runs in the same step. So each is preempted at most as often as those
before it are admitted or get a page, and as often as it needs a page that only they could give, each time one more: a
bounded number of times, by induction from the first, which never is. And the first always progresses: it runs with rows
in every step, or nobody is admitted before it and it waits for requests as important as itself, the first of which
progresses. Nobody overtakes the first in the queue but short prompts and, in layouts whose owners compute what is
theirs, prompts of other owners, as long as older prompts have all the rows that it would need; and they leave it its
pages. A stream of more important requests that never ends does keep others
waiting: that is what priorities ask for.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter

from msgspec import structs

from splash.core.pages import HeldPages
from splash.core.request import SamplingParams
from splash.core.step import PENDING_TOKEN, NewRequest, StepOutput, StepPlan
from splash.scheduler.admission import Admission, Place, check_capacity, check_request, is_stuck
from splash.scheduler.chunks import Batch, Prompt
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.page_keys import Keys, extend_keys
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.queries import PlannedStep, Rows, enter_pages, make_rows
from splash.scheduler.queue import WaitingQueue
from splash.scheduler.request import Progress, Rebase, Request

LOOK_AHEAD = 16  # requests behind the first in the queue that may be short enough to begin before it

_by_order = attrgetter("order")


class Scheduler:
    """Decides what each step computes. `schedule` and `apply` alternate, with one step in flight; or, to plan each step
    while the one before it runs: `schedule`, and then over and over `foresee`, `schedule`, `apply`, with two.

    Args:
        config: limits.
        pool: the group's pages, in the layout to serve in.

    Attributes:
        epoch: number of layout changes so far, stamped on every plan.
        num_preemptions: how often a request lost its pages to another.
        num_queried, num_hit: tokens of prompts that were looked for in the cache, and those of them that were there.
        holds_admission: while set, waiting requests stay where they are.
    """

    def __init__(self, config: SchedulerConfig, pool: PrefixCache) -> None:
        self.config = config
        self.pool = pool
        self.epoch = 0
        self.num_preemptions = 0
        self.num_queried = 0
        self.num_hit = 0
        self._max_running = min(config.max_num_seqs, config.max_batched_tokens)
        self._step = 0
        self._num_arrived = 0
        self._requests: dict[int, Request] = {}  # the live ones
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in order of service
        # See `Rows`, as of the last step, some of which may have lost their pages since. None where that is not known.
        self._turning: list[Request] | None = None
        self._tokens = [0] * pool.ranks  # of running requests, by owner
        self._owned = [0] * pool.ranks  # running requests, by owner
        self._in_flight: deque[PlannedStep] = deque()
        self._pool_before: PrefixCache | None = None  # what `retract` would go back to
        self._aborted_in_flight: list[Request] = []
        self._ending: list[Request] = []  # get their last token by the step that has been foreseen, and hold no pages
        self._released: list[int] = []  # for the next plan, as the following one
        self._finished: list[int] = []
        self.holds_admission = False

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Live requests that hold pages."""
        return len(self._running) - len(self._aborted_in_flight)

    @property
    def num_waiting(self) -> int:
        """Live requests that hold none: new ones, and preempted ones."""
        return len(self._requests) - self.num_running - len(self._ending)

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold pages, in order of service, those aborted in flight included."""
        return tuple(self._running)

    def first_waiting(self, limit: int) -> list[Request]:
        """Some of the waiting requests, the first ones among them, in no particular order."""
        return self._waiting.sample(limit)

    def add(
        self, id: int, prompt: Sequence[int], params: SamplingParams, seed: int, priority: int = 0, keys: Keys = ()
    ) -> None:
        """Queue a request. `id` is never used again. `max_tokens` is clipped to the model's length.

        `keys` name its first full pages, as far as the caller can: equal ones must mean equal tokens up to there.

        Raises:
            RequestError: the prompt is empty, it or its output cannot fit in the model's length or in memory, or the
                priority is not a 64-bit integer.
        """
        assert id not in self._requests, f"request {id} is live"
        prompt = tuple(prompt)
        check_request(prompt, priority, self.config.max_model_len)
        request = Request.of(NewRequest(id, prompt, params, seed), priority, self._num_arrived, self.config, keys)
        for pool in (self.pool, self._pool_before):  # the step in flight may be retracted
            if pool is not None:
                check_capacity(request, pool, self.config.page_size)
        if self.config.prefix_cache and not request.is_unscored:
            extend_keys(request.keys, prompt, self.config.page_size, (len(prompt) - 1) // self.config.page_size)
        self._num_arrived += 1
        self._requests[id] = request
        self._waiting.push(request)

    def abort(self, id: int) -> None:
        """Drop a request, whose output is ignored from now on. One that is not live is passed over.

        Ranks may still write to the pages of a step in flight: those are freed when its output is applied.
        """
        request = self._requests.pop(id, None)
        if request is None:
            return
        request.live = False
        if request.held is None:
            if request.announced and request not in self._ending:
                self._finished.append(id)
        elif self._in_flight:
            self._aborted_in_flight.append(request)
        else:
            self._retire_all([request])

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None where nobody has anything to compute. Releases then wait for the plan after."""
        assert not self._in_flight or [step.is_foreseen for step in self._in_flight] == [True], "a step is in flight"
        batch = self._admit_waiting(self._grow_decoding())
        if not self._running:
            in_use = self.pool.num_free != self.pool.num_total  # a switch under way may hold pages of its own
            assert not self.num_waiting or self.holds_admission or in_use, "a request waits for pages that nobody holds"
            return None
        new = [request.new for request in sorted(batch.new, key=_by_order) if not request.announced]
        for request in batch.new:
            request.announced = True
        rows = make_rows(self._running, batch, self.pool.ranks, self.config.page_size)
        self._turning = rows.turning
        return self._plan(rows, new)

    def schedule_empty(self) -> StepPlan:
        """Plan a step without rows, for what it carries beside them."""
        assert not self._in_flight or [step.is_foreseen for step in self._in_flight] == [True], "a step is in flight"
        return self._plan(Rows(self.pool.ranks), [])

    def _plan(self, rows: Rows, new: list[NewRequest]) -> StepPlan:
        plan = StepPlan(
            self._step,
            self.epoch,
            self.pool.layout.name,
            tuple(chain.from_iterable(rows.queries)),
            tuple(new),
            tuple(self._released),
            tuple(self._finished),
            all([request.is_greedy for request in self._running]),
        )
        self._step += 1
        self._released.clear()
        self._finished.clear()
        self._in_flight.append(PlannedStep(plan, list(chain.from_iterable(rows.sampled)), rows.filling))
        return plan

    def foresee(self) -> None:
        """Go on from the step in flight before it is over, with `PENDING_TOKEN` for each token that it samples.

        A request that has all its tokens then gives up its pages. One that ends by what its token is does not: the next
        step may compute a row of it in vain.
        """
        (step,) = self._in_flight
        assert not step.is_foreseen
        step.is_foreseen = True
        if self.config.prefix_cache:
            enter_pages(self.pool, step.filling, self.config.page_size)
            self.pool.enter_full(2 * len(step.plan.queries) // self.config.page_size + 1)  # twice what is usual
        retired, self._aborted_in_flight = self._aborted_in_flight, []
        tokens_T = self._tokens
        for request in step.sampled:
            if request.live:
                tokens, held = request.tokens, request.held
                assert held is not None
                tokens.append(PENDING_TOKEN)
                tokens_T[held.owner] += 1
                if len(tokens) >= request.most_tokens:
                    self._ending.append(request)
        self._retire_all(retired + self._ending)

    def apply(self, output: StepOutput) -> list[Progress]:
        """Take in what the step in flight brought: one `Progress` for each token of a request that is still live."""
        first = [(step.plan.step, step.plan.epoch) for step in self._in_flight][:1]
        assert first == [(output.step, output.epoch)], "not the step in flight"
        step = self._in_flight[0]
        assert output.requests == tuple([request.id for request in step.sampled])
        if not step.is_foreseen:
            self.foresee()
        self._in_flight.popleft()
        if output.epoch == self.epoch:
            self._pool_before = None
        self._ending = []
        for id, position, scores in output.scores:
            if id in self._requests:
                self._requests[id].take_scores(position, scores)
        progress, ended = step.take(output, self.config.eos_token_ids)
        for request in ended:
            del self._requests[request.id]
            if request.held is None and not request.has_all_tokens:  # preempted since
                self._finished.append(request.id)
        self._retire_all([request for request in ended if request.held is not None])
        return progress

    def first_is_stuck(self) -> tuple[bool, Keys]:
        """Whether nobody who waits could begin, and the keys of pages whose entry into the cache may change that."""
        request = self._waiting.first
        if request is None or self.holds_admission:
            return True, ()
        return is_stuck(request, self.config, self.pool, self._running, self._tokens), request.keys

    def skip(self, num_steps: int) -> None:
        """Count steps that were planned and applied elsewhere: `splash.scheduler.decode_run`."""
        self._step += num_steps
        self._released, self._finished = [], []
        self._turning = None
        self._count_by_owner()

    def rebase(self, pool: PrefixCache, held: Mapping[int, HeldPages]) -> Rebase:
        """Go on in another layout, or with other owners, from the next step on; those in flight end as they began.

        Args:
            pool: the pages of the target state.
            held: the pages of every running request there, as many as it has now.

        Returns:
            what it takes to go back: with `retract` should the next step fail, with `go_back` before there is one.
        """
        before = Rebase(self.pool, tuple((request, request.held, request.num_computed) for request in self._running))
        self._pool_before = self.pool
        self.pool = pool
        self.epoch += 1
        for request in self._running:
            assert request.held is not None and len(held[request.id]) == len(request.held)
            request.held = held[request.id]
        self._count_by_owner()
        return before

    def go_back(self, before: Rebase) -> None:
        """Undo `rebase`, of which no step has been planned yet."""
        self.pool, self._pool_before, self.epoch = before.pool, None, self.epoch - 1
        self.pool.release(*[held for request, held, _ in before.requests if request.held is None and held is not None])
        for request, held, _ in before.requests:
            request.held = None if request.held is None else held
        self._count_by_owner()

    def retract(self, before: Rebase) -> None:
        """Undo `rebase` and the step planned since, which no rank has run.

        What that step admitted waits again; what it preempted stays preempted; what was aborted meanwhile is let go.
        """
        (step,) = self._in_flight  # the one after the rebase
        plan = step.plan
        self._in_flight.clear()
        self._turning = None
        self._pool_before = None
        after, self.pool = self.pool, before.pool
        self.epoch -= 1
        unheard = {new.id for new in plan.new}
        known = {request.id for request, _, _ in before.requests}
        admitted = [request for request in self._running if request.id not in known]
        still_running = {request.id for request in self._running}
        lost = {request.id for request, _, _ in before.requests if request.id not in still_running}
        self._released[:0] = [id for id in plan.released if id in lost or id not in known]
        self._finished[:0] = plan.finished
        self._running = []
        self._aborted_in_flight = []
        for request, held, num_computed in before.requests:
            assert held is not None
            if request.id not in still_running:
                self.pool.release(held)
                continue
            request.held, request.num_computed = held, num_computed
            self._running.append(request)
        self._count_by_owner()
        self._retire_all([request for request in self._running if not request.live])
        self.pool.distrust(after)
        for request in admitted:
            request.held, request.num_computed = None, 0
            if request.id in unheard:
                request.announced = False
                self._count_found(request, -1)
            if request.live:
                self._waiting.push(request)
            elif request.announced:
                self._finished.append(request.id)

    def preempt_all(self) -> None:
        """Take every running request's pages: the cache is lost, and all is computed again from tokens."""
        assert not self._in_flight, "a step is in flight"
        while self._running:
            self._preempt(len(self._running) - 1)
        self.pool.evict()

    def start_over(self) -> None:
        """The ranks have died and others take their place, which know nothing: tell and compute everything anew."""
        self._in_flight.clear()
        self._pool_before = None
        self._retire_all(self._aborted_in_flight)
        self._aborted_in_flight = []
        for request in self._requests.values():
            if request.tokens[-1] == PENDING_TOKEN:
                request.tokens.pop()
            if request.announced:
                request.announced = False
                self._count_found(request, -1)
                request.new = structs.replace(request.new, output=tuple(request.tokens[request.num_prompt :]))
        self._count_by_owner()
        for request in self._ending:
            request.num_computed = 0
            self._waiting.push(request)
        self._ending = []
        self.preempt_all()
        self._released, self._finished = [], []

    def _count_by_owner(self) -> None:
        self._tokens, self._owned = [0] * self.pool.ranks, [0] * self.pool.ranks
        for request in self._running:
            self._tokens[_held(request).owner] += len(request.tokens)
            self._owned[_held(request).owner] += 1

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, running and waiting."""
        return tuple(self._requests.values())

    def _grow_decoding(self) -> Batch:
        """Give each running request with one token to compute the page that it needs. Returns the step so far."""
        page_size = self.config.page_size
        chunks: list[Prompt] = []
        growing: list[HeldPages] = []
        for request in self._running if self._turning is None else self._turning:
            start, held = request.num_computed, request.held
            if held is None:
                continue
            left = len(request.tokens) - start
            if left > 1:
                chunks.append(Prompt(request.order, left, request, held.owner))
            elif not start % page_size and len(held.ids) * page_size == start:
                growing.append(held)
        if growing and not self.pool.grow_each(growing):
            wanting = set(growing)
            for request in [request for request in self._running if request.held in wanting]:
                if request.held is not None:  # else preempted for one before it
                    self._grow(self._running.index(request))
            chunks = [chunk for chunk in chunks if chunk.request.held is not None]
        return Batch.of_step(self.pool.layout, self.config.max_batched_tokens, self._owned, chunks)

    def _admit_waiting(self, batch: Batch) -> Batch:
        """Let waiting requests begin, in order of service, as long as there are rows and pages for them."""
        while not self.holds_admission and (request := self._waiting.first) is not None:
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
            elif not begins:
                self._admit_short(batch, place)
                break
            self._waiting.pop()
            self._begin(request, admission, place)
            batch.add(request, admission.left(place.owner), place.owner)
        return batch

    def _admit_short(self, batch: Batch, reserved: Place) -> None:
        """Let short prompts begin before the first in the queue, which has to wait for rows, and leave it its place."""
        passed: list[Request] = []
        while len(passed) < LOOK_AHEAD and len(self._running) + 1 < self._max_running:
            request = self._waiting.pop()
            if request is None:
                break
            passed.append(request)
            if len(passed) == 1:
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
        for request in passed:
            self._waiting.push(request)

    def _begin(self, request: Request, admission: Admission, place: Place) -> None:
        """Give a waiting request its pages and let it run."""
        request.held = HeldPages(place.owner, self.pool.ranks)
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

    def _count_found(self, request: Request, times: int) -> None:
        if self.config.prefix_cache:
            self.num_queried += times * request.num_prompt
            self.num_hit += times * request.num_cached

    def _grow(self, index: int) -> None:
        """Add a page to the running request at `index`, making room by preemption, in the end its own."""
        running = self._running
        held = _held(running[index])
        while not self.pool.grow(held, 1):
            lacking = self.pool.lacking(held.owner, len(held), 1)
            victim = len(running) - 1
            while victim > index and not self.pool.lies_on(_held(running[victim]), lacking):
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
        self.pool.release(*[_held(request) for request in requests])
        for request in requests:
            owner = _held(request).owner
            self._tokens[owner] -= len(request.tokens)
            self._owned[owner] -= 1
            self._released.append(request.id)
            request.held = None

    def _retire_all(self, requests: Sequence[Request]) -> None:
        """Let requests that ran be over."""
        if requests:
            self._release(requests)
            self._finished += [request.id for request in requests]
            self._running = [request for request in self._running if request.held is not None]


def _held(request: Request) -> HeldPages:
    assert request.held is not None
    return request.held
