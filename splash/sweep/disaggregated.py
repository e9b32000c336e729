"""Prefill on one group, decode on another: what published sweeps of prefill layouts run.

The group under test only prefills, in the layout under test. Where owners keep requests (dp, dop), each has a queue and
an even share of the chunk budget of its own, as servers with a scheduler a rank do; elsewhere one queue has all of it.
A prompt is admitted with the pages of all its tokens. Its cache then moves, layer by layer behind the prefill, to a
second group that decodes in `dp`, and its pages are free.

Steps take what the cost model predicts. Moving the cache is taken to be hidden, and the second group to have room.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from splash.core.capacity import page_slots
from splash.core.errors import CapacityError, ConfigError
from splash.core.layout import DP, KV, Layout, check_layout, parse_layout
from splash.core.memory import ArenaGeometry
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad
from splash.sweep.outcome import Floats, Outcome, arenas, cost_model
from splash.sweep.points import Point
from splash.workload import Phase, Requests

STRIDE = 16  # decode steps for which one prediction does


def run_disaggregated(point: Point, requests: Requests) -> Outcome:
    """Serve `requests` on two groups.

    Raises:
        CapacityError: the model, or one request, does not fit.
        ConfigError: the layout cannot work with these ranks, or requests wait for each other.
    """
    settings = point.settings
    layout = parse_layout(settings.layout)
    check_layout(layout, point.spec.num_heads, point.ranks)
    if settings.policy.kind != "static":
        raise ConfigError("policy", f"must be static where serving is disaggregated, not {settings.policy.kind!r}")
    if requests.phases != (Phase(),) or (requests.after >= 0).any():
        raise ConfigError("workload", "must not wait for requests to finish where serving is disaggregated")
    group = _Prefill(cost_model(point), arenas(point), layout, settings.max_batched_tokens)
    first, steps, peak = group.run(requests)
    finish = first.copy()
    if (requests.output_len > 1).any():
        finish, decode_steps = _decode(cost_model(point, settings.decode_ranks), requests, first)
        steps += decode_steps
    return Outcome(
        seconds=float(finish.max()),
        arrival_s=requests.time_s,
        first_token_s=first,
        finish_s=finish,
        steps=steps,
        preemptions=0,
        peak_running=peak,
        switches=0,
        layout_seconds={layout.name: float(first.max())},
    )


@dataclass
class _Prompt:
    """A prompt under way: which it is, its pages by rank, and how far it has come."""

    index: int
    owner: int
    pages_T: np.ndarray
    length: int
    done: int = 0


class _Prefill:
    """The group that prefills."""

    def __init__(self, model: CostModel, geometry: ArenaGeometry, layout: Layout, budget: int) -> None:
        self._model = model
        self._layout = layout
        self._page_size = geometry.page_size
        ranks = model.ranks
        self._free_T = page_slots(geometry, layout)
        num_queues = ranks if layout.kv is KV.REQUEST else 1
        self._budgets = [budget // num_queues + (queue < budget % num_queues) for queue in range(num_queues)]
        self._queues: list[deque[_Prompt]] = [deque() for _ in range(num_queues)]
        self._waiting_T = np.zeros(num_queues)  # tokens to compute, by queue

    def run(self, requests: Requests) -> tuple[Floats, int, int]:
        """(time at which each prompt has been computed, steps, most prompts that held pages at once)."""
        first = np.zeros(len(requests))
        arrivals = deque(range(len(requests)))
        now, steps, resident, peak = 0.0, 0, 0, 0
        while arrivals or resident:
            if not resident:
                now = max(now, float(requests.time_s[arrivals[0]]))
            while arrivals and requests.time_s[arrivals[0]] <= now and self._admit(requests, arrivals[0], resident):
                arrivals.popleft()
                resident += 1
            peak = max(peak, resident)
            chunks = list(self._chunks())
            ended = sum(prompt.done + rows == prompt.length for prompt, rows in chunks)
            load = StepLoad.of_arrays(
                [prompt.owner for prompt, _ in chunks],
                [rows for _, rows in chunks],
                [prompt.done for prompt, _ in chunks],
                self._model.ranks,
                ended,
            )
            now += self._model.step(self._layout, load).seconds
            steps += 1
            for prompt, rows in chunks:
                prompt.done += rows
                queue = prompt.owner % len(self._queues)
                self._waiting_T[queue] -= rows
                if prompt.done == prompt.length:
                    first[prompt.index] = now
                    self._queues[queue].popleft()
                    self._free_T = self._free_T + prompt.pages_T
                    resident -= 1
        return first, steps, peak

    def _admit(self, requests: Requests, index: int, resident: int) -> bool:
        """Give the next request its pages; False where it has to wait for some."""
        ranks, length = self._model.ranks, int(requests.input_len[index])
        pages = -(-length // self._page_size)
        # Striped pages: each rank takes its share, rounded up.
        pages_T = np.full(ranks, pages if self._layout.kv is KV.REPLICATED else -(-pages // ranks))
        owner = index % ranks
        if self._layout.kv is KV.REQUEST:
            owner = min(range(ranks), key=lambda rank: (self._free_T[rank] < pages, self._waiting_T[rank], rank))
            pages_T = np.zeros(ranks, dtype=np.int64)
            pages_T[owner] = pages
        if (pages_T > self._free_T).any():
            if not resident:
                raise CapacityError(
                    f"a request of {length:,} tokens takes {pages:,} pages in {self._layout}, and a rank has room for "
                    f"{int(self._free_T.min()):,}"
                )
            return False
        self._free_T = self._free_T - pages_T
        queue = owner % len(self._queues)
        self._queues[queue].append(_Prompt(index, owner, pages_T, length))
        self._waiting_T[queue] += length
        return True

    def _chunks(self) -> Iterator[tuple[_Prompt, int]]:
        """(prompt, rows) of the next step: each queue in order, as far as its budget goes."""
        for budget, queue in zip(self._budgets, self._queues, strict=True):
            for prompt in queue:
                rows = min(budget, prompt.length - prompt.done)
                if not rows:
                    break
                yield prompt, rows
                budget -= rows


def _decode(model: CostModel, requests: Requests, ready_s: Floats) -> tuple[Floats, int]:
    """(when each request has its last token, steps), from when its cache is there: continuous batching in dp."""
    finish = ready_s.copy()
    arrivals = deque(int(index) for index in np.argsort(ready_s, kind="stable") if requests.output_len[index] > 1)
    ends: list[tuple[int, int]] = []  # (step after which it has ended, request)
    context = np.zeros(len(requests), dtype=np.int64)
    owner = np.zeros(len(requests), dtype=np.int64)
    owned = np.zeros(model.ranks, dtype=np.int64)
    running: set[int] = set()
    now, steps = 0.0, 0
    while arrivals or running:
        if not running:
            now = max(now, float(ready_s[arrivals[0]]))
        while arrivals and ready_s[arrivals[0]] <= now:
            index = arrivals.popleft()
            owner[index] = int(owned.argmin())
            owned[owner[index]] += 1
            context[index] = requests.input_len[index]
            running.add(index)
            heapq.heappush(ends, (steps + int(requests.output_len[index]) - 1, index))
        chosen = np.array(sorted(running), dtype=np.int64)
        load = StepLoad.of_arrays(owner[chosen], np.ones(len(chosen), int), context[chosen], model.ranks)
        seconds = model.step(DP, load).seconds
        # Until a request comes or ends, steps differ by a key a request: one prediction does for some.
        same = min(STRIDE, ends[0][0] - steps)
        if arrivals:
            same = min(same, max(1, math.ceil((ready_s[arrivals[0]] - now) / seconds)))
        now += same * seconds
        steps += same
        context[chosen] += same
        while ends and ends[0][0] <= steps:
            _, index = heapq.heappop(ends)
            finish[index] = now
            owned[owner[index]] -= 1
            running.remove(index)
    return finish, steps
