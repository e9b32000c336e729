"""Rows of a step: which pages a rank holds for them, and how idle rows fill a recorded step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import LAYOUTS
from splash.core.ownership import page_holders
from splash.core.step import NO_SLOT, Query, StepPlan
from splash.layouts.rows import NO_QUERY, StepRows, run_edges, single_rows, step_rows
from splash.layouts.tables import PageTables

PAGE = 4


@st.composite
def steps(draw: st.DrawFn) -> StepRows:
    """One step of a rank, with requests that decode and chunks of prompts."""
    ranks = draw(st.integers(1, 4))
    layout = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))]
    owners = sorted(draw(st.lists(st.integers(0, ranks - 1), max_size=6)))
    queries, slot = [], 0
    for number, owner in enumerate(owners):
        start, count = draw(st.integers(0, 20)), draw(st.sampled_from([1, 1, 1, 2, 9]))
        numbers = np.arange(-(-(start + count) // PAGE))
        held = page_holders(numbers, np.full(len(numbers), owner), layout, ranks)
        pages = []
        for row in held.tolist():
            slot += 1
            pages.append(tuple(slot if holds else NO_SLOT for holds in row))
        queries.append(Query(number, start, tuple(range(count)), owner, draw(st.booleans()), tuple(pages)))
    plan = StepPlan(0, 0, layout.name, tuple(queries))
    return step_rows(plan, layout, draw(st.integers(0, ranks - 1)), ranks, PAGE, PageTables(ranks))


@given(rows=steps(), data=st.data())
def test_pages_are_those_of_the_tables(rows: StepRows, data: st.DataObject) -> None:
    some = [*range(len(rows.queries)), NO_QUERY]
    chosen = data.draw(st.lists(st.sampled_from(some), max_size=8))
    pages = rows.held_pages.of(np.array(chosen, dtype=np.int64))
    for place, query in enumerate(chosen):
        part = slice(pages.starts[place], pages.starts[place + 1])
        on_rank = [] if query == NO_QUERY else rows.tables[query].slots_cT[:, rows.rank].tolist()
        want = [(slot, number) for number, slot in enumerate(on_rank) if slot != NO_SLOT]
        assert list(zip(pages.slots[part].tolist(), pages.numbers[part].tolist(), strict=True)) == want
    for row, slot in enumerate(rows.slots(slice(None)).tolist()):
        table = rows.tables[rows.query_N[row]].slots_cT
        assert slot == table[rows.positions_N[row] // PAGE, rows.rank]


@given(rows=steps())
def test_chunks_as_single_rows(rows: StepRows) -> None:
    """The same rows on the same pages, none of them a chunk's, and the same ones sampled."""
    plan = StepPlan(0, 0, rows.layout.name, single_rows(rows.queries))
    singles = step_rows(plan, rows.layout, rows.rank, rows.ranks, PAGE, PageTables(rows.ranks))
    assert not singles.is_chunk_N.any() and len(singles.queries) == len(singles.tokens_N)

    def kind(of: StepRows, row: int) -> tuple[int, int, int]:
        return of.queries[of.query_N[row]].request, int(of.positions_N[row]), int(of.tokens_N[row])

    def described(of: StepRows, some: Sequence[int]) -> list[tuple[int, int, int]]:
        return [kind(of, row) for row in some]

    every = range(len(rows.tokens_N))
    assert sorted(described(singles, every)) == sorted(described(rows, every))
    assert described(singles, singles.sampled.tolist()) == described(rows, rows.sampled.tolist())
    slots = dict(zip(described(rows, every), rows.slots(slice(None)).tolist(), strict=True))
    assert [slots[row] for row in described(singles, every)] == singles.slots(slice(None)).tolist()


@given(rows=steps(), extra=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_idle_rows_follow_each_ranks_own(rows: StepRows, extra: list[int]) -> None:
    counts = tuple(count + more for count, more in zip(rows.counts_T, extra, strict=False))
    padded, sampled = rows.padded(counts)
    assert padded.counts_T == counts and len(padded.tokens_N) == sum(counts)
    start = first = 0
    for count, room in zip(rows.counts_T, counts, strict=True):
        for name in ("tokens_N", "positions_N", "query_N", "is_chunk_N"):
            kept = getattr(padded, name)[start : start + count]
            assert np.array_equal(kept, getattr(rows, name)[first : first + count])
        assert (padded.query_N[start + count : start + room] == NO_QUERY).all()
        start, first = start + room, first + count
    assert np.array_equal(padded.query_N[sampled], rows.query_N[rows.sampled])
    assert np.array_equal(padded.positions_N[sampled], rows.positions_N[rows.sampled])
    assert (padded.slots(slice(None))[padded.query_N == NO_QUERY] == NO_SLOT).all()


@given(st.lists(st.integers(-1, 2), max_size=12))
def test_runs(values: list[int]) -> None:
    edges = run_edges(np.array(values, dtype=np.int64)).tolist()
    assert edges[-1] == len(values)
    parts = [values[a:b] for a, b in itertools.pairwise(edges)]
    assert [value for part in parts for value in part] == values
    assert all(len(set(part)) == 1 for part in parts)
    assert all(a[0] != b[0] for a, b in itertools.pairwise(parts))
