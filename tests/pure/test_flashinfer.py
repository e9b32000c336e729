"""How a batch becomes FlashInfer's: checked against the definition of what a row sees, without FlashInfer."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splash.platform.base import AttentionBatch
from splash.platform.cuda.flashinfer_mla import Sequences, sequences, single_rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[AttentionBatch, int]:
    """Sequences of one or more rows, with all pages or some of them."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    positions, numbers, row_starts, page_starts = [], [], [0], [0]
    for _ in range(draw(st.integers(0, 5))):
        length, count = draw(st.integers(1, 60)), draw(st.integers(0, 5))
        count = min(count, length)
        every = range(-(-length // page_size))
        held = [number for number in every if draw(st.booleans())] if draw(st.booleans()) else list(every)
        positions += range(length - count, length)
        numbers += held
        row_starts.append(len(positions))
        page_starts.append(len(numbers))
    slots = np.random.default_rng(len(numbers)).permutation(len(numbers) + 3)[: len(numbers)]
    arrays = (positions, row_starts, slots, numbers, page_starts)
    return AttentionBatch(*(np.array(array, dtype=np.int64) for array in arrays)), page_size


def seen_keys(batch: AttentionBatch, page_size: int) -> list[list[tuple[int, int]]]:
    """What each row sees by definition: (slot, offset) in order."""
    seen = []
    for b in range(len(batch.row_starts) - 1):
        pages = range(batch.page_starts[b], batch.page_starts[b + 1])
        keys = [
            (int(batch.slots[p]), o, int(batch.numbers[p]) * page_size + o) for p in pages for o in range(page_size)
        ]
        for row in range(batch.row_starts[b], batch.row_starts[b + 1]):
            seen.append([(slot, o) for slot, o, at in keys if at <= batch.row_positions[row]])
    return seen


def keys_from(made: Sequences, first: int, page_size: int) -> list[tuple[int, int]]:
    """What FlashInfer reads from a page on, until it has enough."""
    return [(slot, o) for slot in made.slots[first:].tolist() for o in range(page_size)]


@given(batches())
def test_every_row_sees_what_it_must(case: tuple[AttentionBatch, int]) -> None:
    batch, page_size = case
    made, truth = sequences(batch, page_size), seen_keys(batch, page_size)
    spans = list(itertools.pairwise(batch.row_starts.tolist()))
    simple = all(
        stop - start < 2 or len(truth[row]) == batch.row_positions[row] + 1
        for start, stop in spans
        for row in range(start, stop)
    )
    assert (made is not None) == simple
    if made is None:
        return
    assert made.causal == any(stop - start > 1 for start, stop in spans)
    for b, (start, stop) in enumerate(spans):
        keys = keys_from(made, int(made.page_starts[b]), page_size)
        for row in range(start, stop):
            hidden = stop - 1 - row if made.causal else 0  # FlashInfer aligns rows with the end of the keys
            assert keys[: max(0, int(made.lengths[b]) - hidden)] == truth[row]


@given(batches(), st.integers(0, 3))
def test_rows_by_themselves_see_what_they_must(case: tuple[AttentionBatch, int], num_idle: int) -> None:
    """As a graph has them, idle rows in a last sequence without pages included."""
    batch, page_size = case
    arrays = (
        np.append(batch.row_positions, np.zeros(num_idle, dtype=np.int64)),
        np.append(batch.row_starts, len(batch.row_positions) + num_idle),
        batch.slots,
        batch.numbers,
        np.append(batch.page_starts, batch.page_starts[-1]),
    )
    batch = AttentionBatch(*arrays)
    made, truth = single_rows(batch, page_size), seen_keys(batch, page_size)
    assert not made.causal and len(made.lengths) == len(truth)
    for row, want in enumerate(truth):
        assert keys_from(made, int(made.page_starts[row]), page_size)[: int(made.lengths[row])] == want


def test_rows_with_gaps_are_left_to_the_other_backend() -> None:
    arrays = ([3, 5], [0, 2], [0], [0], [0, 1])
    assert sequences(AttentionBatch(*(np.array(array, dtype=np.int64) for array in arrays)), 16) is None
