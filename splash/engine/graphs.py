"""Steps of single rows as graphs: one a layout and number of rows, recorded at the start and only replayed after that.

Decode steps are such, and steps with prompts that are short enough are turned into such (`DecodeGraphs.takes_chunks`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splash.core.layout import KV, LAYOUTS, Layout, Projections, Rows
from splash.core.memory import ArenaGeometry
from splash.core.step import NO_SLOT, REPLAYED_KEYS, REPLAYED_ROWS, StepPlan
from splash.layouts.inputs import FixedInputs
from splash.layouts.rows import NO_QUERY, StepRows
from splash.model.transformer import Transformer
from splash.platform.base import Graph, Graphs, Rank
from splash.platform.host_copies import upload
from splash.scheduler.load import chunk_pairs

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, REPLAYED_ROWS)


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to record: those of `BUCKETS` below `max_rows`, and `max_rows` where that is not above all."""
    most = min(max_rows, BUCKETS[-1])
    return (*(bucket for bucket in BUCKETS if bucket < most), most)


def servable_layouts(num_heads: int, ranks: int) -> list[Layout]:
    """The layouts in which these ranks can run a model with so many heads."""
    divides = num_heads % ranks == 0
    return [layout for layout in LAYOUTS.values() if divides or layout.projections is Projections.REPLICATED]


def padded_counts(counts_T: Sequence[int], layout: Layout, buckets: Sequence[int]) -> tuple[int, ...] | None:
    """Rows by rank that a graph has which fits rows like these, or None where there is none.

    Where rows or pages are with their owner, ranks exchange rows, and every rank has as many as the one with most.
    Else only the number of all rows matters, which are counted as the first rank's.
    """
    by_owner = len(counts_T) > 1 and (layout.rows is Rows.SPLIT or layout.kv is KV.REQUEST)
    wanted = max(counts_T) if by_owner else sum(counts_T)
    bucket = next((bucket for bucket in buckets if bucket >= wanted), None)
    if bucket is None:
        return None
    return (bucket,) * len(counts_T) if by_owner else (bucket, *(0,) * (len(counts_T) - 1))


@dataclass
class _Recorded:
    inputs: FixedInputs
    graph: Graph
    scores: Tensor


class DecodeGraphs:
    """The graphs of one rank.

    A graph reads weights, arenas and its inputs at addresses that a switch of layout does not change, so it outlives
    every switch. Every rank replays the same graph in the same step, rows of its own or not.

    Args:
        graphs: the platform's.
        transformer: the model.
        group: the rank.
        geometry: of the arenas.
        dtype: of activations.
        max_rows: most requests that run at once.

    Attributes:
        seconds: that it took to record.
        num_replayed: steps that were replayed.
    """

    def __init__(
        self,
        graphs: Graphs,
        transformer: Transformer,
        group: Rank,
        geometry: ArenaGeometry,
        dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        self._graphs = graphs
        self._transformer = transformer
        self._group = group
        self._geometry = geometry
        self._dtype = dtype
        self._buckets = buckets_for(max_rows)
        self._recorded: dict[tuple[str, tuple[int, ...]], _Recorded] = {}
        self.seconds = 0.0
        self.num_replayed = 0

    def __len__(self) -> int:
        return len(self._recorded)

    def capture(self) -> None:
        """Record every layout and bucket, the largest first. All ranks do so together."""
        started = time.monotonic()
        ranks = self._group.size
        for layout in servable_layouts(self._geometry.spec.num_heads, ranks):
            for bucket in reversed(self._buckets):
                counts = padded_counts([bucket, *[0] * (ranks - 1)], layout, self._buckets)
                assert counts is not None
                self._recorded[layout.name, counts] = self._record(self._idle(layout, counts))
        self.seconds = time.monotonic() - started

    def _record(self, rows: StepRows) -> _Recorded:
        attention, num_rows = self._graphs.attention, len(rows.tokens_N)
        inputs = FixedInputs(self._group.device, attention, num_rows, self._max_pages, self._geometry, self._dtype)
        step = self._transformer.prepare(rows, inputs)
        inputs.send()
        self._transformer.forward(step)  # kernels are compiled and workspaces made outside of the recording
        graph, scores = self._graphs.capture(lambda: self._transformer.forward(step))
        assert scores is not None
        return _Recorded(inputs, graph, scores)

    @property
    def _max_pages(self) -> int:
        """Pages of a batch that a graph takes. Only where requests share very many pages are there more."""
        return self._geometry.num_slots + self._buckets[-1]

    def _has_too_many_pages(self, rows: StepRows) -> bool:
        """Whether the pages of the rank that attends to most do not fit. Every rank comes to the same answer."""
        if sum(len(table) for table in rows.tables) <= self._max_pages:
            return False
        held_T = sum((table.slots_cT != NO_SLOT).sum(axis=0) for table in rows.tables)
        return bool(np.max(held_T) > self._max_pages)

    def _idle(self, layout: Layout, counts_T: tuple[int, ...]) -> StepRows:
        total = sum(counts_T)
        zeros = np.zeros(total, dtype=np.int64)
        return StepRows(
            layout=layout,
            rank=self._group.rank,
            ranks=self._group.size,
            page_size=self._geometry.page_size,
            queries=(),
            tables=(),
            tokens_N=zeros,
            positions_N=zeros,
            query_N=np.full(total, NO_QUERY, dtype=np.int64),
            is_chunk_N=np.zeros(total, dtype=bool),
            counts_T=counts_T,
            sampled=np.arange(total),
        )

    def takes_chunks(self, plan: StepPlan) -> bool:
        """Whether a step has chunks, and is worth running as single rows. Every rank comes to the same answer."""
        lengths = [len(query.tokens) for query in plan.queries]
        if max(lengths) == 1 or sum(lengths) > self._buckets[-1] or any(query.score for query in plan.queries):
            return False
        keys = [chunk_pairs(rows, query.start) for rows, query in zip(lengths, plan.queries, strict=True)]
        return sum(keys) <= REPLAYED_KEYS

    def fits(self, rows: StepRows) -> bool:
        """Whether a step was recorded that `rows` can be. Every rank comes to the same answer."""
        if rows.is_chunk_N.any():
            return False
        counts = padded_counts(rows.counts_T, rows.layout, self._buckets)
        return (
            counts is not None and (rows.layout.name, counts) in self._recorded and not self._has_too_many_pages(rows)
        )

    def forward(self, rows: StepRows, fill: Callable[[Tensor, StepRows], None]) -> Tensor | None:
        """Run a step that fits. Returns what `Transformer.forward` does, valid until the next step.

        `fill` puts the tokens that the host does not know into those of the graph's rows.
        """
        counts = padded_counts(rows.counts_T, rows.layout, self._buckets)
        assert counts is not None
        recorded = self._recorded[rows.layout.name, counts]
        if sum(counts[1:]) == 0:
            rows = dataclasses.replace(rows, counts_T=(len(rows.tokens_N), *(0,) * (rows.ranks - 1)))
        padded, sampled = rows.padded(counts)
        recorded.inputs.begin()
        step = self._transformer.prepare(padded, recorded.inputs)
        recorded.inputs.send()
        fill(step.tokens, padded)
        recorded.graph.replay()
        self.num_replayed += 1
        if not len(sampled):
            return None
        if np.array_equal(sampled, np.arange(len(sampled))):
            return recorded.scores[: len(sampled)]
        return recorded.scores[upload(torch.from_numpy(sampled), self._group.device)]
