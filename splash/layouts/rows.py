"""The rows of a step: which tokens, at which positions, on which rank.

Rows have one global order, sorted by home rank, in which an all-gather of every rank's rows concatenates. With
request- or replicated KV a row's home is its request's owner. With position-sharded KV the rows of a prefill chunk
live where their page lives, so that their keys are stored without moving, and single rows are dealt out evenly,
since any rank can compute them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splash.core.layout import KV, Layout, Rows
from splash.core.pages import PageTable
from splash.core.step import NO_SLOT, Query, StepPlan
from splash.layouts.tables import PageTables

NO_QUERY = -1  # query index of an idle row


def run_edges(values_n: np.ndarray) -> np.ndarray:
    """Where runs of equal values begin, and the length of all: int64 [runs + 1]; [0] for no values."""
    begins = np.ones(len(values_n), dtype=bool)
    begins[1:] = values_n[1:] != values_n[:-1]
    return np.r_[np.flatnonzero(begins), len(values_n)]


@dataclass(frozen=True)
class QueryPages:
    """Pages of some queries, one query after another: int64 slots [p], page numbers [p] and starts [queries + 1]."""

    slots: np.ndarray
    numbers: np.ndarray
    starts: np.ndarray

    def of(self, queries: np.ndarray) -> QueryPages:
        """The pages of these queries, in this order; none for NO_QUERY."""
        if np.array_equal(queries, np.arange(len(self.starts) - 1)):
            return self
        lengths = np.where(queries == NO_QUERY, 0, np.append(np.diff(self.starts), 0)[queries])
        ends = np.cumsum(lengths)
        index = np.arange(lengths.sum()) + np.repeat(self.starts[queries] - (ends - lengths), lengths)
        return QueryPages(self.slots[index], self.numbers[index], np.r_[0, ends])


@dataclass(frozen=True)
class StepRows:
    """The rows of one step in global order.

    Attributes:
        layout: the layout of the step.
        rank, ranks, page_size: as everywhere.
        queries: the plan's queries, in plan order.
        tables: the page table of each query, rows of this step included.
        tokens_N, positions_N, query_N: token id, position and query index of each row, int64. Idle rows, which fill a
            graph's, have the index NO_QUERY.
        is_chunk_N: bool, the row belongs to a query of several rows.
        counts_T: rows by home rank.
        sampled: for each query in plan order, all its rows if it scores, its last row if it only samples.
    """

    layout: Layout
    rank: int
    ranks: int
    page_size: int
    queries: tuple[Query, ...]
    tables: tuple[PageTable, ...]
    tokens_N: np.ndarray
    positions_N: np.ndarray
    query_N: np.ndarray
    is_chunk_N: np.ndarray
    counts_T: tuple[int, ...]
    sampled: np.ndarray

    @property
    def own(self) -> slice:
        """The rows whose home is this rank."""
        start = sum(self.counts_T[: self.rank])
        return slice(start, start + self.counts_T[self.rank])

    @property
    def local(self) -> slice:
        """The rows that this rank holds at a layer boundary."""
        return slice(0, len(self.tokens_N)) if self.layout.rows is Rows.REPLICATED else self.own

    @cached_property
    def _own_slots(self) -> tuple[np.ndarray, np.ndarray]:
        """This rank's slots of the tables of all queries, one after another, and where each table begins."""
        starts = np.cumsum([0, *(len(table) for table in self.tables)])
        slots = [table.slots_cT[:, self.rank] for table in self.tables]
        return np.concatenate(slots or [np.empty(0)]).astype(np.int64), starts

    def slots(self, rows: slice | np.ndarray) -> np.ndarray:
        """This rank's slot for the page of each of `rows`, NO_SLOT where it does not hold the page. int64."""
        query_n, page_n = self.query_N[rows], self.positions_N[rows] // self.page_size
        slots, starts = self._own_slots
        busy_n = query_n != NO_QUERY
        if busy_n.all():
            return slots[starts[query_n] + page_n]
        slots_n = np.full(len(query_n), NO_SLOT, dtype=np.int64)
        slots_n[busy_n] = slots[starts[query_n[busy_n]] + page_n[busy_n]]
        return slots_n

    @cached_property
    def held_pages(self) -> QueryPages:
        """The pages of each query's request that this rank holds."""
        slots, starts = self._own_slots
        numbers = np.arange(len(slots)) - np.repeat(starts[:-1], np.diff(starts))
        held = slots != NO_SLOT
        if not held.all():
            slots, numbers, starts = slots[held], numbers[held], np.r_[0, np.cumsum(held)][starts]
        return QueryPages(slots, numbers, starts)

    def padded(self, counts_T: Sequence[int]) -> tuple[StepRows, np.ndarray]:
        """These rows with idle ones after each rank's, up to `counts_T`, all of them sampled.

        Idle rows are those of no query: they hold no page, see nothing and are not cached.

        Returns:
            the rows, and for each sampling query the padded row that it samples.
        """
        pairs = list(zip(self.counts_T, counts_T, strict=True))
        assert all(count <= most for count, most in pairs), f"{self.counts_T} rows do not fit in {tuple(counts_T)}"
        total = sum(counts_T)
        place_N = np.flatnonzero(np.concatenate([np.arange(most) < count for count, most in pairs]))

        def spread(values_N: np.ndarray, idle: int) -> np.ndarray:
            padded = np.full(total, idle, dtype=values_N.dtype)
            padded[place_N] = values_N
            return padded

        rows = dataclasses.replace(
            self,
            tokens_N=spread(self.tokens_N, 0),
            positions_N=spread(self.positions_N, 0),
            query_N=spread(self.query_N, NO_QUERY),
            is_chunk_N=spread(self.is_chunk_N, False),
            counts_T=tuple(counts_T),
            sampled=np.arange(total),
        )
        return rows, place_N[self.sampled]


def single_rows(queries: Sequence[Query]) -> tuple[Query, ...]:
    """The same rows as queries of one row each, as those of requests that decode."""
    singles: list[Query] = []
    for query in queries:
        if len(query.tokens) == 1:
            singles.append(query)
            continue
        last = len(query.tokens) - 1
        for at, token in enumerate(query.tokens):
            pages = query.new_pages if at == 0 else ()
            place = query.start + at
            singles.append(Query(query.request, place, (token,), query.owner, query.sample and at == last, pages))
    return tuple(singles)


def step_rows(plan: StepPlan, layout: Layout, rank: int, ranks: int, page_size: int, tables: PageTables) -> StepRows:
    """Lay out the rows of `plan`, entering its new pages into `tables`."""
    queries = plan.queries
    request_tables = tuple(tables.extend(query.request, query.new_pages) for query in queries)
    lengths = np.array([len(query.tokens) for query in queries], dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.fromiter((token for query in queries for token in query.tokens), dtype=np.int64, count=total)
    starts = np.array([query.start for query in queries], dtype=np.int64)
    query_N = np.repeat(np.arange(len(queries)), lengths)
    positions = np.arange(total) - np.repeat(ends - lengths, lengths) + np.repeat(starts, lengths)
    is_chunk = np.repeat(lengths > 1, lengths)
    if layout.kv is KV.POSITION and layout.rows is Rows.SPLIT:
        home = (positions // page_size) % ranks
        singles = np.flatnonzero(~is_chunk)
        home[singles] = np.arange(len(singles)) * ranks // max(len(singles), 1)
        # Within a rank the rows of chunks come first: the two kinds exchange differently.
        order = np.lexsort((~is_chunk, home))
    else:
        home = np.repeat(np.array([query.owner for query in queries], dtype=np.int64), lengths)
        order = np.argsort(home, kind="stable")
    place = np.empty(total, dtype=np.int64)
    place[order] = np.arange(total)
    if any(query.score for query in queries):
        counts = [len(query.tokens) if query.score else query.sample for query in queries]
        sampled = place[np.concatenate([np.arange(end - n, end) for n, end in zip(counts, ends, strict=True)])]
    else:
        sampling = [index for index, query in enumerate(queries) if query.sample]
        sampled = place[ends[sampling] - 1] if sampling else np.empty(0, dtype=np.int64)
    return StepRows(
        layout=layout,
        rank=rank,
        ranks=ranks,
        page_size=page_size,
        queries=queries,
        tables=request_tables,
        tokens_N=tokens[order],
        positions_N=positions[order],
        query_N=query_N[order],
        is_chunk_N=is_chunk[order],
        counts_T=tuple(int(count) for count in np.bincount(home, minlength=ranks)),
        sampled=sampled,
    )
