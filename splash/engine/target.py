"""Where a switch leads: which pages it takes along, whether they can fit, and the pools and tables after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import HeldPages, HolderTable, PageTable
from splash.core.step import NO_SLOT
from splash.engine.ahead import AheadCopies
from splash.scheduler.heritage import as_they_arrive
from splash.scheduler.idle_pages import Chain
from splash.scheduler.prefix_cache import MOST_TAKEN_ALONG, PrefixCache
from splash.scheduler.scheduler import Scheduler
from splash.switch.manifest import Occupancy, Planned, check_fits, rank_copies


@dataclass(frozen=True, eq=False)
class Moved:
    """What a switch moves.

    Attributes:
        occupancy: the running requests, then the chains, which stand for requests of negative ids.
        owners: owner after the switch of each.
        chains: idle pages of the cache.
    """

    occupancy: Occupancy
    owners: tuple[int, ...]
    chains: tuple[Chain, ...]


def running_pages(scheduler: Scheduler, target: Layout) -> Occupancy:
    """The running requests, the rows of steps in flight included."""
    scheduler.pool.enter_full()  # which may change ids
    running = scheduler.running
    held = [request.held for request in running]
    return Occupancy(
        layout=scheduler.pool.layout,
        requests=tuple(request.id for request in running),
        owners=tuple(pages.owner for pages in held if pages is not None),
        written=tuple(request.num_computed for request in running),
        tables=tuple(pages.table for pages in held if pages is not None),
        pages=tuple(pages.ids for pages in held if pages is not None),
        idle=scheduler.pool.idle_slots(target),
    )


def with_chains(
    cache: PrefixCache, geometry: ArenaGeometry, target: Layout, occupancy: Occupancy, owners: Sequence[int]
) -> Moved:
    """What moves: running requests, and of the idle pages of the cache what there is room for."""
    ranks = geometry.ranks
    if not any(cache.num_idle):
        return Moved(occupancy, tuple(owners), ())
    # What is copied ahead fills slots of the pool as well, and those are counted as wanted.
    held = occupancy.pages_wanted(occupancy.layout, occupancy.owners, ranks)
    wanted = occupancy.pages_wanted(target, owners, ranks)
    room = [
        min(own, total) - before - after
        for own, total, before, after in zip(page_room(geometry, target), cache.num_total, held, wanted, strict=True)
    ]
    chains = tuple(cache.chains(target, room, MOST_TAKEN_ALONG))
    if not chains:
        return Moved(occupancy, tuple(owners), ())
    page_size = geometry.page_size
    along = {page for chain in chains for page in chain.pages}
    extended = Occupancy(
        layout=occupancy.layout,
        requests=occupancy.requests + tuple(range(-1, -1 - len(chains), -1)),
        owners=occupancy.owners + tuple(chain.pages[-1].place for chain in chains),
        written=occupancy.written + tuple(len(chain.pages) * page_size for chain in chains),
        tables=occupancy.tables + tuple(PageTable(ranks, [page.slots for page in chain.pages]) for chain in chains),
        pages=(occupancy.pages or ()) + tuple([page.id for page in chain.pages] for chain in chains),
        idle=cache.idle_slots(target, along),
    )
    return Moved(extended, (*owners, *(chain.owner for chain in chains)), chains)


def page_room(geometry: ArenaGeometry, layout: Layout) -> list[int]:
    """Pages that each rank has room for."""
    return [len(geometry.page_slots(layout, rank)) for rank in range(geometry.ranks)]


def check_room(occupancy: Occupancy, target: Layout, owners: Sequence[int], geometry: ArenaGeometry) -> None:
    """Raise `CapacityError` where all claims together need more pages than a rank has room for."""
    rooms, holders = (
        page_room(geometry, target),
        [HolderTable(target, owner, geometry.ranks) for owner in range(geometry.ranks)],
    )
    needs = [holders[owner].needs(0, len(table)) for owner, table in zip(owners, occupancy.tables, strict=True)]
    if all(sum(own) <= room for own, room in zip(zip(*needs, strict=True), rooms, strict=False)):
        return  # even if no two claims were on one page
    wanted = occupancy.pages_wanted(target, owners, geometry.ranks)
    for rank, (num_wanted, room) in enumerate(zip(wanted, rooms, strict=True)):
        check_fits(target, rank, num_wanted, room)


def never_fits(scheduler: Scheduler, geometry: ArenaGeometry, target: Layout) -> str:
    """Why a live request could never run to its end in the target, even alone, or an empty string."""
    ranks, page_size = geometry.ranks, geometry.page_size
    room = page_room(geometry, target)
    holders = [HolderTable(target, owner, ranks) for owner in range(ranks)]
    for request in scheduler.requests:
        num_pages = -(-request.max_positions // page_size)
        needs = (table.needs(0, num_pages) for table in holders)
        if not any(all(num <= most for num, most in zip(own, room, strict=True)) for own in needs):
            return (
                f"layout {target} has room for {room} pages on the ranks, and a live request may "
                f"grow to {num_pages} pages of {page_size} tokens"
            )
    return ""


def staging_shortage(planned: Planned, geometry: ArenaGeometry, staging_bytes: int) -> str:
    """Why a rank cannot stage a layer of the switch, or an empty string."""
    group_bytes = geometry.attention_bytes // geometry.ranks
    needs = []
    for rank in range(geometry.ranks):
        copies = rank_copies(planned.manifest, geometry, rank)
        needs.append(
            copies.num_staged * geometry.slot_bytes + copies.weights_staged * len(copies.weights) * group_bytes
        )
    if max(needs) <= staging_bytes:
        return ""
    return f"it would stage {max(needs)} bytes a layer, and a rank has {staging_bytes}"


def pages_after(
    scheduler: Scheduler,
    geometry: ArenaGeometry,
    target: Layout,
    planned: Planned,
    chains: Sequence[Chain],
    ahead: AheadCopies | None,
) -> tuple[PrefixCache, dict[int, HeldPages]]:
    """The pages after a switch, with all of the cache that can be kept, and those of each running request."""
    cache, manifest = scheduler.pool, planned.manifest
    cache.enter_full()
    before = {request.id: request.held for request in scheduler.running if request.held is not None}
    held = {
        id: HeldPages(owner, geometry.ranks, planned.tables[id], before[id].ids)
        for id, owner in zip(manifest.requests, manifest.owners, strict=True)
        if id >= 0
    }
    in_use = None if ahead is None else ahead.slots_after(planned)
    pool = PrefixCache.of_geometry(geometry, target, held.values(), planned.withheld, in_use, cache.next_id)
    num_prepared = {id: 0 if ahead is None else ahead.prepared.num(id) for id in held}
    moved = [(before[id], pages, num_prepared[id]) for id, pages in held.items()]
    pool.inherit(cache, moved, None if ahead is None else ahead.prepared.heritage)
    if any(cache.num_idle):
        along = [(chain, planned.tables[-1 - number]) for number, chain in enumerate(chains)]
        usable = [geometry.page_flags(target, rank).copy() for rank in range(geometry.ranks)]
        for rank, flags in enumerate(usable):
            for table in (*(pages.table.slots_cT for pages in held.values()), *(table for _, table in along)):
                flags[table[table[:, rank] != NO_SLOT, rank]] = False
        pool.adopt(cache.survivors(pool, usable, as_they_arrive(target, along)))
    return pool, held
