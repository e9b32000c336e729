"""Continuous batching with chunked prefill (Orca, OSDI '22; Sarathi-Serve, OSDI '24) over paged KV.

Every step takes one row of each running request that has one token left to compute, then chunks of longer ones in
order of arrival, then admits waiting requests, within one budget of rows. A request is admitted with the pages of
all tokens that it has, so a prefill never stalls half-way. Where a request cannot grow by a page, the youngest
request on the ranks that lack one gives up its pages and waits, to be computed again from its prompt and output.
With a prefix cache a request begins behind those of its full pages that are in the cache, its own of before included.

The oldest request always progresses: only younger requests make room for it, and by itself it fits. Nobody overtakes
the first in the queue, so every request comes to be the oldest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter

from splash.core.errors import RequestError
from splash.core.pages import HeldPages
from splash.core.request import SamplingParams
from splash.core.step import NewRequest, Query, StepOutput, StepPlan
from splash.scheduler.admission import check_capacity, find_place
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache, extend_keys
from splash.scheduler.queue import WaitingQueue
from splash.scheduler.request import Progress, Rebase, Request

_by_arrival = attrgetter("arrival")


class Scheduler:
    """Decides what each step computes. At most one step is in flight: `schedule` and `apply` alternate.

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
        self._running: list[Request] = []  # by arrival
        self._tokens = [0] * pool.ranks  # of running requests, by owner
        self._in_flight: StepPlan | None = None
        self._pool_before: PrefixCache | None = None  # what `retract` would go back to
        self._aborted_in_flight: list[Request] = []
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
        return len(self._requests) - self.num_running

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold pages, oldest first, those aborted in flight included."""
        return tuple(self._running)

    @property
    def free_pages(self) -> list[int]:
        """Free pages on each rank, with those that only the cache holds."""
        return self.pool.num_free

    @property
    def tokens_per_rank(self) -> list[int]:
        """Context tokens of the running requests that each rank owns."""
        return list(self._tokens)

    def add(self, id: int, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Queue a request. `id` is never used again. `max_tokens` is clipped to the model's length.

        Raises:
            RequestError: the prompt is empty, or it or its output cannot fit in the model's length or in memory.
        """
        assert id not in self._requests, f"request {id} is live"
        prompt = tuple(prompt)
        max_model_len = self.config.max_model_len
        if not prompt:
            raise RequestError("prompt", "must have at least 1 token")
        if len(prompt) + 1 > max_model_len:
            raise RequestError(
                "prompt", f"has {len(prompt)} tokens; the model's length of {max_model_len} accepts {max_model_len - 1}"
            )
        max_tokens = min(params.max_tokens, max_model_len - len(prompt))
        new = NewRequest(id, prompt, params, seed)
        request = Request(id, self._num_arrived, new, len(prompt), max_tokens, list(prompt))
        for pool in (self.pool, self._pool_before):  # the step in flight may be retracted
            if pool is not None:
                check_capacity(request, pool, self.config.page_size)
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
            if request.announced:
                self._finished.append(id)
        elif self._in_flight is not None:
            self._aborted_in_flight.append(request)
        else:
            self._retire(request)
            self._running.remove(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None where no request is live. Releases then wait for the plan after."""
        assert self._in_flight is None, "a step is in flight"
        rows: list[list[Query]] = [[] for _ in range(self.pool.ranks)]  # by owner
        prefilling = self._schedule_decodes(rows)
        budget = self.config.max_batched_tokens - sum(map(len, rows))
        for request in prefilling:
            budget -= self._schedule_chunk(request, budget, rows)
        new: list[NewRequest] = []
        while budget and (admitted := self._admit()) is not None:
            if not admitted.announced:
                admitted.announced = True
                new.append(admitted.new)
            budget -= self._schedule_chunk(admitted, budget, rows, knows_pages=False)
        if not self._running:
            unused = self.pool.num_free == self.pool.num_total  # a switch under way may hold pages of its own
            assert not self._requests or self.holds_admission or not unused, (
                "a request waits for pages that nobody holds"
            )
            return None
        return self._plan(rows, new)

    def schedule_empty(self) -> StepPlan:
        """Plan a step without rows, for what it carries beside them."""
        assert self._in_flight is None, "a step is in flight"
        return self._plan([], [])

    def _plan(self, rows: list[list[Query]], new: list[NewRequest]) -> StepPlan:
        plan = StepPlan(
            self._step,
            self.epoch,
            self.pool.layout.name,
            tuple(chain.from_iterable(rows)),
            tuple(new),
            tuple(self._released),
            tuple(self._finished),
        )
        self._step += 1
        self._released.clear()
        self._finished.clear()
        self._in_flight = plan
        return plan

    def apply(self, output: StepOutput) -> list[Progress]:
        """Take in what the step in flight brought: one `Progress` for each token of a request that is still live."""
        plan = self._in_flight
        assert plan is not None and (output.step, output.epoch) == (plan.step, plan.epoch), "not the step in flight"
        assert output.requests == tuple([query.request for query in plan.queries if query.sample])
        self._in_flight = None
        self._pool_before = None
        if self.config.prefix_cache:
            self._enter_pages(plan)
        progress = []
        retired = self._aborted_in_flight
        self._aborted_in_flight = []
        eos_token_ids = self.config.eos_token_ids
        for id, token, logprob in zip(output.requests, output.tokens, output.logprobs, strict=True):
            request = self._requests.get(id)
            if request is None:
                continue
            assert request.held is not None
            request.tokens.append(token)
            self._tokens[request.held.owner] += 1
            finish_reason, stop_reason = request.finish(eos_token_ids)
            if finish_reason is not None:
                del self._requests[id]
                request.live = False
                retired.append(request)
            progress.append(Progress(id, token, logprob, finish_reason, stop_reason, request.num_cached))
        if retired:
            for request in retired:
                self._retire(request)
            self._running = [request for request in self._running if request.live]
        return progress

    def _enter_pages(self, plan: StepPlan) -> None:
        """Let the cache know the pages that a step has filled."""
        page_size = self.config.page_size
        for query in plan.queries:
            first, end = query.start // page_size, (query.start + len(query.tokens)) // page_size
            request = self._requests.get(query.request) if first < end else None
            if request is not None and request.held is not None:
                extend_keys(request.keys, request.tokens, page_size, end)
                for page in range(first, end):
                    self.pool.enter(request.held, page, request.keys)

    def rebase(self, pool: PrefixCache, held: Mapping[int, HeldPages]) -> Rebase:
        """Go on in another layout, or with other owners, from the next step on.

        Args:
            pool: the pages of the target state.
            held: the pages of every running request there, as many as it has now.

        Returns:
            what `retract` needs to go back, should the next step fail.
        """
        assert self._in_flight is None, "a step is in flight"
        before = Rebase(self.pool, tuple((request, request.held, request.num_computed) for request in self._running))
        self._pool_before = self.pool
        self.pool = pool
        self.epoch += 1
        for request in self._running:
            assert request.held is not None and len(held[request.id]) == len(request.held)
            request.held = held[request.id]
        self._count_tokens()
        return before

    def retract(self, before: Rebase) -> None:
        """Undo `rebase` and the step planned since, which no rank has run.

        What that step admitted waits again; what it preempted stays preempted; what was aborted meanwhile is let go.
        """
        plan = self._in_flight
        assert plan is not None, "the step after a rebase is in flight"
        self._in_flight = None
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
        self._count_tokens()
        for request in [request for request in self._running if not request.live]:
            self._retire(request)
        self._running = [request for request in self._running if request.live]
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
        assert self._in_flight is None, "a step is in flight"
        while self._running:
            self._preempt(len(self._running) - 1)
        self.pool.evict()

    def _count_tokens(self) -> None:
        self._tokens = [0] * self.pool.ranks
        for request in self._running:
            assert request.held is not None
            self._tokens[request.held.owner] += len(request.tokens)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live requests, running and waiting."""
        return tuple(self._requests.values())

    def _num_pages(self, num_positions: int) -> int:
        return -(-num_positions // self.config.page_size)

    def _schedule_decodes(self, rows: list[list[Query]]) -> list[Request]:
        """Add a row of each running request with one token to compute. Returns those with more, oldest first."""
        page_size = self.config.page_size
        running = self._running
        prefilling = []
        index = 0
        while index < len(running):  # whoever is preempted on the way stands at `index` or later
            request = running[index]
            held, start, tokens = request.held, request.num_computed, request.tokens
            assert held is not None
            if len(tokens) - start > 1:
                prefilling.append(request)
                index += 1
                continue
            new_pages: tuple[tuple[int, ...], ...] = ()
            if start % page_size == 0:
                page = start // page_size
                if page == len(held) and not self._grow(index):
                    continue
                new_pages = held.table.rows(page, page + 1)
            owner = held.owner
            rows[owner].append(Query(request.id, start, (tokens[start],), owner, True, new_pages))
            request.num_computed = start + 1
            index += 1
        return prefilling

    def _schedule_chunk(self, request: Request, budget: int, rows: list[list[Query]], knows_pages: bool = True) -> int:
        """Add up to `budget` rows of a request whose pages it has. Returns how many.

        `knows_pages` False means that the ranks have not heard of the pages before the chunk.
        """
        held, start, tokens = request.held, request.num_computed, request.tokens
        assert held is not None
        end = min(len(tokens), start + budget)
        if end > start:
            pages = held.table.rows(self._num_pages(start) if knows_pages else 0, self._num_pages(end))
            query = Query(request.id, start, tuple(tokens[start:end]), held.owner, end == len(tokens), pages)
            rows[held.owner].append(query)
            request.num_computed = end
        return end - start

    def _admit(self) -> Request | None:
        """Give the first waiting request its pages and let it run. None where it has to wait, or nobody does."""
        request = self._waiting.first
        if self.holds_admission or request is None or len(self._running) >= self._max_running:
            return None
        place = find_place(self.config, self.pool, request, self._tokens)
        if place is None:
            return None
        self._waiting.pop()
        request.held = HeldPages(place.owner, self.pool.ranks)
        if self.config.prefix_cache:
            self.pool.share(request.held, place.shared)
            request.num_computed = len(place.shared) * self.config.page_size
            if not request.announced:
                request.num_cached = request.num_computed
                self._count_found(request, 1)
        grown = self.pool.grow(request.held, place.num_pages - len(request.held))
        assert grown
        insort(self._running, request, key=_by_arrival)
        self._tokens[place.owner] += len(request.tokens)
        return request

    def _count_found(self, request: Request, times: int) -> None:
        if self.config.prefix_cache:
            self.num_queried += times * request.num_prompt
            self.num_hit += times * request.num_cached

    def _grow(self, index: int) -> bool:
        """Add a page to the running request at `index`, making room by preemption. False: it was itself preempted."""
        running = self._running
        held = running[index].held
        assert held is not None
        while not self.pool.grow(held, 1):
            lacking = self.pool.lacking(held.owner, len(held), 1)
            victim = len(running) - 1
            while victim > index and not _holds_any(running[victim], lacking):
                victim -= 1
            self._preempt(victim)
            if victim == index:
                return False
        return True

    def _preempt(self, index: int) -> None:
        """Take the pages of the running request at `index` and let it wait, ahead of all that arrived after it."""
        request = self._running.pop(index)
        self._release(request)
        request.num_computed = 0
        self._waiting.push(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        """Free the pages of a running request. The next plan tells the ranks."""
        held = request.held
        assert held is not None
        self.pool.release(held)
        self._tokens[held.owner] -= len(request.tokens)
        self._released.append(request.id)
        request.held = None

    def _retire(self, request: Request) -> None:
        self._release(request)
        self._finished.append(request.id)


def _holds_any(request: Request, ranks: Sequence[int]) -> bool:
    assert request.held is not None
    counts = request.held.counts
    return any(counts[rank] for rank in ranks)
