"""PrefixCache: a page pool in which requests that begin alike share pages, and what they leave behind is found again.

A page is known by what it holds, its key. It is entered once it is full and the step that filled it is over, so nobody
sees it before it is written, and nobody writes to it afterwards. A page that no request holds any more is *idle*: it
counts as free, and is evicted when its slot is needed.

To work out a key and enter a page takes a few microseconds, and many requests may fill a page in one step. So pages
queue up to be entered, by the key of the page before. Whoever could tell enters those first that it could find, or that
would find another in their place: so all is as if they had been entered at once.

Where the layout keeps pages by request, a page is of use on the rank of its owner only: this is its *place*, and a
rank may have a copy of what another has. Everywhere else there is one place, 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from splash.core.layout import KV, Layout
from splash.core.pages import HeldPages, HolderTable, PagePool
from splash.core.step import NO_SLOT
from splash.scheduler.heritage import Heritage
from splash.scheduler.idle_pages import CachedPage, Chain, IdlePages
from splash.scheduler.page_keys import Keys, extend_keys

KEEP = 1 - 2.0**-14  # what a release is worth after the next
MOST_TAKEN_ALONG = 1 << 13  # idle pages that a switch moves: to plan more would take longer than a step

# A full page that is yet to be entered: the request's pages, its number, all tokens, the page size, the keys so far.
Full = tuple[HeldPages, int, list[int], int, list[bytes]]


class Found(NamedTuple):
    """What the cache has of the first pages of a request.

    Attributes:
        counts: how many of them are of use to a request of each rank.
        copies: each of them, by place.
        by_request: whether a place is a rank, else there is one.
    """

    counts: Sequence[int]
    copies: Sequence[Mapping[int, CachedPage]]
    by_request: bool

    def pages(self, owner: int) -> list[CachedPage]:
        """Those that are of use to a request of `owner`."""
        place = owner if self.by_request else 0
        return [there[place] for there in self.copies[: self.counts[owner]]]


class PrefixCache(PagePool):
    """The pages of a group in one layout, shared by content. Without `enter` or `fill` nothing is ever shared."""

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
        super().__init__(layout, slots, resident, withheld, border, in_use, next_id)
        # Of the pages that have been entered. `_by_key` and `_by_id` are for those who look for any page.
        self._entered_by_key: dict[bytes, dict[int, CachedPage]] = {}
        self._entered_by_id: dict[tuple[int, int], CachedPage] = {}
        self._full: dict[bytes, list[Full]] = {}  # by the key of the page before, which is empty for the first
        self._parents: dict[HeldPages, bytes] = {}  # that key, of requests with such a page; they have one at most
        self._idle = IdlePages(self.ranks)
        self._by_request = layout.kv is KV.REQUEST
        self._missed: set[tuple[bytes, int]] = set()  # (key, place) of pages for want of which idle ones are no chain
        self._clock = 0
        # Of the last releases, older ones worth less: how many, and for how many releases pages were idle until found.
        self._releases, self._waits = 0.0, 0.0

    @property
    def _by_key(self) -> dict[bytes, dict[int, CachedPage]]:
        """The pages by key and place."""
        self.enter_full()
        return self._entered_by_key

    @property
    def _by_id(self) -> dict[tuple[int, int], CachedPage]:
        """The pages by (id, place)."""
        self.enter_full()
        return self._entered_by_id

    # --- what requests do ---

    def match(self, keys: Keys) -> Found:
        """The pages that a request would find: as many of the first of `keys` as are there."""
        num_places = self.ranks if self._by_request else 1
        counts, going_on = [0] * num_places, set(range(num_places))
        copies: list[dict[int, CachedPage]] = []
        full, by_key, before = self._full, self._entered_by_key, b""
        for key in keys:
            if full and before in full:
                self._enter_after(before)
            before = key
            there = by_key.get(key)
            if there is None:
                break
            if len(there) < num_places:
                for place in going_on.difference(there):
                    counts[place] = len(copies)
                    going_on.remove(place)
                if not going_on:
                    break
            copies.append(there)
        for place in going_on:
            counts[place] = len(copies)
        return Found(counts if self._by_request else counts * self.ranks, copies, self._by_request)

    def has(self, key: bytes) -> bool:
        """Whether a page of that key, entered by `enter`, is there for any request."""
        return bool(self._entered_by_key.get(key))

    def takes(self, owner: int, shared: Sequence[CachedPage], count: int) -> list[int]:
        """Free pages on each rank that a request of `owner` takes to have `count`, of which the first are `shared`."""
        takes = self._holders[owner].needs(len(shared), count - len(shared))
        for page in shared:
            if not page.refs:
                for rank in page.ranks:
                    takes[rank] += 1
        return takes

    def freed(self, held: HeldPages, given_up: Counter[CachedPage]) -> list[int]:
        """Pages on each rank that are free once a request gives up its own, after others that have given up theirs.

        Args:
            held: the pages of the request.
            given_up: how many have given up each shared page before. Takes in those of this request.
        """
        if held in self._parents:
            self._enter_after(self._parents[held])
        freed, place = [0] * self.ranks, self._place(held.owner)
        for number, id in enumerate(held.ids):
            page = self._entered_by_id.get((id, place))
            if page is not None:
                given_up[page] += 1
                if given_up[page] < page.refs:
                    continue
            for rank in self._holders[held.owner].of(number):
                freed[rank] += 1
        return freed

    def share(self, held: HeldPages, pages: Sequence[CachedPage]) -> None:
        """Give a request without pages those that it shares."""
        assert not len(held)
        place = self._place(held.owner)
        woken = []
        for number, page in enumerate(pages):
            assert page.place == place and page.number == number
            if not page.refs:
                woken.append(page)
                self._waits += self._clock - page.released
            page.refs += 1
        if woken:
            self._idle.remove(woken)
        held.ids += [page.id for page in pages]
        held.table.append_all([page.slots for page in pages])

    def fill(self, held: HeldPages, number: int, tokens: list[int], page_size: int, keys: list[bytes]) -> None:
        """Let others find a page of a request, now that it is full and written, whose key is not known yet.

        It is entered later, and its id may change then, as those of copies are the same.
        """
        if held in self._parents:
            self._enter_after(self._parents[held])
        if len(keys) < number:
            extend_keys(keys, tokens, page_size, number)
        parent = self._parents[held] = keys[number - 1] if number else b""
        alike = self._full.get(parent)
        if alike is None:
            self._full[parent] = alike = []
        alike.append((held, number, tokens, page_size, keys))

    def enter_full(self, most: int | None = None) -> None:
        """Enter the pages of `fill`, those after `most` different pages or all."""
        for parent in list(islice(self._full, most)):
            self._enter_after(parent)

    def enter(self, held: HeldPages, first: int, end: int, keys: Keys) -> None:
        """Let others find the pages first .. end - 1 of a request, now that they are full and written. `keys` are those
        of its first pages.

        Where the same was computed twice at once, the later one stays private.
        """
        if self._full:
            for number in range(first, end):
                self._enter_after(keys[number - 1] if number else b"")
        self._enter(held, first, end, keys)

    def _enter_after(self, parent: bytes) -> None:
        """Enter the full pages after the page of a key, in the order in which they were filled."""
        for held, number, tokens, page_size, keys in self._full.pop(parent, ()):
            del self._parents[held]
            extend_keys(keys, tokens, page_size, number + 1)
            self._enter(held, number, number + 1, keys)

    def _enter(self, held: HeldPages, first: int, end: int, keys: Keys) -> None:
        by_key, by_id, ids, holders = self._entered_by_key, self._entered_by_id, held.ids, self._holders[held.owner]
        place = held.owner if self._by_request else 0
        pages = (held.table.row(first),) if end == first + 1 else held.table.rows(first, end)
        parent = keys[first - 1] if first else b""
        for number, slots in enumerate(pages, first):
            before, parent = parent, keys[number]
            copies = by_key.get(parent)
            if copies is None:
                by_key[parent] = copies = {}
            elif place in copies:
                continue
            else:
                ids[number] = next(iter(copies.values())).id  # which all of them have
            id = ids[number]
            page = CachedPage(parent, before, number, id, place, slots, holders.of(number), 1)
            copies[place] = by_id[id, place] = page
            if self._missed:
                self._no_longer_missed(page)

    # --- what the pool does, with idle pages counting as free ---

    @property
    def num_idle(self) -> list[int]:
        """Pages on each rank that no request holds but a request may find."""
        return list(self._idle.num_T)

    @property
    def num_free(self) -> list[int]:
        return [own.num_free + idle for own, idle in zip(self._allocators, self._idle.num_T, strict=True)]

    @property
    def num_wanted(self) -> int:
        """About how many idle pages, copies included, somebody will find before they are evicted.

        By Little's law: as many as are found a release, times the releases that they are idle for until then.
        """
        return round(self._waits / self._releases) if self._releases else 0

    def grow(self, held: HeldPages, count: int) -> bool:
        if super().grow(held, count):
            return True
        if self.lacking(held.owner, len(held), count):
            return False
        self._make_room(self._holders[held.owner].needs(len(held), count))
        return super().grow(held, count)

    def grow_each(self, growing: Sequence[HeldPages]) -> bool:
        if super().grow_each(growing):
            return True
        needs = [0] * self.ranks
        for held in growing:
            for rank in self._holders[held.owner].of(len(held)):
                needs[rank] += 1
        if any([need > free for need, free in zip(needs, self.num_free, strict=True)]):
            return False
        self._make_room(needs)
        return super().grow_each(growing)

    def _make_room(self, needs: Sequence[int]) -> None:
        """Evict until each rank has so many free slots."""
        for rank, allocator in enumerate(self._allocators):
            lacking = needs[rank] - allocator.num_free
            if lacking > 0:  # a page on `rank` is on no other, or on all
                self._evict(self._idle.first(0 if self.layout.kv is KV.REPLICATED else rank, lacking))

    def release(self, *given_up: HeldPages) -> None:
        """Let go of all pages of some requests, whose tables are empty afterwards. Those in the cache stay, the deepest
        of each request first to be evicted."""
        for held in given_up:
            if held in self._parents:
                self._enter_after(self._parents[held])
        known = self._entered_by_id
        if not known:
            super().release(*given_up)
            return
        private: list[list[int]] = [[] for _ in range(self.ranks)]
        idle: list[CachedPage] = []
        for held in given_up:
            place, holders, ids = self._place(held.owner), self._holders[held.owner], held.ids
            for number in range(len(ids) - 1, -1, -1):
                page = known.get((ids[number], place))
                if page is not None:
                    page.refs -= 1
                    if not page.refs:
                        idle.append(page)
                    continue
                slots = held.table.row(number)
                for rank in holders.of(number):
                    private[rank].append(slots[rank])
            held.clear()
        if idle:
            self._become_idle(idle)
        super().free(private)

    def are_free(self, slots: Sequence[Sequence[int] | np.ndarray]) -> bool:
        if super().are_free(slots):
            return True
        idle = [set(own.tolist()) for own in self.idle_slots()]
        return super().are_free([[s for s in own if s not in taken] for own, taken in zip(slots, idle, strict=True)])

    def free_flags(self, num_slots: int) -> list[np.ndarray]:
        flags = super().free_flags(num_slots)
        for own, idle in zip(flags, self.idle_slots(), strict=True):
            own[idle] = True
        return flags

    def claim(self, slots: Sequence[Sequence[int] | np.ndarray]) -> None:
        if not super().are_free(slots):
            wanted = [set(own) for own in slots]
            self.evict(lambda page: any(slot in own for slot, own in zip(page.slots, wanted, strict=True)))
        super().claim(slots)

    # --- idle pages ---

    def idle_slots(self, target: Layout | None = None, but: Container[CachedPage] = ()) -> tuple[np.ndarray, ...]:
        """By rank, the slots of idle pages, int64, but for some pages; only of those that `target` could use where they
        lie, if given."""
        return self._idle.slots(target, but)

    def evict(self, unwanted: Callable[[CachedPage], bool] = lambda page: True) -> None:
        """Evict the idle pages for which `unwanted` holds."""
        self._evict([page for page in self._idle if unwanted(page)])

    def _place(self, owner: int) -> int:
        return owner if self._by_request else 0

    def _add(self, page: CachedPage) -> None:
        self._by_key.setdefault(page.key, {})[page.place] = page
        self._by_id[page.id, page.place] = page
        if self._missed:
            self._no_longer_missed(page)

    def _no_longer_missed(self, page: CachedPage) -> None:
        if (page.key, page.place) in self._missed:
            self._missed.clear()
            self._idle.forget()

    def _become_idle(self, pages: Sequence[CachedPage]) -> None:
        """Let pages be idle that no request holds any more, one after the other."""
        clock, releases, waits = self._clock, self._releases, self._waits
        for page in pages:
            clock += 1
            releases = releases * KEEP + 1.0
            waits *= KEEP
            page.released = clock
        self._clock, self._releases, self._waits = clock, releases, waits
        self._idle.add(pages)

    def _evict(self, pages: Sequence[CachedPage]) -> None:
        slots: list[list[int]] = [[] for _ in range(self.ranks)]
        for page in pages:
            if self._full:
                self._enter_after(page.parent)
            copies = self._entered_by_key[page.key]
            del copies[page.place], self._entered_by_id[page.id, page.place]
            if not copies:
                del self._entered_by_key[page.key]
            for rank in page.ranks:
                slots[rank].append(page.slots[rank])
        self._idle.remove(pages)
        super().free(slots)

    # --- switches ---

    def chains(self, target: Layout, room: Sequence[int], most: int) -> list[Chain]:
        """What a switch should take along of the idle pages: those released last, each with all pages before it.

        Args:
            target: the layout wanted.
            room: by rank, slots that they may fill, before and after the switch together.
            most: pages in all, at most.
        """
        self.enter_full()
        left, num, chains = list(room), 0, []
        for chain in self._idle.chains(target, lambda: self._work_out(target)):
            num += chain.num_more
            left = [have - take for have, take in zip(left, chain.takes, strict=True)]
            if num > most or min(left) < 0:
                break
            chains.append(chain)
        return chains

    def _work_out(self, target: Layout) -> Iterator[Chain]:
        """All chains to `target`, those first that are wanted most."""
        idle = list(self._idle)
        inner = {(page.parent, page.place) for page in idle}
        leaves = [page for page in idle if (page.key, page.place) not in inner]
        holders = [HolderTable(target, owner, self.ranks) for owner in range(self.ranks)]
        counted: set[tuple[int, int]] = set()  # (id, owner)
        for leaf in sorted(leaves, key=lambda page: page.released, reverse=True):
            pages: list[CachedPage] = []
            page: CachedPage | None = leaf
            while page is not None:
                pages.append(page)
                page = self._by_key.get(page.parent, {}).get(page.place)
            if pages[-1].parent:
                self._missed.add((pages[-1].parent, leaf.place))
                continue  # a page before it is gone, so nobody would find it
            owner = 0
            if target.kv is KV.REQUEST:
                owner = leaf.place if self.layout.kv is KV.REQUEST else leaf.key[0] % self.ranks
            num_before, of = len(counted), holders[owner].of
            # Pages on the same ranks, before and after together, are counted and not looked at one by one.
            alike: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
            for page in pages:
                if (page.id, owner) not in counted:
                    counted.add((page.id, owner))
                    alike[() if page.refs else page.ranks, of(page.number)] += 1
            takes = [0] * self.ranks
            for (there, wanted), count in alike.items():
                for rank in {*there, *wanted}:
                    takes[rank] += count
            yield Chain(tuple(reversed(pages)), owner, len(counted) - num_before, tuple(takes))

    def survivors(
        self, after: PrefixCache, usable: Sequence[np.ndarray], taken_along: Mapping[tuple[bytes, int], CachedPage]
    ) -> list[CachedPage]:
        """The idle pages that are there after a switch, as they are there, next to be evicted first.

        Those that are not taken along do not move, so each must lie where one is wanted.

        Args:
            after: the pool of the target, which has inherited what requests hold.
            usable: by rank, bool [slots], where those may lie that are not taken along.
            taken_along: see `splash.scheduler.heritage.as_they_arrive`.
        """
        places = range(self.ranks if after.layout.kv is KV.REQUEST else 1)
        kept = [page for (key, place), page in taken_along.items() if place not in after._by_key.get(key, ())]
        there = {(page.key, page.place) for page in kept}

        def is_there(key: bytes, place: int) -> bool:
            return (key, place) in there or place in after._by_key.get(key, ())

        holders = [HolderTable(after.layout, owner, self.ranks) for owner in range(self.ranks)]
        idle = list(self._idle)
        along = {key for key, _ in taken_along}
        for page in sorted((page for page in idle if page.key not in along), key=lambda page: page.number):
            # Without the page before it, it would never be found. First pages are dealt out over the places.
            for place in sorted(places, key=lambda place: (place - page.key[0]) % self.ranks):
                if is_there(page.key, place) or (page.parent and not is_there(page.parent, place)):
                    continue
                wanted = holders[place].of(page.number)
                if all(page.slots[rank] != NO_SLOT and usable[rank][page.slots[rank]] for rank in wanted):
                    slots = tuple(slot if rank in wanted else NO_SLOT for rank, slot in enumerate(page.slots))
                    kept.append(page.copied(place, slots))
                    there.add((page.key, place))
                    break
        return sorted(kept, key=lambda page: page.released)

    def inherit(
        self,
        before: PrefixCache,
        moved: Iterable[tuple[HeldPages, HeldPages, int]],
        heritage: Heritage | None = None,
    ) -> None:
        """Know of what requests hold what another pool knew, after a switch.

        Args:
            before: the other pool.
            moved: what each running request holds there, what it holds here, and how many of its first pages are in
                the heritage.
            heritage: what was taken over ahead of the switch. It is this pool's own from now on.
        """
        self.next_id, self._clock = max(self.next_id, before.next_id), before._clock
        self._releases, self._waits = before._releases, before._waits
        heritage = heritage or Heritage(before, self.layout)
        for old, new, first in moved:
            heritage.add(old.owner, new.owner, first, new.ids[first:], new.table)
        self._entered_by_key, self._entered_by_id = heritage.by_key, heritage.by_id

    def adopt(self, survivors: Sequence[CachedPage]) -> None:
        """Take in idle pages of another pool that lie in free slots of this one."""
        super().claim([[page.slots[rank] for page in survivors if rank in page.ranks] for rank in range(self.ranks)])
        for page in survivors:
            self._add(page)
        self._become_idle(survivors)

    def distrust(self, other: PrefixCache) -> None:
        """Evict every idle page that `other`, a pool over the same slots, does not know to lie where it lies here."""
        known = {(page.key, *at) for page in other._by_id.values() for at in enumerate(page.slots)}
        self.evict(
            lambda page: any(
                slot != NO_SLOT and (page.key, rank, slot) not in known for rank, slot in enumerate(page.slots)
            )
        )
