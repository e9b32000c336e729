"""StepTimes: what steps of any shape take in any layout, each shape predicted once and remembered.

An outlook asks for many steps that differ little from those it asked for a moment ago. Shapes are therefore put on a
grid that is finer than what a policy acts on, the same for all layouts, so that layouts are compared on equal loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from splash.core.layout import Layout
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad

GRID = 1.1  # ratio of neighbours on the grid
_EXACT = 20  # counts up to this are their own
_LOG_GRID = math.log(GRID)
COARSE = 1.25
_LOG_COARSE = math.log(COARSE)
REMEMBERED = 1 << 14  # shapes


class Shape(NamedTuple):
    """A step, by what its cost depends on. The busiest rank matters where requests have owners that hold their pages.

    Attributes:
        singles: requests that decode.
        context: keys that one of them sees, on average.
        top_singles: those of them on the busiest rank.
        top_context: keys that one of those sees, on average.
        chunks: chunks of prefills, dealt out to the ranks in turn.
        rows: query rows of a chunk.
        start: positions before a chunk.
        top_rows: rows of a chunk on the busiest rank, where `rows` is the average.
    """

    singles: int
    context: int
    top_singles: int
    top_context: int
    chunks: int = 0
    rows: int = 0
    start: int = 0
    top_rows: int = 0


class StepTimes:
    """Predicted seconds of steps in layouts that feel the same shapes.

    Args:
        model: what predicts them.
        layouts: the layouts.

    Attributes:
        num_layouts: how many.
    """

    def __init__(self, model: CostModel, layouts: Sequence[Layout]) -> None:
        self.num_layouts = len(layouts)
        self._model = model
        self._layouts = layouts
        self._seconds: dict[Shape, list[float]] = {}

    def seconds(self, shape: Shape) -> list[float]:
        """A step of that shape, whose numbers are on the grid, in each of the layouts."""
        seconds = self._seconds.get(shape)
        if seconds is None:
            if len(self._seconds) >= REMEMBERED:
                self._seconds.clear()
            load = load_of(shape, self._model.ranks, self._model.page_size)
            costs = self._model.steps(load, self._layouts).values()
            seconds = self._seconds[shape] = [cost.seconds for cost in costs]
        return seconds


@lru_cache(1 << 16)
def on_grid(value: int) -> int:
    """The nearest number of the grid."""
    return value if value <= _EXACT else round(GRID ** round(math.log(value) / _LOG_GRID))


def coarsely(ratio: float) -> float:
    """The nearest power of `COARSE` to a positive number."""
    return COARSE ** round(math.log(max(ratio, 1e-6)) / _LOG_COARSE)


@lru_cache(1 << 12)
def on_coarse_grid(value: int) -> int:
    """The nearest of few numbers, for what all layouts feel alike, or less than their differences."""
    return value if value <= 2 else round(COARSE ** round(math.log(value) / _LOG_COARSE))


def load_of(shape: Shape, ranks: int, page_size: int) -> StepLoad:
    """A load of that shape: rank 0 is the busiest, the others share the rest evenly."""
    rest = shape.singles - shape.top_singles
    keys_left = shape.singles * shape.context - shape.top_singles * shape.top_context
    other_context = max(1, keys_left // rest) if rest else 0
    context = np.repeat([shape.top_context, other_context], [shape.top_singles, rest])
    # Requests of one length would all end on one rank's stripe.
    period = page_size * ranks
    if shape.singles > 1:
        spread = (np.arange(shape.singles) * period) // shape.singles - period // 2
        context = context + np.where(context > period, spread, 0)
    owner = np.zeros(shape.singles, dtype=np.int64)
    if rest:
        owner[shape.top_singles :] = 1 + np.arange(rest) % (ranks - 1)
    chunks = np.arange(shape.chunks)
    on_top = chunks % ranks == 0
    num_top = int(on_top.sum())
    others = max(2, (shape.rows * shape.chunks - shape.top_rows * num_top) // max(1, shape.chunks - num_top))
    rows = np.where(on_top, max(2, shape.top_rows), others)
    return StepLoad.of_arrays(
        np.concatenate((owner, chunks % ranks)),
        np.concatenate((np.ones(shape.singles, dtype=np.int64), rows)),
        np.concatenate((np.maximum(context, 1) - 1, np.full(shape.chunks, shape.start))),
        ranks,
        shape.singles,
    )
