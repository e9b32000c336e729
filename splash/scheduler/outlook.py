"""Outlook: what the next while will hold, and how long each layout would take over it.

One step says little: a chunk of a prefill would make any layout look best or worst. The outlook is the work that is
known and expected until the load has changed by half, or the horizon is reached:

- decode steps, half of them with the requests that are wanted at its begin, half with those at its end
  (`splash.scheduler.crowd`);
- the rows of prompts that are to be prefilled meanwhile, in chunks beside decodes: those that are there, as many at a
  time as a step has rows for, and those that come, as they come in the time that all this takes
  (`splash.scheduler.pace`); as uneven as what was left to compute of the last ones. Where pages are kept by request,
  each owner computes one at the same time, of as many rows as the others as long as there are enough.

A layout whose memory holds only n of the N requests that are wanted serves them in N / n waves of the smaller batch:

    T(layout) = sum over both halves of steps x N / n x step(n)  +  prefill steps x (mixed step - decode step)     [s]

which compares the throughput of layouts with the admission that each allows.

Prefill steps include those of what is preempted. Where memory is full, whatever an ended request leaves is taken by one
that waits. So of the pages that running requests grow by, each is taken from another request, which has to be computed
again: pages are neither made nor lost, and every token that is generated costs one.

    tokens lost(layout) = tokens generated in the outlook x share of it in which memory is full

where the pages wanted go evenly from what they are at its begin to what they are at its end. Each layout is full at
another time, as each has room of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from splash.core.layout import KV, Layout
from splash.scheduler.cost_model import CostModel
from splash.scheduler.crowd import Crowd, Phase, Prompts
from splash.scheduler.pace import NONE, Carried, Pace, carried_together
from splash.scheduler.room import Fill, Room
from splash.scheduler.situation import Ints, Situation
from splash.scheduler.step_times import Shape, StepTimes, coarsely, on_coarse_grid, on_grid
from splash.scheduler.traffic import Arrivals, Outputs

SKEW_STEPS = 10  # a skew is told to a tenth
FITS = Fill(1.0, 1.0)  # of every layout that is never full


class Skew(NamedTuple):
    """How uneven the owners of the running requests are: the busiest rank over the average.

    Attributes:
        requests: its requests.
        keys: their tokens.
    """

    requests: float
    keys: float


EVEN = Skew(1.0, 1.0)


def skew_of(owner_n: Ints, tokens_n: Ints, ranks: int) -> Skew:
    """The skew of requests with those owners and tokens."""
    if not len(owner_n):
        return EVEN
    tokens_T = np.bincount(owner_n, tokens_n, ranks).tolist()
    most = max(tokens_T)
    num_requests = np.count_nonzero(owner_n == tokens_T.index(most))
    requests, keys = num_requests * ranks / len(owner_n), most * ranks / sum(tokens_T)
    return Skew(round(requests * SKEW_STEPS) / SKEW_STEPS, round(keys * SKEW_STEPS) / SKEW_STEPS)


class Prefill(NamedTuple):
    """Steps that carry chunks.

    Attributes:
        steps: of them.
        chunks, rows, start: chunks of a step, rows of each on average, and positions before it.
        top_rows: rows of each on the busiest rank.
        decoding: requests that decode beside them.
    """

    steps: float
    chunks: int
    rows: int
    start: int
    top_rows: int
    decoding: float


class Shapes:
    """Shapes of decode steps on the grid, worked out once for all layouts that ask for the same.

    Args:
        ranks: T.
        longest: tokens of the longest request.
    """

    def __init__(self, ranks: int, longest: int) -> None:
        self._ranks = ranks
        self._longest = longest
        self._known: dict[tuple[float, float, int, bool, Skew | None], Shape] = {}

    def of(self, phase: Phase, singles: int, has_owners: bool, skew: Skew | None) -> Shape:
        """A step of `singles` requests of a phase, on ranks with owners of that skew, None for even ones."""
        key = phase.context, phase.kept, singles, has_owners, skew if has_owners else None
        shape = self._known.get(key)
        if shape is None:
            shape = self._known[key] = self._make(phase, singles, has_owners, skew or EVEN)
        return shape

    def _make(self, phase: Phase, singles: int, has_owners: bool, skew: Skew) -> Shape:
        singles, context = on_grid(singles), on_grid(max(1, round(phase.context)))
        even = -(-singles // self._ranks)
        if not (has_owners and singles):
            return Shape(singles, context, even, context)
        # Of requests that come, each goes to the rank with the least.
        mean = singles / self._ranks
        top = min(singles, max(even, round(mean * (1 + (skew.requests - 1) * phase.kept))))
        keys = max(even * context, mean * context * (1 + (skew.keys - 1) * phase.kept))
        keys = min(max(keys, min(self._longest, singles * context)), singles * context)
        return Shape(singles, context, top, on_grid(max(1, round(keys / top))))


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The work of the next while, the same for every layout.

    Attributes:
        first, last: the batch at its begin and at its end.
        decode_steps: that each request takes, half of them in either batch.
        shared: steps that carry chunks as well, of the backlog and of what comes, where every rank takes part in them.
        owned: the same where owners alone compute their chunks, at once.
        found_tokens: of its prompts, that need not be computed as long as the prefix cache has them.
        wanted: requests at the begin and at the end; the phases have them too, the last on a coarse ladder.
        pages: of one of them at the begin and at the end.
        pages_held: of those that run now, with one each to grow by, which have room in every layout that is asked for.
        skew: of the owners now, where pages are kept by them.
        shapes: of its steps.
        known: seconds that have been predicted, by whether layouts have owners, their skew, and how full they are.
    """

    first: Phase
    last: Phase
    decode_steps: float
    shared: tuple[Prefill, ...]
    owned: tuple[Prefill, ...]
    found_tokens: float
    wanted: tuple[float, float]
    pages: tuple[float, float]
    pages_held: int
    skew: Skew
    shapes: Shapes
    known: dict[tuple[bool, Skew | None, Fill], list[float]] = field(default_factory=dict)

    @property
    def steps(self) -> float:
        """Steps that it takes where all that is wanted fits."""
        return max(sum(prefill.steps for prefill in self.shared), self.decode_steps)

    def prefills(self, has_owners: bool) -> tuple[Prefill, ...]:
        """The steps that carry chunks, by whether their owners alone compute them."""
        return self.owned if has_owners else self.shared

    def lost(self, full_share: float) -> Prompts:
        """What is preempted in a layout whose memory is full for that share of it, and has to be computed again.

        It is the youngest requests that are, which are half as long as others on average.
        """
        rows = full_share * self.decode_steps * (self.first.requests + self.last.requests) / 2
        each = max(2.0, (self.first.context + self.last.context) / 4)
        return Prompts(rows, rows / each, each / 2)


def _part(prefills: tuple[Prefill, Prefill], part: float) -> tuple[Prefill, Prefill]:
    """That part of their steps."""
    shared, owned = prefills
    return shared._replace(steps=part * shared.steps), owned._replace(steps=part * owned.steps)


def _on_ladder(phase: Phase, first: Phase) -> Phase:
    """About `phase`, whole steps of `COARSE` away from `first`: what is far ahead is not known to a percent."""
    return Phase(
        first.requests * coarsely(phase.requests / first.requests),
        first.context * coarsely(phase.context / first.context),
        phase.kept,
    )


@dataclass(frozen=True)
class _Lane:
    """What is asked of a layout again and again."""

    has_owners: bool
    times: StepTimes
    index: int  # of the layout in `times`
    capacity: Callable[[float], float]

    def fitting(self, pages: float, held: int) -> float:
        """Requests of so many pages each that fit at once, where `held` pages are known to fit."""
        return max(1.0, self.capacity(pages), held / pages)


class _Serving(NamedTuple):
    """The layout that serves, and what it does without prompts.

    Attributes:
        lane: of the layout.
        shapes: of its steps.
        phase: what is wanted.
        batch: requests of it that fit at once.
        round_s: seconds in which each decodes one token.
    """

    lane: _Lane
    shapes: Shapes
    phase: Phase
    batch: float
    round_s: float

    @property
    def waves(self) -> float:
        """Steps of a round."""
        return self.phase.requests / self.batch


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
        self._lanes: dict[Layout, _Lane] = {}
        for has_owners in (False, True):
            layouts = [layout for layout in model.layouts if (layout.kv is KV.REQUEST) == has_owners]
            times = StepTimes(model, layouts)
            for index, layout in enumerate(layouts):
                self._lanes[layout] = _Lane(has_owners, times, index, room.capacity(layout))
        self._ranks = model.ranks
        self._page_size = model.page_size
        self._max_running = min(max_num_seqs, max_batched_tokens)
        self._max_rows = max_batched_tokens
        self._horizon_s = horizon_s

    def look(self, situation: Situation, arrivals: Arrivals, outputs: Outputs) -> Outlook:
        """The outlook from a situation in which anything runs or waits."""
        crowd = Crowd.of(situation, arrivals, outputs, self._max_running)
        lane, first, skew = self._lanes[situation.layout], crowd.later(0.0, 0.0), EVEN
        if lane.has_owners:
            skew = skew_of(situation.owner_n, situation.length_n, situation.ranks)
        shapes = Shapes(self._ranks, int(situation.length_n.max(initial=1)))
        pages = self._pages(first, situation)
        held = situation.num_pages
        batch = min(first.requests, lane.fitting(pages, held))
        decode = lane.times.seconds(shapes.of(first, round(batch), lane.has_owners, skew))[lane.index]
        serving = _Serving(lane, shapes, first, batch, first.requests / batch * decode)
        unevenness = partial(arrivals.unevenness, ranks=self._ranks)
        backlog = crowd.backlog()
        pace, prefills = self._pace(serving, crowd, backlog, unevenness)
        steps = crowd.steps_to_half(pace.rounds(self._horizon_s), pace.seconds)
        step_s = pace.seconds(steps) / steps
        stream = crowd.stream(steps, step_s)
        behind = serving.waves * (steps - pace.backlog_rounds)
        if stream.rows >= 1 and behind > 0:
            # A layout that computes fewer at once has more of them there.
            alone = max(stream.requests, stream.rows / max(1.0, self._max_rows - crowd.wanted))
            at_once = max(pace.carried.prompts, alone / behind)
            both = self._dealt(stream, at_once, crowd.wanted, unevenness)
            part = min(1.0, behind / both[lane.has_owners].steps)  # the rest finds no step to be computed in
            prefills.append(_part(both, part))
            stream = stream._replace(found=part * stream.found)
        ahead = crowd.later(steps, step_s)
        return Outlook(
            first=first,
            last=_on_ladder(ahead, first),
            decode_steps=steps,
            shared=tuple([both[False] for both in prefills]),
            owned=tuple([both[True] for both in prefills]),
            found_tokens=backlog.found + stream.found,
            wanted=(first.requests, ahead.requests),
            pages=(pages, self._pages(ahead, situation)),
            pages_held=held,
            skew=skew,
            shapes=shapes,
        )

    def seconds(self, layout: Layout, outlook: Outlook, skew: Skew | None) -> float:
        """How long the outlook takes in `layout` with owners of that skew, None for even ones."""
        lane = self._lanes[layout]
        fill = self._fill(lane, outlook)
        key = lane.has_owners, skew if lane.has_owners else None, fill
        known = outlook.known.get(key)
        if known is None:
            known = outlook.known[key] = self._seconds(lane, outlook, skew, fill)
        return known[lane.index]

    def _fill(self, lane: _Lane, outlook: Outlook) -> Fill:
        pairs, held = zip(outlook.wanted, outlook.pages, strict=True), outlook.pages_held
        fill = Fill(*[requests / lane.fitting(pages, held) for requests, pages in pairs])
        return fill if max(fill) > 1 else FITS

    def _seconds(self, lane: _Lane, outlook: Outlook, skew: Skew | None, fill: Fill) -> list[float]:
        """The same for all layouts that feel the same shapes and are as full."""
        seconds, steps, waves = [0.0] * lane.times.num_layouts, 0.0, fill.waves
        for phase, times in ((outlook.last, waves.end), (outlook.first, waves.begin)):
            num = outlook.decode_steps / 2 * times
            shape = outlook.shapes.of(phase, round(phase.requests / times), lane.has_owners, skew)
            seconds = [sum_s + num * step_s for sum_s, step_s in zip(seconds, lane.times.seconds(shape), strict=True)]
            steps += num
        batch = outlook.first.requests / waves.begin
        for prefill in outlook.prefills(lane.has_owners):
            added = self._prefill(lane, prefill, outlook.shapes, outlook.first, batch, steps)
            seconds = [sum_s + more_s for sum_s, more_s in zip(seconds, added, strict=True)]
            steps = max(0.0, steps - prefill.steps)
        if fill.full_share:
            again = self._lost(outlook, fill.full_share)[lane.has_owners]
            added = self._prefill(lane, again, outlook.shapes, outlook.first, batch, again.steps)
            seconds = [sum_s + more_s for sum_s, more_s in zip(seconds, added, strict=True)]
        return seconds

    def _lost(self, outlook: Outlook, full_share: float) -> tuple[Prefill, Prefill]:
        """Steps in which what is preempted is computed again, as it comes; see `_dealt`."""
        lost, decoding = outlook.lost(full_share), outlook.first.requests
        return self._dealt(lost, max(1.0, lost.requests / outlook.decode_steps), decoding, lambda chunks: 1.0)

    def recompute_s(self, layout: Layout, outlook: Outlook, tokens: float) -> float:
        """Seconds to compute, in `layout`, what of the outlook's prompts would have been found in `tokens` of cache."""
        rows = min(float(tokens), outlook.found_tokens)
        lane = self._lanes[layout]
        return self._rows_s(lane, outlook, rows)[lane.index] if rows else 0.0

    def _rows_s(self, lane: _Lane, outlook: Outlook, rows: float) -> list[float]:
        """Seconds that so many more rows of prompts take in the layouts of a lane, as the last of the outlook's do."""
        prefills = outlook.prefills(lane.has_owners)
        if not prefills:
            return [0.0] * lane.times.num_layouts
        batch = outlook.first.requests / self._fill(lane, outlook).waves.begin
        prefill = prefills[-1]
        share = rows / (prefill.steps * prefill.chunks * prefill.rows)
        seconds = self._prefill(lane, prefill, outlook.shapes, outlook.first, batch, prefill.steps)
        return [share * all_s for all_s in seconds]

    def _pace(
        self, serving: _Serving, crowd: Crowd, backlog: Prompts, unevenness: Callable[[int], float]
    ) -> tuple[Pace, list[tuple[Prefill, Prefill]]]:
        """How rounds go by in the layout that serves; and the steps of the backlog, if there is one, by `_dealt`."""
        lane, waves = serving.lane, serving.waves
        pace, prefills = Pace(crowd.coming(), NONE, serving.round_s), list[tuple[Prefill, Prefill]]()

        def seconds(prefill: Prefill, covered: float) -> float:
            return self._prefill(lane, prefill, serving.shapes, serving.phase, serving.batch, covered)[lane.index]

        if backlog.rows >= 1:
            both = self._dealt(backlog, backlog.requests, (crowd.decoding + crowd.wanted) / 2, unevenness)
            backlog_s = seconds(both[lane.has_owners], 0.0)
            if backlog_s > self._horizon_s:
                both, backlog_s = _part(both, self._horizon_s / backlog_s), self._horizon_s
            prefills.append(both)
            pace = pace._replace(backlog_rounds=both[lane.has_owners].steps / waves, backlog_s=backlog_s)
        left_s = self._horizon_s - pace.backlog_s
        typical = crowd.typical(left_s)
        if typical.rows <= 0 or left_s <= 0:
            return pace, prefills

        def carry(n: int) -> Carried:
            prompts = Prompts(n * typical.rows, n * typical.requests, typical.position)
            prefill = self._dealt(prompts, n, crowd.wanted, unevenness)[lane.has_owners]
            return Carried(n, prefill.steps / waves, seconds(prefill, prefill.steps))

        most = int((self._max_rows - crowd.wanted) / max(2.0, typical.rows))
        most = max(self._ranks if lane.has_owners else 1, most)
        return pace._replace(carried=carried_together(pace.coming, carry, serving.round_s, left_s, most)), prefills

    def _dealt(
        self, prompts: Prompts, at_once: float, decoding: float, unevenness: Callable[[int], float]
    ) -> tuple[Prefill, Prefill]:
        """The steps that carry chunks of prompts, of which so many are there at once, beside so many that decode.

        First where every rank takes part in each, and prompts are computed one after another; then with owners, one of
        each owner at once: as many rows on every rank, as long as prompts last for that. By chunks of a step,
        `unevenness` is the rows of the busiest rank over the average.
        """
        budget, each = max(2.0, self._max_rows - decoding), max(2.0, prompts.rows / prompts.requests)
        most, ready = math.ceil(budget / each), max(1, math.ceil(at_once))
        chunks = on_coarse_grid(min(ready, most))
        rows, start = self._rows(prompts, chunks, each, budget)
        top = on_coarse_grid(round(rows * unevenness(chunks)))
        shared = Prefill(prompts.rows / (chunks * rows), chunks, rows, start, top, decoding)
        if at_once * each <= budget:  # a step has room for all
            return shared, shared
        chunks = on_coarse_grid(min(ready, max(most, self._ranks)))
        if at_once >= self._ranks:
            chunks = self._ranks * on_coarse_grid(max(1, round(chunks / self._ranks)))
        rows, start = self._rows(prompts, chunks, each, budget)
        return shared, Prefill(prompts.rows / (chunks * rows), chunks, rows, start, rows, decoding)

    def _rows(self, prompts: Prompts, chunks: int, each: float, budget: float) -> tuple[int, int]:
        """(rows, start) of one of so many chunks, where prompts have `each` tokens and a step `budget` rows."""
        rows = on_coarse_grid(max(2, round(min(each, budget / chunks))))
        start = on_coarse_grid(max(0, round((prompts.position - rows / 2) / self._page_size)))
        return rows, self._page_size * start

    def _pages(self, phase: Phase, situation: Situation) -> float:
        """Pages of a request of a phase, which shares as many as those that run share now."""
        return max(1.0, math.ceil(phase.context / self._page_size + 0.5) * situation.page_share)

    def _prefill(
        self, lane: _Lane, prefill: Prefill, shapes: Shapes, phase: Phase, batch: float, covered: float
    ) -> list[float]:
        """Seconds that the chunks add to `covered` steps of decodes, in each layout of a lane."""
        alone = shapes.of(phase, round(min(prefill.decoding, batch)), lane.has_owners, None)
        mixed = Shape(
            alone.singles,
            alone.context,
            alone.top_singles,
            alone.top_context,
            prefill.chunks,
            prefill.rows,
            prefill.start,
            prefill.top_rows,
        )
        fewer = min(prefill.steps, covered)
        pairs = zip(lane.times.seconds(mixed), lane.times.seconds(alone), strict=True)
        return [prefill.steps * mixed_s - fewer * alone_s for mixed_s, alone_s in pairs]
