"""Preparing a switch: what ranks are told bit by bit, with the manifest that commits, is the whole target state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.layout import LAYOUTS, Layout
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
from splash.switch.manifest import Occupancy
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
    reason = copies.begin(copies.plan(serving.occupancy(), serving.occupancy().owners, 0))
    assert not reason, reason
    preparation, may_commit, orders = Preparation(1, RANKS), False, 0
    leaver = data.draw(st.integers(0, len(serving.held) - 1))
    leaves_at = data.draw(st.integers(0, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "MANY_PAGES", 3)
        patch.setattr(ahead, "FEW_PAGES", 2)
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
    kept_and_fetched = [a + b + c for a, b, c in zip(*list_of_counts(copies, planned), strict=True)]
    assert kept_and_fetched == [len(slots) for slots in taken]
    copies.abandon()
    for held in serving.held.values():
        serving.pool.release(held)
    assert serving.pool.num_free == serving.pool.num_total


def list_of_counts(copies: AheadCopies, planned: ahead.Planned) -> tuple[tuple[int, ...], ...]:
    counts = copies.count(planned)
    return counts.kept, counts.fetched, counts.moved


def test_a_rank_whose_table_is_another_does_not_agree() -> None:
    serving = Serving(LAYOUTS["tp"], LAYOUTS["dop"], [20])
    serving.step()
    copies = AheadCopies(1, serving.target, serving.geometry, serving.pool)
    assert not copies.begin(copies.plan(serving.occupancy(), (0,), 0))
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
