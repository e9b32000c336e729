"""Pages: which of the slots of each rank's arenas hold the pages of a request, and which are free.

A page table serves every layer, so a page is one slot number on each rank that holds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Self

import numpy as np

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.slots import PageAllocator
from splash.core.step import NO_SLOT

MAX_TAIL = 64  # pages of a table that are kept as they came
FIRST_ROWS = 8  # of a table's array, once it has any
_NOWHERE = repeat(NO_SLOT)  # the slots of some pages on a rank that holds none of them


class PageTable:
    """The pages of one request, in page order: int32 [pages, T], the slot on each rank or NO_SLOT. Grows in place.

    Pages come one or few at a time, are told to the ranks once, and are looked at as an array far more rarely. The last
    ones are therefore kept as they came until somebody asks for the array, or there are many.
    """

    __slots__ = ("_buffer", "_length", "_tail")

    def __init__(self, ranks: int, pages: Iterable[Sequence[int]] | np.ndarray = ()) -> None:
        self._buffer = _no_rows(ranks)
        self._length = 0  # in the buffer
        self._tail: list[tuple[int, ...]] = []  # the pages after those
        self._store(pages if isinstance(pages, np.ndarray) else list(pages))

    @property
    def slots_cT(self) -> np.ndarray:
        """A view of the table, valid until it next grows."""
        if self._tail:
            self._store_tail()
        return self._buffer[: self._length]

    def __len__(self) -> int:
        return self._length + len(self._tail)

    def extend(self, pages: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Append pages, each as T slots."""
        if len(pages):
            self._store_tail()
            self._store(pages)

    def append_all(self, pages: Iterable[tuple[int, ...]]) -> None:
        """Append a few pages, each as T slots, which `rows` is about to be asked for."""
        self._tail += pages
        if len(self._tail) > MAX_TAIL:
            self._store_tail()

    def _store_tail(self) -> None:
        tail, self._tail = self._tail, []
        self._store(tail)

    def _store(self, pages: Sequence[Sequence[int]] | np.ndarray) -> None:
        if not len(pages):
            return
        end = self._length + len(pages)
        if end > len(self._buffer):
            grown = np.empty((max(end, 2 * len(self._buffer), FIRST_ROWS), self._buffer.shape[1]), dtype=np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = pages
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget the pages from number `length` on."""
        self._store_tail()
        self._length = min(self._length, length)

    def rows(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        """The pages start .. stop - 1, for a message."""
        first = start - self._length
        if first >= 0:
            return tuple(self._tail[first : stop - self._length])
        return tuple(map(tuple, self.slots_cT[start:stop].tolist()))

    def row(self, number: int) -> tuple[int, ...]:
        """The page of that number, for a message."""
        at = number - self._length
        return self._tail[at] if at >= 0 else tuple(self._buffer[number].tolist())

    def from_end(self, count: int) -> tuple[int, ...] | None:
        """The page with `count` - 1 behind it, None where there are fewer."""
        if len(self._tail) >= count:
            return self._tail[-count]
        number = len(self) - count
        return tuple(self._buffer[number].tolist()) if number >= 0 else None

    @staticmethod
    def last_of_each(tables: Sequence[PageTable], count: int) -> list[tuple[int, ...] | None]:
        """The page with `count` - 1 behind it in each of many tables, None where there are fewer."""
        try:  # all of them mostly keep as many pages as they came
            return [table._tail[-count] for table in tables]
        except IndexError:
            return [table.from_end(count) for table in tables]

    @staticmethod
    def append_each(tables: Sequence[PageTable], pages: Sequence[tuple[int, ...]]) -> None:
        """Append a page to each of many tables, which `rows` is about to be asked for."""
        is_long = False
        for table, page in zip(tables, pages, strict=True):
            tail = table._tail
            tail.append(page)
            is_long |= len(tail) > MAX_TAIL
        if is_long:
            for table in tables:
                if len(table._tail) > MAX_TAIL:
                    table._store_tail()

    def slots_on(self, rank: int) -> np.ndarray:
        """The slots of `rank` in page order, int32."""
        slots = self.slots_cT[:, rank]
        return slots[slots != NO_SLOT]

    def list_on(self, rank: int) -> list[int]:
        """The same as a list, and sooner where the pages are few."""
        tail = [page[rank] for page in self._tail if page[rank] != NO_SLOT]
        if not self._length:
            return tail
        stored = self._buffer[: self._length, rank]
        slots: list[int] = stored[stored != NO_SLOT].tolist()
        return slots + tail

    def clear(self) -> None:
        """Forget all pages."""
        self._length, self._tail = 0, []


@lru_cache
def _no_rows(ranks: int) -> np.ndarray:
    """What tables without an array have in its place."""
    return np.empty((0, ranks), dtype=np.int32)


class HeldPages:
    """The pages of one request and who owns it.

    Attributes:
        owner: the request's owner rank, the same for as long as it holds pages.
        table: its pages.
        ids: a number for each page that says what is in it: pages of one number are copies of each other, and in one
            table or in several they are the same page where they lie in the same slot.
    """

    __slots__ = ("ids", "owner", "table")

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

    def __len__(self) -> int:
        return len(self.table)

    def clear(self) -> None:
        """Hold nothing, for the same owner."""
        self.table.clear()
        self.ids.clear()


class PagePool:
    """The free pages of a group in one layout. Another layout has other slots and other holders: another pool.

    Args:
        layout: decides which ranks hold a page.
        slots: for each rank, the slots that may hold pages in `layout`.
        resident: pages that already lie where `layout` wants them.
        withheld: for each rank, slots that count as used until `free` gives them back.
        border: slots below it are the last to be given out.
        in_use: for each rank, the slots that the resident pages lie in, each once, where they are known. Left out, they
            are read from the tables.
        next_id: the first number that no page has, where that is known. Left out, it follows on the resident pages'.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[np.ndarray],
        resident: Iterable[HeldPages] = (),
        withheld: Sequence[Sequence[int] | np.ndarray] = (),
        border: int = 0,
        in_use: Sequence[np.ndarray] | None = None,
        next_id: int | None = None,
    ) -> None:
        self.layout = layout
        self.ranks = len(slots)
        self._holders = [HolderTable(layout, owner, self.ranks) for owner in range(self.ranks)]
        # Pages so many apart have the same holders, and these none of the pages between.
        self._period = 1 if all([table.always is not None for table in self._holders]) else self.ranks
        self._is_everywhere = all([len(table.of(0)) == self.ranks for table in self._holders])
        each = [table.of(number) for table in self._holders for number in range(self.ranks)]
        assert self._is_everywhere or all([len(ranks) == 1 for ranks in each]), "a page lies on some ranks, not on all"
        self._only = [table.always[0] if table.always else None for table in self._holders]  # by owner, if it is one
        residents = list(resident)
        if next_id is None:
            next_id = max((max(held.ids) for held in residents if held.ids), default=-1) + 1
        self.next_id = next_id
        for held in residents:
            columns = held.table.slots_cT.T  # one by one, since numpy counts along a long axis far faster
            assert [np.count_nonzero(own != NO_SLOT) for own in columns] == self.counts(held)
            if len(held.ids) < len(held):
                held.ids = self._new_ids(len(held))
        taken = _slots_in_use(residents, self.ranks) if in_use is None else in_use
        used = [
            np.concatenate([own, np.asarray(kept_back, dtype=np.int64)]) if len(kept_back) else own
            for own, kept_back in zip(taken, withheld or [()] * self.ranks, strict=True)
        ]
        self._allocators = [PageAllocator(own, taken, border) for own, taken in zip(slots, used, strict=True)]
        self._most_alone: list[int | None] = [None] * self.ranks  # pages of a request of each owner, once asked for

    @classmethod
    def of_geometry(
        cls,
        geometry: ArenaGeometry,
        layout: Layout,
        resident: Iterable[HeldPages] = (),
        withheld: Sequence[Sequence[int] | np.ndarray] = (),
        in_use: Sequence[np.ndarray] | None = None,
        next_id: int | None = None,
    ) -> Self:
        """The pool of a group whose arenas have this geometry."""
        slots = [geometry.page_slots(layout, rank) for rank in range(geometry.ranks)]
        # Pages under weights would have to move before a switch brings the weights, so they are the last resort.
        return cls(layout, slots, resident, withheld, geometry.num_weight_slots, in_use, next_id)

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
        most = self._most_alone[owner]
        if most is None:
            most = self._most_alone[owner] = self._holders[owner].most(self.num_total)
        return count <= most

    def lacking(self, owner: int, first: int, count: int) -> list[int]:
        """The ranks that have too few free pages for the pages first .. first + count - 1 of a request of `owner`."""
        needs = self._holders[owner].needs(first, count)
        return [rank for rank, free in enumerate(self.num_free) if needs[rank] > free]

    def counts(self, held: HeldPages) -> list[int]:
        """Pages of a request on each rank."""
        return self._holders[held.owner].needs(0, len(held))

    def lies_on(self, held: HeldPages, ranks: Sequence[int]) -> bool:
        """Whether some pages of a request lie on one of `ranks`."""
        counts = self.counts(held)
        return any([counts[rank] for rank in ranks])

    def grow(self, held: HeldPages, count: int) -> bool:
        """Add `count` pages to a request on the ranks that hold them. Where any rank lacks one, add none: False."""
        if not count:
            return True
        table = self._holders[held.owner]
        if table.always is None and count != 1:
            return self._grow_striped(table, held, count)
        ranks = table.always or table.of(len(held.ids))
        for rank in ranks:
            if count > self._allocators[rank].num_free:
                return False
        before = held.table.from_end(self._period)
        columns: list[Iterable[int]] = [_NOWHERE] * self.ranks
        for rank in ranks:
            columns[rank] = self._allocators[rank].allocate(count, None if before is None else before[rank])
        held.table.append_all(zip(*columns, strict=False))
        held.ids += self._new_ids(count)
        return True

    def _grow_striped(self, table: HolderTable, held: HeldPages, count: int) -> bool:
        """`grow` where pages lie on one rank after the other."""
        first = len(held.ids)
        needs = table.needs(first, count)
        for allocator, need in zip(self._allocators, needs, strict=True):
            if need > allocator.num_free:
                return False
        columns = [[NO_SLOT] * count for _ in range(self.ranks)]
        for at in range(min(count, self._period)):
            number = first + at
            before = held.table.from_end(self._period - at)
            for rank in table.of(number):
                last = None if before is None else before[rank]
                columns[rank][at :: self._period] = self._allocators[rank].allocate(needs[rank], last)
        held.table.append_all(zip(*columns, strict=True))
        held.ids += self._new_ids(count)
        return True

    def grow_each(self, growing: Sequence[HeldPages]) -> bool:
        """Add a page to each of several requests, as `grow` does to one. Where any rank lacks one, add none: False."""
        groups = self._by_holders(growing)
        for ranks, holding in groups:
            if any([len(holding) > self._allocators[rank].num_free for rank in ranks]):
                return False
        for ranks, holding in groups:
            tables = [held.table for held in holding]
            before = PageTable.last_of_each(tables, self._period)
            columns: list[Iterable[int]] = [_NOWHERE] * self.ranks
            for rank in ranks:
                last = [None if page is None else page[rank] for page in before]
                columns[rank] = self._allocators[rank].allocate_each(last)
            PageTable.append_each(tables, list(zip(*columns, strict=False)))
            for held, id in zip(holding, self._new_ids(len(holding)), strict=True):
                held.ids.append(id)
        return True

    def _by_holders(self, growing: Sequence[HeldPages]) -> list[tuple[tuple[int, ...], Sequence[HeldPages]]]:
        """Requests by the ranks that hold their next page: these are the same for all, or one for each."""
        if self._is_everywhere:
            return [(tuple(range(self.ranks)), growing)] if growing else []
        groups: list[list[HeldPages]] = [[] for _ in range(self.ranks)]
        for held in growing:
            rank = self._only[held.owner]
            groups[self._holders[held.owner].of(len(held.ids))[0] if rank is None else rank].append(held)
        return [((rank,), group) for rank, group in enumerate(groups) if group]

    def _new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def free_flags(self, num_slots: int) -> list[np.ndarray]:
        """By rank, bool [num_slots]: the slots that are free, and hold nothing that anybody could want."""
        return [allocator.free_flags(num_slots) for allocator in self._allocators]

    def are_free(self, slots: Sequence[Sequence[int] | np.ndarray]) -> bool:
        """Whether all of some slots of each rank are free."""
        return all(allocator.are_free(own) for allocator, own in zip(self._allocators, slots, strict=True))

    def claim(self, slots: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Take particular free slots of each rank, which belong to no request."""
        for allocator, own in zip(self._allocators, slots, strict=True):
            allocator.claim(own)

    def free(self, slots: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Give back slots of each rank that belong to no request."""
        for allocator, own in zip(self._allocators, slots, strict=True):
            if len(own):
                allocator.free(own)

    def release(self, *given_up: HeldPages) -> None:
        """Free all pages of some requests, whose tables are empty afterwards."""
        for held in given_up:  # one by one: the slots of a request mostly follow one another
            for rank in self._holders[held.owner].always or range(self.ranks):
                self._allocators[rank].free(held.table.list_on(rank))
            held.clear()


def _slots_in_use(residents: Sequence[HeldPages], ranks: int) -> list[np.ndarray]:
    """By rank, int64, the slots of all pages. Requests that share a page name it alike, and its slot is there once."""
    in_use = []
    slots_cT = np.concatenate([np.empty((0, ranks), dtype=np.int32), *(held.table.slots_cT for held in residents)])
    for own in slots_cT.T.astype(np.int64, order="C"):
        is_held = own != NO_SLOT
        taken = own[is_held]
        flags = np.zeros(int(taken.max(initial=-1)) + 1, dtype=bool)
        flags[taken] = True
        if np.count_nonzero(flags) < len(taken):
            ids = np.concatenate([np.array(held.ids, dtype=np.int64) for held in residents])[is_held]
            taken = np.unique(np.stack((taken, ids), axis=1), axis=0)[:, 0]
        in_use.append(taken)
    return in_use


class HolderTable:
    """Who holds each page number of any request of one owner: the ownership rule, kept for quick look-up.

    It depends on a number only through its remainder by T, so T numbers say all.

    Attributes:
        always: the ranks that hold every page, where all pages have the same holders.
    """

    def __init__(self, layout: Layout, owner: int, ranks: int) -> None:
        held = page_holders(np.arange(ranks), np.full(ranks, owner), layout, ranks)
        self._ranks = ranks
        self._holders = [tuple(np.flatnonzero(row).tolist()) for row in held]
        self.always = self._holders[0] if len(set(self._holders)) == 1 else None
        # By number below 2 T: pages on each rank of those before it.
        sums = np.cumsum(np.concatenate((np.zeros((1, ranks), dtype=np.int64), held, held)), axis=0)
        self._before: list[list[int]] = sums.tolist()
        self._all = self._before[ranks]

    def of(self, number: int) -> tuple[int, ...]:
        """The ranks that hold page `number`."""
        return self._holders[number % self._ranks]

    def needs(self, first: int, count: int) -> list[int]:
        """Pages on each rank among the pages first .. first + count - 1."""
        if self.always is not None:
            return [count * own for own in self._before[1]]
        times, rest = divmod(count, self._ranks)
        first %= self._ranks
        start, end = self._before[first], self._before[first + rest]
        return [times * all + b - a for all, a, b in zip(self._all, start, end, strict=True)]

    def most(self, room: Sequence[int]) -> int:
        """The most pages that a request can have where each rank has so much room."""
        return bisect_right(range(1, sum(room) + 1), 0, key=lambda count: _exceeds(self.needs(0, count), room))


def _exceeds(needs: Sequence[int], room: Sequence[int]) -> int:
    return int(any([need > own for need, own in zip(needs, room, strict=True)]))
