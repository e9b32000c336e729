"""Server-sent events, several outputs merged into one stream, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from splash.core.errors import SplashError
from splash.engine.outputs import RequestOutput
from splash.server.errors import ApiError, from_splash, shutting_down

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


def event(data: Any) -> bytes:
    """One server-sent event carrying JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def unless_client_leaves(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects.

    Args:
        receive: the connection's, with the request's body already read.
        work: cancelled on disconnect, and always finished when this returns.

    Raises:
        ClientGone: the client disconnected.
        ApiError: 503, the server is shutting down and has cancelled this request.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    except asyncio.CancelledError:
        # Nothing else cancels a request, and there is still time to tell the client.
        raise shutting_down() from None
    finally:
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they come, each with its stream's number.

    An error in one ends all. However this ends, every stream is closed before it returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    queue.put_nowait((number, output))
        except Exception as error:  # raised again by the reader
            queue.put_nowait((number, error))
        else:
            queue.put_nowait((number, None))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            number, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class EventStream(Response):
    """A streamed answer. Its status is sent with the first event, so that a request refused before has a proper error.

    Args:
        events: encoded events. A `SplashError` after the first becomes an event with an error, and ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except ClientGone:
            return
        except (ApiError, SplashError) as error:
            failure = from_splash(error) if isinstance(error, SplashError) else error
            if not self._started:
                await failure.response()(scope, receive, send)
                return
            await self._send(send, event(failure.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for item in events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send(send, item)

    async def _send(self, send: Send, item: bytes) -> None:
        await send({"type": "http.response.body", "body": item, "more_body": True})
