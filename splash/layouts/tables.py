"""Page tables: for each live request, which slot holds each of its pages on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from splash.core.pages import PageTable


class PageTables:
    """Page tables of the live requests. Every rank keeps the same ones: they say where peers hold pages too."""

    def __init__(self, ranks: int, tables: Mapping[int, PageTable] | None = None) -> None:
        """Start with `tables`, by request, which are these tables' own from now on."""
        self.ranks = ranks
        self._requests = dict(tables or {})

    def slots(self, request: int) -> np.ndarray:
        """The table of a request, int32 [pages, T]; empty where it has none."""
        table = self._requests.get(request)
        return np.empty((0, self.ranks), dtype=np.int32) if table is None else table.slots_cT

    def extend(self, request: int, pages: Sequence[Sequence[int]]) -> PageTable:
        """Append `pages` to a request's table, which is made if it is new, and return the table."""
        table = self._requests.get(request)
        if table is None:
            table = self._requests[request] = PageTable(self.ranks)
        table.extend(pages)
        return table

    def release(self, requests: Iterable[int]) -> None:
        """Forget the tables of `requests`; those without one are passed over."""
        for request in requests:
            self._requests.pop(request, None)

    def __len__(self) -> int:
        return len(self._requests)
