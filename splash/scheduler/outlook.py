"""Outlook: what the next while will hold, and how long each layout would take over it.

One step says little: a chunk of a prefill would make any layout look best or worst. The outlook is the work that is
known and expected until the load has changed by half, or the horizon is reached:

- two phases of decode steps, with the requests that are wanted at its begin and at its end: running ones as they end
  (memoryless, with the expected remaining tokens of each), replaced from the queue, then by arrivals (Little's law);
- the rows of prompts that are to be prefilled meanwhile, in chunks beside decodes.

A layout whose memory holds only n of the N requests that are wanted serves them in N / n waves of the smaller batch:

    T(layout) = sum over phases of steps x N / n x step(n)  +  prefill steps x (mixed step - decode step)        [s]

which compares the throughput of layouts with the admission that each allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from splash.core.layout import KV, Layout
from splash.scheduler.cost_model import CostModel
from splash.scheduler.room import Room
from splash.scheduler.situation import Ints, Situation
from splash.scheduler.step_times import Shape, StepTimes
from splash.scheduler.traffic import Arrivals, Floats, Outputs

_HALVINGS = 12  # of the horizon, at most, to find where half of the load has gone


@dataclass(frozen=True)
class Phase:
    """Decode steps of one batch.

    Attributes:
        requests: that are wanted at once, by all layouts; a share of one where the engine is idle in between.
        context: keys that one of them sees, on average.
        steps: decode steps that each of them takes.
        kept: share of them that run already and keep their owners.
    """

    requests: float
    context: float
    steps: float
    kept: float


@dataclass(frozen=True)
class Skew:
    """How uneven the owners of the running requests are: the busiest rank over the average.

    Attributes:
        requests: its requests.
        keys: their tokens.
    """

    requests: float
    keys: float


EVEN = Skew(1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The work of the next while, the same for every layout.

    Attributes:
        decoding: requests that decode beside chunks.
        longest: tokens of the longest running request.
        page_share: pages of requests over those that they would hold if none were shared.
        skew: of the owners now.
        phases: decode steps, now and later.
        prefill_steps: steps that carry chunks as well.
        chunks, rows, start: chunks of such a step, rows of each, and positions before it.
        seconds: that all of it takes in the layout that serves.
    """

    decoding: float
    longest: int
    page_share: float
    skew: Skew
    phases: tuple[Phase, ...] = ()
    prefill_steps: float = 0.0
    chunks: int = 0
    rows: float = 0.0
    start: float = 0.0
    seconds: float = 0.0

    @property
    def steps(self) -> float:
        """Steps that it takes where all that is wanted fits."""
        return max(self.prefill_steps, sum(phase.steps for phase in self.phases))


@dataclass(frozen=True)
class _Lane:
    """What is asked of a layout again and again."""

    has_owners: bool
    times: StepTimes
    capacity: Callable[[float], float]


class Forecaster:
    """Makes outlooks and predicts them.

    Args:
        model: predicts steps.
        room: what fits.
        max_num_seqs: most requests that run at once.
        max_batched_tokens: most rows a step.
        horizon_s: the longest outlook, seconds.
    """

    def __init__(
        self, model: CostModel, room: Room, max_num_seqs: int, max_batched_tokens: int, horizon_s: float
    ) -> None:
        self._lanes = {
            layout: _Lane(layout.kv is KV.REQUEST, StepTimes(model, layout), room.capacity(layout))
            for layout in model.layouts
        }
        self._ranks = model.ranks
        self._page_size = model.page_size
        self._max_running = min(max_num_seqs, max_batched_tokens)
        self._max_rows = max_batched_tokens
        self._horizon_s = horizon_s

    def look(self, situation: Situation, arrivals: Arrivals, outputs: Outputs) -> Outlook:
        """The outlook from a situation in which anything runs or waits."""
        crowd = _Crowd.of(situation, arrivals, outputs, self._max_running)
        layout, skew = situation.layout, skew_of(situation.owner_n, situation.length_n, situation.ranks)
        first = crowd.later(0.0, 0.0)
        outlook = Outlook(
            decoding=(crowd.decoding + crowd.wanted) / 2,
            longest=int(situation.length_n.max(initial=1)),
            page_share=situation.page_share,
            skew=skew,
        )
        lane = self._lanes[layout]
        batch = self._batch(lane, outlook, first)
        shape = self._shape(lane, batch, first, outlook.longest, skew)
        step_s = first.requests / batch * lane.times.seconds(shape)
        steps = crowd.steps_to_half(self._horizon_s / step_s, step_s)
        rows, pending, position = crowd.prefill(steps, step_s)
        prefill_s = 0.0
        if rows >= 1:
            budget = max(2.0, self._max_rows - outlook.decoding)
            each = max(2.0, rows / pending)
            chunks = max(1, min(math.ceil(pending), math.ceil(budget / each)))  # prompts go one after another
            chunk_rows = max(2.0, min(each, budget / chunks))
            outlook = replace(
                outlook,
                prefill_steps=rows / (chunks * chunk_rows),
                chunks=chunks,
                rows=chunk_rows,
                start=max(0.0, position - chunk_rows / 2),
            )
            prefill_s = self._prefill(lane, outlook, first, batch, covered=0.0)
            if prefill_s > self._horizon_s:
                outlook = replace(outlook, prefill_steps=outlook.prefill_steps * self._horizon_s / prefill_s)
                prefill_s = self._horizon_s
        # Decodes go on beside chunks, and by themselves for what is left of the horizon.
        steps = min(steps, outlook.prefill_steps + max(0.0, self._horizon_s - prefill_s) / step_s)
        phases = (replace(first, steps=steps / 2), replace(crowd.later(steps, step_s), steps=steps / 2))
        outlook = replace(outlook, phases=phases)
        return replace(outlook, seconds=self.seconds(layout, outlook, skew))

    def seconds(self, layout: Layout, outlook: Outlook, skew: Skew) -> float:
        """How long the outlook takes in `layout` with owners of that skew."""
        lane, seconds, steps = self._lanes[layout], 0.0, 0.0
        batch = 1.0
        for phase in reversed(outlook.phases):
            batch = self._batch(lane, outlook, phase)
            waves = phase.requests / batch
            seconds += phase.steps * waves * lane.times.seconds(self._shape(lane, batch, phase, outlook.longest, skew))
            steps += phase.steps * waves
        if outlook.prefill_steps:
            seconds += self._prefill(lane, outlook, outlook.phases[0], batch, steps)
        return seconds

    def _batch(self, lane: _Lane, outlook: Outlook, phase: Phase) -> float:
        """Requests of a phase that run at once in a layout. Those that run now do fit."""
        pages = max(1.0, math.ceil(phase.context / self._page_size + 0.5) * outlook.page_share)
        return max(1.0, min(phase.requests, max(phase.kept * phase.requests, lane.capacity(pages))))

    def _prefill(self, lane: _Lane, outlook: Outlook, phase: Phase, batch: float, covered: float) -> float:
        """Seconds that the chunks add to `covered` steps of decodes."""
        alone = self._shape(lane, min(outlook.decoding, batch), phase, outlook.longest, EVEN)
        mixed = Shape(*alone[:4], outlook.chunks, round(outlook.rows), round(outlook.start))
        seconds = outlook.prefill_steps * lane.times.seconds(mixed)
        return seconds - min(outlook.prefill_steps, covered) * lane.times.seconds(alone)

    def _shape(self, lane: _Lane, batch: float, phase: Phase, longest: int, skew: Skew) -> Shape:
        singles, context = round(batch), max(1, round(phase.context))
        if not (lane.has_owners and singles):
            return Shape(singles, context, 0, 0)
        # Of requests that come, each goes to the rank with the least.
        mean, even = singles / self._ranks, math.ceil(singles / self._ranks)
        top = min(singles, max(even, round(mean * (1 + (skew.requests - 1) * phase.kept))))
        keys = max(even * context, mean * context * (1 + (skew.keys - 1) * phase.kept))
        keys = min(max(keys, min(longest, singles * context)), singles * context)
        return Shape(singles, context, top, max(1, round(keys / top)))


@dataclass(frozen=True)
class _Crowd:
    """The requests that are there and that are expected, in numbers that change as steps go by.

    Attributes:
        remaining_n: expected tokens of each running request.
        tokens_n: tokens of each.
        decoding, prefilling: how many of them decode, and have prompts left.
        rows_left, start: rows of those prompts, and where on average they are to be computed.
        queue, prompt: waiting requests, and their mean tokens.
        rate, arriving: arrivals a second, and their mean tokens.
        output: tokens that a new request is expected to generate.
        most: requests that may run at once.
    """

    remaining_n: Floats
    tokens_n: Floats
    decoding: int
    prefilling: int
    rows_left: float
    start: float
    queue: int
    prompt: float
    rate: float
    arriving: float
    output: float
    most: int

    @classmethod
    def of(cls, situation: Situation, arrivals: Arrivals, outputs: Outputs, most: int) -> _Crowd:
        expected, new = outputs.remaining(situation.outputs_n)
        left = situation.length_n - situation.computed_n
        is_prefill = left > 1
        rows_left = float(left[is_prefill].sum())
        start = 0.0
        if rows_left:
            start = float((left * (situation.computed_n + left / 2))[is_prefill].sum()) / rows_left
        waiting = [len(request.tokens) for request in situation.waiting]
        allowed = [request.max_tokens for request in situation.waiting]
        prefilling = int(np.count_nonzero(is_prefill))
        return cls(
            remaining_n=np.minimum(expected, situation.allowed_n),
            tokens_n=situation.length_n.astype(np.float64),
            decoding=len(left) - prefilling,
            prefilling=prefilling,
            rows_left=rows_left,
            start=start,
            queue=situation.num_waiting,
            prompt=sum(waiting) / len(waiting) if waiting else arrivals.prompt_tokens,
            rate=arrivals.rate(situation.now),
            arriving=arrivals.prompt_tokens,
            output=min(new, sum(allowed) / len(allowed)) if allowed else new,
            most=most,
        )

    @property
    def running(self) -> int:
        return len(self.remaining_n)

    @property
    def wanted(self) -> float:
        """Requests that would run now if memory allowed it."""
        return float(min(self.most, self.running + self.queue))

    def _survivors(self, steps: float) -> tuple[float, float]:
        """(running requests left after so many steps, their tokens then)."""
        if not steps:
            return float(self.running), float(self.tokens_n.sum())
        alive_n = np.exp(steps / -self.remaining_n)
        left = float(alive_n.sum())
        return left, float(alive_n @ self.tokens_n) + left * steps

    def _newcomers(self, steps: float, step_s: float, left: float) -> tuple[float, float, float]:
        """After so many steps: (those admitted now that are left, those that replaced others, arrivals that run)."""
        admitted, gone = self.wanted - self.running, 1 - math.exp(-steps / self.output)
        ended = self.running - left + admitted * gone
        return admitted * (1 - gone), min(self.queue - admitted, ended), self.rate * step_s * self.output * gone

    def _requests(self, steps: float, step_s: float) -> float:
        left, _ = self._survivors(steps)
        return min(float(self.most), left + sum(self._newcomers(steps, step_s, left)))

    def steps_to_half(self, most: float, step_s: float) -> float:
        """Steps until half of what is wanted now has gone, at most `most`, to within a factor of 2."""
        for _ in range(_HALVINGS):
            if self._requests(most, step_s) >= self.wanted / 2:
                break
            most /= 2
        return max(1.0, most)

    def later(self, steps: float, step_s: float) -> Phase:
        """The batch after so many steps."""
        left, tokens = self._survivors(steps)
        admitted, replaced, arrived = self._newcomers(steps, step_s, left)
        there = left + admitted + replaced + arrived
        grown = min(steps, self.output) / 2
        tokens += (admitted + replaced) * (self.prompt + grown) + arrived * (self.arriving + grown)
        return Phase(min(float(self.most), there), tokens / max(there, 1e-9), 0.0, left / max(there, 1e-9))

    def prefill(self, steps: float, step_s: float) -> tuple[float, float, float]:
        """(rows, requests, mean position) of the prompts that are to be prefilled in so many steps."""
        left, _ = self._survivors(steps)
        from_queue = self.wanted - self.running + self._newcomers(steps, step_s, left)[1]
        arrived = self.rate * step_s * steps if self.queue <= from_queue else 0.0  # else they queue behind others
        rows = self.rows_left + from_queue * self.prompt + arrived * self.arriving
        if not rows:
            return 0.0, 0.0, 0.0
        position = self.rows_left * self.start + from_queue * self.prompt**2 / 2 + arrived * self.arriving**2 / 2
        return rows, self.prefilling + from_queue + arrived, position / rows


def skew_of(owner_n: Ints, tokens_n: Ints, ranks: int) -> Skew:
    """The skew of requests with those owners and tokens."""
    if not len(owner_n):
        return EVEN
    tokens_T = np.bincount(owner_n, tokens_n, ranks)
    requests_T = np.bincount(owner_n, None, ranks)
    top = int(tokens_T.argmax())
    return Skew(float(requests_T[top] * ranks / len(owner_n)), float(tokens_T[top] * ranks / tokens_T.sum()))
