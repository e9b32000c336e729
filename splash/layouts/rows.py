"""The rows of a step: which tokens, at which positions, on which rank.

Rows have one global order, sorted by home rank, in which an all-gather of every rank's rows concatenates. With
request- or replicated KV a row's home is its request's owner. With position-sharded KV the rows of a prefill chunk
live where their page lives, so that their keys are stored without moving, and single rows are dealt out evenly,
since any rank can compute them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from splash.core.layout import KV, Layout, Rows
from splash.core.pages import PageTable
from splash.core.step import Query, StepPlan
from splash.layouts.tables import PageTables


@dataclass(frozen=True)
class StepRows:
    """The rows of one step in global order.

    Attributes:
        layout: the layout of the step.
        rank, ranks, page_size: as everywhere.
        queries: the plan's queries, in plan order.
        tables: the page table of each query, rows of this step included.
        tokens_N, positions_N, query_N: token id, position and query index of each row, int64.
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

    def slots(self, rows: slice | np.ndarray) -> np.ndarray:
        """This rank's slot for the page of each of `rows`, NO_SLOT where it does not hold the page. int64."""
        query_n, page_n = self.query_N[rows], self.positions_N[rows] // self.page_size
        slots_n = np.empty(len(query_n), dtype=np.int64)
        # Rows of a query are neighbours, so there is one look-up a query.
        edges = np.flatnonzero(np.diff(query_n, prepend=-1, append=-1))
        for start, end in itertools.pairwise(edges.tolist()):
            slots_n[start:end] = self.tables[query_n[start]].slots_cT[page_n[start:end], self.rank]
        return slots_n


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
