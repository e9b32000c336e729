"""Page tables: for each live request, which slot holds each of its pages on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class RequestPages:
    """The pages of one request, in page order.

    `slots_cT` is an int32 view [pages, T] of slot numbers, NO_SLOT where a rank does not hold the page.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, ranks: int) -> None:
        self._buffer = np.empty((8, ranks), dtype=np.int32)
        self._length = 0

    @property
    def slots_cT(self) -> np.ndarray:
        return self._buffer[: self._length]

    def __len__(self) -> int:
        return self._length

    def extend(self, pages: Sequence[Sequence[int]]) -> None:
        """Append pages, each as T slots."""
        if not pages:
            return
        end = self._length + len(pages)
        if end > len(self._buffer):
            grown = np.empty((max(end, 2 * len(self._buffer)), self._buffer.shape[1]), dtype=np.int32)
            grown[: self._length] = self.slots_cT
            self._buffer = grown
        self._buffer[self._length : end] = pages
        self._length = end


class PageTables:
    """Page tables of the live requests. Every rank keeps the same ones: they say where peers hold pages too."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._requests: dict[int, RequestPages] = {}

    def extend(self, request: int, pages: Sequence[Sequence[int]]) -> RequestPages:
        """Append `pages` to a request's table, which is made if it is new, and return the table."""
        table = self._requests.get(request)
        if table is None:
            table = self._requests[request] = RequestPages(self.ranks)
        table.extend(pages)
        return table

    def release(self, requests: Iterable[int]) -> None:
        """Forget the tables of `requests`; those without one are passed over."""
        for request in requests:
            self._requests.pop(request, None)

    def __len__(self) -> int:
        return len(self._requests)
