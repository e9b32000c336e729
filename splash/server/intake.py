"""Intake: how many requests are taken at once, and none once the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from splash.server.errors import overloaded, shutting_down

RECENT = 32  # requests whose ends tell how soon there is room
LONGEST_RETRY_S = 60


class Intake:
    """Counts the requests that are being served, each choice of an answer as one.

    Args:
        most: requests that are taken at once, running and waiting. One answer alone may have more choices.
        clock: the time in seconds, from any origin.

    Attributes:
        live: requests that are being served.
        num_refused: answers that were refused because there were too many.
        draining: set by `drain`; no request is taken any more.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._empty = asyncio.Event()
        self.live = 0
        self.num_refused = 0
        self.draining = False

    def check(self, count: int = 1) -> None:
        """Refuse what there is no room for.

        Raises:
            ApiError: 429 with the time after which to try again, or 503 while the server stops.
        """
        if self.draining:
            raise shutting_down()
        if self.live and self.live + count > self._most:
            self.num_refused += 1
            raise overloaded(self._most, self.retry_after_s)

    @property
    def retry_after_s(self) -> int:
        """How long it takes until a request ends, judging from the last ones."""
        if len(self._ends) < 2:
            return 1
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(1, min(LONGEST_RETRY_S, math.ceil(each)))

    @contextlib.contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Count requests while they are served.

        Raises:
            ApiError: as `check`.
        """
        self.check(count)
        self.live += count
        try:
            yield
        finally:
            self.live -= count
            self._ends.append(self._clock())
            if not self.live:
                self._empty.set()

    async def drain(self) -> None:
        """Take no request from now on, and return once those that are being served have ended."""
        self.draining = True
        while self.live:
            self._empty.clear()
            await self._empty.wait()
