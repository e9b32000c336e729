"""Pages: which slots of each rank's arenas are free, and which of them hold the pages of a request.

A page table serves every layer, so a page is one slot number on each rank that holds it. Switches and peers' reads
move long runs of slots far faster than scattered ones; an allocator therefore lets a request continue after its last
slot, and leaves room behind what it places so that it can.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.step import NO_SLOT

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
        edges = np.flatnonzero(np.diff((state == _FREE).astype(np.int8), prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
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

    def are_free(self, slots: Sequence[int]) -> bool:
        """Whether all of some slots are free."""
        state = np.frombuffer(self._state, dtype=np.uint8)
        return bool((state[np.asarray(slots, dtype=np.int64)] == _FREE).all())

    def free_flags(self, num_slots: int) -> np.ndarray:
        """bool [num_slots]: which slots are free."""
        flags = np.zeros(num_slots, dtype=bool)
        flags[: len(self._state)] = np.frombuffer(self._state, dtype=np.uint8) == _FREE
        return flags

    def claim(self, slots: Sequence[int]) -> None:
        """Take particular slots, all of them free, in any order. Costs O(extents) a run of slots."""
        for begin, end in _runs(np.asarray(slots, dtype=np.int64)):
            assert self._state[begin:end] == bytes((_FREE,)) * (end - begin), f"slots {begin}..{end - 1} are not free"
            while begin < end:  # a run may cross the border, which no extent does
                start = max(first for first in self._lengths if first <= begin)
                count = min(end, start + self._lengths[start]) - begin
                self._take(start, begin - start, count, [])
                begin += count
        self.num_free -= len(slots)

    def free(self, slots: Sequence[int] | np.ndarray) -> None:
        """Take slots back, in any order. Each must be in use."""
        for begin, end in _runs(np.asarray(slots, dtype=np.int64)):
            self._give_back(begin, end)
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


def _runs(slots: np.ndarray) -> Iterator[tuple[int, int]]:
    """The runs of consecutive slots, as first and slot after the last, ascending."""
    if not len(slots):
        return
    ordered = np.sort(slots)
    gaps = np.flatnonzero(np.diff(ordered) != 1) + 1
    for begin, end in itertools.pairwise([0, *gaps.tolist(), len(ordered)]):
        yield int(ordered[begin]), int(ordered[end - 1]) + 1


class PageTable:
    """The pages of one request, in page order: int32 [pages, T], the slot on each rank or NO_SLOT. Grows in place."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, ranks: int, pages: Iterable[Sequence[int]] | np.ndarray = ()) -> None:
        self._buffer = np.empty((8, ranks), dtype=np.int32)
        self._length = 0
        self.extend(pages if isinstance(pages, np.ndarray) else list(pages))

    @property
    def slots_cT(self) -> np.ndarray:
        """A view of the table, valid until it next grows."""
        return self._buffer[: self._length]

    def __len__(self) -> int:
        return self._length

    def extend(self, pages: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Append pages, each as T slots."""
        if not len(pages):
            return
        end = self._length + len(pages)
        if end > len(self._buffer):
            grown = np.empty((max(end, 2 * len(self._buffer)), self._buffer.shape[1]), dtype=np.int32)
            grown[: self._length] = self.slots_cT
            self._buffer = grown
        self._buffer[self._length : end] = pages
        self._length = end

    def append(self, page: Sequence[int]) -> None:
        """Append one page, as T slots."""
        if self._length == len(self._buffer):
            self.extend([page])
            return
        self._buffer[self._length] = page
        self._length += 1

    def truncate(self, length: int) -> None:
        """Forget the pages from number `length` on."""
        self._length = min(self._length, length)

    def rows(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        """The pages start .. stop - 1, for a message."""
        return tuple(map(tuple, self._buffer[start : min(stop, self._length)].tolist()))

    def slots_on(self, rank: int) -> np.ndarray:
        """The slots of `rank` in page order, int32."""
        slots = self.slots_cT[:, rank]
        return slots[slots != NO_SLOT]

    def clear(self) -> None:
        """Forget all pages."""
        self._length = 0


class HeldPages:
    """The pages of one request and who owns it.

    Attributes:
        owner: the request's owner rank, the same for as long as it holds pages.
        table: its pages.
        ids: a number for each page that says what is in it: pages of one number are copies of each other, and in one
            table or in several they are the same page where they lie in the same slot.
        counts: pages on each rank.
        last: slot of the last page on each rank, None where it holds none.
    """

    __slots__ = ("counts", "ids", "last", "owner", "table")

    def __init__(
        self,
        owner: int,
        ranks: int,
        pages: Iterable[Sequence[int]] | np.ndarray = (),
        ids: Iterable[int] | None = None,
    ) -> None:
        """Hold `pages`, numbered `ids`. Where these are left out, no page is like another, and a pool numbers them."""
        self.owner = owner
        self.table = PageTable(ranks, pages)
        self.ids = list(ids) if ids is not None else []
        assert ids is None or len(self.ids) == len(self.table)
        self.counts = [0] * ranks
        self.last: list[int | None] = [None] * ranks
        if len(self.table):
            slots_cT = self.table.slots_cT
            is_held = slots_cT != NO_SLOT
            self.counts = np.count_nonzero(is_held, axis=0).tolist()
            last_T = len(slots_cT) - 1 - is_held[::-1].argmax(axis=0)
            self.last = [int(slots_cT[at, rank]) if self.counts[rank] else None for rank, at in enumerate(last_T)]

    def __len__(self) -> int:
        return len(self.table)


class PagePool:
    """The free pages of a group in one layout. Another layout has other slots and other holders: another pool.

    Args:
        layout: decides which ranks hold a page.
        slots: for each rank, the slots that may hold pages in `layout`.
        resident: pages that already lie where `layout` wants them.
        withheld: for each rank, slots that count as used until `free` gives them back.
        border: slots below it are the last to be given out.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[np.ndarray],
        resident: Iterable[HeldPages] = (),
        withheld: Sequence[Sequence[int] | np.ndarray] = (),
        border: int = 0,
    ) -> None:
        self.layout = layout
        self.ranks = len(slots)
        self._holders = [HolderTable(layout, owner, self.ranks) for owner in range(self.ranks)]
        residents = list(resident)
        self._next_id = max((max(held.ids) for held in residents if held.ids), default=-1) + 1
        for held in residents:
            assert not len(held) or held.counts == self._holders[held.owner].needs(0, len(held))
            if len(held.ids) < len(held):
                held.ids = self._new_ids(len(held))
        used = [
            np.concatenate([own, np.asarray(kept_back, dtype=np.int64)])
            for own, kept_back in zip(_slots_in_use(residents, self.ranks), withheld or [()] * self.ranks, strict=True)
        ]
        self._allocators = [PageAllocator(own, taken, border) for own, taken in zip(slots, used, strict=True)]

    @classmethod
    def of_geometry(
        cls,
        geometry: ArenaGeometry,
        layout: Layout,
        resident: Iterable[HeldPages] = (),
        withheld: Sequence[Sequence[int] | np.ndarray] = (),
    ) -> Self:
        """The pool of a group whose arenas have this geometry."""
        slots = [geometry.page_slots(layout, rank) for rank in range(geometry.ranks)]
        # Pages under weights would have to move before a switch brings the weights, so they are the last resort.
        return cls(layout, slots, resident, withheld, geometry.num_weight_slots)

    @property
    def num_free(self) -> list[int]:
        """Free pages on each rank."""
        return [allocator.num_free for allocator in self._allocators]

    @property
    def num_total(self) -> list[int]:
        """Pages that each rank has room for."""
        return [allocator.num_total for allocator in self._allocators]

    def fits_alone(self, owner: int, count: int) -> bool:
        """Whether a request of `owner` could have `count` pages if no other request had any."""
        needs = self._holders[owner].needs(0, count)
        return all(need <= allocator.num_total for need, allocator in zip(needs, self._allocators, strict=True))

    def lacking(self, owner: int, first: int, count: int) -> list[int]:
        """The ranks that have too few free pages for the pages first .. first + count - 1 of a request of `owner`."""
        needs = self._holders[owner].needs(first, count)
        return [rank for rank, free in enumerate(self.num_free) if needs[rank] > free]

    def grow(self, held: HeldPages, count: int) -> bool:
        """Add `count` pages to a request on the ranks that hold them. Where any rank lacks one, add none: False."""
        first = len(held)
        table = self._holders[held.owner]
        if count == 1:
            return self._grow_by_one(held, table.of(first))
        needs = table.needs(first, count)
        for allocator, need in zip(self._allocators, needs, strict=True):
            if need > allocator.num_free:
                return False
        supplies: list[Iterator[int]] = []
        for rank, need in enumerate(needs):
            slots: list[int] = []
            if need:
                slots = self._allocators[rank].allocate(need, held.last[rank])
                held.last[rank] = slots[-1]
                held.counts[rank] += need
            supplies.append(iter(slots))
        pages = []
        for number in range(first, first + count):
            page = [NO_SLOT] * self.ranks
            for rank in table.of(number):
                page[rank] = next(supplies[rank])
            pages.append(page)
        held.table.extend(pages)
        held.ids += self._new_ids(count)
        return True

    def _grow_by_one(self, held: HeldPages, holders: tuple[int, ...]) -> bool:
        """What `grow` does most often: a page of a request that decodes."""
        for rank in holders:
            if not self._allocators[rank].num_free:
                return False
        page = [NO_SLOT] * self.ranks
        for rank in holders:
            page[rank] = held.last[rank] = self._allocators[rank].allocate(1, held.last[rank])[0]
            held.counts[rank] += 1
        held.table.append(page)
        held.ids.append(self._next_id)
        self._next_id += 1
        return True

    def _new_ids(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def free_flags(self, num_slots: int) -> list[np.ndarray]:
        """By rank, bool [num_slots]: the slots that are free, and hold nothing that anybody could want."""
        return [allocator.free_flags(num_slots) for allocator in self._allocators]

    def are_free(self, slots: Sequence[Sequence[int]]) -> bool:
        """Whether all of some slots of each rank are free."""
        return all(allocator.are_free(own) for allocator, own in zip(self._allocators, slots, strict=True))

    def claim(self, slots: Sequence[Sequence[int]]) -> None:
        """Take particular free slots of each rank, which belong to no request."""
        for allocator, own in zip(self._allocators, slots, strict=True):
            allocator.claim(own)

    def free(self, slots: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Give back slots of each rank that belong to no request."""
        for allocator, own in zip(self._allocators, slots, strict=True):
            allocator.free(own)

    def release(self, held: HeldPages) -> None:
        """Free all pages of a request, whose table is empty afterwards."""
        for rank, allocator in enumerate(self._allocators):
            if held.counts[rank]:
                allocator.free(held.table.slots_on(rank).tolist())
                held.counts[rank] = 0
                held.last[rank] = None
        held.table.clear()
        held.ids.clear()


def _slots_in_use(residents: Sequence[HeldPages], ranks: int) -> list[np.ndarray]:
    """By rank, int64, the slots of all pages. Requests that share a page name it alike, and its slot is there once."""
    in_use = []
    slots_cT = np.concatenate([np.empty((0, ranks), dtype=np.int32), *(held.table.slots_cT for held in residents)])
    for own in slots_cT.T:
        is_held = own != NO_SLOT
        taken = own[is_held].astype(np.int64)
        if len(taken) and np.bincount(taken).max() > 1:
            ids = np.concatenate([np.array(held.ids, dtype=np.int64) for held in residents])[is_held]
            taken = np.unique(np.stack((taken, ids), axis=1), axis=0)[:, 0]
        in_use.append(taken)
    return in_use


class HolderTable:
    """Who holds each page number of any request of one owner: the ownership rule, kept for quick look-up.

    It depends on a number only through its remainder by T, so T numbers say all.
    """

    def __init__(self, layout: Layout, owner: int, ranks: int) -> None:
        held = page_holders(np.arange(ranks), np.full(ranks, owner), layout, ranks)
        self._ranks = ranks
        self._holders = [tuple(np.flatnonzero(row).tolist()) for row in held]
        self._before = np.concatenate((np.zeros((1, ranks), dtype=np.int64), np.cumsum(held, axis=0))).tolist()

    def of(self, number: int) -> tuple[int, ...]:
        """The ranks that hold page `number`."""
        return self._holders[number % self._ranks]

    def needs(self, first: int, count: int) -> list[int]:
        """Pages on each rank among the pages first .. first + count - 1."""
        return [end - start for start, end in zip(self._below(first), self._below(first + count), strict=True)]

    def _below(self, number: int) -> list[int]:
        """Pages on each rank of those numbered below `number`."""
        times, rest = divmod(number, self._ranks)
        return [times * all + some for all, some in zip(self._before[-1], self._before[rest], strict=True)]
