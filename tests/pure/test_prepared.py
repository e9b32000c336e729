"""Preparing a switch: what ranks are told bit by bit, with the manifest that commits, is the whole target state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.layout import KV, LAYOUTS, Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.pages import HeldPages, PageTable
from splash.core.spec import ModelSpec, RopeSpec, kv_format
from splash.core.step import NO_SLOT
from splash.engine import ahead
from splash.engine.ahead import AheadCopies
from splash.layouts.tables import PageTables
from splash.scheduler.prefix_cache import PrefixCache
from splash.switch.checks import validate
from splash.switch.manifest import Occupancy, RankCopies, rank_copies
from splash.switch.prepared import Preparation, chain

SPEC = ModelSpec("test", 2, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())
RANKS, PAGE = 2, 4


class Serving:
    """Requests that grow by a token a step, on an engine's pool and in the tables of a rank."""

    def __init__(self, layout: Layout, target: Layout, lengths: list[int]) -> None:
        self.geometry = ArenaGeometry(SPEC, kv_format(SPEC, "float32"), PAGE, 4, RANKS, num_slots=200)
        self.layout, self.target = layout, target
        self.pool = PrefixCache.of_geometry(self.geometry, layout)
        self.held = {id: HeldPages(id % RANKS, RANKS) for id in range(len(lengths))}
        self.written = dict(enumerate(lengths))
        for id in self.held:
            self.grow(id)
        self.own = PageTables(RANKS)

    def grow(self, id: int) -> None:
        missing = -(-self.written[id] // PAGE) - len(self.held[id])
        assert self.pool.grow(self.held[id], missing)

    def step(self) -> None:
        for id in self.held:
            self.written[id] += 1
            self.grow(id)
        tables = {id: PageTable(RANKS, held.table.slots_cT) for id, held in self.held.items()}
        self.own = PageTables(RANKS, tables)

    def occupancy(self) -> Occupancy:
        held = list(self.held.values())
        return Occupancy(
            layout=self.layout,
            requests=tuple(self.held),
            owners=tuple(pages.owner for pages in held),
            written=tuple(self.written.values()),
            tables=tuple(pages.table for pages in held),
            pages=tuple(pages.ids for pages in held),
            idle=self.pool.idle_slots(self.target),
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_and_the_commit_make_up_the_target_state(data: st.DataObject) -> None:
    source, target = data.draw(st.permutations(list(LAYOUTS.values())))[:2]
    serving = Serving(source, target, data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=5)))
    serving.step()
    copies = AheadCopies(1, target, serving.geometry, serving.pool)
    reason = copies.begin(copies.plan(serving.occupancy(), serving.occupancy().owners, 0), SPEC.num_layers)
    assert not reason, reason
    preparation, may_commit, orders = Preparation(1, RANKS), False, 0
    leaver = data.draw(st.integers(0, len(serving.held) - 1))
    leaves_at = data.draw(st.integers(0, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "MANY_PAGES", 3)
        patch.setattr(ahead, "FEW_PAGES", 2)
        patch.setattr(ahead, "LAST_PAGES", data.draw(st.sampled_from([0, 6, 512])))
        while not may_commit:
            full = tuple(written // PAGE for written in serving.written.values())
            serving.step()
            if orders == leaves_at:
                serving.pool.release(serving.held.pop(leaver))
                del serving.written[leaver]
                full = (*full[:leaver], *full[leaver + 1 :])
            occupancy = serving.occupancy()
            order, may_commit = copies.next(occupancy, occupancy.owners, full, 0, step_bytes=3000)
            assert order is not None
            preparation.add(order.prepared, serving.own)
            orders += 1
            assert orders < 200, "it never ends"
    occupancy = serving.occupancy()
    planned = copies.plan(occupancy, occupancy.owners, 0)
    manifest = planned.manifest
    validate(manifest, serving.geometry, planned.prepared)
    assert manifest.prepared in (preparation.digest, 0)
    assert all(num <= 2 for num in manifest.num_pages), "the rest of each request was prepared"
    tables = preparation.tables(manifest)
    taken: list[set[int]] = [set() for _ in range(RANKS)]
    for id, owner in zip(occupancy.requests, occupancy.owners, strict=True):
        num = -(-serving.written[id] // PAGE)
        told = tables[id].slots_cT
        assert np.array_equal(told, planned.tables[id][:num])
        wanted = page_holders(np.arange(num), np.full(num, owner), target, RANKS)
        assert np.array_equal(told != NO_SLOT, wanted)
        for rank, slots in enumerate(told.T):
            own = set(slots[slots != NO_SLOT].tolist())
            assert not own & taken[rank] and own <= set(serving.geometry.page_slots(target, rank).tolist())
            taken[rank] |= own
    assert [set(slots.tolist()) for slots in copies.slots_after(planned)] == taken
    kept_and_fetched = [a + b + c for a, b, c in zip(*list_of_counts(copies, planned), strict=True)]
    assert kept_and_fetched == [len(slots) for slots in taken]
    copies.abandon()
    for held in serving.held.values():
        serving.pool.release(held)
    assert serving.pool.num_free == serving.pool.num_total


def list_of_counts(copies: AheadCopies, planned: ahead.Planned) -> tuple[tuple[int, ...], ...]:
    counts = copies.count(planned)
    return counts.kept, counts.fetched, counts.moved


class Sharing:
    """Claims that begin with the same pages: requests, and one of pages that are only cached, with what lies where."""

    def __init__(self, layout: Layout, target: Layout) -> None:
        self.geometry = ArenaGeometry(SPEC, kv_format(SPEC, "float32"), PAGE, 4, RANKS, num_slots=300)
        self.layout, self.target = layout, target
        self.pool = PrefixCache.of_geometry(self.geometry, layout)
        self.held: dict[int, HeldPages] = {}
        self.wanted: dict[int, int] = {}  # owner in the target
        self.written: dict[int, int] = {}
        self.content = np.full((RANKS, self.geometry.num_slots), -1)

    def add(self, id: int, owners: tuple[int, int], written: int, model: int | None, num_shared: int) -> None:
        """Add a claim that has its first pages from the claim `model`: the same, or copies on other ranks."""
        held = HeldPages(owners[0], RANKS)
        if model is not None:
            ids = self.held[model].ids[: min(num_shared, written // PAGE, self.written[model] // PAGE)]
            for other in self.held.values():
                if self.layout.kv is not KV.REQUEST or owners[0] == other.owner:
                    num = sum(a == b for a, b in zip(ids, other.ids, strict=False))
                    if num > len(held):
                        held = HeldPages(owners[0], RANKS, other.table.slots_cT[:num], ids[:num])
            assert self.pool.grow(held, len(ids) - len(held))
            held.ids[:] = ids
        self.held[id], self.wanted[id], self.written[id] = held, owners[1], written
        self.step(grows=False)

    def step(self, grows: bool = True) -> None:
        for id, held in self.held.items():
            self.written[id] += grows and id >= 0
            missing = -(-self.written[id] // PAGE) - len(held)
            assert not missing or self.pool.grow(held, missing)
            for rank, slots in enumerate(held.table.slots_cT.T):
                is_held = slots != NO_SLOT
                self.content[rank, slots[is_held]] = np.array(held.ids)[is_held]

    def tables(self) -> PageTables:
        own = {id: PageTable(RANKS, held.table.slots_cT) for id, held in self.held.items() if id >= 0}
        return PageTables(RANKS, own)

    def occupancy(self) -> Occupancy:
        return Occupancy(
            layout=self.layout,
            requests=tuple(self.held),
            owners=tuple(held.owner for held in self.held.values()),
            written=tuple(self.written.values()),
            tables=tuple(
                held.table if id >= 0 else PageTable(RANKS, held.table.slots_cT) for id, held in self.held.items()
            ),
            pages=tuple(held.ids for held in self.held.values()),
        )

    def copy(self, by_rank: list[RankCopies]) -> None:
        before = self.content.copy()
        for rank, copies in enumerate(by_rank):
            self.content[rank, copies.target] = before[copies.peer, copies.source]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_pages_that_are_shared_or_cached_arrive_wherever_they_are_wanted(data: st.DataObject) -> None:
    source, target = data.draw(st.permutations(list(LAYOUTS.values())))[:2]
    claims, owner = Sharing(source, target), st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1))
    for id in range(data.draw(st.integers(1, 4))):
        model = data.draw(st.sampled_from([None, *claims.held]))
        claims.add(id, data.draw(owner), data.draw(st.integers(1, 40)), model, data.draw(st.integers(1, 9)))
    joins_at, joiner = data.draw(st.integers(0, 5)), data.draw(owner)
    cached_from = data.draw(st.integers(0, 5))
    copies = AheadCopies(1, target, claims.geometry, claims.pool)
    wanted = tuple(claims.wanted.values())
    assert not copies.begin(copies.plan(claims.occupancy(), wanted, 0), SPEC.num_layers)
    preparation, may_commit, orders = Preparation(1, RANKS), False, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "MANY_PAGES", 3)
        patch.setattr(ahead, "FEW_PAGES", 2)
        while not may_commit:
            if orders == joins_at:
                claims.add(100, joiner, 30, 0, 7)
            if orders == cached_from:
                claims.add(-1, data.draw(owner), 5 * PAGE, 0, 3)
            # Cached pages come after the requests.
            for group in (claims.held, claims.wanted, claims.written):
                if -1 in group:
                    group[-1] = group.pop(-1)  # type: ignore[assignment]
            full = tuple(written // PAGE for id, written in claims.written.items() if id >= 0)
            claims.step()
            order, may_commit = copies.next(claims.occupancy(), tuple(claims.wanted.values()), full, 0, 3000)
            assert order is not None
            claims.copy([order.rank_copies(rank) for rank in range(RANKS)])
            preparation.add(order.prepared, claims.tables())
            orders += 1
            assert orders < 300, "it never ends"
    planned = copies.plan(claims.occupancy(), tuple(claims.wanted.values()), 0)
    manifest = planned.manifest
    validate(manifest, claims.geometry, planned.prepared)
    assert preparation.matches(manifest)
    tables = {id: table.slots_cT for id, table in preparation.tables(manifest).items()}
    claims.copy([rank_copies(manifest, claims.geometry, rank) for rank in range(RANKS)])
    lies: list[dict[int, int]] = [{} for _ in range(RANKS)]
    for id, held in claims.held.items():
        slots_cT = planned.tables[id]
        assert id < 0 or np.array_equal(tables[id], slots_cT)
        holders = page_holders(np.arange(len(held)), np.full(len(held), claims.wanted[id]), target, RANKS)
        assert np.array_equal(slots_cT != NO_SLOT, holders)
        for rank, slots in enumerate(slots_cT.T):
            for slot, page in zip(slots.tolist(), held.ids, strict=True):
                if slot != NO_SLOT:
                    assert claims.content[rank, slot] == page, "another page lies there"
                    assert lies[rank].setdefault(page, slot) == slot, "a page has one slot on a rank"
    counts = copies.count(planned)
    for rank, after in enumerate(lies):
        tables = [(held.table.slots_cT[:, rank].tolist(), held.ids) for held in claims.held.values()]
        before = {page: slot for slots, ids in tables for slot, page in zip(slots, ids, strict=True) if slot != NO_SLOT}
        both = before.keys() & after.keys()
        kept = sum(before[page] == after[page] for page in both)
        expected = kept, len(after) - len(both), len(both) - kept, len(before) - len(both)
        assert (counts.kept[rank], counts.fetched[rank], counts.moved[rank], counts.dropped[rank]) == expected
    of_requests = np.concatenate([slots_cT for id, slots_cT in planned.tables.items() if id >= 0])
    for slots, own in zip(copies.slots_after(planned), of_requests.T, strict=True):
        assert slots.tolist() == np.unique(own[own != NO_SLOT]).tolist()


def test_a_rank_whose_table_is_another_does_not_agree() -> None:
    serving = Serving(LAYOUTS["tp"], LAYOUTS["dop"], [20])
    serving.step()
    copies = AheadCopies(1, serving.target, serving.geometry, serving.pool)
    assert not copies.begin(copies.plan(serving.occupancy(), (0,), 0), SPEC.num_layers)
    order, _ = copies.next(serving.occupancy(), (0,), (5,), 0, step_bytes=1 << 20)
    assert order is not None and order.prepared
    manifest = copies.plan(serving.occupancy(), (0,), 0).manifest
    assert manifest.first == (5,)
    told, fewer, stranger = (Preparation(1, RANKS) for _ in range(3))
    told.add(order.prepared, serving.own)
    fewer.add([msgspec.structs.replace(order.prepared[0], first=1)], serving.own)
    stranger.add(order.prepared, PageTables(RANKS))
    assert told.digest == stranger.digest == chain(0, order.prepared) == manifest.prepared
    assert [rank.matches(manifest) for rank in (told, fewer, stranger, Preparation(1, RANKS))] == [
        True,
        False,
        False,
        False,
    ]
    stranger.add(order.prepared, serving.own)  # told anew, of a table that it has by now
    later = msgspec.structs.replace(manifest, prepared=stranger.digest)
    assert stranger.matches(later) and not told.matches(later)
