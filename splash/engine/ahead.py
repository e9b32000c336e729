"""Copying ahead of a switch: which pages and weights are at their target already, and what each step copies next.

History is append-only, so a page copied now is right for ever up to the positions that were written then. A switch
commits with nothing left to move once all that is written, the step before the commit included, has been copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import PagePool, PageTable
from splash.core.step import NO_SLOT
from splash.switch.manifest import Manifest, Occupancy, Planned, plan_switch, rank_copies, settle, slots_under
from splash.switch.orders import CopyAhead


class AheadCopies:
    """The state of one switch that copies ahead. Slots that it copies to are claimed from the serving pool.

    Args:
        switch: number of the switch.
        target: the layout to switch to.
        geometry: of the arenas.
        pool: the pages that serve meanwhile.
        step_bytes: most that a rank copies after one step.

    Attributes:
        kv_bytes, weight_bytes: received by each rank so far, over all layers.
    """

    def __init__(self, switch: int, target: Layout, geometry: ArenaGeometry, pool: PagePool, step_bytes: int) -> None:
        self._switch = switch
        self._target = target
        self._geometry = geometry
        self._pool = pool
        self._step_bytes = step_bytes
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (request, page) -> slot claimed on each rank
        self._covered: dict[tuple[int, int], int] = {}  # (request, page) -> positions copied
        self._copied: dict[int, tuple[PageTable, int]] = {}  # request -> the table and owner that its copies are for
        self._weights: list[tuple[int, int, int, int]] | None = None  # (rank, head group, peer, layer) still to copy
        self._under: list[list[int]] = [[] for _ in range(geometry.ranks)]  # slots claimed under weights, by rank
        self.kv_bytes = [0] * geometry.ranks
        self.weight_bytes = [0] * geometry.ranks

    def plan(self, occupancy: Occupancy, owners: Sequence[int], epoch: int) -> Planned:
        """The switch as it would be committed now, with what has been copied marked as settled."""
        planned = plan_switch(occupancy, self._target, owners, self._geometry, epoch, self._chosen(occupancy, owners))
        manifest = planned.manifest
        keys = _page_keys(manifest)
        covered = np.array([self._covered.get(key, 0) for key in keys], dtype=np.int16)
        settled = np.repeat(covered[:, None], manifest.ranks, axis=1)
        pending = {rank for rank, _, _, _ in self._weights} if self._weights is not None else range(manifest.ranks)
        weights_settled = [rank not in pending for rank in range(manifest.ranks)]
        return Planned(settle(manifest, settled, weights_settled), planned.tables, planned.withheld)

    def _chosen(self, occupancy: Occupancy, owners: Sequence[int]) -> dict[tuple[int, int], tuple[int, ...]]:
        """Give up what was claimed for requests that are gone, and return what was claimed for the others.

        A request that lost its pages and has new ones, or that shall have another owner, counts as gone.
        """
        live = dict(zip(occupancy.requests, zip(occupancy.tables, owners, strict=True), strict=True))
        stale = set()
        for id, (table, owner) in self._copied.items():
            now = live.get(id)
            if now is None or now[0] is not table or now[1] != owner:
                stale.add(id)
        if stale:
            gone = [key for key in self._slots if key[0] in stale]
            self._pool.free(_by_rank([self._slots.pop(key) for key in gone], self._geometry.ranks))
            for key in gone:
                self._covered.pop(key, None)
            for id in stale:
                del self._copied[id]
        return self._slots

    def begin(self, planned: Planned) -> str:
        """Claim the room under weights to fetch. Returns why copying ahead is impossible, or an empty string."""
        manifest = planned.manifest
        wanted = []
        for rank in range(manifest.ranks):
            copies = rank_copies(manifest, self._geometry, rank)
            if copies.num_staged or copies.weights_staged:
                return f"rank {rank} has no room to copy ahead without overwriting what is in use"
            wanted.append(copies.weights)
        reserved = manifest.source_pT()
        for rank, weights in enumerate(wanted):
            under = set(slots_under(self._geometry, [group for group, _ in weights]).tolist())
            usable = set(self._geometry.page_slots(self._pool.layout, rank).tolist())
            self._under[rank] = sorted(under & usable)
            assert not under & set(reserved[:, rank].tolist())
        if not self._pool.are_free(self._under):
            self._under = [[] for _ in self._under]
            return "pages are reserved where weights have to come"
        self._pool.claim(self._under)
        layers = range(self._geometry.spec.num_layers)
        self._weights = [
            (rank, group, peer, layer) for layer in layers for rank, own in enumerate(wanted) for group, peer in own
        ]
        return ""

    def next(self, occupancy: Occupancy, owners: Sequence[int], epoch: int) -> tuple[CopyAhead | None, bool]:
        """What to copy after the step that `occupancy` includes, and whether nothing will be left to copy then.

        Returns None where room for further pages has run out: the switch has to commit with copies.
        """
        planned = self.plan(occupancy, owners, epoch)
        manifest, ranks = planned.manifest, self._geometry.ranks
        copies = [rank_copies(manifest, self._geometry, rank) for rank in range(ranks)]
        if any(own.num_staged for own in copies):
            return None, False
        keys, after = _page_keys(manifest), manifest.target_pT()
        before, filled = manifest.source_pT(), manifest.filled_p(self._geometry.page_size)
        peers, settled = manifest.peers_pT(), manifest.settled_pT()
        todo = (after != NO_SLOT) & (after != before) & (settled < filled[:, None])
        unclaimed = todo & np.array([key not in self._slots for key in keys], dtype=bool)[:, None]
        if not self._pool.are_free([after[unclaimed[:, rank], rank].tolist() for rank in range(ranks)]):
            return None, False  # what is left are slots that are reserved for tokens to come
        budget = [self._step_bytes] * ranks
        weights, done = self._next_weights(budget)
        chosen: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(ranks)]
        copied = dict(zip(occupancy.requests, zip(occupancy.tables, owners, strict=True), strict=True))
        layer_token = self._geometry.kv.token_bytes * self._geometry.spec.num_layers
        for page in np.flatnonzero(todo.any(axis=1)).tolist():
            first, last = int(settled[page].max()), int(filled[page])
            if any(budget[rank] <= 0 for rank in np.flatnonzero(todo[page])):
                done = False
                break
            self._claim(keys[page], before[page], after[page])
            for rank in np.flatnonzero(todo[page]).tolist():
                local = before[page, rank] != NO_SLOT
                peer = rank if local else int(peers[page, rank])
                chosen[rank].append((peer, int(before[page, peer]), int(after[page, rank]), first, last))
                budget[rank] -= (last - first) * layer_token
                self.kv_bytes[rank] += 0 if local else (last - first) * layer_token
            self._covered[keys[page]] = last
            self._copied[keys[page][0]] = copied[keys[page][0]]
        pages = tuple(np.array(own, dtype=np.int32).reshape(-1, 5).tobytes() for own in chosen)
        return CopyAhead(self._switch, pages, weights), done

    def _next_weights(self, budget: list[int]) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], bool]:
        assert self._weights is not None, "begin() first"
        group_bytes = self._geometry.attention_bytes // self._geometry.ranks
        chosen: list[list[tuple[int, int, int]]] = [[] for _ in budget]
        left = []
        for rank, group, peer, layer in self._weights:
            if budget[rank] > 0:
                budget[rank] -= group_bytes
                chosen[rank].append((group, peer, layer))
                self.weight_bytes[rank] += group_bytes
            else:
                left.append((rank, group, peer, layer))
        self._weights = left
        return tuple(tuple(own) for own in chosen), not left

    def _claim(self, key: tuple[int, int], before: np.ndarray, after: np.ndarray) -> None:
        """Keep the slots that a page is copied to from being given to another."""
        if key in self._slots:
            return
        slots = tuple(NO_SLOT if old == new else int(new) for old, new in zip(before, after, strict=True))
        self._pool.claim([[slot] if slot != NO_SLOT else [] for slot in slots])
        self._slots[key] = slots

    def abandon(self) -> None:
        """Give every claimed slot back to the pool."""
        self._pool.free(_by_rank(self._slots.values(), self._geometry.ranks))
        self._pool.free(self._under)
        self._slots.clear()
        self._covered.clear()
        self._copied.clear()
        self._under = [[] for _ in self._under]


def _by_rank(pages: object, ranks: int) -> list[list[int]]:
    return [[page[rank] for page in pages if page[rank] != NO_SLOT] for rank in range(ranks)]  # type: ignore[attr-defined]


def _page_keys(manifest: Manifest) -> list[tuple[int, int]]:
    """(request, page number) of each row of the manifest's arrays."""
    return [
        (id, number) for id, num in zip(manifest.requests, manifest.num_pages, strict=True) for number in range(num)
    ]
