"""Plans of attention: every pair of a row and a head meets every key that it sees once, and programs end together."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.platform.base import AttentionBatch
from splash.platform.triton.plan import max_segments, plan_absorbed, plan_expanded, visible_keys


def batch_of(sequences: list[tuple[int, list[int]]], page_size: int, rank: int = 0, ranks: int = 1) -> AttentionBatch:
    """Sequences of (length, row positions), of whose pages every `ranks`-th is here, at slots that tell them apart."""
    numbers = [np.arange(rank, -(-length // page_size), ranks) for length, _ in sequences]
    slots = [1000 * index + own for index, own in enumerate(numbers)]
    rows = [np.array(positions, dtype=np.int64) for _, positions in sequences]
    starts = [np.cumsum([0, *map(len, parts)]) for parts in (rows, numbers)]
    flat = [np.concatenate(parts).astype(np.int64) for parts in (rows, slots, numbers)]
    return AttentionBatch(flat[0], starts[0], flat[1], flat[2], starts[1])


@st.composite
def batches(draw: st.DrawFn) -> tuple[AttentionBatch, int]:
    page_size = draw(st.sampled_from([1, 4, 16, 64]))
    sequences = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 400))
        sequences.append((length, sorted(draw(st.sets(st.integers(0, length - 1), max_size=10)))))
    ranks = draw(st.integers(1, 3))
    return batch_of(sequences, page_size, draw(st.integers(0, ranks - 1)), ranks), page_size


@settings(max_examples=200)
@given(batches())
def test_visible_keys_are_those_at_or_before_the_row(case: tuple[AttentionBatch, int]) -> None:
    batch, page_size = case
    want = []
    for b in range(len(batch.row_starts) - 1):
        numbers = batch.numbers[batch.page_starts[b] : batch.page_starts[b + 1]]
        keys = (numbers[:, None] * page_size + np.arange(page_size)).reshape(-1)
        want += [(keys <= p).sum() for p in batch.row_positions[batch.row_starts[b] : batch.row_starts[b + 1]]]
    assert visible_keys(batch, page_size).tolist() == want


@settings(max_examples=200)
@given(
    case=batches(),
    heads=st.sampled_from([1, 8, 12, 16, 64, 128]),
    block=st.sampled_from([16, 64]),
    tile=st.sampled_from([16, 64]),
    programs=st.integers(1, 140),
)
def test_segments_cover_every_pair_and_tile_once(
    case: tuple[AttentionBatch, int], heads: int, block: int, tile: int, programs: int
) -> None:
    batch, page_size = case
    num_rows = len(batch.row_positions)
    plan = plan_absorbed(batch, page_size, heads, block, tile, programs)
    tiles = -(-int(plan.visible.max(initial=0)) // tile)
    seen = np.zeros((num_rows * heads, tiles), dtype=np.int64)
    written = np.zeros(num_rows * heads, dtype=np.int64)
    parts: dict[int, tuple[int, int]] = {}
    sequence_of = np.repeat(np.arange(len(batch.row_starts) - 1), np.diff(batch.row_starts))
    for first, pairs, page, start, end, common, most, part in plan.segments.tolist():
        assert 0 < pairs <= block
        rows = np.arange(first, first + pairs) // heads
        assert len(set(sequence_of[rows].tolist())) == 1 and page == batch.page_starts[sequence_of[rows[0]]]
        assert common <= plan.visible[rows].min() and plan.visible[rows].max() <= most
        seen[first : first + pairs, start:end] += 1
        if part < 0:
            written[first : first + pairs] += 1
        else:
            assert part not in parts
            parts[part] = (first, pairs)
    for first, pairs, first_part, num_parts in plan.splits.tolist():
        assert num_parts > 1
        written[first : first + pairs] += 1
        assert [parts.pop(first_part + k) for k in range(num_parts)] == [(first, pairs)] * num_parts
    assert not parts and (written == 1).all()
    needed = -(-plan.visible // tile)
    for pair in range(num_rows * heads):
        assert (seen[pair, : needed[pair // heads]] == 1).all() and (seen[pair] <= 1).all()
    segments, splits, partials = max_segments(num_rows, heads, block, programs)
    assert len(plan.segments) <= segments and len(plan.splits) <= splits
    assert plan.segments[:, 7].max(initial=-1) < partials


def last_end(lengths: list[int], programs: int) -> int:
    """When the last program ends that takes the next segment as soon as it is free."""
    free = [0] * programs
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


@pytest.mark.parametrize(
    ("lengths", "heads", "worst"),
    [
        ([32768] * 16, 16, 1.05),
        ([32768] * 16, 128, 1.05),
        ([4096] * 128, 64, 1.05),
        ([131072], 128, 1.10),
        ([32768] * 13, 64, 1.10),
        ([131072] + [1000] * 40, 64, 1.40),  # each segment costs as much as three tiles, so few are better
        (list(range(1000, 64000, 1000)), 64, 1.25),
        ([2000] * 200, 64, 1.35),
    ],
)
def test_programs_end_together(lengths: list[int], heads: int, worst: float) -> None:
    batch = batch_of([(length, [length - 1]) for length in lengths], 64)
    plan = plan_absorbed(batch, 64, heads, 64, 64, 132)
    tiles = plan.segments[:, 4] - plan.segments[:, 3]
    assert last_end(tiles.tolist(), 132) <= worst * tiles.sum() / 132


@settings(max_examples=100)
@given(batches(), st.sampled_from([1, 4, 128]))
def test_expanded_blocks_cover_the_rows_and_gather_what_they_see(
    case: tuple[AttentionBatch, int], block_rows: int
) -> None:
    batch, page_size = case
    if not len(batch.row_positions):
        return
    plan = plan_expanded(batch, page_size, block_rows)
    covered = np.concatenate([np.arange(first, first + num) for first, num, *_ in plan.blocks.tolist()])
    assert sorted(covered.tolist()) == list(range(len(batch.row_positions)))
    sequence_of = np.repeat(np.arange(len(batch.row_starts) - 1), np.diff(batch.row_starts))
    for first, num, offset, common, most in plan.blocks.tolist():
        visible = plan.visible[first : first + num]
        assert (common, most) == (visible.min(), visible.max())
        b = sequence_of[first]
        slots = batch.slots[batch.page_starts[b] : batch.page_starts[b + 1]]
        held = (slots[:, None] * page_size + np.arange(page_size)).reshape(-1)
        assert plan.keys[offset : offset + most].tolist() == held[:most].tolist()
