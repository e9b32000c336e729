"""The live page and what feeds it: one JSON document, made at most a few times a second however many watch."""

from __future__ import annotations

import asyncio
import hashlib
import time
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from splash.core.layout import LAYOUTS
from splash.server.auth import may_change_layout
from splash.server.errors import ERRORS
from splash.server.layout import layout_state
from splash.server.requests import Service, answer

if TYPE_CHECKING:
    from splash.engine.outputs import Live

REFRESH_S = 0.2  # what is at most this old is shown again
PAGE_PATH = "/page/"
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The page loads nothing from elsewhere, runs no inline script or style, and may not be framed.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def live_router(service: Service) -> APIRouter:
    """The routes, over a service."""
    router = APIRouter()
    watch = _Watch(service)

    @router.get("/live", responses=ERRORS)
    async def live(
        request: Request,
        since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    ) -> Response:
        """What each rank holds, the last minutes of work, and the layout with the policy's last decision.

        With `since`, the `time_s` of the last sample that the client has, only samples and events after it.
        """
        service.check_ready()
        seen = await watch.look()
        fields: dict[str, Any] = msgspec.to_builtins(seen.picture)
        return answer(
            {
                "now_s": seen.now_s,
                "model": service.settings.model,
                "version": service.settings.version,
                "may_switch": may_change_layout(request.scope),
                "control": layout_state(service.engine),
                "placements": {
                    name: {"projections": layout.projections.value, "kv": layout.kv.value}
                    for name, layout in LAYOUTS.items()
                },
                "load": msgspec.to_builtins(service.engine.stats()),
                "picture": fields,
                "step_times": seen.step_times,
                "samples": [sample for sample in seen.samples if since is None or sample.time_s > since],
                "events": [event for event in seen.events if since is None or event.time_s > since],
            }
        )

    _add_page(router)
    return router


class _Watch:
    """Asks the engine on behalf of all who look, one question at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seen: Live | None = None
        self._seen_s = 0.0
        self._asking: asyncio.Task[Live] | None = None

    async def look(self) -> Live:
        """What is to be seen now, or was a moment ago."""
        if self._seen is not None and time.monotonic() - self._seen_s < REFRESH_S:
            return self._seen
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)  # one who leaves does not end it for the others

    async def _ask(self) -> Live:
        seen = await self._service.engine.live()
        self._seen, self._seen_s = seen, time.monotonic()
        return seen


def _add_page(router: APIRouter) -> None:
    """Serve the files of the page, which are read once."""
    files = {file.name: file.read_bytes() for file in resources.files("splash.server").joinpath("page").iterdir()}

    def add(path: str, name: str) -> None:
        content = files[name]
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

        async def file(request: Request) -> Response:
            if headers["ETag"] in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=media_type, headers=headers)

        router.add_api_route(path, file, methods=["GET"], include_in_schema=False)

    for name in files:
        if name != "index.html":
            add(f"{PAGE_PATH}{name}", name)
    add("/", "index.html")
