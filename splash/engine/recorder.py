"""Recorder: what happens in a simulation, by request, by switch and over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splash.core.step import NewRequest, StepPlan
from splash.scheduler.load import StepLoad
from splash.scheduler.request import Progress, Request
from splash.scheduler.scheduler import Scheduler

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_ROWS = 512  # of a time line
FIRST_INTERVAL_S = 0.05  # between its rows, doubled where they become too many


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One moment of a simulation.

    Attributes:
        t_s: when, seconds.
        layout: that steps run in.
        running, waiting: live requests that hold pages, and that hold none.
        kv_used_T: by rank, share of its pages that requests hold.
        rows_s: query rows computed a second since the row before: prompts, what is computed again, and decodes.
        output_tokens_s: tokens generated a second since the row before.
    """

    t_s: float
    layout: str
    running: int
    waiting: int
    kv_used_T: tuple[float, ...]
    rows_s: float
    output_tokens_s: float


class Recorder:
    """Takes notes of plans and progress.

    Args:
        count: requests of the workload.
        scheduler: of the simulation, for what the time line shows of it.

    Attributes:
        arrival_s, admitted_s, first_token_s, finish_s: float64 [N], seconds; nan for what did not happen.
        num_output, num_cached, num_preempted: int64 [N].
        admissions: requests in the order in which they first ran.
        preemptions: (step, request) of each time that a request lost its pages to another.
        steps, request_steps: steps, and queries of all of them.
        peak_running: most requests with rows in one step.
        layout_seconds: seconds of steps by layout.
        next_row_s: when the time line is due.
        timeline: at most `MAX_ROWS` rows; where there would be more, every other one is dropped.
    """

    def __init__(self, count: int, scheduler: Scheduler) -> None:
        self.arrival_s, self.admitted_s, self.first_token_s, self.finish_s = np.full((4, count), np.nan)
        self.num_output, self.num_cached, self.num_preempted = np.zeros((3, count), dtype=np.int64)
        self.admissions: list[int] = []
        self.preemptions: list[tuple[int, int]] = []
        self.steps = 0
        self.request_steps = 0
        self.peak_running = 0
        self.layout_seconds: dict[str, float] = {}
        self.timeline: list[TimelineRow] = []
        self._scheduler = scheduler
        self._without_token: set[int] = set()  # admitted, and no token yet
        self._every_s = FIRST_INTERVAL_S
        self.next_row_s = 0.0
        self._last_row_s = 0.0
        self._rows = 0  # since the last row of the time line
        self._outputs = 0

    def planned(self, plan: StepPlan, load: StepLoad, now: float, seconds: float) -> None:
        """A step begins at `now` and takes so many seconds."""
        self.admitted(plan.new, now)
        if len(plan.released) > len(plan.finished):
            finished = set(plan.finished)
            for request in plan.released:
                if request not in finished:
                    self.preemptions.append((plan.step, request))
                    self.num_preempted[request] += 1
        self.began(plan.layout, load.num_queries, load.num_rows, seconds)

    def admitted(self, requests: Iterable[NewRequest | Request], now: float) -> None:
        """Requests have their first rows in the step that begins at `now`. `planned` counts them itself."""
        for request in requests:
            self.admissions.append(request.id)
            self.admitted_s[request.id] = now
            self._without_token.add(request.id)

    def began(self, layout: str, num_queries: int, num_rows: int, seconds: float) -> None:
        """A step begins. `planned` counts it itself."""
        self.steps += 1
        self.request_steps += num_queries
        if num_queries > self.peak_running:
            self.peak_running = num_queries
        self.layout_seconds[layout] = self.layout_seconds.get(layout, 0.0) + seconds
        self._rows += num_rows

    def decoded(self, num_tokens: int) -> None:
        """A step has brought so many tokens that are neither the first nor the last of a request."""
        self._outputs += num_tokens

    def progressed(self, progress: Sequence[Progress], now: float) -> list[int]:
        """A step has ended at `now`. Returns the requests that have finished."""
        self._outputs += len(progress)
        if self._without_token:
            for item in progress:
                if item.id in self._without_token:
                    self._without_token.discard(item.id)
                    self.first_token_s[item.id] = now
                    self.num_cached[item.id] = item.num_cached
        finished = [item.id for item in progress if item.finish_reason is not None]
        for request in finished:
            self.finish_s[request] = now
        return finished

    def sample(self, now: float, layout: str) -> None:
        """Add a row to the time line."""
        pool, past = self._scheduler.pool, max(now - self._last_row_s, 1e-9)
        used = tuple(
            round(1 - free / max(1, total), 4) for free, total in zip(pool.num_free, pool.num_total, strict=True)
        )
        self.timeline.append(
            TimelineRow(
                now,
                layout,
                self._scheduler.num_running,
                self._scheduler.num_waiting,
                used,
                self._rows / past,
                self._outputs / past,
            )
        )
        self._rows = self._outputs = 0
        if len(self.timeline) == MAX_ROWS:
            del self.timeline[1::2]
            self._every_s *= 2
        self._last_row_s = now
        self.next_row_s = now + self._every_s
