"""What a rank knows of a coming switch: where pages will lie that need nothing more, told bit by bit.

The table of a long context has thousands of pages. Those that are full never change, so they are told, compared and
entered while ordinary steps run, and the commit has only the last pages of each request to look at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from splash.core.pages import PageTable
from splash.core.step import NO_SLOT
from splash.layouts.tables import PageTables
from splash.switch.manifest import Manifest, RankCopies
from splash.switch.orders import PreparedPages
from splash.switch.placement import Slots


def chain(digest: int, prepared: Sequence[PreparedPages]) -> int:
    """A 63-bit hash of all that was prepared: of what was before, by its own hash, and of what is now, if anything."""
    if not prepared:
        return digest
    text = digest.to_bytes(8, "little") + msgspec.msgpack.encode(prepared)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def last_pages(manifest: Manifest, with_cached: bool) -> tuple[PreparedPages, ...]:
    """The pages of a manifest as ranks are told them: with those prepared before, all pages of every request."""
    before, after = manifest.tables_before(), manifest.tables_after()
    return tuple(
        PreparedPages(id, first, before[id].tobytes(), after[id].tobytes())
        for id, first in zip(manifest.requests, manifest.first, strict=True)
        if id >= 0 or with_cached
    )


class Preparation:
    """The tables of one switch, as far as they were told. Once they are whole, a commit only takes them.

    Args:
        switch: its number.
        ranks: T.

    Attributes:
        switch: its number.
        digest: of all that was told.
    """

    def __init__(self, switch: int, ranks: int) -> None:
        self.switch = switch
        self.digest = 0
        self._ranks = ranks
        self._tables: dict[int, PageTable] = {}
        self._wrong: set[int] = set()
        self._target: dict[int, PageTable] = {}
        self._moves: tuple[Slots, Slots] | None = None

    def add(self, prepared: Sequence[PreparedPages], own: PageTables) -> None:
        """Take in more pages.

        They may be of a request that has lost its pages since they were chosen. So it is no failure that this rank's
        own table is another, unless the switch commits with them.
        """
        self.digest = chain(self.digest, prepared)
        for told in prepared:
            source, target = (
                np.frombuffer(slots, dtype=np.int32).reshape(-1, self._ranks) for slots in (told.source, told.target)
            )
            if told.first == 0:
                self._wrong.discard(told.request)
            table = self._tables.setdefault(told.request, PageTable(self._ranks))
            is_known = np.array_equal(own.slots(told.request)[told.first : told.first + len(source)], source)
            if not (is_known or told.request < 0) or len(table) < told.first:
                self._wrong.add(told.request)
            table.truncate(told.first)
            table.extend(target)

    def complete(self, rest: Sequence[PreparedPages], own: PageTables) -> str:
        """Take in the last pages of every request. Returns why this rank cannot commit to them, or an empty string."""
        self.add(rest, own)
        self._target = {told.request: self._tables[told.request] for told in rest if told.request >= 0}
        cached = [told for told in rest if told.request < 0]
        sources = [own.slots(id)[: len(table)] for id, table in self._target.items()]
        sources += [np.frombuffer(told.source, dtype=np.int32).reshape(-1, self._ranks) for told in cached]
        targets = [self._tables[id].slots_cT for id in (*self._target, *(told.request for told in cached))]
        nothing = np.empty((0, self._ranks), dtype=np.int32)
        self._moves = np.concatenate([nothing, *sources]), np.concatenate([nothing, *targets])
        return "has other page tables than the switch starts from" if self._wrong & self._target.keys() else ""

    def copies(self, rank: int, page_size: int, weights: tuple[tuple[int, int], ...]) -> RankCopies:
        """All that a rank copies in a layer that nothing was copied ahead in, once `complete`.

        `weights` are the (head group, peer) pairs to fetch.
        """
        assert self._moves is not None, "complete() first"
        before_cT, after_cT = self._moves
        _, rows = np.unique(after_cT[:, rank], return_index=True)  # a page that several requests claim once
        before_cT, after = before_cT[rows], after_cT[rows, rank]
        todo = (after != NO_SLOT) & (after != before_cT[:, rank])
        before_cT, after = before_cT[todo], after[todo]
        held = before_cT != NO_SLOT
        peer = np.where(held[:, rank], rank, held.argmax(axis=1))
        return RankCopies(
            peer=peer.astype(np.int16),
            source=before_cT[np.arange(len(peer)), peer],
            target=after,
            first=np.zeros(len(peer), dtype=np.int64),
            last=np.full(len(peer), page_size, dtype=np.int64),
            staged=np.zeros(len(peer), dtype=bool),
            weights=weights,
            weights_staged=False,
        )

    def target(self, digest: int) -> dict[int, PageTable]:
        """The tables of the target state that the ranks have voted for. Only once: they are these."""
        assert digest == self.digest, "a commit of something else than was voted for"
        return self._target

    def matches(self, manifest: Manifest) -> bool:
        """Whether what a manifest takes for prepared is what was told, of tables that are this rank's."""
        claimed = [(id, first) for id, first in zip(manifest.requests, manifest.first, strict=True) if first]
        return not claimed or (
            self.digest == manifest.prepared
            and all(id not in self._wrong and len(self._tables.get(id, ())) >= first for id, first in claimed)
        )

    def tables(self, manifest: Manifest) -> dict[int, PageTable]:
        """The tables of the target state of a manifest that matches. Only once: they are these grown."""
        tables, first_of = {}, dict(zip(manifest.requests, manifest.first, strict=True))
        for request, tail in manifest.target_tables().items():
            first = first_of[request]
            table = self._tables.pop(request) if first else PageTable(self._ranks)
            table.truncate(first)
            table.extend(tail)
            tables[request] = table
        return tables
