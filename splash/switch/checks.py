"""What must hold of a manifest before anybody acts on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from splash.core.diff import NO_SOURCE
from splash.core.layout import LAYOUTS, Projections, parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State, weight_holders
from splash.core.step import NO_SLOT
from splash.switch.manifest import Manifest, living, slots_under
from splash.switch.placement import Flags, slot_flags

Prepared = tuple[tuple[Flags, Flags], ...]


def validate(manifest: Manifest, geometry: ArenaGeometry, prepared: Prepared | None = None) -> None:
    """Check a manifest for exact cover: each rank that must hold a block has one slot for it, and one way to get it.

    `prepared` says where pages lie and will lie that are not in it, as in `Occupancy`.

    Raises:
        ValueError: naming the first property that does not hold.
    """
    for name, holds in _properties(manifest, geometry, prepared):
        if not holds:
            raise ValueError(f"manifest of {manifest.source} -> {manifest.target}: not so: {name}")


def _properties(manifest: Manifest, geometry: ArenaGeometry, prepared: Prepared | None) -> Iterator[tuple[str, bool]]:
    """What must hold, and whether it does. Later ones make sense only where earlier ones hold."""
    m, ranks, size = manifest, geometry.ranks, geometry.page_size
    yield "both layouts exist", m.source in LAYOUTS and m.target in LAYOUTS
    source, target = parse_layout(m.source), parse_layout(m.target)
    sharded = Projections.SHARDED in (source.projections, target.projections)
    yield "the ranks divide the heads of a layout that shards them", not sharded or not geometry.spec.num_heads % ranks
    yield "it is for all ranks", m.ranks == ranks
    yield "no request is named twice", len(set(m.requests)) == len(m.requests)
    fields = (m.source_owners, m.owners, m.written, m.first, m.num_pages)
    yield "each request has all its fields", all(len(field) == len(m.requests) for field in fields)
    yield "owners are ranks", all(0 <= owner < ranks for owner in (*m.source_owners, *m.owners))
    pages = zip(m.written, m.first, m.num_pages, strict=True)
    exact = all(0 <= first * size <= written and first + num == -(-written // size) for written, first, num in pages)
    yield "each request has as many pages as it has written", exact
    cached = [first for id, first in zip(m.requests, m.first, strict=True) if id < 0]
    yield "only pages of requests are prepared", not any(cached)
    yield "each page of a request is claimed", len(m.pages) == 4 * sum(m.num_pages)
    claimed, numbers = m.pages_c(), m.numbers_c()
    num_pages = len(m.source_slots) // (4 * ranks)
    yield "claims are on pages that there are", _all_within(claimed, 0, num_pages - 1)
    yield "every page is claimed", bool(np.bincount(claimed, minlength=num_pages).all())
    number_of = np.zeros(num_pages, dtype=np.int64)
    number_of[claimed] = numbers
    yield "a page has one number in all requests", np.array_equal(number_of[claimed], numbers)
    filled = m.filled_p(size)
    filled_c = np.minimum(np.repeat(np.array(m.written, dtype=np.int64), m.num_pages) - numbers * size, size)
    yield "what is written of a page is so for all its requests", np.array_equal(filled[claimed], filled_c)
    entries = num_pages * ranks
    arrays = ((m.source_slots, 4), (m.target_slots, 4), (m.sources, 2), (m.settled, 2))
    yield "arrays have an entry a page and rank", all(len(array) == entries * width for array, width in arrays)
    before, after, peers, settled = m.source_pT(), m.target_pT(), m.peers_pT(), m.settled_pT()
    held, wanted = before != NO_SLOT, after != NO_SLOT
    claims = None if np.array_equal(claimed, np.arange(num_pages)) else claimed
    owners_c = np.repeat(np.array(m.owners, dtype=np.int64), m.num_pages)
    holders = State(target, ranks, numbers, owners_c, claims).page_holders
    yield "pages are wanted where the target layout has them", np.array_equal(wanted, holders)
    owners_c = np.repeat(np.array(m.source_owners, dtype=np.int64), m.num_pages)
    holders = State(source, ranks, numbers, owners_c, claims).page_holders
    yield "pages are held where the source layout has them", np.array_equal(held, holders)
    fetched = wanted & ~held
    yield "a page that is fetched has a source", _all_within(np.where(fetched, peers, 0), 0, ranks - 1)
    yield "nothing that is resident or unwanted is fetched", bool(((peers == NO_SOURCE) | fetched).all())
    peer_holds = held.ravel()[np.arange(0, held.size, ranks)[:, None] + peers] if held.size else held
    yield "a source holds what it is asked for", bool((peer_holds | ~fetched).all())
    yield "no more of a page is settled than is written", _all_within(settled, 0, filled[:, None])

    groups = np.array(m.weight_sources, dtype=np.int64)
    yield "weights have an entry a head group and rank", groups.shape == (ranks, ranks)
    missing = weight_holders(target, ranks) & ~weight_holders(source, ranks)
    yield "head groups that are missing are fetched, and no others", np.array_equal(groups != NO_SOURCE, missing)
    rows, columns = np.nonzero(missing)
    peer = groups[rows, columns]
    yield "head groups are fetched from ranks", _all_within(peer, 0, ranks - 1)
    yield "a source holds the head group it is asked for", bool(weight_holders(source, ranks)[rows, peer].all())

    before_Tp, after_Tp = before.T.astype(np.int64, order="C"), after.T.astype(np.int64, order="C")
    for rank, (old, new) in enumerate(zip(before_Tp, after_Tp, strict=True)):
        on_rank = f"on rank {rank}"
        lies, will_lie = prepared[rank] if prepared else np.zeros((2, geometry.num_slots), dtype=bool)
        for when, layout, slots in (("before", source, old), ("after", target, new)):
            yield f"pages lie inside the arena {when}, {on_rank}", _all_within(slots, NO_SLOT, geometry.num_slots - 1)
            taken = slot_flags(slots, geometry.num_slots)
            yield f"no page lies on weights {when}, {on_rank}", not (taken & ~geometry.page_flags(layout, rank)).any()
            yield f"no slot has two pages {when}, {on_rank}", taken.sum() == (slots != NO_SLOT).sum()
        yield f"no page will lie where a prepared one will, {on_rank}", not will_lie[new[new != NO_SLOT]].any()
        occupied, alive = living(old, geometry.page_flags(source, rank))
        occupied, alive = occupied | lies, alive | lies
        staged = (new != NO_SLOT) & (new != old) & alive[new]
        yield f"what is staged cannot be settled, {on_rank}", not settled[staged, rank].any()
        under = bool(occupied[slots_under(geometry, np.flatnonzero(missing[:, rank]).tolist())].any())
        yield f"weights that are staged cannot be settled, {on_rank}", not (m.weights_settled[rank] and under)
        yield f"staged copies make it not abandonable, {on_rank}", not (m.abandonable and (staged.any() or under))


def _all_within(values: npt.NDArray[Any], least: int, most: npt.ArrayLike) -> bool:
    return bool(((values >= least) & (values <= most)).all())
