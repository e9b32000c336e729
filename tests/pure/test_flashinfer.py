"""How a batch becomes FlashInfer's: checked against the definition of what a row sees, without FlashInfer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splash.platform.base import AttentionBatch
from splash.platform.cuda.flashinfer_mla import sequences


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


@given(batches())
def test_every_row_sees_what_it_must(case: tuple[AttentionBatch, int]) -> None:
    batch, page_size = case
    made = sequences(batch, page_size)
    truth, simple = [], True
    for b in range(len(batch.row_starts) - 1):
        rows = range(batch.row_starts[b], batch.row_starts[b + 1])
        pages = range(batch.page_starts[b], batch.page_starts[b + 1])
        keys = [
            (int(batch.slots[p]), o, int(batch.numbers[p]) * page_size + o) for p in pages for o in range(page_size)
        ]
        seen = [[(slot, o) for slot, o, at in keys if at <= batch.row_positions[row]] for row in rows]
        truth += seen
        simple &= len(rows) < 2 or len(seen[-1]) == batch.row_positions[rows[-1]] + 1
    assert (made is not None) == simple
    if made is None:
        return
    for b in range(len(batch.row_starts) - 1):
        start, stop = made.row_starts[b : b + 2].tolist()
        first, last = made.page_starts[b : b + 2].tolist()
        keys = [(slot, o) for slot in made.slots[first:last].tolist() for o in range(page_size)]
        for row in range(start, stop):
            hidden = stop - 1 - row if made.causal else 0  # FlashInfer aligns rows with the end of the keys
            assert keys[: max(0, int(made.lengths[b]) - hidden)] == truth[row]
            assert (made.blind is not None and bool(made.blind[row])) == (not truth[row])
