"""Copying ahead of a switch: which pages and weights are at their target already, and what each step copies next.

History is append-only, so a page copied now is right for ever up to the positions that were written then. A switch
commits with nothing left to move once all that is written, the step before the commit included, has been copied.

A page that is full and where the target wants it is *prepared*: the ranks are told where it will lie, and neither the
plans that follow nor the commit look at it again. So each step plans a *window* of the pages that are left, and the
commit the last pages of each request. Cached pages that no request uses are in all plans, and so are requests that
share a page with one that wants it on other ranks: there it depends on all of them at once where a page lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.pages import PageTable
from splash.core.step import NO_SLOT
from splash.engine.claims import Claims, Pages
from splash.engine.target_pages import TargetPages, most_of_each
from splash.engine.windows import cut_out
from splash.scheduler.prefix_cache import PrefixCache
from splash.switch.counts import SwitchCounts, count
from splash.switch.manifest import (
    Manifest,
    Occupancy,
    Planned,
    plan_switch,
    rank_copies,
    settle,
    slots_under,
)
from splash.switch.orders import CopyAhead, PreparedPages
from splash.switch.placement import Flags, Slots, page_numbers
from splash.switch.prepared import chain

LAST_SHARE = 0.1  # of a step's bytes: so little may be copied right before the commit
LAST_PAGES = 512  # so few may be planned then
KEPT_BACK = 3  # orders for which slots that were given up are kept
FEW_PAGES = 8  # the least window
MANY_PAGES = 4096  # the largest: they are planned in a few milliseconds


@dataclass(frozen=True)
class _Running:
    """A request as it is now: its page table, the owner wanted, and how many of its first pages are sure to be full."""

    table: PageTable
    owner: int
    full: int


class AheadCopies:
    """The state of one switch that copies ahead. Slots that it copies to are claimed from the serving pool.

    Args:
        switch: number of the switch.
        target: the layout to switch to.
        geometry: of the arenas.
        pool: the pages that serve meanwhile.

    Attributes:
        kv_bytes, weight_bytes: received by each rank of what was begun, over all layers, those streamed included.
        prepared: the pages that need nothing more.
    """

    def __init__(self, switch: int, target: Layout, geometry: ArenaGeometry, pool: PrefixCache) -> None:
        self._switch = switch
        self._target = target
        self._geometry = geometry
        self._pool = pool
        self._layers = geometry.spec.num_layers
        self._claims = Claims(geometry.ranks)
        self.prepared = TargetPages(target, geometry, pool)
        self._weights: list[tuple[int, int, int, int]] | None = None  # (rank, head group, peer, layer) still to copy
        self._under: list[list[int]] = [[] for _ in range(geometry.ranks)]  # slots claimed under weights, by rank
        self._groups: tuple[tuple[tuple[int, int], ...], ...] = ()  # of weights to fetch, by rank, with their peers
        self._moves_pages = True
        self._caught_up = False  # whether the step before copied all that was left
        self._whole: set[int] = set()  # requests of which no page is prepared
        self._digest = 0
        self._known: frozenset[PageTable] = frozenset()  # those of the last occupancy
        # By order and rank, slots that nobody wants any more. Copies to them may run until the second order after that.
        self._given_up: deque[list[Pages]] = deque([self._none()])
        self.kv_bytes = [0] * geometry.ranks
        self.weight_bytes = [0] * geometry.ranks

    # --- planning ---

    def plan(self, occupancy: Occupancy, owners: Sequence[int], epoch: int) -> Planned:
        """The switch as it would be committed now, with what has been copied marked as settled."""
        self._give_up_stale(occupancy, owners)
        planned = self._plan(*self._rest(occupancy, owners, None), epoch)
        prepared = self.prepared.by_request
        if prepared and not planned.manifest.abandonable and all(request >= 0 for request in occupancy.requests):
            # Pages would be overwritten, which the ranks can only do with all of them in sight.
            for request in list(prepared):
                self.prepared.forget(request)
            planned = self._plan(*self._rest(occupancy, owners, None), epoch)
        tables = {
            request: np.concatenate((prepared[request].target.slots_cT, table)) if request in prepared else table
            for request, table in planned.tables.items()
        }
        return replace(planned, tables=tables)

    def plan_window(self, occupancy: Occupancy, owners: Sequence[int], epoch: int) -> Planned:
        """A plan of the first pages, before any are copied: whether there is room for them shows whether to begin."""
        return self._plan(*self._rest(occupancy, owners, MANY_PAGES), epoch)

    def is_settled(self, manifest: Manifest) -> bool:
        """Whether a plan of `plan` finds everything in its place and overwrites nothing."""
        copies = [rank_copies(manifest, self._geometry, rank) for rank in range(self._geometry.ranks)]
        return manifest.abandonable and not any(len(own.peer) or own.weights for own in copies)

    def digest_with(self, rest: Sequence[PreparedPages]) -> int:
        """The digest of all that was prepared and of `rest`, which the ranks are told last."""
        return chain(self._digest, rest)

    def count(self, planned: Planned) -> SwitchCounts:
        """What a plan of `plan` and everything before it do."""
        manifest, prepared = planned.manifest, self.prepared.by_request.values()
        before = np.concatenate([*(own.source.slots_cT for own in prepared), manifest.source_pT()])
        after = np.concatenate([*(own.target.slots_cT for own in prepared), manifest.target_pT()])
        if self.prepared.may_share(planned.pages):
            ids = np.concatenate([*(id for own in prepared for id in own.ids), planned.pages])
            _, first, which = np.unique(ids, return_index=True, return_inverse=True)
            if len(first) < len(ids):  # a page that several requests claim is where any of them has it
                before, after = (most_of_each(slots, which, len(first)) for slots in (before, after))
        return count(manifest, self._geometry, (before, after))

    def slots_after(self, planned: Planned) -> list[npt.NDArray[np.intp]]:
        """By rank, where the pages of running requests lie after a plan of `plan`, ascending."""
        return self.prepared.slots_with({id: table for id, table in planned.tables.items() if id >= 0})

    def _plan(self, rest: Occupancy, owners: Sequence[int], epoch: int) -> Planned:
        planned = plan_switch(rest, self._target, owners, self._geometry, epoch, self._claims.slots)
        manifest, ranks = planned.manifest, self._geometry.ranks
        settled = self._claims.copied(planned.pages)
        settled[manifest.target_pT() == NO_SLOT] = 0
        pending = {rank for rank, _, _, _ in self._weights} if self._weights is not None else range(ranks)
        weights_settled = [rank not in pending for rank in range(ranks)]
        digest = self._digest if self.prepared.by_request else 0
        return replace(planned, manifest=settle(manifest, settled, weights_settled, digest))

    def _rest(
        self, occupancy: Occupancy, owners: Sequence[int], window: int | None
    ) -> tuple[Occupancy, tuple[int, ...]]:
        """The pages that are not prepared: all, or the first `window` of those that are written.

        Where it is a window, whatever is not free is in use by pages that are not in it.

        Returns:
            the pages, and the owner wanted of each request that they are of.
        """
        while True:
            rest, wanted = self._cut_out(occupancy, owners, window)
            wanted_cT = page_holders(
                page_numbers(rest.lengths()) + np.repeat(np.array(rest.first, dtype=np.int64), rest.lengths()),
                np.repeat(np.array(wanted, dtype=np.int64), rest.lengths()),
                self._target,
                self._geometry.ranks,
            )
            shared = self.prepared.shared(rest)
            clashing = self.prepared.clashing(rest, wanted_cT, shared) if shared else []
            if not clashing:
                return replace(rest, prepared=self._flags(rest, wanted_cT, shared, window is not None)), wanted
            for request in clashing:
                self.prepared.forget(request)
            self._whole.update(clashing)

    def _is_whole(self, request: int) -> bool:
        """Whether all pages of a request are in every plan."""
        return request < 0 or request in self._whole

    def _cut_out(
        self, occupancy: Occupancy, owners: Sequence[int], window: int | None
    ) -> tuple[Occupancy, tuple[int, ...]]:
        begins = [self.prepared.num(request) for request in occupancy.requests]
        whole = [self._is_whole(request) for request in occupancy.requests]
        rest, chosen = cut_out(occupancy, begins, whole, self._geometry.page_size, self._geometry.ranks, window)
        return rest, tuple(owners[index] for index in chosen)

    def _flags(
        self, rest: Occupancy, wanted_cT: Flags, shared: Mapping[int, npt.NDArray[np.intp]], is_window: bool
    ) -> tuple[tuple[Flags, Flags], ...] | None:
        """What `Occupancy.prepared` says of the pages that are not in `rest`."""
        if not self.prepared.by_request and not is_window:
            return None
        lies, will_lie = self.prepared.flags(shared)
        if is_window:
            lies |= ~np.stack(self._pool.free_flags(self._geometry.num_slots))
            slots_cT = np.where(wanted_cT, self._claims.slots(rest.page_c), NO_SLOT)
            for rank, slots in enumerate(slots_cT.T):
                lies[rank, slots[slots != NO_SLOT]] = False
        return tuple(zip(lies, will_lie, strict=True))

    def _give_up_stale(self, occupancy: Occupancy, owners: Sequence[int]) -> None:
        """Forget requests that are gone, or will have another owner, and give back what only they claimed."""
        assert occupancy.pages is not None
        now = dict(zip(occupancy.requests, zip(occupancy.tables, owners, strict=True), strict=True))
        self._whole &= now.keys()
        for request, own in list(self.prepared.by_request.items()):
            table, owner = now.get(request, (None, -1))
            if table is not own.own or owner != own.owner:
                self.prepared.forget(request)
        known, self._known = self._known, frozenset(occupancy.tables)  # cached pages are in a new table each time
        if known <= self._known:
            return
        given_up = self._claims.keep({page for pages in occupancy.pages for page in pages})
        self._given_up[-1] = [np.concatenate(own) for own in zip(self._given_up[-1], given_up, strict=True)]

    def _none(self) -> list[Pages]:
        return [np.empty(0, dtype=np.int64) for _ in range(self._geometry.ranks)]

    # --- copying ---

    def begin(self, planned: Planned, layers: int) -> str:
        """Claim the room under weights to fetch.

        Args:
            planned: a first window.
            layers: how many of the first layers are copied ahead. The others are streamed in the step that commits.

        Returns:
            why copying ahead is impossible, or an empty string.
        """
        manifest, moves_pages = planned.manifest, False
        wanted = []
        for rank in range(manifest.ranks):
            copies = rank_copies(manifest, self._geometry, rank)
            if copies.num_staged or copies.weights_staged:
                return f"rank {rank} has no room to copy ahead without overwriting what is in use"
            wanted.append(copies.weights)
            moves_pages |= len(copies.peer) > 0
        self._moves_pages, self._layers = moves_pages, layers
        reserved = manifest.source_pT()
        for rank, weights in enumerate(wanted):
            under = slots_under(self._geometry, [group for group, _ in weights])
            self._under[rank] = under[self._geometry.page_flags(self._pool.layout, rank)[under]].tolist()
            assert not np.isin(reserved[:, rank], under).any()
        if not self._pool.are_free(self._under):
            self._under = [[] for _ in self._under]
            return "pages are reserved where weights have to come"
        self._pool.claim(self._under)
        self._groups = tuple(wanted)
        self._weights = [
            (rank, group, peer, layer)
            for layer in range(self._layers)
            for rank, own in enumerate(wanted)
            for group, peer in own
        ]
        return ""

    @property
    def streamed(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By rank, (head group, peer) to fetch in the layers that are not copied ahead."""
        return self._groups if self._layers < self._geometry.spec.num_layers else ()

    def next(
        self, occupancy: Occupancy, owners: Sequence[int], full: Sequence[int], epoch: int, step_bytes: int
    ) -> tuple[CopyAhead | None, bool]:
        """What to copy once the step that `occupancy` includes is over, and whether the step after that may commit.

        A rank copies at most `step_bytes`, and beyond them what was begun: a page, or a head group of a layer.

        Args:
            occupancy: the requests and pages, the rows of the step in flight included.
            owners: the owner wanted, one a request.
            full: for each request, cached pages apart, the number of its pages that were full before that step. Only
                from then on does a page keep its number in `Occupancy.pages`.
            epoch: of the source state.
            step_bytes: as above.

        Returns:
            the order, or None where room for further pages has run out: the switch has to commit with copies.
        """
        ranks, size = self._geometry.ranks, self._geometry.page_size
        self._give_up_stale(occupancy, owners)
        self._given_up.append(self._none())
        if len(self._given_up) > KEPT_BACK:
            self._pool.free(self._given_up.popleft())
        layer_token = self._geometry.kv.token_bytes * self._layers
        window = MANY_PAGES
        if self._moves_pages:  # then so many fill a step on every rank
            window = min(max(FEW_PAGES, 2 * ranks * step_bytes // (layer_token * size)), MANY_PAGES)
        window += 2 * len(occupancy.requests)  # each has pages at its end that are not full
        planned = self._plan(*self._rest(occupancy, owners, window), epoch)
        left = sum(
            -(-num // size)
            for request, num in zip(occupancy.requests, occupancy.written, strict=True)
            if not self._is_whole(request)
        ) - sum(len(own.target) for own in self.prepared.by_request.values())
        manifest = planned.manifest
        before, after, settled = manifest.source_pT(), manifest.target_pT(), manifest.settled_pT()
        todo = (after != NO_SLOT) & (after != before) & (settled < manifest.filled_p(size)[:, None])
        claimed = self._claims.slots(planned.pages)
        unclaimed = todo & (claimed == NO_SLOT)
        is_staged = not manifest.abandonable and any(
            rank_copies(manifest, self._geometry, rank).num_staged for rank in range(ranks)
        )
        if is_staged or not self._pool.are_free([after[unclaimed[:, rank], rank] for rank in range(ranks)]):
            return None, False  # what is left are slots that are reserved for tokens to come
        budget = [step_bytes] * ranks
        weights, done = self._next_weights(budget)
        done &= left <= window
        pages = (b"",) * ranks
        if todo.any():
            pages, settled, is_all = self._next_pages(planned, todo, claimed, budget)
            done &= is_all
        there_pT = (after == NO_SLOT) | (after == before) | (settled >= size)
        now = zip(occupancy.requests, occupancy.tables, owners, strict=True)
        mine = [own for own in now if own[0] >= 0]
        running = {id: _Running(table, owner, num) for (id, table, owner), num in zip(mine, full, strict=True)}
        prepared = self._prepare(running, planned, _on_every_rank(there_pT))
        # The commit waits for the copies of the step before, and the step before for the plan of the commit. Where
        # there was much to copy or to plan, one step more leaves only its own.
        is_small = min(budget) >= step_bytes * (1 - LAST_SHARE) and len(planned.pages) <= LAST_PAGES
        may_commit = done and (is_small or self._caught_up)
        self._caught_up = done
        return CopyAhead(self._switch, self._layers, pages, weights, prepared), may_commit

    def _next_pages(
        self, planned: Planned, todo: Flags, claimed: Slots, budget: list[int]
    ) -> tuple[tuple[bytes, ...], npt.NDArray[np.int16], bool]:
        """Choose pages to copy, claim their slots and take what they cost each rank from its `budget`.

        Args:
            planned: the window.
            todo: [p, T] pages that a rank has to copy. Those that are left for later are taken out.
            claimed: [p, T] slots that are claimed for pages already.
            budget: by rank, bytes that it may copy.

        Returns:
            `CopyAhead.pages`; leading positions [p, T] that need no further copy once these are made; whether all pages
            were chosen.
        """
        manifest, geometry, ranks = planned.manifest, self._geometry, self._geometry.ranks
        layer_token = geometry.kv.token_bytes * self._layers
        before, after, filled = manifest.source_pT(), manifest.target_pT(), manifest.filled_p(geometry.page_size)
        peers, settled = manifest.peers_pT(), manifest.settled_pT()
        size_pT = np.where(todo, filled[:, None] - settled, 0) * layer_token
        # A page begins as long as every rank that copies it has bytes left.
        fits = _on_every_rank((np.cumsum(size_pT, axis=0) - size_pT < np.array(budget)) | ~todo)
        todo[~fits] = False
        by_rank = []
        for rank in range(ranks):
            rows = np.flatnonzero(todo[:, rank])
            sizes, is_local = size_pT[rows, rank], before[rows, rank] != NO_SLOT
            peer = np.where(is_local, rank, peers[rows, rank])
            ends = (settled[rows, rank], filled[rows])
            table = np.stack((peer, before[rows, peer], after[rows, rank], *ends), axis=1)
            by_rank.append(table.astype(np.int32).tobytes())
            budget[rank] -= int(sizes.sum())
            positions = int(sizes[~is_local].sum()) // layer_token
            self.kv_bytes[rank] += positions * geometry.kv.token_bytes * geometry.spec.num_layers
        unclaimed = todo & (claimed == NO_SLOT)
        self._pool.claim([after[unclaimed[:, rank], rank] for rank in range(ranks)])
        settled = np.where(todo, filled[:, None], settled).astype(np.int16)
        rows = np.flatnonzero(~_on_every_rank(~todo))
        slots, copied = np.where(todo, after, claimed), np.where(todo, settled, 0)
        self._claims.put(planned.pages[rows], slots[rows], copied[rows])
        return tuple(by_rank), settled, bool(fits.all())

    def _prepare(
        self, running: Mapping[int, _Running], planned: Planned, is_there_p: Flags
    ) -> tuple[PreparedPages, ...]:
        """The full pages of a window that need nothing more, as far as those before them need nothing either.

        `is_there_p`: every rank that wants the page has it where it will lie.
        """
        manifest = planned.manifest
        is_request_c = np.repeat(np.array(manifest.requests, dtype=np.int64) >= 0, manifest.num_pages)
        pages_c = manifest.pages_c()[is_request_c]
        ready_c, ids_c = is_there_p[pages_c], planned.pages[pages_c]
        before_cT, first_of = manifest.source_tables(), dict(zip(manifest.requests, manifest.first, strict=True))
        owner_of = dict(zip(manifest.requests, manifest.source_owners, strict=True))
        prepared, start = [], 0
        for request, after_cT in manifest.target_tables().items():
            first, now = first_of[request], running[request]
            ready = ready_c[start : start + len(after_cT)]
            num = min(len(ready) if ready.all() else int(ready.argmin()), now.full - first)
            if num > 0 and not self._is_whole(request):
                source, target, ids = before_cT[start : start + num], after_cT[:num], ids_c[start : start + num]
                self.prepared.add(request, now.table, (owner_of[request], now.owner), source, target, ids)
                prepared.append(PreparedPages(request, first, source.tobytes(), target.tobytes()))
            start += len(after_cT)
        self._digest = chain(self._digest, tuple(prepared))
        return tuple(prepared)

    def _next_weights(self, budget: list[int]) -> tuple[tuple[tuple[tuple[int, int, int], ...], ...], bool]:
        assert self._weights is not None, "begin() first"
        group_bytes = self._geometry.attention_bytes // self._geometry.ranks
        num_streamed = self._geometry.spec.num_layers - self._layers
        chosen: list[list[tuple[int, int, int]]] = [[] for _ in budget]
        left = []
        for rank, group, peer, layer in self._weights:
            if budget[rank] > 0:
                budget[rank] -= group_bytes
                chosen[rank].append((group, peer, layer))
                self.weight_bytes[rank] += group_bytes * (1 if layer else 1 + num_streamed)
            else:
                left.append((rank, group, peer, layer))
        self._weights = left
        return tuple(tuple(own) for own in chosen), not left

    def abandon(self) -> None:
        """Give every claimed slot back to the pool."""
        for slots in (self._claims.clear(), *self._given_up):
            self._pool.free(slots)
        self._pool.free(self._under)
        self._given_up = deque([self._none()])
        self._under = [[] for _ in self._under]


def _on_every_rank(flags_nT: Flags) -> Flags:
    """[n]: where all of a row are set. Rows are so short that numpy is far slower along them than column by column."""
    return reduce(np.logical_and, flags_nT.T)
