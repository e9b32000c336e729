"""Heritage: what the cache of a target layout takes over from the one that serves, before and at a switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from splash.core.layout import KV, Layout
from splash.core.pages import PageTable
from splash.scheduler.idle_pages import CachedPage, Chain

if TYPE_CHECKING:
    from splash.scheduler.prefix_cache import PrefixCache


class Heritage:
    """What the pool of a target layout will know of pages that requests hold, taken over bit by bit.

    A page of a running request is known from when it is full, and its content never changes. So what the pool that
    serves knows of it can be taken over as soon as it is known where the page will lie.

    Attributes:
        by_key, by_id: the pages by key and place, and by (id, place).
    """

    def __init__(self, before: PrefixCache, target: Layout) -> None:
        """Take over from `before` for a pool of the layout `target`."""
        self._before = before
        self._by_request = target.kv is KV.REQUEST
        self.by_key: dict[bytes, dict[int, CachedPage]] = {}
        self.by_id: dict[tuple[int, int], CachedPage] = {}

    def add(self, old_owner: int, owner: int, first: int, ids: Sequence[int], table: PageTable) -> list[int]:
        """Take over pages of a request.

        Args:
            old_owner, owner: of the request, before and after.
            first: the number of the first page.
            ids: of the pages.
            table: of the request in the target, these pages included.

        Returns:
            the ids of those that are known.
        """
        known_of = self._before._by_id
        if not known_of:
            return []
        old_place, place, known = self._before._place(old_owner), owner if self._by_request else 0, []
        for id, own in zip(ids, table.rows(first, first + len(ids)), strict=True):
            old = known_of.get((id, old_place))
            if old is None:
                continue
            page = self.by_id.get((id, place))
            if page is None:
                page = self.by_id[id, place] = old.copied(place, own)
                self.by_key.setdefault(old.key, {})[place] = page
            page.refs += 1
            known.append(id)
        return known

    def remove(self, owner: int, known: Iterable[int]) -> None:
        """Forget what `add` has taken over for a request that will not hold it in the target."""
        place = owner if self._by_request else 0
        for id in known:
            page = self.by_id[id, place]
            page.refs -= 1
            if not page.refs:
                del self.by_id[id, place], self.by_key[page.key][place]
                if not self.by_key[page.key]:
                    del self.by_key[page.key]


def as_they_arrive(target: Layout, chains: Iterable[tuple[Chain, np.ndarray]]) -> dict[tuple[bytes, int], CachedPage]:
    """Pages that a switch takes along, as they are in `target`, by (key, place).

    Args:
        target: the layout.
        chains: each with its slots there, int32 [pages, T].
    """
    pages: dict[tuple[bytes, int], CachedPage] = {}
    for chain, slots_cT in chains:
        place = chain.owner if target.kv is KV.REQUEST else 0
        for page, slots in zip(chain.pages, map(tuple, slots_cT.tolist()), strict=True):
            if (page.key, place) not in pages:
                pages[page.key, place] = page.copied(place, slots)
    return pages
