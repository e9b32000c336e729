"""Release requests as they fall due: the one reading of a workload that a simulator and a benchmark client share."""

from __future__ import annotations

import heapq
import math

import numpy as np

from splash.workload.requests import Requests


class Feed:
    """Says which requests to send now, given the time and which ones have finished.

        feed = Feed(requests)
        while not feed.exhausted:
            send(feed.take(now))  # then wait until feed.next_time() or a finish, whichever comes first
            feed.finish(index, now)

    Times are seconds from the start of the workload and never go back. Requests fall due in order of time, ties in
    order of index; where their phase has a limit they wait in that order for a place. A phase begins when all requests
    of the one before have ended, and what comes in it by the clock comes as much later as that is.
    """

    def __init__(self, requests: Requests) -> None:
        self.in_flight = 0
        self._delay_s = requests.delay_s
        self._roots = np.flatnonzero(requests.after < 0)
        self._root_time_s = requests.time_s[self._roots]
        waiting = np.flatnonzero(requests.after >= 0)
        self._followers = waiting[np.argsort(requests.after[waiting], kind="stable")]
        self._first_follower = np.searchsorted(requests.after[self._followers], np.arange(len(requests) + 1))
        self._released: list[tuple[float, int]] = []
        self._phases = iter(requests.phases)
        self._ends = iter([*(phase.start for phase in requests.phases[1:]), len(requests)])
        self._end = self._last_root = 0
        self._left = len(requests)
        self._begin(0.0)

    @property
    def exhausted(self) -> bool:
        """Whether every request has been taken."""
        return self._left == 0

    def next_time(self) -> float:
        """When the next request falls due, in seconds; infinite while that takes a finish first."""
        return self._head()[0] if self.in_flight < self._limit else math.inf

    def take(self, now_s: float) -> list[tuple[int, float]]:
        """(index, time due in seconds) of every request to send at `now_s`; they count as in flight from here on."""
        taken = []
        while self.in_flight < self._limit and self._left:
            due_s, index = self._head()
            if index < 0 or due_s > now_s:
                break
            if self._released and self._released[0] == (due_s, index):
                heapq.heappop(self._released)
            else:
                self._next_root += 1
            self.in_flight += 1
            self._left -= 1
            self._left_of_phase -= 1
            taken.append((index, due_s))
        return taken

    def finish(self, index: int, now_s: float) -> None:
        """Request `index`, which was taken, has ended at `now_s`: make room, and start the clocks that wait for it."""
        assert self.in_flight > 0
        self.in_flight -= 1
        for follower in self._followers[self._first_follower[index] : self._first_follower[index + 1]].tolist():
            heapq.heappush(self._released, (now_s + float(self._delay_s[follower]), follower))
        if not self.in_flight and not self._left_of_phase and self._left:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        """Let the next phase begin."""
        phase = next(self._phases)
        start, self._end = self._end, next(self._ends)
        self._next_root, self._last_root = self._last_root, int(np.searchsorted(self._roots, self._end))
        self._left_of_phase = self._end - start
        self._late_s = now_s - phase.begin_s
        self._limit = math.inf if phase.concurrency is None else phase.concurrency

    def _head(self) -> tuple[float, int]:
        root = (math.inf, -1)
        if self._next_root < self._last_root:
            due_s = float(self._root_time_s[self._next_root]) + self._late_s
            root = (due_s, int(self._roots[self._next_root]))
        return min(root, self._released[0]) if self._released else root
