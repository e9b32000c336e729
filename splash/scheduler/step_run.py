"""StepRun: many steps in one go, without a plan for each, where nobody wants to see the plans.

A scheduler plans every step afresh and touches every running request in it. Most of them only decode: each step takes
them one position further, and all that changes besides are their pages, which they begin and fill one at a time. A run
therefore leaves requests that decode as they are and counts steps; it looks at them when they begin or fill a page, and
when they end. What is left of a step are the prompts in work and who is admitted, which the scheduler decides. At its
end a run has left the scheduler exactly as `schedule` and `apply` would. The simulator is fast because of it.

A run does not preempt: it ends before a step in which somebody may have to give up pages for another.

Where only decodes run, the queue is not asked again once its first request could not begin: pages get fewer until
somebody ends or comes, what it finds in the cache grows only by a page of its own, and short prompts pass it only where
it lacks rows, not pages.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter, itemgetter

import numpy as np

from splash.scheduler.chunks import Prompt
from splash.scheduler.load import StepLoad
from splash.scheduler.page_keys import Keys, extend_keys
from splash.scheduler.queries import enter_pages
from splash.scheduler.request import Progress, Request, held_pages
from splash.scheduler.scheduler import Scheduler

_by_order = attrgetter("order")
_by_owner = itemgetter(0)


class StepRun:
    """A run of steps, begun when no step is in flight. Use, with `end` in any case:

        run = StepRun(scheduler, token, end_token, total_tokens)
        while run.begin():
            ...  # the step takes place
            progress = run.finish()
            for _ in range(run.num_void):
                ...  # a step like the one before takes place
            run.pass_over(...)  # as many as took place
        run.end()

    Args:
        scheduler: what is changed.
        token: what every request generates in every step but its last.
        end_token: what it generates in that, if it may have as many tokens.
        total_tokens: by request, tokens of its prompt and its whole output.

    Attributes:
        num_steps: steps that have been finished.
        new: requests that the step which has begun is the first to compute, in order of service.
        is_decode: whether that step only decodes.
        is_next: whether it is the step before it, one position on: it only decodes, and the same requests.
        num_queries, num_rows, num_tokens: requests that have rows in it, those, and tokens that it brings.
    """

    def __init__(self, scheduler: Scheduler, token: int, end_token: int, total_tokens: Sequence[int]) -> None:
        self._scheduler = scheduler
        self._token = token
        self._end_token = end_token
        self._total_tokens = total_tokens
        self._page_size = scheduler.config.page_size
        self.num_steps = 0
        self.new: list[Request] = []
        self.is_decode = self.is_next = False
        self.num_queries = self.num_rows = self.num_tokens = 0
        # Requests that decode, with the positions that they had computed when the run began, or would have had.
        self._decoding: dict[Request, int] = {}
        self._has_changed = True  # who decodes, since the last step began
        self._without_token: list[Request] = []  # of those, with the last token of their prompt to compute
        self._in_columns: list[Request] = []  # the same requests
        self._columns: dict[Request, int] = {}  # where each of them is there
        self._owner_base = np.empty((2, scheduler.config.max_num_seqs), dtype=np.int64)  # owners and those positions
        self._singles_T = [0] * scheduler.pool.ranks  # by owner, how many they are
        self._bases_T = [0] * scheduler.pool.ranks  # and their positions
        # By step, modulo the page size: who begins a page in it, and has filled one before it. In order of service.
        self._turning: list[list[Request]] = [[] for _ in range(self._page_size)]
        self._ends: dict[int, list[Request]] = {}  # by step
        self._next_end: int | None = None  # the first of those steps, once it has been looked for
        self._prompts: list[Request] = []  # requests with more to compute, in order of service
        self._chunks: list[tuple[Request, int, int, bool]] = []  # of them: start, rows, whether it is the last
        # Whether the first in the queue cannot begin until something changes, and the keys of pages that would.
        self._is_quiet = False
        self._wanted: Keys = ()
        self._num_told = 0  # steps that the scheduler has counted
        for request in scheduler.running:
            if len(request.tokens) - request.num_computed > 1:
                self._prompts.append(request)
            else:
                self._take_in(request)

    def begin(self) -> bool:
        """Begin the next step. False where nobody has anything to compute, or the step takes a plan."""
        scheduler, size, at = self._scheduler, self._page_size, self.num_steps
        growing = []
        for request in self._turning[at % size]:
            held = held_pages(request)
            if (self._decoding[request] + at) // size == len(held):
                growing.append(held)
        if growing and not scheduler.pool.grow_each(growing):
            return False
        if self._is_quiet:
            self.is_next = self.is_decode and not self._has_changed
            self.is_decode = True
        elif not self._share_rows():
            return False
        self._has_changed = False
        self.num_queries = self.num_rows = self.num_tokens = len(self._decoding)
        for _, _, count, is_last in self._chunks:
            self.num_queries += 1
            self.num_rows += count
            self.num_tokens += is_last
        return True

    def _share_rows(self) -> bool:
        """Let requests begin, and count the rows of prompts as computed. False where the step takes a plan."""
        scheduler = self._scheduler
        self._tell()
        batch = scheduler.admit(
            [
                Prompt(request.order, len(request.tokens) - request.num_computed, request, held_pages(request).owner)
                for request in self._prompts
            ]
        )
        if batch is None:
            return False
        self.new = scheduler.announce(batch)
        self._chunks = []
        for count, (_, left, request, _) in zip(batch.rows(), batch.chunks, strict=True):
            if count:
                self._chunks.append((request, request.num_computed, count, count == left))
                request.num_computed += count
        self._prompts = [chunk.request for chunk in batch.chunks]
        self.is_decode, self.is_next = not self._prompts, False
        if self.is_decode:
            self._is_quiet, self._wanted = scheduler.first_is_stuck()
        return True

    def load(self) -> StepLoad:
        """Of the step that has begun."""
        owner_q, base_q = self._owner_base[:, : len(self._decoding)].copy()
        at = self.num_steps
        keys_T = [base + count * (at + 1) for base, count in zip(self._bases_T, self._singles_T, strict=True)]
        chunks = [(held_pages(request).owner, count, start) for request, start, count, _ in self._chunks]
        chunks.sort(key=_by_owner)  # as queries are
        return StepLoad.of_parts(owner_q, base_q + at, self._singles_T, keys_T, chunks, self.num_tokens)

    @property
    def num_void(self) -> int:
        """How many steps that come next are the step before, one position on, in which no page is begun or filled."""
        if not self._is_quiet or self._has_changed:
            return 0
        if self._next_end is None:
            self._next_end = min(self._ends)
        at, size, turning = self.num_steps, self._page_size, self._turning
        most, count = min(self._next_end - at, size), 0
        while count < most and not turning[(at + count) % size] and not turning[(at + count + 1) % size]:
            count += 1
        return count

    def pass_over(self, num_steps: int) -> None:
        """Finish so many steps, of the first of `num_void`, that have not been begun."""
        self.num_steps += num_steps

    def arrived(self) -> None:
        """Somebody has come since the step began."""
        self._is_quiet = False

    def finish(self) -> list[Progress]:
        """Finish the step that has begun.

        Returns:
            what it brought for requests whose prompt it was the last to compute, and for those that have ended by it.
            Everybody else who decodes has one token more.
        """
        if self._scheduler.config.prefix_cache:
            self._enter_pages()
        ending = self._ends.pop(self.num_steps, ())
        if ending:
            self._next_end = None
        self.num_steps += 1
        first, self._without_token = self._without_token, []
        if not ending and not first and not self._chunks:
            return []
        self._tell()
        for request in first:
            self._catch_up(request)
        for request in ending:
            self._let_go(request)
        sampled = [(held_pages(request).owner, 0, request) for request in {*first, *ending}]
        ranks = [0] * self._scheduler.pool.ranks
        for request, _, _, is_last in self._chunks:
            if is_last:
                request.tokens.append(self._token)
                ranks[held_pages(request).owner] += 1
                sampled.append((held_pages(request).owner, 1, request))
        self._scheduler.add_tokens(ranks)
        sampled.sort(key=lambda item: (item[0], item[1], item[2].order))  # as queries are
        progress = [self._progress(request) for _, _, request in sampled]
        ended = [request for (_, _, request), item in zip(sampled, progress, strict=True) if item.finish_reason]
        self._scheduler.retire(ended)
        prompts, self._prompts = self._prompts, []
        for request in prompts:
            if len(request.tokens) - request.num_computed > 1:
                self._prompts.append(request)
            elif request.live:
                self._take_in(request)
        self._chunks, self.new = [], []
        if ended:
            self._is_quiet = False
        return progress

    def _progress(self, request: Request) -> Progress:
        """What a step has brought a request."""
        num_tokens, token, reason = len(request.tokens), self._token, None
        if num_tokens == self._total_tokens[request.id]:
            token, reason = self._end_token, "stop"
        elif request.has_all_tokens:
            reason = "length"
        return Progress(request.id, token, None, reason, None, request.num_cached, num_tokens - request.num_prompt)

    def _enter_pages(self) -> None:
        """Let the cache know the pages that the step which has begun fills."""
        scheduler, size = self._scheduler, self._page_size
        end = self.num_steps + 1
        for request in self._turning[end % size]:
            page = (self._decoding[request] + end) // size - 1
            if page >= len(request.keys):
                self._catch_up(request)
                extend_keys(request.keys, request.tokens, size, page + 1)
            scheduler.pool.enter(held_pages(request), page, page + 1, request.keys)
            if page < len(self._wanted) and self._wanted[page] == request.keys[page]:
                self._is_quiet = False
        if self._chunks:
            filling = [(request, start // size, (start + count) // size) for request, start, count, _ in self._chunks]
            enter_pages(scheduler.pool, filling, size)

    def _take_in(self, request: Request) -> None:
        """Let a request decode from the next step on."""
        base = self._decoding[request] = request.num_computed - self.num_steps
        owner = held_pages(request).owner
        self._singles_T[owner] += 1
        self._bases_T[owner] += base
        insort(self._turning[-base % self._page_size], request, key=_by_order)
        most = min(request.most_tokens, self._total_tokens[request.id])
        self._ends.setdefault(self.num_steps + most - len(request.tokens) - 1, []).append(request)
        self._next_end = None
        column = self._columns[request] = len(self._in_columns)
        self._in_columns.append(request)
        self._owner_base[:, column] = owner, base
        self._has_changed = True
        if len(request.tokens) == request.num_prompt:
            self._without_token.append(request)

    def _let_go(self, request: Request) -> None:
        """Let a request no longer decode."""
        self._catch_up(request)
        base, owner = self._decoding.pop(request), held_pages(request).owner
        self._singles_T[owner] -= 1
        self._bases_T[owner] -= base
        self._turning[-base % self._page_size].remove(request)
        column, last = self._columns.pop(request), self._in_columns.pop()
        if last is not request:
            self._owner_base[:, column] = self._owner_base[:, len(self._in_columns)]
            self._in_columns[column], self._columns[last] = last, column
        self._has_changed = True

    def _catch_up(self, request: Request) -> None:
        """Let a request that decodes have the tokens of the steps that are finished."""
        count = self._decoding[request] + self.num_steps - request.num_computed
        request.tokens.extend([self._token] * count)
        request.num_computed += count

    def _tell(self) -> None:
        """Let the scheduler count the steps that are finished."""
        count = self.num_steps - self._num_told
        if count:
            self._num_told = self.num_steps
            self._scheduler.skip(count)
            self._scheduler.add_tokens([count * own for own in self._singles_T])

    def end(self) -> None:
        """Let the requests have their tokens. No step must have begun that is not finished."""
        self._tell()
        self._scheduler.forget_following()
        for request in self._decoding:
            self._catch_up(request)
