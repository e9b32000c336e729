"""Bearer authentication of the routes that serve the model or tell about it."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from splash.server.errors import ApiError

_OPEN = frozenset({"/health", "/ready", "/version"})


class BearerAuth:
    """Middleware that answers 401 unless the request carries the key. Probes stay open.

    It runs before routing and before the body is read, so that nobody without the key learns anything.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in _OPEN or self._is_authorised(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "missing or wrong API key; send `Authorization: Bearer <api_key>`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are Latin-1; a key beyond that arrives as UTF-8 bytes. Comparing takes the same time for any key.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._expected)
