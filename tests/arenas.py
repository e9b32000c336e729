"""Every rank's arena as bytes, and states to switch between: what manifests are tested against.

Nothing here knows the planner: the bytes of pages and head groups are laid out by the rules of the ownership table, and
copies are made in an arbitrary order of copies and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from splash.core.layout import CP, DP, KV, LAYOUTS, TP, Layout, Projections
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State
from splash.core.pages import HeldPages, PagePool
from splash.core.spec import KVFormat, ModelSpec, RopeSpec
from splash.core.step import NO_SLOT
from splash.switch.manifest import Manifest, Occupancy, Planned, RankCopies, plan_switch, rank_copies

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

    def plan(self, ahead: Mapping[int, Sequence[int]] | None = None) -> Planned:
        """Plan the switch, with slots that were chosen ahead for some pages."""
        chosen, nowhere = ahead or {}, [NO_SLOT] * self.geometry.ranks

        def slots(pages: np.ndarray) -> np.ndarray:
            rows = [chosen.get(page, nowhere) for page in pages.tolist()]
            return np.array(rows, dtype=np.int32).reshape(-1, self.geometry.ranks)

        return plan_switch(self.occupancy, self.target, self.owners, self.geometry, 7, slots if ahead else None)

    def num_written(self, index: int) -> int:
        return -(-self.occupancy.written[index] // self.geometry.page_size)

    def fits(self) -> bool:
        """Whether the target has a slot for every page, reserved ones included."""
        ranks = self.geometry.ranks
        wanted = {
            (rank, page)
            for owner, table, pages in zip(self.owners, self.occupancy.tables, self.pages(), strict=True)
            for number, page in zip(range(len(table)), pages, strict=True)
            for rank in range(ranks)
            if holds_page(self.target, rank, number, owner, ranks)
        }
        room = [len(self.geometry.page_slots(self.target, rank)) for rank in range(ranks)]
        return all(sum(at == rank for at, _ in wanted) <= room[rank] for rank in range(ranks))

    def pages(self) -> list[list[int]]:
        """For each request, the pages that it claims."""
        ends = np.cumsum(self.occupancy.lengths())[:-1]
        return [part.tolist() for part in np.split(self.occupancy.page_c, ends)] if len(self.owners) else []

    def states(self) -> tuple[State, State]:
        """Who holds the written pages before and after, in order of their first claims."""
        counts = [self.num_written(index) for index in range(len(self.owners))]
        numbers = np.concatenate([np.arange(count) for count in counts] or [np.empty(0, dtype=np.int64)])
        row: dict[int, int] = {}
        for pages, count in zip(self.pages(), counts, strict=True):
            for page in pages[:count]:
                row.setdefault(page, len(row))
        rows = [row[page] for pages, count in zip(self.pages(), counts, strict=True) for page in pages[:count]]
        claimed = np.array(rows, dtype=np.int64)
        ranks, owners = self.geometry.ranks, (self.occupancy.owners, self.owners)
        old, new = (np.repeat(np.array(own, dtype=np.int64), counts) for own in owners)
        return (
            State(self.occupancy.layout, ranks, numbers, old, claimed),
            State(self.target, ranks, numbers, new, claimed),
        )


def page_counts(geometry: ArenaGeometry, layout: Layout, pages: Sequence[HeldPages]) -> list[int]:
    """Slots of each rank that are left beside some requests' pages, which may be shared."""
    return [
        len(geometry.page_slots(layout, rank))
        - len({slot for held in pages for slot in held.table.slots_on(rank).tolist()})
        for rank in range(geometry.ranks)
    ]


def occupy(
    geometry: ArenaGeometry, layout: Layout, wishes: Sequence[tuple[int, int]], random: np.random.Generator
) -> list[HeldPages]:
    """Requests (owner, pages wished for) that grow side by side, as far as there is room. Others among them then go."""
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


def share(
    geometry: ArenaGeometry, layout: Layout, wishes: Sequence[tuple[int, int]], random: np.random.Generator
) -> tuple[list[HeldPages], list[int]]:
    """Requests that grow one after the other, most of them behind first pages that one before them has.

    Where the layout keeps pages by request, another owner has copies of its own. Returns the requests, and how many
    pages each shares.
    """
    pool = PagePool.of_geometry(geometry, layout)
    held: list[HeldPages] = []
    num_shared: list[int] = []
    for owner, wish in wishes:
        pages, common = HeldPages(owner, geometry.ranks), 0
        if held and random.random() < 0.7:
            other = int(random.integers(len(held)))
            common = int(random.integers(len(held[other]) + 1))
            ids, rows = held[other].ids[:common], held[other].table.rows(0, common)
            if layout.kv is not KV.REQUEST or held[other].owner == owner:
                pages = HeldPages(owner, geometry.ranks, rows, ids)
            elif not ({*ids} & {id for mine in held if mine.owner == owner for id in mine.ids}) and pool.grow(
                pages, common
            ):
                pages.ids[:] = ids
            else:
                common = 0
            num_shared[other] = max(num_shared[other], common)
        pool.grow(pages, min(wish, 3))
        held.append(pages)
        num_shared.append(common)
    return held, num_shared


def idle_slots(
    geometry: ArenaGeometry, layout: Layout, held: Sequence[HeldPages], random: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Some of the slots that no request uses."""
    idle = []
    for rank in range(geometry.ranks):
        used = [slot for pages in held for slot in pages.table.slots_on(rank).tolist()]
        free = np.setdiff1d(geometry.page_slots(layout, rank), used)
        idle.append(free[random.random(len(free)) < 0.5])
    return tuple(idle)


@st.composite
def cases(draw: st.DrawFn, roomy: bool = False, tight: bool = False, shared: bool = False) -> Case:
    """Any direction. `tight` cases start with every page on every rank and no slot free, and let most of them go.

    In `shared` cases requests share pages, and some slots have idle pages in them.
    """
    ranks = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 8]), label="ranks")
    num_heads = draw(st.sampled_from([24] if tight else [24, 24, 24, 5]), label="heads")
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
    source = TP if tight else draw(st.sampled_from(usable), label="source")
    target = draw(st.sampled_from([DP, CP] if tight else usable), label="target")
    rank_numbers = st.integers(0, ranks - 1)
    # Copies are staged only where nearly all slots are in use: half of the cases ask for all there are.
    most = 12 if roomy or not (tight or draw(st.booleans(), label="fill")) else 60
    num_pages = st.just(most) if tight else st.integers(0, most) | st.just(most)
    wishes = draw(st.lists(st.tuples(rank_numbers, num_pages), max_size=6), label="owner, pages")
    random = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    num_shared = [0] * len(wishes)
    if shared:
        held, num_shared = share(geometry, source, wishes, random)
    else:
        held = occupy(geometry, source, wishes, random)
    # Most requests have written nearly all of their pages, some little or nothing.
    sizes = [len(pages) * geometry.page_size for pages in held]
    unwritten = draw(st.lists(st.integers(0, 5) | st.integers(0, 60), min_size=len(held), max_size=len(held)))
    occupancy = Occupancy(
        layout=source,
        requests=tuple(int(id) for id in random.permutation(100)[: len(held)]),
        owners=tuple(pages.owner for pages in held),
        written=tuple(
            max(num * geometry.page_size, size - less)
            for num, size, less in zip(num_shared, sizes, unwritten, strict=True)
        ),
        tables=tuple(pages.table for pages in held),
        pages=tuple(pages.ids for pages in held),
        idle=idle_slots(geometry, source, held, random) if shared else (),
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
    content: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # (page, offset) -> what is there

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
        size = self.geometry.page_size
        for id, written, table, pages in zip(
            case.occupancy.requests, case.occupancy.written, case.occupancy.tables, case.pages(), strict=True
        ):
            for position in range(written):
                at_page = (pages[position // size], position % size)
                content = self.content.setdefault(at_page, self._noise(self.geometry.kv.token_bytes))
                self.tokens[id, position] = content
                for arena, slot in zip(self.bytes, table.slots_cT[position // size], strict=True):
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
        HeldPages(owner, case.geometry.ranks, planned.tables[id], pages)
        for id, owner, pages in zip(ids, case.owners, case.pages(), strict=True)
    ]
    withheld = [slots.tolist() for slots in planned.withheld]
    return PagePool.of_geometry(case.geometry, case.target, held, withheld), held


def execute(case: Case, planned: Planned, manifest: Manifest, arenas: Arenas) -> None:
    """Carry a manifest out, checking the source state up to the barrier and the target state after it."""
    staging = arenas.read(all_copies(manifest, case.geometry))
    arenas.check_source(case)
    arenas.write_back(staging)
    arenas.check_target(case, planned)


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
