"""PrefixCache: a page pool in which requests that begin alike share pages, and what they leave behind is found again.

A page is known by what it holds: its key is a hash of its tokens and of the key of the page before it. It is entered
once it is full and the step that filled it is over, so nobody sees it before it is written, and nobody writes to it
afterwards. A page that no request holds any more is *idle*: it counts as free, and is evicted when its slot is needed.

Where the layout keeps pages by request, a page is of use on the rank of its owner only: this is its *place*, and a
rank may have a copy of what another has. Everywhere else there is one place, 0.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from splash.core.layout import KV, Layout
from splash.core.pages import HeldPages, HolderTable, PagePool
from splash.core.step import NO_SLOT
from splash.scheduler.idle_pages import CachedPage, Chain, IdlePages

KEY_BYTES = 16
KEEP = 1 - 2.0**-14  # what a release is worth after the next
MOST_TAKEN_ALONG = 1 << 13  # idle pages that a switch moves: to plan more would take longer than a step

Keys = Sequence[bytes]  # of a request's first pages


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, num_pages: int) -> None:
    """Add the keys of the pages of `tokens` up to `num_pages`, all of them full."""
    first = len(keys)
    if first >= num_pages:
        return
    content = array("i", tokens[first * page_size : num_pages * page_size])
    data, size = content.tobytes(), content.itemsize * page_size
    key = keys[-1] if keys else b""
    for start in range(0, len(data), size):
        key = hashlib.blake2b(key + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)


class PrefixCache(PagePool):
    """The pages of a group in one layout, shared by content. Without `enter` nothing is ever shared."""

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[np.ndarray],
        resident: Iterable[HeldPages] = (),
        withheld: Sequence[Sequence[int]] = (),
        border: int = 0,
    ) -> None:
        super().__init__(layout, slots, resident, withheld, border)
        self._by_key: dict[bytes, dict[int, CachedPage]] = {}  # key -> place -> page
        self._by_id: dict[tuple[int, int], CachedPage] = {}  # (id, place)
        self._idle = IdlePages(self.ranks)
        self._missed: set[tuple[bytes, int]] = set()  # (key, place) of pages for want of which idle ones are no chain
        self._clock = 0
        # Of the last releases, older ones worth less: how many, and for how many releases pages were idle until found.
        self._releases, self._waits = 0.0, 0.0

    # --- what requests do ---

    def match(self, keys: Keys) -> list[list[CachedPage]]:
        """For a request of each rank, the pages that it would find: as many of the first of `keys` as are there."""
        num_places = self.ranks if self.layout.kv is KV.REQUEST else 1
        counts, going_on = [0] * num_places, set(range(num_places))
        copies: list[dict[int, CachedPage]] = []
        for key in keys:
            there = self._by_key.get(key)
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
        found = [[there[place] for there in copies[:count]] for place, count in enumerate(counts)]
        return found if num_places == self.ranks else found * self.ranks

    def takes(self, owner: int, shared: Sequence[CachedPage], count: int) -> list[int]:
        """Free pages on each rank that a request of `owner` takes to have `count`, of which the first are `shared`."""
        takes = self._holders[owner].needs(len(shared), count - len(shared))
        for page in [page for page in shared if not page.refs]:
            for rank in page.ranks:
                takes[rank] += 1
        return takes

    def freed(self, held: HeldPages, given_up: Counter[CachedPage]) -> list[int]:
        """Pages on each rank that are free once a request gives up its own, after others that have given up theirs.

        Args:
            held: the pages of the request.
            given_up: how many have given up each shared page before. Takes in those of this request.
        """
        freed, place = [0] * self.ranks, self._place(held.owner)
        for number, id in enumerate(held.ids):
            page = self._by_id.get((id, place))
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
        for page in pages:
            assert page.place == self._place(held.owner) and page.number == len(held.ids)
            if not page.refs:
                self._idle.remove(page)
                self._waits += self._clock - page.released
            page.refs += 1
            held.ids.append(page.id)
            for rank in page.ranks:
                held.counts[rank] += 1
                held.last[rank] = page.slots[rank]
        held.table.append(*[page.slots for page in pages])

    def enter(self, held: HeldPages, number: int, keys: Keys) -> None:
        """Let others find a page of a request, now that it is full and written. `keys` are those of its first pages.

        Where the same was computed twice at once, the later one stays private.
        """
        key, place = keys[number], self._place(held.owner)
        copies = self._by_key.get(key)
        if copies:
            if place in copies:
                return
            held.ids[number] = next(iter(copies.values())).id  # which all of them have
        (slots,) = held.table.rows(number, number + 1)
        parent = keys[number - 1] if number else b""
        ranks = self._holders[held.owner].of(number)
        self._add(CachedPage(key, parent, number, held.ids[number], place, slots, 1, 0, ranks))

    # --- what the pool does, with idle pages counting as free ---

    @property
    def num_idle(self) -> list[int]:
        """Pages on each rank that no request holds but a request may find."""
        return list(self._idle.num_T)

    @property
    def num_free(self) -> list[int]:
        return [free + idle for free, idle in zip(super().num_free, self._idle.num_T, strict=True)]

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
            while needs[rank] > allocator.num_free:
                self._evict_next(rank)

    def release(self, *given_up: HeldPages) -> None:
        """Let go of all pages of some requests, whose tables are empty afterwards. Those in the cache stay, the deepest
        of each request first to be evicted."""
        if not self._by_id:
            super().release(*given_up)
            return
        private: list[list[int]] = [[] for _ in range(self.ranks)]
        for held in given_up:
            place, holders, number = self._place(held.owner), self._holders[held.owner], len(held)
            for id, slots in zip(reversed(held.ids), reversed(held.table.rows(0, number)), strict=True):
                page = self._by_id.get((id, place))
                number -= 1
                if page is None:
                    for rank in holders.of(number):
                        private[rank].append(slots[rank])
                    continue
                page.refs -= 1
                if not page.refs:
                    self._become_idle(page)
            held.clear()
        super().free(private)

    def are_free(self, slots: Sequence[Sequence[int]]) -> bool:
        if super().are_free(slots):
            return True
        idle = [set(own.tolist()) for own in self.idle_slots()]
        return super().are_free([[s for s in own if s not in taken] for own, taken in zip(slots, idle, strict=True)])

    def free_flags(self, num_slots: int) -> list[np.ndarray]:
        flags = super().free_flags(num_slots)
        for own, idle in zip(flags, self.idle_slots(), strict=True):
            own[idle] = True
        return flags

    def claim(self, slots: Sequence[Sequence[int]]) -> None:
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
        for page in [page for page in self._idle if unwanted(page)]:
            self._evict(page)

    def _place(self, owner: int) -> int:
        return owner if self.layout.kv is KV.REQUEST else 0

    def _add(self, page: CachedPage) -> None:
        self._by_key.setdefault(page.key, {})[page.place] = page
        self._by_id[page.id, page.place] = page
        if (page.key, page.place) in self._missed:
            self._missed.clear()
            self._idle.forget()

    def _become_idle(self, page: CachedPage) -> None:
        self._clock += 1
        self._releases = self._releases * KEEP + 1.0
        self._waits *= KEEP
        page.released = self._clock
        self._idle.add(page)

    def _evict_next(self, rank: int) -> None:
        """Evict the page that is next on `rank`."""
        self._evict(self._idle.first(0 if self.layout.kv is KV.REPLICATED else rank))

    def _evict(self, page: CachedPage) -> None:
        self._idle.remove(page)
        copies = self._by_key[page.key]
        del copies[page.place], self._by_id[page.id, page.place]
        if not copies:
            del self._by_key[page.key]
        super().free([[slot] if slot != NO_SLOT else [] for slot in page.slots])

    # --- switches ---

    def chains(self, target: Layout, room: Sequence[int], most: int) -> list[Chain]:
        """What a switch should take along of the idle pages: those released last, each with all pages before it.

        Args:
            target: the layout wanted.
            room: by rank, slots that they may fill, before and after the switch together.
            most: pages in all, at most.
        """
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

    def arrived(
        self, target: Layout, chains: Iterable[tuple[Chain, np.ndarray]]
    ) -> dict[tuple[bytes, int], CachedPage]:
        """Pages that a switch takes along, as they are in `target`, by (key, place).

        Args:
            target: the layout.
            chains: each with its slots there, int32 [pages, T].
        """
        pages: dict[tuple[bytes, int], CachedPage] = {}
        for chain, slots_cT in chains:
            place = chain.owner if target.kv is KV.REQUEST else 0
            for page, slots in zip(chain.pages, map(tuple, slots_cT.tolist()), strict=True):
                if (page.key, place) not in pages:
                    pages[page.key, place] = CachedPage(
                        page.key, page.parent, page.number, page.id, place, slots, 0, page.released
                    )
        return pages

    def survivors(
        self,
        target: Layout,
        owners: Iterable[tuple[HeldPages, int]],
        usable: Sequence[np.ndarray],
        taken_along: Mapping[tuple[bytes, int], CachedPage],
    ) -> list[CachedPage]:
        """The idle pages that are there after a switch, as they are in `target`, next to be evicted first.

        Those that are not taken along do not move, so each must lie where one is wanted.

        Args:
            target: the layout wanted.
            owners: the pages that each running request holds now, and its owner there.
            usable: by rank, bool [slots], where those may lie that are not taken along.
            taken_along: see `arrived`.
        """
        if not any(self._idle.num_T):
            return []
        by_request = target.kv is KV.REQUEST
        there: dict[bytes, set[int]] = {b"": set(range(self.ranks if by_request else 1))}  # key -> places
        for held, owner in owners:
            place = self._place(held.owner)
            for id in held.ids:
                live = self._by_id.get((id, place))
                if live is not None:
                    there.setdefault(live.key, set()).add(owner if by_request else 0)
        kept = [page for (key, place), page in taken_along.items() if place not in there.get(key, ())]
        for page in kept:
            there.setdefault(page.key, set()).add(page.place)
        holders = [HolderTable(target, owner, self.ranks) for owner in range(self.ranks)]
        idle = list(self._idle)
        along = {key for key, _ in taken_along}
        for page in sorted((page for page in idle if page.key not in along), key=lambda page: page.number):
            # Without the page before it, it would never be found. First pages are dealt out over the places.
            known = there.get(page.key, set())
            places = [place for place in there.get(page.parent, ()) if place not in known]
            for place in sorted(places, key=lambda place: (place - page.key[0]) % self.ranks):
                wanted = holders[place].of(page.number)
                if all(page.slots[rank] != NO_SLOT and usable[rank][page.slots[rank]] for rank in wanted):
                    slots = tuple(slot if rank in wanted else NO_SLOT for rank, slot in enumerate(page.slots))
                    kept.append(CachedPage(page.key, page.parent, page.number, page.id, place, slots, 0, page.released))
                    there.setdefault(page.key, set()).add(place)
                    break
        return sorted(kept, key=lambda page: page.released)

    def inherit(
        self,
        before: PrefixCache,
        moved: Iterable[tuple[HeldPages, HeldPages]],
        survivors: Sequence[CachedPage],
    ) -> None:
        """Know what another pool knew, after a switch.

        Args:
            before: the other pool.
            moved: what each running request holds there, and what it holds here.
            survivors: idle pages, which this pool has withheld.
        """
        self._next_id, self._clock = max(self._next_id, before._next_id), before._clock
        self._releases, self._waits = before._releases, before._waits
        for old, new in moved if before._by_id else ():
            place, old_place = self._place(new.owner), before._place(old.owner)
            for number, id in enumerate(new.ids):
                known = before._by_id.get((id, old_place))
                if known is None:
                    continue
                page = self._by_id.get((id, place))
                if page is None:
                    (slots,) = new.table.rows(number, number + 1)
                    page = CachedPage(known.key, known.parent, number, id, place, slots)
                    self._add(page)
                page.refs += 1
        for page in survivors:
            self._add(page)
            self._become_idle(page)

    def distrust(self, other: PrefixCache) -> None:
        """Evict every idle page that `other`, a pool over the same slots, does not know to lie where it lies here."""
        known = {(page.key, *at) for page in other._by_id.values() for at in enumerate(page.slots)}
        self.evict(
            lambda page: any(
                slot != NO_SLOT and (page.key, rank, slot) not in known for rank, slot in enumerate(page.slots)
            )
        )
