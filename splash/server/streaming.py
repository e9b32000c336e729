"""Server-sent events, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from splash.core.errors import SplashError
from splash.server.errors import ApiError, from_splash, shutting_down

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")
_HOLE = uuid.uuid4().hex  # nothing that anybody says
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


def event(data: Any) -> bytes:
    """One server-sent event carrying JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def event_of_text(data: Callable[[str], Any]) -> Callable[[str], bytes]:
    """`event(data(text))` as a function of the text, where nothing else of it changes: the rest is encoded once."""
    before, hole, after = event(data(_HOLE)).partition(_encode(_HOLE))
    assert hole, "the text is part of the data"
    return lambda text: before + _encode(text) + after


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
        send_part = scope["state"]["send_part"]
        try:
            await unless_client_leaves(receive, self._send_all(send, send_part))
        except ClientGone:
            return
        except (ApiError, SplashError) as error:
            failure = from_splash(error) if isinstance(error, SplashError) else error
            if not self._started:
                await failure.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": event(failure.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send, send_part: Send) -> None:
        async with aclosing(self._events) as events:
            async for item in events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send_part({"type": "http.response.body", "body": item, "more_body": True})
