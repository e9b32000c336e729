"""IdlePages: the pages of the prefix cache that no request holds, next to be evicted first.

A switch that copies ahead asks at every step which of them it should take along, and where the others lie. Steps that
only decode change neither, so answers are kept until a page comes or goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec
import numpy as np

from splash.core.layout import Layout
from splash.core.ownership import page_holders
from splash.core.step import NO_SLOT


class CachedPage(msgspec.Struct, eq=False, gc=False):
    """A page that is written and full. As nothing in it can be part of a cycle, the garbage collector does not look at
    it.

    Attributes:
        key: what it and the pages before it hold.
        parent: key of the page before it, empty for the first.
        number: page number, which is the same in every request that holds it.
        id: its number in `HeldPages.ids`; copies at several places have the same.
        place: owner rank of the requests that may share it where the layout keeps pages by request, else 0.
        slots: its slot on each rank, NO_SLOT where there is none.
        ranks: those that have a slot of it, in order.
        refs: requests that hold it.
        released: when it last became idle, by a clock of releases.
    """

    key: bytes
    parent: bytes
    number: int
    id: int
    place: int
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    refs: int = 0
    released: int = 0

    def copied(self, place: int, slots: tuple[int, ...]) -> CachedPage:
        """The same page in another layout or at another place, where no request holds it yet."""
        ranks = tuple([rank for rank, slot in enumerate(slots) if slot != NO_SLOT])
        return CachedPage(self.key, self.parent, self.number, self.id, place, slots, ranks, 0, self.released)


@dataclass(frozen=True, eq=False)
class Chain:
    """Pages that a switch takes along for whoever may ask for them: the first pages of a prompt, up to an idle one.

    Attributes:
        pages: in page order; those that requests hold as well are among them.
        owner: owner rank of the requests that are to find them where the target keeps pages by request, else 0.
        num_more: how many of them are in no chain before it.
        takes: slots on each rank that those fill, before and after the switch together.
    """

    pages: tuple[CachedPage, ...]
    owner: int
    num_more: int
    takes: tuple[int, ...]


class IdlePages:
    """See the module.

    Args:
        ranks: T.

    Attributes:
        num_T: pages on each rank.
    """

    def __init__(self, ranks: int) -> None:
        self.num_T = [0] * ranks
        # By their first holder: pages with the same holders are in one queue.
        self._queues: list[OrderedDict[int, CachedPage]] = [OrderedDict() for _ in range(ranks)]
        self._listed: tuple[list[CachedPage], np.ndarray] | None = None  # all of them, and their slots [pages, T]
        self._resident: dict[Layout, np.ndarray] = {}  # bool [pages]
        self._chains: dict[Layout, tuple[list[Chain], Iterator[Chain]]] = {}

    def __iter__(self) -> Iterator[CachedPage]:
        return chain.from_iterable([queue.values() for queue in self._queues])

    def add(self, pages: Sequence[CachedPage]) -> None:
        """Take in pages, each the last of its queue to be evicted."""
        queues, num_T = self._queues, self.num_T
        for page in pages:
            queues[page.ranks[0]][page.id] = page
            for rank in page.ranks:
                num_T[rank] += 1
        self.forget()

    def remove(self, pages: Sequence[CachedPage]) -> None:
        """Let go of pages."""
        queues, num_T = self._queues, self.num_T
        for page in pages:
            del queues[page.ranks[0]][page.id]
            for rank in page.ranks:
                num_T[rank] -= 1
        self.forget()

    def first(self, rank: int, count: int) -> list[CachedPage]:
        """The pages next to be evicted of those whose first holder is `rank`. There must be so many."""
        pages = list(islice(self._queues[rank].values(), count))
        assert len(pages) == count
        return pages

    def forget(self) -> None:
        """Work everything out anew when it is asked for next."""
        if self._listed is not None:
            self._listed = None
            self._resident.clear()
        if self._chains:
            self._chains.clear()

    def slots(self, target: Layout | None = None, but: Container[CachedPage] = ()) -> tuple[np.ndarray, ...]:
        """See `PrefixCache.idle_slots`."""
        if self._listed is None:
            pages = list(self)
            slots = np.array([page.slots for page in pages], dtype=np.int64).reshape(-1, len(self.num_T))
            self._listed = pages, slots
        pages, slots = self._listed
        keep = np.ones(len(pages), dtype=bool) if target is None else self._residents(target, pages, slots)
        if but:
            keep = keep & np.array([page not in but for page in pages], dtype=bool)
        return tuple(own[own != NO_SLOT] for own in slots[keep].T)

    def _residents(self, target: Layout, pages: list[CachedPage], slots: np.ndarray) -> np.ndarray:
        """bool [pages], those that lie where some owner would want them in `target`."""
        resident = self._resident.get(target)
        if resident is None:
            ranks = len(self.num_T)
            numbers = np.array([page.number for page in pages], dtype=np.int64)
            resident = np.zeros(len(pages), dtype=bool)
            for owner in range(ranks):
                wanted = page_holders(numbers, np.full(len(pages), owner), target, ranks)
                resident |= ((slots != NO_SLOT) | ~wanted).all(axis=1)
            self._resident[target] = resident
        return resident

    def chains(self, target: Layout, work_out: Callable[[], Iterator[Chain]]) -> Iterator[Chain]:
        """The chains of `work_out`, each of which is worked out once, and only as far as somebody asks."""
        if target not in self._chains:
            self._chains[target] = [], work_out()
        known, rest = self._chains[target]
        yield from known
        for more in rest:
            known.append(more)
            yield more
