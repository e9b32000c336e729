"""Slots: which of those of one rank's arenas are free to hold pages.

Switches and peers' reads move long runs of slots far faster than scattered ones; the allocator therefore lets a request
continue after its last slot, and leaves room behind what it places so that it can.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

FEW = 64  # slots that are sorted faster as a list than as an array
_ABSENT, _FREE, _USED = 0, 1, 2  # what a slot is to an allocator; absent slots hold weights or do not exist


class PageAllocator:
    """The slots of one rank that may hold pages. Costs O(log extents) for each extent handed out or taken back.

    Free slots are kept as maximal extents (start, length). A run that continues nothing is placed in the largest
    extent: at its start where no page lies before it, else in its middle, which leaves half of what remains to the
    page before it and half to the new run.

    Args:
        slots: allocatable slots, int64, ascending, without repeats.
        used: those of them that already hold pages.
        border: slots below it are placed in only when there are no others. No extent crosses it.
    """

    def __init__(self, slots: np.ndarray, used: Iterable[int] = (), border: int = 0) -> None:
        self._border = border
        self.num_total = len(slots)
        self.num_free = 0
        self._state = bytearray(int(slots[-1]) + 1 if len(slots) else 0)
        self._lengths: dict[int, int] = {}  # start of a free extent -> its length
        self._starts: dict[int, int] = {}  # slot after a free extent -> its start
        # (below the border, -length, slot after) of every free extent, and of some that are gone. An extent that
        # shrinks from its start keeps its entry: a length here may be too large, and is put right at the top.
        self._heap: list[tuple[bool, int, int]] = []
        state = np.frombuffer(self._state, dtype=np.uint8)
        state[slots] = _FREE
        taken = used if isinstance(used, np.ndarray) else np.fromiter(used, dtype=np.int64)
        assert not len(taken) or 0 <= taken.min() <= taken.max() < len(state), "a page lies in no slot"
        assert (state[taken] == _FREE).all(), "a page lies in a slot that cannot hold one"
        state[taken] = _USED
        assert np.count_nonzero(state == _USED) == len(taken), "a slot holds two pages"
        is_free = state == _FREE
        inner = np.flatnonzero(is_free[1:] != is_free[:-1]) + 1
        edges = [*([0] if is_free[:1].any() else []), *inner.tolist(), *([len(state)] if is_free[-1:].any() else [])]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            cut = min(max(border, start), end)
            for first, last in ((start, cut), (cut, end)):
                if first < last:
                    self._add_extent(first, last)
            self.num_free += end - start

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free slots, in the order in which pages should fill them.

        Starts with the slot right after `after` where that is free. There must be `count` free slots.
        """
        assert 0 <= count <= self.num_free, f"{count} slots asked for, {self.num_free} free"
        taken: list[int] = []
        if count and after is not None and after + 1 in self._lengths:
            self._take(after + 1, 0, min(count, self._lengths[after + 1]), taken)
        while len(taken) < count:
            start = self._largest_extent()
            length = self._lengths[start]
            num = min(count - len(taken), length)
            page_before = start > 0 and self._state[start - 1] == _USED
            self._take(start, (length - num) // 2 if page_before else 0, num, taken)
        self.num_free -= count
        return taken

    def allocate_each(self, last: Sequence[int | None]) -> list[int]:
        """Take one free slot for each of several runs, given their last slots, as `allocate` would for one by one."""
        assert len(last) <= self.num_free, f"{len(last)} slots asked for, {self.num_free} free"
        lengths, starts, state = self._lengths, self._starts, self._state
        taken: list[int] = []
        for before in last:
            slot = -1 if before is None else before + 1
            length = lengths.pop(slot, 0)
            if not length:
                slot = self._largest_extent()
                length = lengths[slot]
                page_before = slot > 0 and state[slot - 1] == _USED
                self._take(slot, (length - 1) // 2 if page_before else 0, 1, taken)
                continue
            if length > 1:
                lengths[slot + 1] = length - 1
                starts[slot + length] = slot + 1
            else:
                del starts[slot + 1]
            state[slot] = _USED
            taken.append(slot)
        self.num_free -= len(taken)
        return taken

    def are_free(self, slots: Sequence[int] | np.ndarray) -> bool:
        """Whether all of some slots are free."""
        state = np.frombuffer(self._state, dtype=np.uint8)
        return bool((state[np.asarray(slots, dtype=np.int64)] == _FREE).all())

    def free_flags(self, num_slots: int) -> np.ndarray:
        """bool [num_slots]: which slots are free."""
        flags = np.zeros(num_slots, dtype=bool)
        flags[: len(self._state)] = np.frombuffer(self._state, dtype=np.uint8) == _FREE
        return flags

    def claim(self, slots: Sequence[int] | np.ndarray) -> None:
        """Take particular slots, all of them free, in any order. Costs O(extents) a run of slots."""
        for begin, end in _runs(slots):
            assert self._state[begin:end] == bytes((_FREE,)) * (end - begin), f"slots {begin}..{end - 1} are not free"
            while begin < end:  # a run may cross the border, which no extent does
                start = max(first for first in self._lengths if first <= begin)
                count = min(end, start + self._lengths[start]) - begin
                self._take(start, begin - start, count, [])
                begin += count
        self.num_free -= len(slots)

    def free(self, slots: Sequence[int] | np.ndarray) -> None:
        """Take slots back, in any order. Each must be in use."""
        for start, end in _runs(slots):
            self._give_back(start, end)
        self.num_free += len(slots)

    def _take(self, start: int, offset: int, count: int, taken: list[int]) -> None:
        """Move `count` slots at `offset` of the free extent at `start` to `taken`."""
        end = start + self._lengths.pop(start)
        first, last = start + offset, start + offset + count
        if last < end:
            self._lengths[last] = end - last
            self._starts[end] = last
        else:
            del self._starts[end]
        if offset:
            self._add_extent(start, first)
        if count == 1:
            self._state[first] = _USED
            taken.append(first)
        else:
            self._state[first:last] = bytes((_USED,)) * count
            taken.extend(range(first, last))

    def _give_back(self, start: int, end: int) -> None:
        """Turn the used slots start .. end - 1 into part of a maximal free extent."""
        if start < self._border < end:
            self._give_back(start, self._border)
            start = self._border
        used = bytes((_USED,)) * (end - start)
        assert start >= 0 and self._state[start:end] == used, f"slots {start}..{end - 1} are not all in use"
        self._state[start:end] = bytes((_FREE,)) * (end - start)
        if start != self._border and start in self._starts:
            start = self._starts.pop(start)
            del self._lengths[start]
        if end != self._border and end in self._lengths:
            end += self._lengths.pop(end)
            del self._starts[end]
        self._add_extent(start, end)

    def _add_extent(self, start: int, end: int) -> None:
        self._lengths[start] = end - start
        self._starts[end] = start
        heapq.heappush(self._heap, (start < self._border, start - end, end))
        if len(self._heap) > 2 * len(self._lengths) + 64:
            self._heap = [(start < self._border, start - end, end) for end, start in self._starts.items()]
            heapq.heapify(self._heap)

    def _largest_extent(self) -> int:
        """The start of the longest free extent above the border, or below it. There must be one."""
        while True:
            below, negative_length, end = self._heap[0]
            start = self._starts.get(end)
            if start is None:
                heapq.heappop(self._heap)
            elif start - end == negative_length:
                return start
            else:
                heapq.heapreplace(self._heap, (below, start - end, end))


def _runs(slots: Sequence[int] | np.ndarray) -> Iterator[tuple[int, int]]:
    """Slots, in any order, as runs start .. end - 1 of as many as follow one another."""
    if len(slots) > FEW:
        ordered = np.asarray(slots, dtype=np.int64)
        steps = np.diff(ordered)
        if (steps < 0).any():
            ordered = np.sort(ordered)
            steps = np.diff(ordered)
        gaps = np.flatnonzero(steps != 1)
        yield from zip(
            ordered[np.concatenate(([0], gaps + 1))].tolist(),
            (ordered[np.concatenate((gaps, [-1]))] + 1).tolist(),
            strict=True,
        )
        return
    if not len(slots):
        return
    few = sorted(slots.tolist() if isinstance(slots, np.ndarray) else slots)
    start = few[0]
    if few == list(range(start, start + len(few))):
        yield start, start + len(few)
        return
    for before, slot in itertools.pairwise(few):
        if slot != before + 1:
            yield start, before + 1
            start = slot
    yield start, few[-1] + 1
