"""WaitingQueue: the requests that hold no pages, in order of service."""

from __future__ import annotations

import heapq

from splash.scheduler.request import Order, Request


class WaitingQueue:
    """A heap by order of service. Requests that were aborted while they waited leave when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Request]] = []

    def push(self, request: Request) -> None:
        """Let a request wait, before all that come after it in the order of service."""
        heapq.heappush(self._heap, (request.order, request))

    @property
    def first(self) -> Request | None:
        """The request that is served next, None where nobody waits."""
        while self._heap:
            request = self._heap[0][1]
            if request.live:
                return request
            heapq.heappop(self._heap)
        return None

    def sample(self, limit: int) -> list[Request]:
        """At most `limit` of the requests, the first among them, in no particular order."""
        return [request for _, request in self._heap[:limit] if request.live]

    def pop(self) -> Request | None:
        """Take the first request out."""
        request = self.first
        if request is not None:
            heapq.heappop(self._heap)
        return request
