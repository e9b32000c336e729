"""WaitingQueue: the requests that hold no pages, in order of arrival."""

from __future__ import annotations

import heapq

from splash.scheduler.request import Request


class WaitingQueue:
    """A heap by arrival. Requests that were aborted while they waited leave when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []

    def push(self, request: Request) -> None:
        """Let a request wait, ahead of all that arrived after it."""
        heapq.heappush(self._heap, (request.arrival, request))

    @property
    def first(self) -> Request | None:
        """The request that is served next, None where nobody waits."""
        while self._heap:
            request = self._heap[0][1]
            if request.live:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request | None:
        """Take the first request out."""
        request = self.first
        if request is not None:
            heapq.heappop(self._heap)
        return request
