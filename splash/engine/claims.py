"""Claims: the slots that pages are copied to ahead of a switch, and how much of them is there."""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat

import numpy as np
import numpy.typing as npt

from splash.core.step import NO_SLOT
from splash.switch.placement import Slots

Pages = npt.NDArray[np.int64]


class Claims:
    """By page, as `Occupancy` numbers them, and rank: what is copied there is right whoever claims the page.

    Args:
        ranks: T.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._rows: dict[int, int] = {}
        self._slots = np.empty((64, ranks), dtype=np.int32)
        self._copied = np.empty((64, ranks), dtype=np.int16)
        self._num_rows = 0
        self._asked: Pages | None = None  # what was looked up last
        self._found = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.intp))  # and its rows, see `_rows_of`

    def slots(self, pages: Pages) -> Slots:
        """[n, T]: the slot claimed for each page on each rank, NO_SLOT where there is none."""
        slots = np.full((len(pages), self._ranks), NO_SLOT, dtype=np.int32)
        rows, found = self._rows_of(pages)
        slots[found] = self._slots[rows]
        return slots

    def copied(self, pages: Pages) -> npt.NDArray[np.int16]:
        """[n, T]: how many leading positions of each page are in the slot claimed for it, or on their way."""
        copied = np.zeros((len(pages), self._ranks), dtype=np.int16)
        rows, found = self._rows_of(pages)
        copied[found] = self._copied[rows]
        return copied

    def put(self, pages: Pages, slots: Slots, copied: npt.NDArray[np.integer]) -> None:
        """Take in slots and positions of some pages, [n, T] each. More may have been copied before."""
        rows = self._look_up(pages)
        self._asked = None
        new = np.flatnonzero(rows < 0)
        first, self._num_rows = self._num_rows, self._num_rows + len(new)
        if self._num_rows > len(self._slots):
            shape = max(self._num_rows - len(self._slots), len(self._slots)), self._ranks
            self._slots = np.concatenate((self._slots, np.empty(shape, dtype=np.int32)))
            self._copied = np.concatenate((self._copied, np.empty(shape, dtype=np.int16)))
        rows[new] = np.arange(first, self._num_rows)
        self._copied[first : self._num_rows] = 0
        self._slots[rows] = slots
        self._copied[rows] = np.maximum(self._copied[rows], copied)
        self._rows.update(zip(pages[new].tolist(), range(first, self._num_rows), strict=True))

    def keep(self, pages: Collection[int]) -> list[Pages]:
        """Forget all other pages. Returns their slots, by rank."""
        self._asked = None
        gone = self._rows.keys() - pages
        return self._by_rank([self._rows.pop(page) for page in gone])

    def clear(self) -> list[Pages]:
        """Forget every page. Returns their slots, by rank."""
        return self.keep(())

    def _rows_of(self, pages: Pages) -> tuple[Pages, npt.NDArray[np.intp]]:
        """The rows of those pages that have one, and where in `pages` those are."""
        if self._asked is not pages:  # a plan asks for the same ones again and again
            rows = self._look_up(pages) if self._rows else np.empty(0, dtype=np.int64)
            found = np.flatnonzero(rows >= 0)
            self._asked, self._found = pages, (rows[found], found)
        return self._found

    def _look_up(self, pages: Pages) -> Pages:
        return np.fromiter(map(self._rows.get, pages.tolist(), repeat(-1)), dtype=np.int64, count=len(pages))

    def _by_rank(self, rows: list[int]) -> list[Pages]:
        slots_nT = self._slots[np.array(rows, dtype=np.int64)].astype(np.int64)
        return [own[own != NO_SLOT] for own in slots_nT.T]
