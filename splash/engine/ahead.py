"""Copying ahead of a switch: which pages and weights are at their target already, and what each step copies next.

History is append-only, so a page copied now is right for ever up to the positions that were written then. A switch
commits with nothing left to move once all that is written, the step before the commit included, has been copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import PagePool
from splash.core.step import NO_SLOT
from splash.switch.manifest import Occupancy, Planned, plan_switch, rank_copies, settle, slots_under
from splash.switch.orders import CopyAhead

LAST_SHARE = 0.1  # of a step's bytes: so little may be copied right before the commit


class AheadCopies:
    """The state of one switch that copies ahead. Slots that it copies to are claimed from the serving pool.

    Args:
        switch: number of the switch.
        target: the layout to switch to.
        geometry: of the arenas.
        pool: the pages that serve meanwhile.

    Attributes:
        kv_bytes, weight_bytes: received by each rank so far, over all layers.
    """

    def __init__(self, switch: int, target: Layout, geometry: ArenaGeometry, pool: PagePool) -> None:
        self._switch = switch
        self._target = target
        self._geometry = geometry
        self._pool = pool
        # By page, as the occupancy numbers them, and rank: what is copied there is right whoever claims the page.
        self._slots: dict[int, list[int]] = {}  # slot claimed on each rank, NO_SLOT where none is
        self._covered: dict[int, list[int]] = {}  # positions copied to it
        self._weights: list[tuple[int, int, int, int]] | None = None  # (rank, head group, peer, layer) still to copy
        self._under: list[list[int]] = [[] for _ in range(geometry.ranks)]  # slots claimed under weights, by rank
        self._caught_up = False  # whether the step before copied all that was left
        self.kv_bytes = [0] * geometry.ranks
        self.weight_bytes = [0] * geometry.ranks

    def plan(self, occupancy: Occupancy, owners: Sequence[int], epoch: int) -> Planned:
        """The switch as it would be committed now, with what has been copied marked as settled."""
        self._give_up_stale(occupancy)
        planned = plan_switch(occupancy, self._target, owners, self._geometry, epoch, self._slots)
        manifest, ranks = planned.manifest, self._geometry.ranks
        nothing = [0] * ranks
        covered = [self._covered.get(page, nothing) for page in planned.pages.tolist()]
        settled = np.array(covered, dtype=np.int16).reshape(-1, ranks)
        settled[manifest.target_pT() == NO_SLOT] = 0
        pending = {rank for rank, _, _, _ in self._weights} if self._weights is not None else range(ranks)
        weights_settled = [rank not in pending for rank in range(ranks)]
        return replace(planned, manifest=settle(manifest, settled, weights_settled))

    def _give_up_stale(self, occupancy: Occupancy) -> None:
        """Give back what was claimed for pages that no request claims any more."""
        gone = self._slots.keys() - set(occupancy.page_c().tolist())
        self._pool.free(_by_rank([self._slots.pop(page) for page in gone], self._geometry.ranks))
        for page in gone:
            del self._covered[page]

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

    def next(
        self, occupancy: Occupancy, owners: Sequence[int], epoch: int, step_bytes: int
    ) -> tuple[CopyAhead | None, bool]:
        """What to copy after the step that `occupancy` includes, and whether the next step may commit.

        A rank copies at most `step_bytes`, and beyond them what was begun: a page, or a head group of a layer.
        Returns None where room for further pages has run out: the switch has to commit with copies.
        """
        planned = self.plan(occupancy, owners, epoch)
        manifest, ranks = planned.manifest, self._geometry.ranks
        copies = [rank_copies(manifest, self._geometry, rank) for rank in range(ranks)]
        if any(own.num_staged for own in copies):
            return None, False
        pages, after = planned.pages.tolist(), manifest.target_pT()
        before, filled = manifest.source_pT(), manifest.filled_p(self._geometry.page_size)
        peers, settled = manifest.peers_pT(), manifest.settled_pT()
        todo = (after != NO_SLOT) & (after != before) & (settled < filled[:, None])
        nothing = [NO_SLOT] * ranks
        claimed = np.array([self._slots.get(page, nothing) for page in pages], dtype=np.int32).reshape(-1, ranks)
        unclaimed = todo & (claimed == NO_SLOT)
        if not self._pool.are_free([after[unclaimed[:, rank], rank].tolist() for rank in range(ranks)]):
            return None, False  # what is left are slots that are reserved for tokens to come
        budget = [step_bytes] * ranks
        weights, done = self._next_weights(budget)
        chosen: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(ranks)]
        layer_token = self._geometry.kv.token_bytes * self._geometry.spec.num_layers
        to_claim: list[list[int]] = [[] for _ in range(ranks)]
        for row in np.flatnonzero(todo.any(axis=1)).tolist():
            last = int(filled[row])
            todo_ranks = np.flatnonzero(todo[row]).tolist()
            if any(budget[rank] <= 0 for rank in todo_ranks):
                done = False
                break
            slots = self._slots.setdefault(pages[row], [NO_SLOT] * ranks)
            covered = self._covered.setdefault(pages[row], [0] * ranks)
            for rank in todo_ranks:
                if slots[rank] == NO_SLOT:
                    slots[rank] = int(after[row, rank])
                    to_claim[rank].append(slots[rank])
                first, local = int(settled[row, rank]), before[row, rank] != NO_SLOT
                peer = rank if local else int(peers[row, rank])
                chosen[rank].append((peer, int(before[row, peer]), slots[rank], first, last))
                budget[rank] -= (last - first) * layer_token
                self.kv_bytes[rank] += 0 if local else (last - first) * layer_token
                covered[rank] = last
        self._pool.claim(to_claim)
        by_rank = tuple(np.array(own, dtype=np.int32).reshape(-1, 5).tobytes() for own in chosen)
        # The commit waits for the copies of the step before. Where those are many, one step more leaves only its own.
        is_small = min(budget) >= step_bytes * (1 - LAST_SHARE)
        ends = done and (is_small or self._caught_up)
        self._caught_up = done
        return CopyAhead(self._switch, by_rank, weights), ends

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

    def abandon(self) -> None:
        """Give every claimed slot back to the pool."""
        self._pool.free(_by_rank(self._slots.values(), self._geometry.ranks))
        self._pool.free(self._under)
        self._slots.clear()
        self._covered.clear()
        self._under = [[] for _ in self._under]


def _by_rank(pages: Iterable[Sequence[int]], ranks: int) -> list[list[int]]:
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for page in pages:
        for rank, slot in enumerate(page):
            if slot != NO_SLOT:
                by_rank[rank].append(slot)
    return by_rank
