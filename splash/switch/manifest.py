"""Manifest: one switch as a frozen value. Built once from the ownership diff, checked, hashed, then only obeyed.

A switch takes the pages that are written, and the head groups of the weights, from where one (layout, owners) state
has them to where another wants them. For each rank a page is

    kept      in the slot where it lies,
    moved     from one slot of the rank to another, since its slot turns into weights,
    fetched   from one peer that holds it, or
    dropped.

A copy is *direct* when nothing alive lies in its destination: it can run at any time before the commit, and leaves the
source state whole. Where a rank has too few such slots some copies are *staged*: each layer's are read into a staging
buffer, and written back only once every rank has read that layer. A page that is only reserved needs no copy, but the
step that fills it may overwrite what is alive in its slot. A manifest with neither can be abandoned at any layer. The
manifest is the same for every layer.

Requests may share pages, so each has *claims*, one for each page number, on pages. A page is moved once, to every rank
that one of its claims wants it on; and a request's table has slots only where its own claim wants them.

Shape suffixes: c claims of all requests, p pages (in a manifest, only those that are written), T ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from splash.core.diff import NO_SOURCE, diff_blocks
from splash.core.errors import CapacityError
from splash.core.layout import KV, Layout, parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State, page_holders
from splash.core.pages import PageTable
from splash.core.step import NO_SLOT
from splash.switch.placement import Flags, Slots, page_numbers, place, slot_flags


@dataclass(frozen=True, eq=False)
class Occupancy:
    """The running requests and where their pages lie, at a step boundary.

    Attributes:
        layout: the layout that the pages lie in.
        requests: ids, in any order. Negative ones are no requests: their pages are cached, and move with those of the
            requests, but no rank has a table of them.
        owners: owner rank of each request.
        written: positions of each request whose keys are cached; its first ceil(written / page size) pages hold them.
        tables: page table of each request, at least as long as its written pages; later pages are only reserved.
        pages: for each request the numbers of its pages: the same where the same page, or a copy, is claimed. Left
            out, no two requests share any.
        idle: by rank, slots of cached pages that no request uses. They are taken only where no others are free.
        first: for each request the number of its first page in here. Those before it were prepared ahead of the switch.
            Left out, tables have all pages.
        prepared: by rank, bool [slots] each: where pages that were prepared lie in the source state, and where they
            will lie in the target state.
    """

    layout: Layout
    requests: tuple[int, ...]
    owners: tuple[int, ...]
    written: tuple[int, ...]
    tables: tuple[PageTable, ...]
    pages: tuple[Sequence[int], ...] | None = None
    idle: tuple[npt.NDArray[np.integer[Any]], ...] = ()
    first: tuple[int, ...] | None = None
    prepared: tuple[tuple[Flags, Flags], ...] | None = None

    def lengths(self) -> npt.NDArray[np.int64]:
        """[requests] pages of each table."""
        return np.array([len(table) for table in self.tables], dtype=np.int64)

    def pages_wanted(self, target: Layout, owners: Sequence[int], ranks: int) -> list[int]:
        """By rank, the pages that all claims together want there in `target` with those owners."""
        lengths = self.lengths()
        owners_c = np.repeat(np.array(owners, dtype=np.int64), lengths)
        page_c = self.page_c
        claims = page_c * ranks + owners_c if target.kv is KV.REQUEST else page_c
        _, first = np.unique(claims, return_index=True)
        held = page_holders(page_numbers(lengths)[first], owners_c[first], target, ranks)
        wanted: list[int] = np.count_nonzero(held, axis=0).tolist()
        return wanted

    @cached_property
    def page_c(self) -> npt.NDArray[np.int64]:
        """[c] the number of the page that each claim is on."""
        if self.pages is None:
            return np.arange(int(self.lengths().sum()))
        lists = [np.array(pages, dtype=np.int64) for pages in self.pages]
        return np.concatenate([np.empty(0, dtype=np.int64), *lists])


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """One switch, for every rank and layer.

    Arrays travel as bytes: `pages` int32 [c]; `source_slots`, `target_slots` int32 [p, T]; `sources` and `settled`
    int16 [p, T].

    Attributes:
        epoch: the epoch that the switch starts from; its commit makes it one more.
        source, target: names of the two layouts; the same for a rebalance.
        requests: ids.
        source_owners, owners: each request's owner before and after the switch.
        written: each request's positions whose keys are cached.
        first: the number of each request's first page in here. Those before it were prepared: ranks know where they
            will lie, and everything is there already.
        prepared: the digest of what was prepared; 0 where nothing was.
        num_pages: each request's written pages from `first` on.
        pages: the row of the arrays below for each written page of each request in turn.
        source_slots: where pages lie before, NO_SLOT where a rank does not hold one.
        target_slots: where they lie after.
        sources: the rank that each rank fetches a page from, NO_SOURCE where it fetches nothing.
        settled: how many leading positions of the page are at the target already, copied ahead of the commit.
        weight_sources: int [head group][rank], the rank to fetch a head group from, NO_SOURCE where none is fetched.
        weights_settled: the head groups to fetch are there already, by rank.
        abandonable: neither a copy nor a page that is only reserved takes a slot in which something is alive, so that a
            switch that fails at a later layer leaves the source state whole.
    """

    epoch: int
    source: str
    target: str
    requests: tuple[int, ...]
    source_owners: tuple[int, ...]
    owners: tuple[int, ...]
    written: tuple[int, ...]
    first: tuple[int, ...]
    prepared: int
    num_pages: tuple[int, ...]
    pages: bytes
    source_slots: bytes
    target_slots: bytes
    sources: bytes
    settled: bytes
    weight_sources: tuple[tuple[int, ...], ...]
    weights_settled: tuple[bool, ...]
    abandonable: bool

    @property
    def ranks(self) -> int:
        """T."""
        return len(self.weights_settled)

    @property
    def reads_peers(self) -> bool:
        """Whether some rank reads another's memory, unless all of it was copied ahead."""
        groups = any(source != NO_SOURCE for row in self.weight_sources for source in row)
        return groups or bool((self.peers_pT() != NO_SOURCE).any())

    def pages_c(self) -> npt.NDArray[np.int32]:
        """[c] the page that each claim is on."""
        return np.frombuffer(self.pages, dtype=np.int32)

    def numbers_c(self) -> npt.NDArray[np.int64]:
        """[c] page number of each claim."""
        num_pages = np.array(self.num_pages, dtype=np.int64)
        return page_numbers(num_pages) + np.repeat(np.array(self.first, dtype=np.int64), num_pages)

    def source_pT(self) -> Slots:
        """[p, T] slots before."""
        return np.frombuffer(self.source_slots, dtype=np.int32).reshape(-1, self.ranks)

    def target_pT(self) -> Slots:
        """[p, T] slots after."""
        return np.frombuffer(self.target_slots, dtype=np.int32).reshape(-1, self.ranks)

    def peers_pT(self) -> npt.NDArray[np.int16]:
        """[p, T] ranks to fetch from."""
        return np.frombuffer(self.sources, dtype=np.int16).reshape(-1, self.ranks)

    def settled_pT(self) -> npt.NDArray[np.int16]:
        """[p, T] leading positions that need no copy any more."""
        return np.frombuffer(self.settled, dtype=np.int16).reshape(-1, self.ranks)

    def filled_p(self, page_size: int) -> npt.NDArray[np.int64]:
        """[p] positions of each page that are written, 1 .. page size."""
        written_c = np.repeat(np.array(self.written, dtype=np.int64), self.num_pages)
        # A page that is claimed twice is as full for either.
        filled = np.zeros(len(self.source_pT()), dtype=np.int64)
        filled[self.pages_c()] = np.minimum(written_c - self.numbers_c() * page_size, page_size)
        return filled

    def digest(self) -> int:
        """A 63-bit hash of everything in the manifest."""
        return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest(), "little") >> 1

    def source_tables(self) -> Slots:
        """The tables of all requests' written pages before the switch, one below the other, [pages, T]."""
        tables = [table for id, table in self.tables_before().items() if id >= 0]
        return np.concatenate([np.empty((0, self.ranks), dtype=np.int32), *tables])

    def target_tables(self) -> dict[int, Slots]:
        """Each request's written pages after the switch, [pages, T]; not those that are only cached."""
        return {id: table for id, table in self.tables_after().items() if id >= 0}

    def tables_before(self) -> dict[int, Slots]:
        """Written pages before the switch, [pages, T], of requests and of what is only cached."""
        return self._by_request(self._tables_cT(self.source_pT(), self.source, self.source_owners))

    def tables_after(self) -> dict[int, Slots]:
        """The same after it."""
        return self._by_request(self._tables_cT(self.target_pT(), self.target, self.owners))

    def _by_request(self, tables_cT: Slots) -> dict[int, Slots]:
        ends = np.cumsum(self.num_pages)
        starts = ends - self.num_pages
        return {id: tables_cT[start:end] for id, start, end in zip(self.requests, starts, ends, strict=True)}

    def _tables_cT(self, slots_pT: Slots, layout: str, owners: Sequence[int]) -> Slots:
        owners_c = np.repeat(np.array(owners, dtype=np.int64), self.num_pages)
        claims = page_holders(self.numbers_c(), owners_c, parse_layout(layout), self.ranks)
        return np.where(claims, slots_pT[self.pages_c()], np.int32(NO_SLOT))


@dataclass(frozen=True, eq=False)
class RankCopies:
    """What one rank copies in every layer.

    Attributes:
        peer: int16 [n], rank to read from; the rank itself for a move.
        source: int32 [n], slot there.
        target: int32 [n], slot here.
        first, last: int64 [n], positions first .. last - 1 of the page are copied; whole pages unless part is settled.
        staged: bool [n], goes through the staging buffer.
        weights: (head group, peer) pairs to fetch.
        weights_staged: whether the head groups go through the staging buffer.
    """

    peer: npt.NDArray[np.int16]
    source: Slots
    target: Slots
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    staged: Flags
    weights: tuple[tuple[int, int], ...]
    weights_staged: bool

    @cached_property
    def num_staged(self) -> int:
        """Pages in the staging buffer."""
        return int(self.staged.sum())


def rank_copies(manifest: Manifest, geometry: ArenaGeometry, rank: int) -> RankCopies:
    """The copies of one rank: pages that end up in another slot than the one they lie in, and head groups."""
    before, after = manifest.source_pT()[:, rank], manifest.target_pT()[:, rank]
    filled, settled = manifest.filled_p(geometry.page_size), manifest.settled_pT()[:, rank]
    todo = np.flatnonzero((after != NO_SLOT) & (after != before) & (settled < filled))
    fetched = before[todo] == NO_SLOT
    peer = np.where(fetched, manifest.peers_pT()[todo, rank], rank).astype(np.int16)
    first = settled[todo].astype(np.int64)
    staged, under_weights = np.zeros(len(todo), dtype=bool), False
    weights: tuple[tuple[int, int], ...] = ()
    if not manifest.weights_settled[rank]:
        peers = ((group, sources[rank]) for group, sources in enumerate(manifest.weight_sources))
        weights = tuple((group, peer) for group, peer in peers if peer != NO_SOURCE)
    if not manifest.abandonable:
        occupied, alive = living(before, geometry.page_flags(parse_layout(manifest.source), rank))
        staged = alive[after[todo]]
        under_weights = bool(occupied[slots_under(geometry, [group for group, _ in weights])].any())
    return RankCopies(
        peer=peer,
        source=manifest.source_pT()[todo, peer],
        target=after[todo],
        first=first,
        last=np.where(first == 0, geometry.page_size, filled[todo]),
        staged=staged,
        weights=weights,
        weights_staged=under_weights,
    )


def living(written_slots: npt.NDArray[np.integer[Any]], may_hold_pages: Flags) -> tuple[Flags, Flags]:
    """Two bool [slots] of one rank in the source layout: a written page lies there; that, or weights."""
    occupied = slot_flags(written_slots, len(may_hold_pages))
    return occupied, occupied | ~may_hold_pages


def slots_under(geometry: ArenaGeometry, groups: Sequence[int]) -> npt.NDArray[np.intp]:
    """The slots that some head groups of the weights overlap."""
    under = np.zeros(geometry.num_slots, dtype=bool)
    for group in groups:
        for module in geometry.modules:
            offset, size = geometry.run(module, group)
            under[offset // geometry.slot_bytes : -(-(offset + size) // geometry.slot_bytes)] = True
    return np.flatnonzero(under)


@dataclass(frozen=True, eq=False)
class Planned:
    """A manifest, and the state of the pages after it.

    Attributes:
        manifest: what the ranks do.
        pages: [p] the numbers of its pages, as in `Occupancy.pages`.
        tables: each request's pages after the switch, reserved ones included, int32 [pages, T].
        withheld: by rank, slots that are free after the switch but in use before it. They must not be used before the
            commit of a manifest that can be abandoned. All empty for one that cannot.
        prepared: where pages lie and will lie that are not in the manifest, as in `Occupancy`.
    """

    manifest: Manifest
    pages: npt.NDArray[np.int64]
    tables: dict[int, Slots]
    withheld: tuple[npt.NDArray[np.intp], ...]
    prepared: tuple[tuple[Flags, Flags], ...] | None = None


def plan_switch(
    occupancy: Occupancy,
    target: Layout,
    owners: Sequence[int],
    geometry: ArenaGeometry,
    epoch: int,
    ahead: Callable[[npt.NDArray[np.int64]], Slots] | None = None,
) -> Planned:
    """Plan a switch to `target` with new `owners`, one a request.

    Pages stay where they lie if they may. The others take slots that no page uses; where a rank has too few of those,
    slots of idle pages, then slots that are only reserved, and at last slots that the switch empties. Written pages
    choose first, and those of one peer lie together, so that they are read in long extents.

    Args:
        occupancy: the source state.
        target: the layout wanted.
        owners: the owner wanted, one a request.
        geometry: the arenas.
        epoch: of the source state.
        ahead: for pages [p] the slots [p, T] that were chosen for them by a copy ahead of the commit, NO_SLOT where
            none was. They must be free in the source state.

    Raises:
        CapacityError: the live requests do not fit in the target layout; the message has the numbers.
    """
    ranks, page_size = geometry.ranks, geometry.page_size
    lengths = occupancy.lengths()
    tables_cT = np.concatenate([table.slots_cT for table in occupancy.tables] or [np.empty((0, ranks), dtype=np.int32)])
    first = np.array(occupancy.first or (0,) * len(lengths), dtype=np.int64)
    numbers = page_numbers(lengths) + np.repeat(first, lengths)
    page_ids, page_c = _in_order(occupancy.page_c)
    is_shared = len(page_ids) < len(page_c)  # where nothing is, claims are pages
    old_owners = np.repeat(np.array(occupancy.owners, dtype=np.int64), lengths)
    new_owners = np.repeat(np.array(owners, dtype=np.int64), lengths)
    old = State(occupancy.layout, ranks, numbers, old_owners, page_c if is_shared else None)
    new = State(target, ranks, numbers, new_owners, page_c if is_shared else None)
    before_pT = _slots_of_pages(tables_cT, page_c, len(page_ids)) if is_shared else tables_cT
    assert (old.page_holders == (before_pT != NO_SLOT)).all(), "page tables do not lie as their layout says"
    is_written_c = numbers < np.repeat(-(-np.array(occupancy.written, dtype=np.int64) // page_size), lengths)
    is_written_p = np.zeros(len(page_ids), dtype=bool)
    is_written_p[page_c[is_written_c]] = True
    assert (is_written_p[page_c] == is_written_c).all(), "a page is written for one request and not for another"
    rows = np.flatnonzero(is_written_p)
    weights = diff_blocks(old.weight_holders, new.weight_holders)
    pages = diff_blocks(old.page_holders.take(rows, axis=0), new.page_holders.take(rows, axis=0))
    source_slots = before_pT.take(rows, axis=0)
    chosen_pT = np.full_like(before_pT, NO_SLOT) if ahead is None else ahead(page_ids)
    after_pT = np.empty_like(before_pT)
    withheld, abandonable = [], True
    for rank in range(ranks):
        usable = geometry.page_flags(target, rank)
        lies, will_lie = (
            occupancy.prepared[rank] if occupancy.prepared else np.zeros((2, geometry.num_slots), dtype=bool)
        )
        wanted = np.ascontiguousarray(new.page_holders[:, rank])
        check_fits(
            target, rank, int(np.count_nonzero(wanted) + np.count_nonzero(will_lie)), int(np.count_nonzero(usable))
        )
        before = before_pT[:, rank].astype(np.int64)
        after = np.where(wanted, chosen_pT[:, rank], NO_SLOT).astype(np.int64)
        source = np.full(len(page_ids), ranks, dtype=np.int16)
        source[rows] = pages.fetch_source[:, rank]
        occupied, alive = living(source_slots[:, rank], geometry.page_flags(occupancy.layout, rank))
        occupied, alive, usable = occupied | lies, alive | lies | will_lie, usable & ~will_lie
        idle = slot_flags(occupancy.idle[rank] if occupancy.idle else before[:0], geometry.num_slots)
        kept_back, overwrites = place(before, after, wanted, source, usable, alive, idle, geometry.num_weight_slots)
        after_pT[:, rank] = after
        withheld.append(kept_back)
        groups = np.flatnonzero(weights.fetch[:, rank]).tolist()
        abandonable &= not overwrites and not occupied[slots_under(geometry, groups)].any()
    ends = np.cumsum(lengths)
    manifest = Manifest(
        epoch=epoch,
        source=occupancy.layout.name,
        target=target.name,
        requests=occupancy.requests,
        source_owners=occupancy.owners,
        owners=tuple(int(owner) for owner in owners),
        written=occupancy.written,
        first=tuple(first.tolist()),
        prepared=0,
        num_pages=tuple(
            -(-num // page_size) - skip for num, skip in zip(occupancy.written, first.tolist(), strict=True)
        ),
        pages=(np.cumsum(is_written_p) - 1)[page_c[is_written_c]].astype(np.int32).tobytes(),
        source_slots=source_slots.tobytes(),
        target_slots=after_pT.take(rows, axis=0).tobytes(),
        sources=pages.fetch_source.tobytes(),
        settled=bytes(pages.fetch_source.nbytes),
        weight_sources=tuple(tuple(row) for row in weights.fetch_source.tolist()),
        weights_settled=(False,) * ranks,
        abandonable=abandonable,
    )
    after_cT = after_pT
    if is_shared:
        after_cT = np.where(page_holders(numbers, new_owners, target, ranks), after_pT[page_c], np.int32(NO_SLOT))
    tables = {id: after_cT[end - n : end] for id, n, end in zip(occupancy.requests, lengths, ends, strict=True)}
    withheld = [kept_back[: len(kept_back) * abandonable] for kept_back in withheld]
    written_ids = page_ids if len(rows) == len(page_ids) else page_ids[rows]
    return Planned(manifest, written_ids, tables, tuple(withheld), occupancy.prepared)


def check_fits(target: Layout, rank: int, num_wanted: int, room: int) -> None:
    """Raise `CapacityError` where a rank has room for fewer pages than are wanted there."""
    if num_wanted > room:
        text = f"layout {target} has room for {room} pages on rank {rank}, and the live requests need {num_wanted}"
        raise CapacityError(text)


def _slots_of_pages(tables_cT: Slots, page_c: npt.NDArray[np.int64], num_pages: int) -> Slots:
    """[p, T] where each page lies, from the tables of all requests one below the other."""
    slots_pT = np.full((num_pages, tables_cT.shape[1]), NO_SLOT, dtype=np.int32)
    for rank, own in enumerate(tables_cT.T):
        held = own != NO_SLOT
        slots_pT[page_c[held], rank] = own[held]
    assert ((slots_pT[page_c] == tables_cT) | (tables_cT == NO_SLOT)).all(), "a rank has two copies of a page"
    return slots_pT


def _in_order(page_c: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct pages [p] in order of their first claims, and the index [c] among them of each claim's."""
    pages, first, which = np.unique(page_c, return_index=True, return_inverse=True)
    if len(pages) == len(page_c):
        return page_c, np.arange(len(page_c))
    order = np.argsort(first)
    place = np.empty(len(pages), dtype=np.int64)
    place[order] = np.arange(len(pages))
    return pages[order], place[which]


def settle(
    manifest: Manifest, settled_pT: npt.NDArray[np.int16], weights_settled: Sequence[bool], prepared: int = 0
) -> Manifest:
    """The manifest with what was done ahead marked: leading positions a page and rank, head groups a rank.

    `prepared` is the digest of the pages that were prepared, which are not in the manifest.
    """
    return msgspec.structs.replace(
        manifest, settled=settled_pT.tobytes(), weights_settled=tuple(weights_settled), prepared=prepared
    )
