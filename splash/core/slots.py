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
_TAKEN = 1  # the byte of a slot that is not free
_ONE = b"\1"


class PageAllocator:
    """The slots of one rank that may hold pages.

    There is a byte for each slot, which says whether it is free. To continue a run changes that byte and nothing else:
    where an extent, a maximal run of free slots, begins and ends is read off the bytes when somebody wants to know. An
    extent handed out or taken back costs O(log extents), and to look along it at the speed of `memchr`.

    A run that continues nothing is placed in the largest extent: at its start where no page lies before it, else in its
    middle, which leaves half of what remains to the page before it and half to the new run.

    Args:
        slots: allocatable slots, int64, ascending, without repeats.
        used: those of them that already hold pages.
        border: slots below it are placed in only when there are no others. No extent crosses it.
    """

    def __init__(self, slots: np.ndarray, used: Iterable[int] = (), border: int = 0) -> None:
        self._border = border
        self.num_total = len(slots)
        num_slots = int(slots[-1]) + 1 if len(slots) else 0
        # One byte more, so that every extent ends before one that is taken.
        self._taken = bytearray(_ONE * (num_slots + 1))  # holds a page, or can hold none
        self._usable = bytearray(num_slots + 1)  # may hold a page
        taken, usable = (np.frombuffer(own, dtype=np.uint8) for own in (self._taken, self._usable))
        usable[slots] = 1
        taken[slots] = 0
        used = used if isinstance(used, np.ndarray) else np.fromiter(used, dtype=np.int64)
        assert not len(used) or 0 <= used.min() <= used.max() < num_slots, "a page lies in no slot"
        assert usable[used].all(), "a page lies in a slot that cannot hold one"
        taken[used] = _TAKEN
        self.num_free = int(np.count_nonzero(taken == 0))
        assert self.num_free == len(slots) - len(used), "a slot holds two pages"
        # (below the border, -length, slot after) of every extent, and of some that are gone. An extent that shrinks
        # from its start keeps its entry: a length here may be too large, and is put right at the top.
        self._heap: list[tuple[bool, int, int]] = []
        self._most_entries = FEW
        for start, end in np.flatnonzero(np.diff(taken, prepend=_TAKEN)).reshape(-1, 2).tolist():
            cut = min(max(border, start), end)
            for first, last in ((start, cut), (cut, end)):
                if first < last:
                    self._add_extent(first, last)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free slots, in the order in which pages should fill them.

        Starts with the slot right after `after`, which is in use, where that is free. There must be `count` free slots.
        """
        assert 0 <= count <= self.num_free, f"{count} slots asked for, {self.num_free} free"
        slots: list[int] = []
        if count and after is not None and self._taken[after] and not self._taken[after + 1]:
            self._take(after + 1, self._end(after + 1, count), slots)
        while len(slots) < count:
            self._place(count - len(slots), slots)
        self.num_free -= count
        return slots

    def allocate_each(self, last: Sequence[int | None]) -> list[int]:
        """Take one free slot for each of several runs, given their last slots, as `allocate` would for one by one."""
        assert len(last) <= self.num_free, f"{len(last)} slots asked for, {self.num_free} free"
        taken = self._taken
        slots: list[int] = []
        for before in last:
            if before is None or taken[slot := before + 1]:
                self._place(1, slots)
            else:
                taken[slot] = _TAKEN
                slots.append(slot)
        self.num_free -= len(slots)
        return slots

    def are_free(self, slots: Sequence[int] | np.ndarray) -> bool:
        """Whether all of some slots are free."""
        taken = np.frombuffer(self._taken, dtype=np.uint8)
        return not taken[np.asarray(slots, dtype=np.int64)].any()

    def free_flags(self, num_slots: int) -> np.ndarray:
        """bool [num_slots]: which slots are free."""
        flags = np.zeros(num_slots, dtype=bool)
        flags[: len(self._taken)] = np.frombuffer(self._taken, dtype=np.uint8)[:num_slots] == 0
        return flags

    def claim(self, slots: Sequence[int] | np.ndarray) -> None:
        """Take particular slots, all of them free, in any order."""
        for begin, end in _runs(slots):
            assert begin >= 0 and self._taken[begin:end] == bytes(end - begin), f"slots {begin}..{end - 1} are not free"
            start = self._start(begin + 1)
            self._take(begin, end, [])
            if start < begin:
                self._add_extent(start, begin)
        self.num_free -= len(slots)

    def free(self, slots: Sequence[int] | np.ndarray) -> None:
        """Take slots back, in any order. Each must be in use."""
        for start, end in _runs(slots):
            self._give_back(start, end)
        self.num_free += len(slots)

    def _take(self, first: int, last: int, slots: list[int]) -> None:
        """Add the free slots first .. last - 1 to `slots`."""
        self._taken[first:last] = _ONE * (last - first)
        slots.extend(range(first, last))

    def _place(self, most: int, slots: list[int]) -> None:
        """Add as many of `most` slots as fit in the largest extent to `slots`."""
        start, end = self._largest_extent()
        count = min(most, end - start)
        page_before = start > 0 and self._taken[start - 1] and self._usable[start - 1]
        first = start + ((end - start - count) // 2 if page_before else 0)
        self._take(first, first + count, slots)
        if start < first:
            self._add_extent(start, first)

    def _give_back(self, start: int, end: int) -> None:
        """Turn the used slots start .. end - 1 into part of an extent."""
        if start < self._border < end:
            self._give_back(start, self._border)
            start = self._border
        ones = _ONE * (end - start)
        in_use = start >= 0 and self._taken[start:end] == ones == self._usable[start:end]
        assert in_use, f"slots {start}..{end - 1} are not all in use"
        self._taken[start:end] = bytes(end - start)
        self._add_extent(self._start(start + 1), self._end(start))

    def _start(self, end: int) -> int:
        """The first of the free slots right before `end` that no border parts from it."""
        start = self._taken.rfind(_TAKEN, 0, end) + 1
        return self._border if start < self._border < end else start

    def _end(self, start: int, most: int | None = None) -> int:
        """The slot after the free ones from `start` on that no border parts from it, at most `most` of them."""
        end = self._taken.find(_TAKEN, start, None if most is None else start + most)
        if end < 0:
            assert most is not None, "the last slot is taken"
            end = start + most
        return self._border if start < self._border < end else end

    def _add_extent(self, start: int, end: int) -> None:
        heapq.heappush(self._heap, (start < self._border, start - end, end))
        if len(self._heap) > self._most_entries:
            ends = {end for _, _, end in self._heap if self._is_end(end)}
            self._heap = [(start < self._border, start - end, end) for end in ends for start in (self._start(end),)]
            heapq.heapify(self._heap)
            # All extents are read anew here, so it should be rare. Entries that are gone cost little until then.
            self._most_entries = 4 * len(self._heap) + FEW

    def _is_end(self, end: int) -> bool:
        """Whether an extent ends before a slot."""
        return not self._taken[end - 1] and (bool(self._taken[end]) or end == self._border)

    def _largest_extent(self) -> tuple[int, int]:
        """The longest extent above the border, or below it, as start .. end - 1. There must be one."""
        # Written out, without `_is_end` and `_start`: it looks at every entry that has become shorter, hundreds of them
        # for the first request placed after many others have grown.
        heap, taken, border = self._heap, self._taken, self._border
        while True:
            below, negative_length, end = heap[0]
            if taken[end - 1] or not (taken[end] or end == border):  # no extent ends here any more
                heapq.heappop(heap)
                continue
            start = taken.rfind(_ONE, 0, end) + 1
            if start < border < end:
                start = border
            if start - end == negative_length:
                return start, end
            heapq.heapreplace(heap, (below, start - end, end))


def _runs(slots: Sequence[int] | np.ndarray) -> Iterator[tuple[int, int]]:
    """Slots, in any order, as runs start .. end - 1 of as many as follow one another."""
    if not len(slots):
        return
    first, end = int(slots[0]), int(slots[0]) + len(slots)
    if isinstance(slots, list) and slots == list(range(first, end)):  # as mostly those of a request
        yield first, end
        return
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
    few = sorted(slots.tolist() if isinstance(slots, np.ndarray) else slots)
    start = few[0]
    for before, slot in itertools.pairwise(few):
        if slot != before + 1:
            yield start, before + 1
            start = slot
    yield start, few[-1] + 1
