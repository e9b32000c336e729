"""Manifests against every rank's bytes: what is wanted arrives, what is alive outlives the barrier, no more moves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.diff import diff
from splash.core.errors import CapacityError
from splash.core.layout import CP, DP, LAYOUTS, TP, Layout
from splash.core.pages import HeldPages, PagePool, PageTable
from splash.core.step import NO_SLOT
from splash.switch.checks import validate
from splash.switch.counts import count
from splash.switch.manifest import Occupancy, plan_switch, settle, slots_under
from tests.arenas import (
    Arenas,
    Case,
    all_copies,
    cases,
    execute,
    fixed_case,
    holds_group,
    holds_page,
    page_counts,
    target_pool,
    tiny_geometry,
)


@settings(max_examples=200)
@given(case=cases() | cases(tight=True) | cases(shared=True))
def test_bytes_arrive_and_nothing_alive_is_lost(case: Case) -> None:
    if not case.fits():
        with pytest.raises(CapacityError, match=rf"layout {case.target} has room for \d+ pages on rank \d+, .* \d+$"):
            case.plan()
        return
    planned = case.plan()
    manifest = planned.manifest
    validate(manifest, case.geometry)
    assert {id: len(slots) for id, slots in planned.tables.items()} == {
        id: len(table) for id, table in zip(case.occupancy.requests, case.occupancy.tables, strict=True)
    }
    for index, (id, slots) in enumerate(manifest.target_tables().items()):
        assert np.array_equal(slots, planned.tables[id][: case.num_written(index)])
    arenas = Arenas(case.geometry, case.random)
    arenas.fill(case)
    execute(case, planned, manifest, arenas)
    target_pool(case, planned)


@settings(max_examples=150)
@given(case=cases() | cases(tight=True) | cases(shared=True))
def test_an_abandonable_switch_can_be_abandoned_whatever_the_step_wrote(case: Case) -> None:
    if not case.fits():
        return
    planned = case.plan()
    copies = all_copies(planned.manifest, case.geometry)
    staged = any(rank.num_staged or rank.weights_staged for rank in copies)
    assert not (staged and planned.manifest.abandonable)
    pool, held = target_pool(case, planned)
    if not planned.manifest.abandonable:
        assert not any(len(slots) for slots in planned.withheld)
        return
    arenas = Arenas(case.geometry, case.random)
    arenas.fill(case)
    assert arenas.read(copies) == []
    arenas.overwrite(case, planned)
    arenas.check_source(case)
    # Withheld slots are what is free afterwards and was in use before: together with the free ones, the whole rest.
    for rank, slots in enumerate(planned.withheld):
        kept_back = set(slots.tolist())
        used = {int(slot) for pages in held for slot in pages.table.slots_on(rank)}
        in_use = {int(slot) for table in case.occupancy.tables for slot in table.slots_on(rank)}
        in_use |= set(range(case.geometry.num_slots)) - set(
            case.geometry.page_slots(case.occupancy.layout, rank).tolist()
        )
        usable = set(case.geometry.page_slots(case.target, rank).tolist())
        assert kept_back == (in_use & usable) - used
    before = page_counts(case.geometry, case.target, held)
    pool.free([slots.tolist() for slots in planned.withheld])
    assert pool.num_free == before


@settings(max_examples=100)
@given(case=cases() | cases(tight=True) | cases(shared=True))
def test_counts_are_those_of_the_difference(case: Case) -> None:
    if not case.fits():
        return
    manifest, geometry = case.plan().manifest, case.geometry
    src, dst = case.states()
    moves = diff(src, dst)
    counts = count(manifest, geometry)
    assert counts.fetched == tuple(moves.pages.received)
    assert np.array_equal(manifest.peers_pT(), moves.pages.fetch_source)
    assert np.array_equal(np.array(manifest.weight_sources), moves.weights.fetch_source)
    assert counts.dropped == tuple(moves.pages.drop.sum(axis=0))
    kept_or_moved = np.array(counts.kept) + counts.moved
    assert (kept_or_moved + counts.fetched == dst.page_holders.sum(axis=0)).all()
    assert (kept_or_moved + counts.dropped == src.page_holders.sum(axis=0)).all()
    group_bytes = sum(geometry.run(module, 0)[1] for module in geometry.modules) if moves.weights.fetch.any() else 0
    assert counts.kv_bytes == tuple(moves.pages.received * geometry.slot_bytes * geometry.spec.num_layers)
    assert counts.weight_bytes == tuple(moves.weights.received * group_bytes * geometry.spec.num_layers)
    for rank, copies in enumerate(all_copies(manifest, geometry)):
        assert int((copies.peer != rank).sum()) == counts.fetched[rank]
        assert int((copies.peer == rank).sum()) == counts.moved[rank]
        assert copies.num_staged == counts.staged[rank]
        assert (copies.first == 0).all() and (copies.last == geometry.page_size).all()
        usable = np.isin(manifest.source_pT()[:, rank], geometry.page_slots(case.target, rank))
        held_and_wanted = src.page_holders[:, rank] & dst.page_holders[:, rank]
        assert counts.kept[rank] == int((held_and_wanted & usable).sum()), "a page moves only when it must"


@settings(max_examples=60)
@given(case=cases() | cases(shared=True))
def test_there_and_back_again(case: Case) -> None:
    if not case.fits():
        return
    arenas = Arenas(case.geometry, case.random)
    arenas.fill(case)
    there = case.plan()
    execute(case, there, there.manifest, arenas)
    moved = Occupancy(
        layout=case.target,
        requests=case.occupancy.requests,
        owners=case.owners,
        written=case.occupancy.written,
        tables=tuple(PageTable(case.geometry.ranks, there.tables[id]) for id in case.occupancy.requests),
        pages=case.occupancy.pages,
    )
    home = Case(case.geometry, moved, case.occupancy.layout, case.occupancy.owners, case.random)
    back = home.plan()
    validate(back.manifest, case.geometry)
    execute(home, back, back.manifest, arenas)
    target_pool(home, back)


@settings(max_examples=100)
@given(case=cases(roomy=True), data=st.data())
def test_copies_ahead_are_respected_and_settle_leaves_the_rest(case: Case, data: st.DataObject) -> None:
    if not case.fits():
        return
    geometry, before, ranks = case.geometry, case.occupancy, case.geometry.ranks
    missing = [
        [
            group
            for group in range(ranks)
            if holds_group(case.target, rank, group) > holds_group(before.layout, rank, group)
        ]
        for rank in range(ranks)
    ]
    free = []
    for rank in range(ranks):
        used = np.concatenate([table.slots_on(rank) for table in before.tables] or [np.empty(0, dtype=np.int32)])
        both = np.intersect1d(geometry.page_slots(before.layout, rank), geometry.page_slots(case.target, rank))
        free.append(case.random.permutation(np.setdiff1d(both, used)).tolist())
    # Any page may have a slot chosen, on any of the ranks that want it, be it written or reserved.
    ahead: dict[tuple[int, int], list[int]] = {}
    share = data.draw(st.sampled_from([0.2, 0.7, 1.0]), label="share of pages copied ahead")
    for id, owner, table in zip(before.requests, case.owners, before.tables, strict=True):
        for number in range(len(table)):
            slots = [NO_SLOT] * ranks
            for rank in range(ranks):
                wanted = holds_page(case.target, rank, number, owner, ranks)
                if wanted and free[rank] and case.random.random() < share:
                    slots[rank] = free[rank].pop()
            ahead[id, number] = slots
    page_of = {
        (id, number): page
        for id, pages in zip(before.requests, case.pages(), strict=True)
        for number, page in enumerate(pages)
    }
    # The other pages may still need room in which nothing lies ahead.
    planned = case.plan(ahead={page_of[key]: slots for key, slots in ahead.items()})
    for (id, number), slots in ahead.items():
        row = planned.tables[id][number]
        assert all(row[rank] == slot for rank, slot in enumerate(slots) if slot != NO_SLOT)
    validate(planned.manifest, geometry)
    target_pool(case, planned)

    # Copy leading positions of those ahead, and weights where no page lies under them.
    arenas = Arenas(geometry, case.random)
    arenas.fill(case)
    manifest = planned.manifest
    assert settle(manifest, manifest.settled_pT(), [False] * ranks) == manifest
    source, target, peers = manifest.source_pT(), manifest.target_pT(), manifest.peers_pT()
    settled = np.zeros(target.shape, dtype=np.int16)
    rows = [(id, number) for i, id in enumerate(before.requests) for number in range(case.num_written(i))]
    for row, page in enumerate(rows):
        filled = min(geometry.page_size, before.written[before.requests.index(page[0])] - page[1] * geometry.page_size)
        for rank, slot in enumerate(ahead[page]):
            if slot == NO_SLOT:
                continue
            done = settled[row, rank] = case.random.choice([0, filled, filled, case.random.integers(filled + 1)])
            peer = rank if source[row, rank] != NO_SLOT else int(peers[row, rank])
            start, to, size = (
                arenas.at(int(source[row, peer]), 0),
                arenas.at(slot, 0),
                int(done) * geometry.kv.token_bytes,
            )
            arenas.bytes[rank][to : to + size] = arenas.bytes[peer][start : start + size]
    weights_settled = []
    for rank in range(ranks):
        under = slots_under(geometry, missing[rank])
        is_empty = not np.isin(under, source[:, rank]).any()
        weights_settled.append(bool(missing[rank]) and is_empty and bool(case.random.integers(2)))
        for group, module in itertools.product(missing[rank] if weights_settled[rank] else [], geometry.modules):
            offset, size = geometry.run(module, group)
            peer = manifest.weight_sources[group][rank]
            arenas.bytes[rank][offset : offset + size] = arenas.bytes[peer][offset : offset + size]
    arenas.check_source(case)
    rest = settle(manifest, settled, weights_settled)
    validate(rest, geometry)
    assert rest.target_tables().keys() == manifest.target_tables().keys()
    for rank, copies in enumerate(all_copies(rest, geometry)):
        filled = rest.filled_p(geometry.page_size)
        todo = (target[:, rank] != source[:, rank]) & (target[:, rank] != NO_SLOT) & (settled[:, rank] < filled)
        assert copies.target.tolist() == target[todo, rank].tolist()
        assert copies.first.tolist() == settled[todo, rank].tolist()
        for first, last, end in zip(copies.first, copies.last, filled[todo], strict=True):
            assert last == (end if first else geometry.page_size)
        assert [group for group, _ in copies.weights] == ([] if weights_settled[rank] else missing[rank])
    execute(case, planned, rest, arenas)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS.values(), repeat=2)), ids=str)
def test_every_direction_with_other_owners(source: Layout, target: Layout, ranks: int) -> None:
    case = fixed_case(source, target, ranks=ranks)
    case.owners = tuple((owner + 1) % ranks for owner in case.owners)
    planned = case.plan()
    validate(planned.manifest, case.geometry)
    arenas = Arenas(case.geometry, case.random)
    arenas.fill(case)
    execute(case, planned, planned.manifest, arenas)
    target_pool(case, planned)


def test_nothing_to_do_is_an_empty_manifest() -> None:
    case = fixed_case(TP, TP)
    planned = case.plan()
    assert all(not len(copies.peer) and not copies.weights for copies in all_copies(planned.manifest, case.geometry))
    for id, table in zip(case.occupancy.requests, case.occupancy.tables, strict=True):
        assert np.array_equal(planned.tables[id], table.slots_cT)


def test_no_requests() -> None:
    case = fixed_case(CP, TP, pages=())
    planned = case.plan()
    validate(planned.manifest, case.geometry)
    assert planned.tables == {} and count(planned.manifest, case.geometry).fetched == (0, 0, 0, 0)


def test_pages_of_one_peer_are_fetched_as_one_extent() -> None:
    """A peer's pages lie one after another there; in page order they would be scattered here."""
    case = fixed_case(CP, TP, pages=(40,), spare=60, reserved=0)
    for rank, copies in enumerate(all_copies(case.plan().manifest, case.geometry)):
        for peer in {0, 1, 2, 3} - {rank}:
            source, target = copies.source[copies.peer == peer], copies.target[copies.peer == peer]
            assert len(source) == 10
            assert (np.diff(source) == 1).all() and (np.diff(target) == 1).all()


def test_a_reserved_page_on_a_live_one_makes_a_switch_that_cannot_be_abandoned() -> None:
    """Nothing is staged here, yet the step that commits the switch writes over what an abandoned switch would need."""
    geometry = tiny_geometry(2, num_heads=5, page_size=4, token_bytes=8, spare=4)
    pool = PagePool.of_geometry(geometry, DP)
    written, reserved = HeldPages(0, 2), HeldPages(1, 2)
    room = pool.num_total[0]
    assert pool.grow(written, room) and pool.grow(reserved, 2)
    occupancy = Occupancy(DP, (0, 1), (0, 1), (4 * room, 0), (written.table, reserved.table))
    planned = plan_switch(occupancy, CP, (0, 1), geometry, epoch=0)
    assert count(planned.manifest, geometry).staged == (0, 0)
    assert not planned.manifest.abandonable
    assert [len(slots) for slots in planned.withheld] == [0, 0]


def test_slots_chosen_ahead_must_be_free() -> None:
    with pytest.raises(AssertionError, match="is not free"):
        fixed_case(CP, TP).plan(ahead={0: [0, 0, 0, 0]})


def test_copies_of_a_page_on_two_ranks_become_one_page() -> None:
    """Two owners have copies of the same page: it becomes one page, and each rank keeps the slot it has."""
    geometry = tiny_geometry(2, num_heads=24, page_size=4, token_bytes=8, spare=12)
    pool = PagePool.of_geometry(geometry, DP)
    held = [HeldPages(owner, 2) for owner in (0, 1, 1)]
    assert all(pool.grow(pages, 3) for pages in held)
    held[1].ids[:2] = held[0].ids[:2]
    tables = tuple(pages.table for pages in held)
    occupancy = Occupancy(DP, (5, 6, 7), (0, 1, 1), (12, 12, 12), tables, tuple(pages.ids for pages in held))
    planned = plan_switch(occupancy, TP, (0, 1, 1), geometry, epoch=0)
    validate(planned.manifest, geometry)
    assert count(planned.manifest, geometry).fetched == (4, 1)
    assert np.array_equal(planned.tables[5][:2], planned.tables[6][:2])
    assert planned.tables[5][:2, 0].tolist() == held[0].table.slots_cT[:2, 0].tolist()
    assert planned.tables[5][:2, 1].tolist() == held[1].table.slots_cT[:2, 1].tolist()
    assert len(planned.pages) == 7


def test_idle_pages_are_in_nobodys_way_and_are_spared_where_there_is_other_room() -> None:
    case = fixed_case(CP, TP, pages=(4, 4), reserved=0, spare=30)
    geometry = case.geometry
    free = [
        np.setdiff1d(geometry.page_slots(CP, rank), np.concatenate([t.slots_on(rank) for t in case.occupancy.tables]))
        for rank in range(4)
    ]
    for share in (0.5, 1.0):
        idle = tuple(own[: int(len(own) * share)] for own in free)
        case.occupancy = replace(case.occupancy, idle=idle)
        planned = case.plan()
        for rank in range(4):
            taken = {slot for table in planned.tables.values() for slot in table[:, rank].tolist()}
            unused = np.setdiff1d(np.intersect1d(free[rank], geometry.page_slots(TP, rank)), idle[rank])
            assert not taken & set(idle[rank].tolist()) or set(unused.tolist()) <= taken
