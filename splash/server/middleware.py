"""What every request passes through: an id, a limit to its body, and a refusal of what other web pages send."""

from __future__ import annotations

import ipaddress
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splash.server.errors import ApiError, body_too_large
from splash.server.logs import log

REQUEST_ID = "x-request-id"
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


class RequestIds:
    """Every answer carries the request's `x-request-id`, or one made up where it brings none that is fit to log.

    Others find it as `scope["state"]["request_id"]`. This is the outermost of ours, and lays the server's own `send`
    under `scope["state"]["send_part"]`: between here and a route, nothing looks at the parts of a body that streams.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _VALID_ID.match(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, send_part=send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class RequestLog:
    """Logs every request once it has been answered: what was asked for, how it ended and how long it took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            log(
                "request",
                request_id=scope["state"]["request_id"],
                method=scope["method"],
                path=scope["path"],
                status=status or 499,  # the client left before there was an answer
                seconds=round(time.monotonic() - started, 6),
            )


class BodyLimit:
    """Answers 413 to bodies of more than so many bytes, before the rest of them is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await body_too_large(self._max_bytes).response()(scope, receive, send)
            return
        received = 0

        async def receive_some() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, body_too_large(self._max_bytes).message)
            return message

        await self._app(scope, receive_some, send)


class SameOrigin:
    """Answers 403 where a web page of another origin would change something or run the model.

    A browser lets any page send a request to a server on this machine; it only keeps the answer from the page. It does
    say from which origin the request comes.

    Args:
        app: what is protected.
        origins: other origins that may, such as "https://example.org"; "*" stands for all.
        trusts_names: the server's own pages may have any name. Without keys that is not safe: whoever owns a name can
            make it mean this machine, so pages are taken for ours only under an address or as localhost.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = (), trusts_names: bool = True) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._trusts_names = trusts_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_allowed(origin, headers.get("host", "")):
                error = ApiError(403, "requests from other web pages are not served", code="foreign_origin")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            own = parts.netloc.lower() == host.lower() != ""
            return own and (self._trusts_names or _is_address(parts.hostname or ""))
        except ValueError:
            return False


def _is_address(host: str) -> bool:
    """Whether a host is named by its address, or is this one."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
