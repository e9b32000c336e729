"""Situation: what a policy is told of the load at one moment."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from splash.core.layout import KV, Layout
from splash.scheduler.footprint import Footprint
from splash.scheduler.load import StepLoad
from splash.scheduler.request import Request
from splash.scheduler.scheduler import Scheduler

Ints = npt.NDArray[np.int64]

FIRST_WAITING = 64  # how many waiting requests are looked at


@dataclass(frozen=True, eq=False)
class Situation:
    """The load at one moment. Shape suffix: n running requests.

    Attributes:
        now: seconds on the loop's clock.
        layout: that steps run in.
        ranks: T.
        page_size: token positions a page.
        running: requests that hold pages, oldest first.
        waiting: the first of those that hold none, at most about `FIRST_WAITING`.
        num_waiting: how many wait in all.
        used_T: by rank, pages that requests hold now, shared ones counted once.
        idle_T: by rank, pages that no request holds but a request may find in the cache.
        num_wanted: about how many of those, copies included, will be found.
        num_queried, num_hit: tokens of prompts that were looked for in the cache so far, and those found.
        rows_begun: rows that the last prompts that began had to compute.
        num_begun: how many prompts have begun.
        live: all live requests, asked for only when a switch is about to be proposed.
    """

    now: float
    layout: Layout
    ranks: int
    page_size: int
    running: Sequence[Request]
    waiting: Sequence[Request]
    num_waiting: int
    used_T: Sequence[int]
    idle_T: Sequence[int]
    num_wanted: int
    num_queried: int
    num_hit: int
    rows_begun: Sequence[int]
    num_begun: int
    live: Callable[[], Iterable[Request]]

    @classmethod
    def of_scheduler(cls, scheduler: Scheduler, now: float) -> Situation:
        """The load of a scheduler, which may have a step in flight. Valid until the scheduler goes on."""
        pool = scheduler.pool
        return cls(
            now=now,
            layout=pool.layout,
            ranks=pool.ranks,
            page_size=scheduler.config.page_size,
            running=scheduler.running,
            waiting=scheduler.first_waiting(FIRST_WAITING),
            num_waiting=scheduler.num_waiting,
            used_T=[total - free for total, free in zip(pool.num_total, pool.num_free, strict=True)],
            idle_T=pool.num_idle,
            num_wanted=pool.num_wanted,
            num_queried=scheduler.num_queried,
            num_hit=scheduler.num_hit,
            rows_begun=tuple(scheduler.rows_begun),
            num_begun=scheduler.num_begun,
            live=lambda: scheduler.requests,
        )

    @cached_property
    def _columns(self) -> Ints:
        running = self.running
        values = [request.num_computed for request in running]
        values += [len(request.tokens) for request in running]
        values += [request.num_prompt for request in running]
        values += [request.max_tokens for request in running]
        return _packed(values).reshape(4, len(running))

    @property
    def computed_n(self) -> Ints:
        """int64 [n], positions that are cached, or will be by the step in flight."""
        return self._columns[0]

    @property
    def length_n(self) -> Ints:
        """int64 [n], tokens of prompt and output so far."""
        return self._columns[1]

    @cached_property
    def outputs_n(self) -> Ints:
        """int64 [n], output tokens so far."""
        return self._columns[1] - self._columns[2]

    @cached_property
    def allowed_n(self) -> Ints:
        """int64 [n], output tokens that may still come."""
        return self._columns[3] - self.outputs_n

    @cached_property
    def owner_n(self) -> Ints:
        """int64 [n], owners."""
        return _packed([request.held.owner for request in self.running if request.held is not None])

    @cached_property
    def pages_n(self) -> Ints:
        """int64 [n], pages of each request, shared ones included."""
        pages: Ints = -(-self.length_n // self.page_size)
        return pages

    @cached_property
    def page_share(self) -> float:
        """Pages that the running requests hold over those that they would hold if none were shared, at most 1."""
        copies = self.ranks if self.layout.kv is KV.REPLICATED else 1
        unshared = int(self.pages_n.sum()) * copies
        return min(1.0, sum(self.used_T) / unshared) if unshared else 1.0

    @cached_property
    def num_pages(self) -> int:
        """Pages of the running requests, shared ones counted once, and one for each to grow by."""
        copies = self.ranks if self.layout.kv is KV.REPLICATED else 1
        return sum(self.used_T) // copies + len(self.running)

    @property
    def num_wanted_idle(self) -> int:
        """About how many idle pages will be found."""
        copies = self.ranks if self.layout.kv is KV.REPLICATED else 1
        return min(sum(self.idle_T) // copies, self.num_wanted)

    def moves_idle(self, target: Layout) -> bool:
        """Whether idle pages have to move to be found in `target`, since neither it nor this layout has them there."""
        return self.layout.kv not in (target.kv, KV.REPLICATED)

    @property
    def largest_running(self) -> int:
        """Pages of the largest running request, and one to grow by."""
        return int(self.pages_n.max(initial=0)) + 1

    @cached_property
    def footprint(self) -> Footprint:
        """The pages of the running requests with one to grow by; of shared ones, each has its share."""
        context = (self.length_n * self.page_share).astype(np.int64) + self.page_size
        return Footprint.of(self._load(context), self.page_size)

    @cached_property
    def load(self) -> StepLoad:
        """A step in which every running request decodes."""
        return self._load(self.length_n)

    def wanted_pages(self, most: int) -> int:
        """Pages of the running requests and of those that wait, of at most `most` requests in all."""
        admitted = min(self.num_waiting, max(0, most - len(self.running)))
        each = sum(-(-len(request.tokens) // self.page_size) for request in self.waiting) / max(1, len(self.waiting))
        return self.num_pages + round(admitted * each)

    def largest_request(self) -> int:
        """Pages of the largest live request if it runs to its end."""
        positions = max((request.max_positions for request in self.live()), default=0)
        return -(-positions // self.page_size)

    def _load(self, context: Ints) -> StepLoad:
        return StepLoad.of_arrays(self.owner_n, np.ones(len(context), dtype=np.int64), context - 1, self.ranks)


def _packed(values: list[int]) -> Ints:
    """An array of so many integers: numpy would take twice as long to convert the list."""
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), dtype=np.int64)
