"""Pages of a switch's target state that are known ahead of the commit, since they are full and where they will lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import PageTable
from splash.core.step import NO_SLOT
from splash.scheduler.heritage import Heritage
from splash.scheduler.prefix_cache import PrefixCache
from splash.switch.manifest import Occupancy
from splash.switch.placement import Flags, Slots

Rows = npt.NDArray[np.intp]


@dataclass
class Prepared:
    """The prepared pages of one request, from its first on.

    `own` is the table that they are in, which a request that loses its pages gets anew; `owner` that in the target.
    """

    own: PageTable
    owner: int
    source: PageTable
    target: PageTable
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    known: list[int] = field(default_factory=list)  # ids of those that the cache knows


class TargetPages:
    """The prepared pages of all requests.

    Args:
        target: the layout to switch to.
        geometry: of the arenas.
        pool: the pages that serve meanwhile.

    Attributes:
        by_request: the pages of each request that has any.
        heritage: what the target's pool will know of them.
    """

    def __init__(self, target: Layout, geometry: ArenaGeometry, pool: PrefixCache) -> None:
        self._ranks = geometry.ranks
        self.by_request: dict[int, Prepared] = {}
        self.heritage = Heritage(pool, target)
        self._ids: set[int] = set()  # of pages, those of requests that are gone among them
        self._any_twice = False  # whether a page was taken in for two requests
        # By rank and slot, how many requests have a page that lies there, or will.
        self._lies, self._will_lie = np.zeros((2, geometry.ranks, geometry.num_slots), dtype=np.int32)

    def num(self, request: int) -> int:
        """How many of a request's first pages are prepared."""
        return len(self.by_request[request].target) if request in self.by_request else 0

    def add(
        self,
        request: int,
        table: PageTable,
        owners: tuple[int, int],
        source: Slots,
        target: Slots,
        ids: npt.NDArray[np.int64],
    ) -> None:
        """Take in the pages of a request that follow on those it has here.

        Args:
            request: its id.
            table: its page table now.
            owners: its owner before the switch and after it.
            source, target: [pages, T] slots before and after.
            ids: [pages] as in `Occupancy.pages`.
        """
        own = self.by_request.get(request)
        if own is None:
            own = Prepared(table, owners[1], PageTable(self._ranks), PageTable(self._ranks))
            self.by_request[request] = own
        first = len(own.target)
        own.source.extend(source)
        own.target.extend(target)
        own.ids.append(ids)
        num_known = len(self._ids)
        self._ids.update(numbers := ids.tolist())
        self._any_twice |= len(self._ids) < num_known + len(numbers)
        own.known += self.heritage.add(owners[0], own.owner, first, numbers, own.target)
        self._count_slots(own, slice(first, None), 1)

    def forget(self, request: int) -> None:
        """None of a request's pages is prepared any more."""
        own = self.by_request.pop(request)
        self.heritage.remove(own.owner, own.known)
        self._count_slots(own, slice(None), -1)

    def _count_slots(self, own: Prepared, rows: slice, times: int) -> None:
        for counts, table in ((self._lies, own.source), (self._will_lie, own.target)):
            for rank, slots in enumerate(table.slots_cT[rows].T):
                counts[rank, slots[slots != NO_SLOT]] += times

    def may_share(self, ids: npt.NDArray[np.int64]) -> bool:
        """Whether a page may be prepared for several requests, or be among some others as well. False where none is."""
        return self._any_twice or not self._ids.isdisjoint(ids.tolist())

    def shared(self, rest: Occupancy) -> dict[int, Rows]:
        """By request, which of its pages are among some others as well, for another request."""
        ids = rest.page_c
        if self._ids.isdisjoint(ids.tolist()):
            return {}
        rows = {id: np.flatnonzero(np.isin(np.concatenate(own.ids), ids)) for id, own in self.by_request.items()}
        return {request: own for request, own in rows.items() if len(own)}

    def clashing(self, rest: Occupancy, wanted_cT: Flags, shared: Mapping[int, Rows]) -> list[int]:
        """Requests with a shared page that the others have on other ranks, before the switch or after it.

        `wanted_cT` says where each claim of the others is wanted.
        """
        ids, which = np.unique(rest.page_c, return_inverse=True)
        lies = most_of_each(np.concatenate([table.slots_cT for table in rest.tables]), which, len(ids))
        will_lie = most_of_each(wanted_cT.astype(np.int32), which, len(ids)) > 0
        clashing = []
        for request, rows in shared.items():
            own = self.by_request[request]
            found = np.searchsorted(ids, np.concatenate(own.ids)[rows])
            wanted = own.target.slots_cT[rows] != NO_SLOT
            if not ((lies[found] == own.source.slots_cT[rows]) & (will_lie[found] == wanted)).all():
                clashing.append(request)
        return clashing

    def flags(self, shared: Mapping[int, Rows]) -> tuple[Flags, Flags]:
        """bool [T, slots] each: where pages lie, and where they will but for shared ones.

        A page that is prepared for one request and among the others for another has one slot for both.
        """
        lies, will_lie = self._lies > 0, self._will_lie > 0
        for request, rows in shared.items():
            for rank, slots in enumerate(self.by_request[request].target.slots_cT[rows].T):
                will_lie[rank, slots[slots != NO_SLOT]] = False
        return lies, will_lie

    def slots_with(self, tables: Mapping[int, Slots]) -> list[Rows]:
        """By rank, ascending, where pages will lie: these, and of whole tables by request what is not among them."""
        taken = self._will_lie > 0
        for request, table in tables.items():
            for flags, slots in zip(taken, table[self.num(request) :].T, strict=True):
                flags[slots[slots != NO_SLOT]] = True
        return [np.flatnonzero(flags) for flags in taken]


def most_of_each(slots: Slots, which: Rows, num_pages: int) -> Slots:
    """[num_pages, T]: the largest slot of the rows of each page, which is NO_SLOT where all are."""
    most = np.full((num_pages, slots.shape[1]), NO_SLOT, dtype=np.int32)
    np.maximum.at(most, which, slots)
    return most
