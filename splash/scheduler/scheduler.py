"""Continuous batching with chunked prefill (Orca, OSDI '22; Sarathi-Serve, OSDI '24) over paged KV.

Every step takes one row of each running request that has one token left to compute, then chunks of longer ones as
`splash.scheduler.chunks` shares them out, then admits waiting requests, within one budget of rows. Who is served before
whom, and who makes room, is the matter of `splash.scheduler.service`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter

from msgspec import structs

from splash.core.pages import HeldPages
from splash.core.request import SamplingParams
from splash.core.step import PENDING_TOKEN, NewRequest, StepOutput, StepPlan
from splash.scheduler.admission import check_capacity, check_request
from splash.scheduler.chunks import Batch
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.page_keys import Keys, extend_keys
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.queries import PlannedStep, Rows, enter_pages, fill_pages, make_rows
from splash.scheduler.request import Progress, Rebase, Request, held_pages
from splash.scheduler.service import Service

# A step in which so many times more pages than usual are filled, or were in the one before and are begun in it, has
# enough to do: those that wait to be entered in the prefix cache wait for the next. With pages of 64 tokens this is a
# quarter of all requests. Where they fill pages at odds they hardly come near it; where all do at once, as equal
# prompts do that were admitted in one step, the step takes about twice as long as others anyway.
MANY_FILLED = 16
_by_order = attrgetter("order")


class Scheduler(Service):
    """Decides what each step computes. `schedule` and `apply` alternate, with one step in flight; or, to plan each step
    while the one before it runs: `schedule`, and then over and over `foresee`, `schedule`, `apply`, with two.

    Args:
        config: limits.
        pool: the group's pages, in the layout to serve in.

    Attributes:
        epoch: number of layout changes so far, stamped on every plan.
    """

    def __init__(self, config: SchedulerConfig, pool: PrefixCache) -> None:
        super().__init__(config, pool)
        self.epoch = 0
        self._step = 0
        self._num_arrived = 0
        self._requests: dict[int, Request] = {}  # the live ones
        self._in_flight: deque[PlannedStep] = deque()
        self._pool_before: PrefixCache | None = None  # what `retract` would go back to
        self._aborted_in_flight: list[Request] = []
        self._num_filled = 0  # pages that were filled by the rows of decodes in the last step that was taken in
        self._may_have_ended = False  # whether requests of a step that has not been taken in may not be live any more
        self._ending: list[Request] = []  # get their last token by the step that has been foreseen, and hold no pages

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
            self._may_have_ended = True
        else:
            self._retire_all([request])

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None where nobody has anything to compute. Releases then wait for the plan after."""
        assert not self._in_flight or [step.is_foreseen for step in self._in_flight] == [True], "a step is in flight"
        decoding, batch = self._grow_decoding()
        batch = self._admit_waiting(batch)
        if not self._running:
            in_use = self.pool.num_free != self.pool.num_total  # a switch under way may hold pages of its own
            assert not self.num_waiting or self.holds_admission or in_use, "a request waits for pages that nobody holds"
            return None
        new = [request.new for request in self.announce(batch)]
        if self._has_released:
            decoding = _still_decoding(decoding, batch)
            self._has_released = False
        rows = make_rows(decoding, batch, self._running, self.config.page_size)
        self._following = rows.following
        return self._plan(rows, new)

    def schedule_empty(self) -> StepPlan:
        """Plan a step without rows, for what it carries beside them."""
        assert not self._in_flight or [step.is_foreseen for step in self._in_flight] == [True], "a step is in flight"
        return self._plan(Rows([()] * self.pool.ranks), [])

    def _plan(self, rows: Rows, new: list[NewRequest]) -> StepPlan:
        plan = StepPlan(
            self._step,
            self.epoch,
            self.pool.layout.name,
            tuple(chain.from_iterable(rows.queries)),
            tuple(new),
            tuple(self._released),
            tuple(self._finished),
            not self._num_not_greedy,
        )
        self._step += 1
        self._released.clear()
        self._finished.clear()
        self._in_flight.append(PlannedStep(plan, rows.sampled, rows.filling, rows.filling_chunks))
        return plan

    def foresee(self) -> None:
        """Go on from the step in flight before it is over, with `PENDING_TOKEN` for each token that it samples.

        A request that has all its tokens then gives up its pages. One that ends by what its token is does not: the next
        step may compute a row of it in vain.
        """
        (step,) = self._in_flight
        assert not step.is_foreseen
        step.is_foreseen = True
        self._settle(step)
        for request in chain.from_iterable(step.sampled):
            if request.live:
                tokens = request.tokens
                tokens.append(PENDING_TOKEN)
                if len(tokens) >= request.most_tokens:
                    self._ending.append(request)
        self._retire_ended(self._ending)

    def _settle(self, step: PlannedStep) -> None:
        """Let the cache know the pages that a step fills, and count the tokens that it brings."""
        size = self.config.page_size
        if self.config.prefix_cache:
            fill_pages(self.pool, step.filling, size)
            enter_pages(self.pool, step.filling_chunks, size)
            usual = len(step.plan.queries) // size + 1  # a little more than they fill on average
            most_filled = max(self._num_filled, len(step.filling))
            self._num_filled = len(step.filling)
            if most_filled < MANY_FILLED * usual:
                self.pool.enter_full(usual)
        if self._may_have_ended or step.plan.epoch != self.epoch:  # then some have other owners since, or none
            for request in chain.from_iterable(step.sampled):
                if request.live:
                    self._tokens[held_pages(request).owner] += 1
        else:
            self._tokens = [count + len(own) for count, own in zip(self._tokens, step.sampled, strict=True)]
        self._may_have_ended = False

    def _retire_ended(self, ending: list[Request]) -> None:
        """Let requests be over that a step had to end for: aborted ones, and those that have all their tokens by it."""
        retired, self._aborted_in_flight = self._aborted_in_flight, []
        self._retire_all(retired + ending)

    def apply(self, output: StepOutput) -> list[Progress]:
        """Take in what the step in flight brought: one `Progress` for each token of a request that is still live."""
        first = [(step.plan.step, step.plan.epoch) for step in self._in_flight][:1]
        assert first == [(output.step, output.epoch)], "not the step in flight"
        step = self._in_flight.popleft()
        if not step.is_foreseen:
            self._settle(step)
        if output.epoch == self.epoch:
            self._pool_before = None
        self._ending = []
        for id, position, scores in output.scores:
            if id in self._requests:
                self._requests[id].take_scores(position, scores)
        progress, ended = step.take(output, self.config.eos_token_ids)
        if not step.is_foreseen:
            self._retire_ended([request for request in ended if request.has_all_tokens])
        elif ended:
            self._may_have_ended = True  # the step after it was planned before they ended
        for request in ended:
            del self._requests[request.id]
            if request.held is None and not request.has_all_tokens:  # preempted since
                self._finished.append(request.id)
        self._retire_all([request for request in ended if request.held is not None])
        return progress

    def announce(self, batch: Batch) -> list[Request]:
        """The requests that the ranks are to hear of with a step, in order of service. They count as heard of then."""
        new = [request for request in sorted(batch.new, key=_by_order) if not request.announced]
        for request in new:
            request.announced = True
        return new

    # --- steps without a plan: `splash.scheduler.step_run` ---

    def skip(self, num_steps: int) -> None:
        """Count steps without a plan."""
        self._step += num_steps
        self._released, self._finished = [], []

    def forget_following(self) -> None:
        """Rely no longer on what the last plan has shown of the next step: a run may have begun pages of it."""
        self._following = None

    def add_tokens(self, counts: Sequence[int]) -> None:
        """Count tokens that running requests of each owner have got without a plan."""
        self._tokens = [own + count for own, count in zip(self._tokens, counts, strict=True)]

    def retire(self, ended: Sequence[Request]) -> None:
        """Let running requests be over that have ended by a step without a plan."""
        for request in ended:
            request.live = False
            del self._requests[request.id]
        self._retire_all([request for request in ended if request.has_all_tokens])
        self._retire_all([request for request in ended if request.held is not None])

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
        self._count_running()
        return before

    def go_back(self, before: Rebase) -> None:
        """Undo `rebase`, of which no step has been planned yet."""
        self.pool, self._pool_before, self.epoch = before.pool, None, self.epoch - 1
        self.pool.release(*[held for request, held, _ in before.requests if request.held is None and held is not None])
        for request, held, _ in before.requests:
            request.held = None if request.held is None else held
        self._count_running()

    def retract(self, before: Rebase) -> None:
        """Undo `rebase` and the step planned since, which no rank has run.

        What that step admitted waits again; what it preempted stays preempted; what was aborted meanwhile is let go.
        """
        (step,) = self._in_flight  # the one after the rebase
        plan = step.plan
        self._in_flight.clear()
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
        self._count_running()
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
        self._count_running()
        for request in self._ending:
            request.num_computed = 0
            self._waiting.push(request)
        self._ending = []
        self.preempt_all()
        self._released, self._finished = [], []

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, running and waiting."""
        return tuple(self._requests.values())


def _still_decoding(decoding: Sequence[Sequence[Request]], batch: Batch) -> list[list[Request]]:
    """Those of some requests, by owner, that have not lost their pages. One that has may begin again in the step."""
    return [[request for request in own if request.held is not None and request not in batch.new] for own in decoding]
