"""Stream: what an engine brings for the requests of one caller, on its way to the task that reads it."""

from __future__ import annotations

import asyncio

from splash.core.errors import GrammarError, SplashError
from splash.engine.outputs import RequestOutput


class Stream:
    """Outputs of some requests as they come. One task takes; everything runs on the same event loop.

    A caller's requests share one stream and one wake-up a step, whatever came in it.

    Args:
        count: requests, numbered from 0.

    Attributes:
        ends: the last output of each that has ended, by its number.
    """

    __slots__ = ("_come", "_count", "_error", "_waiter", "ends")

    def __init__(self, count: int) -> None:
        self.ends: dict[int, RequestOutput] = {}
        self._count = count
        self._come: list[tuple[int, RequestOutput]] = []
        self._error: SplashError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, output: RequestOutput) -> None:
        """Bring an output of a request. One that ended in an error ends the stream."""
        reason = output.finish_reason
        if reason is not None:
            self.ends[number] = output
        if reason == "error":
            self.fail(GrammarError(str(output.stop_reason)))
        elif self._error is None:
            self._come.append((number, output))
            self._wake()

    def fail(self, error: SplashError) -> None:
        """End the stream with an error, behind what has come. Of several errors the first counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """All that has come since the last call, each with its request's number; waits until there is something.

        Nothing means that every request has ended, and the caller has had all of it.

        Raises:
            RequestError: a request cannot be served.
            GrammarError: the output of one could not be kept to its grammar.
            DeadlineError: their time is up.
            WorkerError: the group died.
        """
        if not self._come and len(self.ends) < self._count and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._come:
            come, self._come = self._come, []
            return come
        if self._error is not None:
            raise self._error
        return []

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
