"""How attention is cut into programs: worked out on the host, in numpy, once a step for every layer.

Absorbed attention works on blocks of neighbouring pairs (row, head) of one sequence. A *unit* is a few rows, or one,
whose blocks read the same keys: they run side by side and share them in the L2 cache. Where there are too few blocks to
fill the device, the keys of a unit are split evenly over more programs, and their partial results are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from splash.platform.base import AttentionBatch

SEGMENT_FIELDS = 8  # first pair, pairs, first page, first tile, tiles' end, keys all see, keys any sees, partial slot
SPLIT_FIELDS = 4  # first pair, pairs, first partial slot, partial slots
_SEGMENT_OVERHEAD = 3  # tiles that a program's start and end cost
_MERGE_OVERHEAD = 1 / 16  # tiles that merging one more partial result costs
_LEAST_TILES = 2  # tiles of a segment, where there is no lack of programs
_WAVES = np.array([0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4])  # how many programs a device slot the split is tried for


@dataclass(frozen=True)
class AbsorbedPlan:
    """Segments in the order of their start, and the blocks whose partial results are to be merged.

    Attributes (int32):
        segments: [segments, SEGMENT_FIELDS]; a partial slot of -1 writes the result itself.
        splits: [split blocks, SPLIT_FIELDS].
        visible: [n] keys that each row sees, the first so many that its sequence's pages hold.
        slots: [pages]
    """

    segments: np.ndarray
    splits: np.ndarray
    visible: np.ndarray
    slots: np.ndarray


def max_segments(max_rows: int, num_heads: int, block_pairs: int, programs: int) -> tuple[int, int, int]:
    """Most (segments, split blocks, partial slots) of a plan for so many rows, whatever their sequences."""
    blocks = max_rows * -(-num_heads // block_pairs)
    partials = max_partials(programs)
    return blocks + partials, min(blocks, partials // 2), partials


def max_partials(programs: int) -> int:
    """Most partial slots that a plan uses: bounds the workspace."""
    return 4 * programs


def plan_absorbed(
    batch: AttentionBatch, page_size: int, num_heads: int, block_pairs: int, block_keys: int, programs: int
) -> AbsorbedPlan:
    """Cut a batch for a device that runs `programs` at once.

    Args:
        block_pairs: pairs of a block.
        block_keys: keys of a tile.
    """
    row_starts = cast(np.ndarray, batch.row_starts)
    page_starts = cast(np.ndarray, batch.page_starts)
    visible = visible_keys(batch, page_size)
    first_row, num_rows, sequence = _units(row_starts, num_heads, block_pairs)
    most = np.maximum.reduceat(visible, first_row) if len(first_row) else visible[:0]
    common = np.minimum.reduceat(visible, first_row) if len(first_row) else visible[:0]
    tiles = -(-most // block_keys)
    blocks = -(-(num_rows * num_heads) // block_pairs)
    splits = _splits(tiles, blocks, programs)

    # Longest first, so that the short ones fill the gaps at the end; blocks of a unit stay neighbours.
    order = np.argsort(-tiles / np.maximum(splits, 1), kind="stable")
    first_row, num_rows, sequence = first_row[order], num_rows[order], sequence[order]
    most, common, tiles, blocks, splits = most[order], common[order], tiles[order], blocks[order], splits[order]

    # One line a segment: of each unit, its splits, and of each split, its blocks.
    lines = blocks * splits
    unit = np.repeat(np.arange(len(lines)), lines)
    place = np.arange(len(unit)) - np.repeat(np.cumsum(lines) - lines, lines)
    split, block = place // blocks[unit], place % blocks[unit]
    segments = np.empty((len(unit), SEGMENT_FIELDS), dtype=np.int64)
    first_pair = first_row[unit] * num_heads + block * block_pairs
    segments[:, 0] = first_pair
    segments[:, 1] = np.minimum(block_pairs, (first_row + num_rows)[unit] * num_heads - first_pair)
    segments[:, 2] = page_starts[sequence][unit]
    segments[:, 3] = tiles[unit] * split // splits[unit]
    segments[:, 4] = tiles[unit] * (split + 1) // splits[unit]
    segments[:, 5] = common[unit]
    segments[:, 6] = most[unit]
    is_split = splits > 1
    partials = np.where(is_split, blocks * splits, 0)
    first_partial = np.cumsum(partials) - partials
    # The partials of one block lie together.
    segments[:, 7] = np.where(is_split[unit], first_partial[unit] + block * splits[unit] + split, -1)

    split_units = np.repeat(np.flatnonzero(is_split), blocks[is_split])
    split_block = np.arange(len(split_units)) - np.repeat(
        np.cumsum(blocks[is_split]) - blocks[is_split], blocks[is_split]
    )
    merges = np.empty((len(split_units), SPLIT_FIELDS), dtype=np.int64)
    merges[:, 0] = first_row[split_units] * num_heads + split_block * block_pairs
    merges[:, 1] = np.minimum(block_pairs, (first_row + num_rows)[split_units] * num_heads - merges[:, 0])
    merges[:, 2] = first_partial[split_units] + split_block * splits[split_units]
    merges[:, 3] = splits[split_units]
    return AbsorbedPlan(
        segments=segments.astype(np.int32),
        splits=merges.astype(np.int32),
        visible=visible.astype(np.int32),
        slots=cast(np.ndarray, batch.slots).astype(np.int32),
    )


def _units(row_starts: np.ndarray, num_heads: int, block_pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First row, rows and sequence of each unit. A block never spans two units."""
    rows = max(1, block_pairs // num_heads)
    lengths = np.diff(row_starts)
    units = -(-lengths // rows)
    sequence = np.repeat(np.arange(len(lengths)), units)
    place = np.arange(len(sequence)) - np.repeat(np.cumsum(units) - units, units)
    first = row_starts[:-1][sequence] + place * rows
    return first, np.minimum(rows, row_starts[1:][sequence] - first), sequence


def _splits(tiles: np.ndarray, blocks: np.ndarray, programs: int) -> np.ndarray:
    """Into how many runs of tiles each unit is split: the candidate that is estimated to end first.

    With no more segments than the device runs at once, the longest decides. With more, segments are handed out as
    programs end, which levels all but about half a segment; segments that are alike end in waves.
    """
    total = int((tiles * blocks).sum())
    whole = np.ones(len(tiles), dtype=np.int64)
    if total == 0 or int(blocks.sum()) >= 4 * programs:
        return whole
    tile_caps = np.unique(np.maximum(np.ceil(total / (programs * _WAVES)), _LEAST_TILES).astype(np.int64))
    candidates = np.maximum(-(-tiles[None, :] // tile_caps[:, None]), 1)
    candidates = np.concatenate((whole[None, :], candidates, _rounded_down(candidates)))
    lengths = -(-tiles[None, :] // candidates)
    segments = (candidates * blocks).sum(axis=1)
    longest = lengths.max(axis=1) + _SEGMENT_OVERHEAD
    level = (total + segments * _SEGMENT_OVERHEAD) / programs
    alike = lengths.min(axis=1) + _SEGMENT_OVERHEAD > 0.8 * longest
    ends = np.where(alike, np.ceil(segments / programs) * longest, np.maximum(longest, level + longest / 2))
    ends = np.where(segments <= programs, longest, ends) + _MERGE_OVERHEAD * (candidates.max(axis=1) - 1)
    partials = np.where(candidates > 1, candidates * blocks, 0).sum(axis=1)
    ends = np.where(partials <= max_partials(programs), ends, np.inf)
    return cast(np.ndarray, candidates[ends.argmin()])


def _rounded_down(candidates: np.ndarray) -> np.ndarray:
    """One run fewer: where rounding up needs a second wave, this may just fit in the first."""
    return np.maximum(candidates - 1, 1)


def visible_keys(batch: AttentionBatch, page_size: int) -> np.ndarray:
    """How many keys each row sees, int64 [n]: the first so many that the pages of its sequence hold.

    Pages ascend within a sequence, so these are its pages wholly in the past and a part of the page that it lies in.
    """
    positions, numbers = cast(np.ndarray, batch.row_positions), cast(np.ndarray, batch.numbers)
    row_starts, page_starts = cast(np.ndarray, batch.row_starts), cast(np.ndarray, batch.page_starts)
    if not len(numbers):
        return np.zeros(len(positions), dtype=np.int64)
    # One search for all sequences: a number is made unique by its sequence.
    span = int(max(numbers.max(), positions.max(initial=0) // page_size)) + 2
    page_sequence = np.repeat(np.arange(len(page_starts) - 1), np.diff(page_starts))
    row_sequence = np.repeat(np.arange(len(row_starts) - 1), np.diff(row_starts))
    own = positions // page_size
    place = np.searchsorted(page_sequence * span + numbers, row_sequence * span + own)
    inside = np.minimum(place, len(numbers) - 1)
    is_held = (place < page_starts[1:][row_sequence]) & (numbers[inside] == own)
    partial = np.where(is_held, positions % page_size + 1, 0)
    return (place - page_starts[:-1][row_sequence]) * page_size + partial


@dataclass(frozen=True)
class ExpandedPlan:
    """Blocks of rows, longest first, over keys that are gathered one sequence after another.

    Attributes:
        blocks: int32 [blocks, 5]: first row, rows, first gathered key, keys all see, keys any sees.
        visible: int32 [n]
        keys: int64 [keys], where each gathered key is: slot * P + offset.
    """

    blocks: np.ndarray
    visible: np.ndarray
    keys: np.ndarray


def plan_expanded(batch: AttentionBatch, page_size: int, block_rows: int) -> ExpandedPlan:
    """Cut a batch into blocks of at most `block_rows` rows of one sequence."""
    row_starts, page_starts = cast(np.ndarray, batch.row_starts), cast(np.ndarray, batch.page_starts)
    slots = cast(np.ndarray, batch.slots)
    visible = visible_keys(batch, page_size)
    first, num, sequence = _units(row_starts, 1, block_rows)
    most, common = np.maximum.reduceat(visible, first), np.minimum.reduceat(visible, first)
    # Keys that a sequence's rows see; later ones are not gathered.
    lengths = np.zeros(len(row_starts) - 1, dtype=np.int64)
    np.maximum.at(lengths, sequence, most)
    starts = np.cumsum(lengths) - lengths
    key_sequence = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(key_sequence)) - starts[key_sequence]
    keys = slots[page_starts[:-1][key_sequence] + place // page_size] * page_size + place % page_size
    blocks = np.stack((first, num, starts[sequence], common, most), axis=1)
    return ExpandedPlan(
        blocks=blocks[np.argsort(-most, kind="stable")].astype(np.int32), visible=visible.astype(np.int32), keys=keys
    )
