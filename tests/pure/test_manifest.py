"""Manifests against a simulation of every rank's bytes: what is wanted arrives, what is alive survives till the barrier.

The simulation knows nothing of the planner: it lays the bytes of pages and head groups out by the rules of the
ownership table, does what `rank_copies` says in an arbitrary order of copies and ranks, and compares bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.diff import NO_SOURCE, diff
from splash.core.errors import CapacityError
from splash.core.layout import CP, DCP, DP, LAYOUTS, TP, Layout, Projections
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State
from splash.core.pages import HeldPages, PagePool, PageTable
from splash.core.spec import KVFormat, ModelSpec, RopeSpec
from splash.core.step import NO_SLOT
from splash.switch.manifest import (
    Manifest,
    Occupancy,
    Planned,
    RankCopies,
    count,
    plan_switch,
    rank_copies,
    settle,
    slots_under,
    validate,
)

Writes = list[tuple[int, int, np.ndarray]]  # (rank, byte offset, bytes)


def tiny_geometry(ranks: int, num_heads: int, page_size: int, token_bytes: int, spare: int) -> ArenaGeometry:
    """Arenas with `spare` slots beside all weights, which take a few hundred bytes."""
    spec = ModelSpec(
        architecture="tiny",
        num_layers=3,
        hidden_size=2,
        vocab_size=8,
        num_heads=num_heads,
        q_lora_rank=2,
        kv_lora_rank=2,
        qk_nope_head_dim=1,
        qk_rope_head_dim=1,
        v_head_dim=1,
        intermediate_size=2,
        first_dense_layers=0,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope=RopeSpec(),
    )
    kv = KVFormat(token_bytes)
    weight_slots = ArenaGeometry(spec, kv, page_size, 2, ranks, num_slots=1 << 20).num_weight_slots
    return ArenaGeometry(spec, kv, page_size, 2, ranks, num_slots=weight_slots + spare)


def holds_page(layout: Layout, rank: int, number: int, owner: int, ranks: int) -> bool:
    return {"tp": True, "dp": rank == owner, "dop": rank == owner}.get(layout.name, rank == number % ranks)


def holds_group(layout: Layout, rank: int, group: int) -> bool:
    return rank == group or layout.name in ("dp", "cp")


@dataclass
class Case:
    """A source state and where to go from it."""

    geometry: ArenaGeometry
    occupancy: Occupancy
    target: Layout
    owners: tuple[int, ...]
    random: np.random.Generator

    def plan(self, **options: Any) -> Planned:
        return plan_switch(self.occupancy, self.target, self.owners, self.geometry, epoch=7, **options)

    def num_written(self, index: int) -> int:
        return -(-self.occupancy.written[index] // self.geometry.page_size)

    def fits(self) -> bool:
        """Whether the target has a slot for every page, reserved ones included."""
        for rank in range(self.geometry.ranks):
            wanted = sum(
                holds_page(self.target, rank, number, owner, self.geometry.ranks)
                for owner, table in zip(self.owners, self.occupancy.tables, strict=True)
                for number in range(len(table))
            )
            if wanted > len(self.geometry.page_slots(self.target, rank)):
                return False
        return True


def page_counts(geometry: ArenaGeometry, layout: Layout, pages: Sequence[HeldPages]) -> list[int]:
    return [
        len(geometry.page_slots(layout, rank)) - sum(p.counts[rank] for p in pages) for rank in range(geometry.ranks)
    ]


def occupy(
    geometry: ArenaGeometry, layout: Layout, wishes: Sequence[tuple[int, int]], random: np.random.Generator
) -> list[HeldPages]:
    """Requests (owner, pages wished for) that grow side by side, as far as there is room, among others, which then go."""
    pool = PagePool.of_geometry(geometry, layout)
    held = [HeldPages(owner, geometry.ranks) for owner, _ in wishes]
    others = [HeldPages(int(random.integers(geometry.ranks)), geometry.ranks) for _ in range(2)]
    growing = [(pages, wish) for pages, (_, wish) in zip(held, wishes, strict=True)]
    growing += [(pages, int(random.integers(5))) for pages in others]
    while growing:
        index = int(random.integers(len(growing)))
        pages, wish = growing[index]
        step = min(int(random.integers(1, 4)), wish - len(pages))
        if step <= 0 or not pool.grow(pages, step):
            growing.pop(index)
    for pages in others:
        pool.release(pages)
    return held


@st.composite
def cases(draw: st.DrawFn, roomy: bool = False) -> Case:
    ranks = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 8]), label="ranks")
    num_heads = draw(st.sampled_from([24, 24, 24, 5]), label="heads")
    usable = [
        layout for layout in LAYOUTS.values() if num_heads % ranks == 0 or layout.projections is Projections.REPLICATED
    ]
    geometry = tiny_geometry(
        ranks,
        num_heads,
        page_size=draw(st.sampled_from([1, 3, 4]), label="page size"),
        token_bytes=draw(st.sampled_from([8, 24]), label="token bytes"),
        spare=draw(st.integers(40, 60) if roomy else st.integers(0, 24), label="spare slots"),
    )
    source, target = draw(st.sampled_from(usable), label="source"), draw(st.sampled_from(usable), label="target")
    rank_numbers = st.integers(0, ranks - 1)
    # Copies are staged only where nearly all slots are in use: half of the cases ask for all there are.
    most = 12 if roomy or draw(st.booleans(), label="leave room") else 60
    num_pages = st.integers(0, most) | st.just(most)
    wishes = draw(st.lists(st.tuples(rank_numbers, num_pages), max_size=6), label="owner, pages")
    random = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    held = occupy(geometry, source, wishes, random)
    # Most requests have written nearly all of their pages, some little or nothing.
    sizes = [len(pages) * geometry.page_size for pages in held]
    unwritten = draw(st.lists(st.integers(0, 5) | st.integers(0, 60), min_size=len(held), max_size=len(held)))
    occupancy = Occupancy(
        layout=source,
        requests=tuple(int(id) for id in random.permutation(100)[: len(held)]),
        owners=tuple(pages.owner for pages in held),
        written=tuple(max(0, size - less) for size, less in zip(sizes, unwritten, strict=True)),
        tables=tuple(pages.table for pages in held),
    )
    owners = draw(st.lists(rank_numbers, min_size=len(held), max_size=len(held)), label="new owners")
    return Case(geometry, occupancy, target, tuple(owners), random)


@dataclass
class Arenas:
    """One layer of every rank's arena, as bytes. Where nothing is alive lies noise, other on every rank."""

    geometry: ArenaGeometry
    random: np.random.Generator
    bytes: list[np.ndarray] = field(init=False)
    tokens: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    groups: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bytes = [self._noise(self.geometry.arena_bytes) for _ in range(self.geometry.ranks)]

    def _noise(self, size: int) -> np.ndarray:
        return self.random.integers(0, 256, size, dtype=np.uint8)

    def fill(self, case: Case) -> None:
        """Lay out the source state."""
        for module in self.geometry.modules if self.geometry.spec.num_heads % self.geometry.ranks == 0 else ():
            for group in range(self.geometry.ranks):
                offset, size = self.geometry.run(module, group)
                content = self.groups[module, group] = self._noise(size)
                for rank, arena in enumerate(self.bytes):
                    if holds_group(case.occupancy.layout, rank, group):
                        arena[offset : offset + size] = content
        for id, written, table in zip(
            case.occupancy.requests, case.occupancy.written, case.occupancy.tables, strict=True
        ):
            for position in range(written):
                content = self.tokens[id, position] = self._noise(self.geometry.kv.token_bytes)
                for arena, slot in zip(self.bytes, table.slots_cT[position // self.geometry.page_size], strict=True):
                    if slot != NO_SLOT:
                        at = self.at(int(slot), position)
                        arena[at : at + len(content)] = content

    def at(self, slot: int, position: int) -> int:
        size = self.geometry.page_size
        return (slot * size + position % size) * self.geometry.kv.token_bytes

    def check(
        self, layout: Layout, requests: Sequence[int], owners: Sequence[int], tables: dict[int, np.ndarray]
    ) -> None:
        """Every page and head group that `layout` wants lies where it should."""
        ranks = self.geometry.ranks
        for (module, group), content in self.groups.items():
            offset, size = self.geometry.run(module, group)
            for rank, arena in enumerate(self.bytes):
                if holds_group(layout, rank, group):
                    assert np.array_equal(arena[offset : offset + size], content), f"weights on rank {rank}"
        owner_of = dict(zip(requests, owners, strict=True))
        for (id, position), content in self.tokens.items():
            number = position // self.geometry.page_size
            for rank, arena in enumerate(self.bytes):
                slot = int(tables[id][number, rank])
                assert (slot != NO_SLOT) == holds_page(layout, rank, number, owner_of[id], ranks)
                if slot != NO_SLOT:
                    at = self.at(slot, position)
                    assert np.array_equal(arena[at : at + len(content)], content), f"page on rank {rank}"

    def check_source(self, case: Case) -> None:
        before = case.occupancy
        tables = {id: table.slots_cT for id, table in zip(before.requests, before.tables, strict=True)}
        self.check(before.layout, before.requests, before.owners, tables)

    def check_target(self, case: Case, planned: Planned) -> None:
        self.check(case.target, case.occupancy.requests, case.owners, planned.tables)

    def read(self, by_rank: Sequence[RankCopies]) -> Writes:
        """Everything up to the barrier, in random order. Returns what is staged."""
        slot_bytes, token = self.geometry.slot_bytes, self.geometry.kv.token_bytes
        reads = []
        for rank, copies in enumerate(by_rank):
            for index in range(len(copies.peer)):
                skipped = int(copies.first[index]) * token
                size = int(copies.last[index]) * token - skipped
                start = int(copies.source[index]) * slot_bytes + skipped
                to = int(copies.target[index]) * slot_bytes + skipped
                reads.append((rank, int(copies.peer[index]), start, to, size, bool(copies.staged[index])))
            for (group, peer), module in itertools.product(copies.weights, self.geometry.modules):
                offset, size = self.geometry.run(module, group)
                reads.append((rank, peer, offset, offset, size, copies.weights_staged))
        staging: Writes = []
        for index in self.random.permutation(len(reads)):
            rank, peer, start, to, size, staged = reads[index]
            content = self.bytes[peer][start : start + size].copy()
            assert len(content) == size
            if staged:
                staging.append((rank, to, content))
            else:
                self.bytes[rank][to : to + size] = content
        return staging

    def write_back(self, staging: Writes) -> None:
        for index in self.random.permutation(len(staging)):
            rank, to, content = staging[index]
            self.bytes[rank][to : to + len(content)] = content

    def overwrite(self, case: Case, planned: Planned) -> None:
        """What the step in the target layout may do: fill what is reserved, the rest of last pages, and free slots."""
        for rank, arena in enumerate(self.bytes):
            taken = set(planned.withheld[rank].tolist())
            for index, id in enumerate(case.occupancy.requests):
                slots = planned.tables[id][:, rank]
                taken |= set(slots[: case.num_written(index)].tolist())
                written = case.occupancy.written[index]
                if written % self.geometry.page_size and slots[case.num_written(index) - 1] != NO_SLOT:
                    slot = int(slots[case.num_written(index) - 1])
                    start, end = self.at(slot, written), (slot + 1) * self.geometry.slot_bytes
                    arena[start:end] = self._noise(end - start)
            for slot in set(self.geometry.page_slots(case.target, rank).tolist()) - taken:
                start = slot * self.geometry.slot_bytes
                arena[start : start + self.geometry.slot_bytes] = self._noise(self.geometry.slot_bytes)


def all_copies(manifest: Manifest, geometry: ArenaGeometry) -> list[RankCopies]:
    return [rank_copies(manifest, geometry, rank) for rank in range(geometry.ranks)]


def target_pool(case: Case, planned: Planned) -> tuple[PagePool, list[HeldPages]]:
    """The pool of the target layout; building it checks that tables lie in its slots, no slot twice, and holders."""
    ids = case.occupancy.requests
    held = [
        HeldPages(owner, case.geometry.ranks, planned.tables[id]) for id, owner in zip(ids, case.owners, strict=True)
    ]
    withheld = [slots.tolist() for slots in planned.withheld]
    return PagePool.of_geometry(case.geometry, case.target, held, withheld), held


def execute(case: Case, planned: Planned, manifest: Manifest, arenas: Arenas) -> None:
    """Carry a manifest out, checking the source state up to the barrier and the target state after it."""
    staging = arenas.read(all_copies(manifest, case.geometry))
    arenas.check_source(case)
    arenas.write_back(staging)
    arenas.check_target(case, planned)


@settings(max_examples=150)
@given(case=cases())
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


@settings(max_examples=100)
@given(case=cases())
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
@given(case=cases())
def test_counts_are_those_of_the_difference(case: Case) -> None:
    if not case.fits():
        return
    manifest, geometry, ranks = case.plan().manifest, case.geometry, case.geometry.ranks
    numbers, old, new = (
        np.array(values, dtype=np.int64).ravel()
        for values in (
            [n for i in range(len(case.owners)) for n in range(case.num_written(i))],
            [case.occupancy.owners[i] for i in range(len(case.owners)) for _ in range(case.num_written(i))],
            [case.owners[i] for i in range(len(case.owners)) for _ in range(case.num_written(i))],
        )
    )
    src, dst = State(case.occupancy.layout, ranks, numbers, old), State(case.target, ranks, numbers, new)
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
@given(case=cases())
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
    # The other pages may still need room in which nothing lies ahead.
    planned = case.plan(ahead=ahead)
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


def fixed_case(
    source: Layout,
    target: Layout,
    spare: int = 40,
    ranks: int = 4,
    pages: Sequence[int] = (5, 8, 3, 6),
    reserved: int = 1,
) -> Case:
    """Requests of rank 0, 1, ..., each with `reserved` pages behind those that are written."""
    geometry = tiny_geometry(ranks, num_heads=24, page_size=4, token_bytes=8, spare=spare)
    pool = PagePool.of_geometry(geometry, source)
    held = [HeldPages(index % ranks, ranks) for index in range(len(pages))]
    for request, num in zip(held, pages, strict=True):
        assert pool.grow(request, num + reserved)
    occupancy = Occupancy(
        layout=source,
        requests=tuple(range(10, 10 + len(pages))),
        owners=tuple(request.owner for request in held),
        written=tuple(4 * num - 1 for num in pages),
        tables=tuple(request.table for request in held),
    )
    return Case(geometry, occupancy, target, occupancy.owners, np.random.default_rng(0))


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


@pytest.mark.parametrize(
    ("ahead", "message"),
    [
        ({(10, 99): [1, 1, 1, 1]}, "a page that is not there"),
        ({(9, 0): [1, 1, 1, 1]}, "a page that is not there"),
        ({(10, 0): [0, 0, 0, 0]}, "is not free"),
    ],
)
def test_slots_chosen_ahead_must_make_sense(ahead: dict[tuple[int, int], list[int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        fixed_case(CP, TP).plan(ahead=ahead)


def altered(name: str, change: Callable[[np.ndarray], None], dtype: type = np.int32) -> Callable[[Manifest], Manifest]:
    """A manifest with one of its arrays, [p, 4], changed in place."""

    def corrupt(manifest: Manifest) -> Manifest:
        array = np.frombuffer(getattr(manifest, name), dtype=dtype).reshape(-1, 4).copy()
        change(array)
        return msgspec.structs.replace(manifest, **{name: array.tobytes()})

    return corrupt


def replaced(**fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: msgspec.structs.replace(manifest, **fields)


def put(row: int, rank: int, value: int) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[row, rank] = value

    return change


def copy_slot(row: int, of: int, rank: int) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[row, rank] = array[of, rank]

    return change


def swap_groups(manifest: Manifest) -> Manifest:
    """Fetch head group 0 from rank 2 on rank 1, though rank 2 has it not."""
    rows = [list(row) for row in manifest.weight_sources]
    rows[0][1] = 2
    return msgspec.structs.replace(manifest, weight_sources=tuple(map(tuple, rows)))


# Of dcp -> dp with five pages and more a request: rank 0 holds row 0 (request 10, page 0) before and rows 0 to 4 after.
CORRUPTIONS: dict[str, Callable[[Manifest], Manifest]] = {
    "both layouts exist": replaced(source="up"),
    "it is for all ranks": replaced(weights_settled=(False,) * 3),
    "no request is named twice": replaced(requests=(10, 11, 12, 12)),
    "each request has all its fields": replaced(owners=(0, 1, 2)),
    "owners are ranks": replaced(owners=(0, 1, 2, 4)),
    "each request has as many pages as it has written": replaced(written=(19, 31, 11, 27)),
    "arrays have an entry a page and rank": replaced(settled=bytes(8)),
    "pages are wanted where the target layout has them": altered("target_slots", put(0, 1, 30)),
    "pages are held where the source layout has them": altered("source_slots", put(0, 1, 30)),
    "a page that is fetched has a source": altered("sources", put(1, 0, NO_SOURCE), np.int16),
    "nothing that is resident or unwanted is fetched": altered("sources", put(0, 0, 1), np.int16),
    "a source holds what it is asked for": altered("sources", put(1, 0, 2), np.int16),
    "no more of a page is settled than is written": altered("settled", put(4, 0, 4), np.int16),
    "weights have an entry a head group and rank": replaced(weight_sources=((NO_SOURCE,) * 4,)),
    "head groups that are missing are fetched, and no others": replaced(weight_sources=((NO_SOURCE,) * 4,) * 4),
    "head groups are fetched from ranks": replaced(
        weight_sources=tuple(tuple(-1 if g == r else 4 for r in range(4)) for g in range(4))
    ),
    "a source holds the head group it is asked for": swap_groups,
    "pages lie inside the arena after, on rank 0": altered("target_slots", put(0, 0, 10_000)),
    "no page lies on weights after, on rank 0": altered("target_slots", put(0, 0, 0)),
    "no page lies on weights before, on rank 0": altered("source_slots", put(0, 0, 0)),
    "no slot has two pages after, on rank 0": altered("target_slots", copy_slot(0, 1, 0)),
    "no slot has two pages before, on rank 0": altered("source_slots", copy_slot(0, 4, 0)),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_validate_names_what_is_wrong(message: str) -> None:
    case = fixed_case(DCP, DP)
    manifest = case.plan().manifest
    validate(manifest, case.geometry)
    with pytest.raises(ValueError, match=f"^manifest of .* -> dp: not so: {message}$"):
        validate(CORRUPTIONS[message](manifest), case.geometry)


def test_validate_refuses_to_settle_or_abandon_what_is_staged() -> None:
    # Every slot is in use, and some of the pages that rank 0 goes on holding lie where weights will.
    slots = len(tiny_geometry(4, num_heads=24, page_size=4, token_bytes=8, spare=12).page_slots(TP, 0))
    case = fixed_case(TP, CP, spare=12, pages=(slots - 3,), reserved=0)
    manifest = case.plan().manifest
    rank = next(rank for rank in range(4) if count(manifest, case.geometry).staged[rank])
    copies = rank_copies(manifest, case.geometry, rank)
    row = int(np.flatnonzero(manifest.target_pT()[:, rank] == copies.target[copies.staged][0])[0])
    settled = np.zeros_like(manifest.settled_pT())
    settled[row, rank] = 1
    with pytest.raises(ValueError, match=f"what is staged cannot be settled, on rank {rank}"):
        validate(settle(manifest, settled, [False] * 4), case.geometry)
    with pytest.raises(ValueError, match="a switch with staged copies cannot be abandoned, on rank"):
        validate(msgspec.structs.replace(manifest, abandonable=True), case.geometry)


def test_validate_refuses_weights_that_are_settled_under_a_page() -> None:
    case = fixed_case(DCP, CP, spare=6, pages=(12, 12, 12), reserved=0)
    manifest = case.plan().manifest
    rank = next(rank for rank in range(4) if rank_copies(manifest, case.geometry, rank).weights_staged)
    settled = [other == rank for other in range(4)]
    with pytest.raises(ValueError, match=f"weights that are staged cannot be settled, on rank {rank}"):
        validate(settle(manifest, manifest.settled_pT(), settled), case.geometry)


def test_validate_refuses_shards_of_heads_that_do_not_divide() -> None:
    case = fixed_case(DP, CP)
    manifest = case.plan().manifest
    odd = tiny_geometry(4, num_heads=5, page_size=4, token_bytes=8, spare=40)
    with pytest.raises(ValueError, match="the ranks divide the heads of a layout that shards them"):
        validate(msgspec.structs.replace(manifest, target="tp"), odd)


def test_digest_differs_when_anything_does() -> None:
    case = fixed_case(DCP, DP)
    manifest = case.plan().manifest
    assert case.plan().manifest.digest() == manifest.digest()
    changed = [
        replaced(epoch=8),
        replaced(source="tp"),
        replaced(target="tp"),
        replaced(requests=(11, 10, 12, 13)),
        replaced(owners=(1, 0, 2, 3)),
        replaced(written=(18, *manifest.written[1:])),
        replaced(num_pages=manifest.num_pages[::-1]),
        altered("source_slots", put(0, 0, 1)),
        altered("target_slots", put(0, 0, 1)),
        altered("sources", put(0, 0, 1), np.int16),
        altered("settled", put(0, 0, 1), np.int16),
        swap_groups,
        replaced(weights_settled=(False, False, False, True)),
        replaced(abandonable=not manifest.abandonable),
    ]
    assert len(changed) == len(manifest.__struct_fields__)
    digests = {manifest.digest(), *(change(manifest).digest() for change in changed)}
    assert len(digests) == len(changed) + 1
    assert all(0 <= digest < 2**63 for digest in digests)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest).digest() == manifest.digest()
