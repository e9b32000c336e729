"""DecodeRun: many steps in one go, as long as all that steps do is to decode what runs.

A scheduler plans every step afresh. Where each running request has one token left to compute, nobody ends, and nobody
who waits can begin, it plans the same step again and again, each one position further on; what changes besides are the
pages, which requests get and fill one at a time. A run of such steps leaves the scheduler exactly as `schedule` and
`apply` would, without their work for each request and step. The simulator is fast because of it.

Why nobody who waits can begin before the run ends: the first could not at its start, and pages get fewer until somebody
ends. What it finds in the cache grows only by a page of its own, after which the run ends, and short prompts pass it
only where it lacks rows, not pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from splash.core.pages import HeldPages
from splash.scheduler.load import StepLoad
from splash.scheduler.page_keys import extend_keys
from splash.scheduler.request import Request
from splash.scheduler.scheduler import Scheduler


class DecodeRun:
    """A run of decode steps, begun when no step is in flight. Use, with `end` in any case:

        run = DecodeRun(scheduler, token, total_tokens)
        while run.left and run.grow():
            ...  # the step takes place
            run.step()
        run.end()

    Args:
        scheduler: what is changed.
        token: what every request generates in every step.
        total_tokens: by request, tokens of its prompt and its whole output.

    Attributes:
        left: steps that the run can still take.
        num_steps: steps that it has taken.
        load: of the first step, where there is one.
    """

    load: StepLoad

    def __init__(self, scheduler: Scheduler, token: int, total_tokens: Sequence[int]) -> None:
        self._scheduler = scheduler
        self._token = token
        self._page_size = scheduler.config.page_size
        self.num_steps = 0
        self.left = 0
        running = scheduler.running
        # The step in which somebody ends is not part of the run.
        ends = [min(total_tokens[r.id], r.num_prompt + r.max_tokens) - len(r.tokens) for r in running]
        left = min(ends, default=0) - 1
        if left < 1 or any([len(request.tokens) - request.num_computed != 1 for request in running]):
            return
        is_stuck, self._wanted = scheduler.first_is_stuck()
        if not is_stuck:
            return
        self.left = left
        starts = [request.num_computed for request in running]
        owners = [_held(request).owner for request in running]
        self.load = StepLoad.of_arrays(owners, [1] * len(running), starts, scheduler.pool.ranks)
        # In which steps, modulo the page size, requests begin a page, and have filled one. In order of service.
        self._turning: dict[int, list[Request]] = {}
        for request, start in zip(running, starts, strict=True):
            self._turning.setdefault(-start % self._page_size, []).append(request)

    def grow(self) -> bool:
        """Give out the pages that the next step needs. False, and the run over, where pages run out."""
        growing = []
        for request in self._turning.get(self.num_steps % self._page_size, ()):
            held, page = _held(request), (request.num_computed + self.num_steps) // self._page_size
            if page == len(held):
                growing.append(held)
        if growing and not self._scheduler.pool.grow_each(growing):
            self.left = 0
            return False
        return True

    def step(self) -> None:
        """Take a step, after `grow`."""
        assert self.left > 0
        self.num_steps += 1
        self.left -= 1
        if self._scheduler.config.prefix_cache:
            self._enter_pages()

    def _enter_pages(self) -> None:
        """Let the cache know the pages that the step has filled."""
        for request in self._turning.get(self.num_steps % self._page_size, ()):
            page = (request.num_computed + self.num_steps) // self._page_size - 1
            if page >= len(request.keys):
                tokens = request.tokens + [self._token] * (self.num_steps - 1)
                extend_keys(request.keys, tokens, self._page_size, page + 1)
            self._scheduler.pool.enter(_held(request), page, request.keys)
            if page < len(self._wanted) and self._wanted[page] == request.keys[page]:
                self.left = 0

    def end(self) -> None:
        """Let the requests have their tokens."""
        if not self.num_steps:
            return
        for request in self._scheduler.running:
            request.tokens.extend([self._token] * self.num_steps)
            request.num_computed += self.num_steps
        self._scheduler.skip(self.num_steps)


def _held(request: Request) -> HeldPages:
    assert request.held is not None
    return request.held
