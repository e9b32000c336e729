"""Restarts: how often a group of ranks that died may be started anew."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from splash.core.errors import WorkerError


class Restarts:
    """Counts restarts, and says when there were too many of late.

    Args:
        most: restarts that are allowed within the window.
        window_s: how long one counts, in seconds.
        say: receives a line for each.
        clock: the time in seconds, from any origin.

    Attributes:
        num_restarts: how many there have been.
        last_error: what the last one was for, empty before.
        under_way: whether the group is being started anew. Any thread may ask.
    """

    def __init__(
        self,
        most: int,
        window_s: float,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._window_s = window_s
        self._say = say
        self._clock = clock
        self._recent: deque[float] = deque()
        self.num_restarts = 0
        self.last_error = ""
        self.under_way = False

    def run(self, error: WorkerError, restart: Callable[[], None]) -> None:
        """Have the group started anew, again if it dies at that.

        Args:
            error: what the group died of.
            restart: ends what is left of the group and starts it.

        Raises:
            WorkerError: the restarts are spent.
        """
        started = self._clock()
        self.under_way = True
        try:
            while True:
                self._count(error)
                try:
                    restart()
                    break
                except WorkerError as another:
                    error = another
        finally:
            self.under_way = False
        self._say(f"the ranks serve again after {self._clock() - started:.1f} s")

    def _count(self, error: WorkerError) -> None:
        now = self._clock()
        while self._recent and now - self._recent[0] >= self._window_s:
            self._recent.popleft()
        if len(self._recent) >= self._most:
            spent = f"; restarts are spent ({self._most} in {self._window_s:g} s)" if self._most else ""
            raise WorkerError(f"{error}{spent}", error.rank)
        self._recent.append(now)
        self.num_restarts += 1
        self.last_error = str(error)
        self._say(f"{error}; starting the ranks anew (restart {len(self._recent)} of {self._most})")
