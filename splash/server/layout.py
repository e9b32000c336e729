"""The layout that serves: what it is, changing it while requests run, and the record of such changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from splash.core.errors import ConfigError
from splash.core.layout import LAYOUTS, check_layout
from splash.server.errors import bad_option, no_switch, switch_not_aborted, switch_not_committed
from splash.server.requests import Service, answer
from splash.server.schemas import LayoutRequest
from splash.server.streaming import unless_client_leaves
from splash.switch.orders import METHODS

AUTO = "auto"

if TYPE_CHECKING:
    from splash.engine.async_engine import AsyncEngine
    from splash.switch.orders import SwitchRecord


def layout_router(service: Service) -> APIRouter:
    """The routes, over a service."""
    router = APIRouter()
    engine = service.engine

    @router.get("/layout")
    async def get_layout() -> Response:
        """The layout, who chooses it and why, those that this model could run in here, and the switch under way."""
        service.check_ready()
        return answer(layout_state(engine))

    @router.post("/layout")
    async def switch_layout(body: LayoutRequest, request: Request) -> Response:
        """Change the layout while requests run, and pin it. Answers once the switch has ended.

        The layout "auto" lets the policy choose again, and answers as GET /layout does.
        """
        service.check_ready()
        if body.layout == AUTO:
            if body.rebalance or body.method != AUTO:
                raise bad_option(ConfigError("layout", f"{AUTO} leaves method and owners to the policy"))
            await engine.follow_policy()
            return answer(layout_state(engine))
        try:
            # A client that leaves does not end the switch: the engine serves others too.
            switching = engine.switch(body.layout, body.method, rebalance=body.rebalance)
            record = await unless_client_leaves(request.receive, switching)
        except ConfigError as error:
            raise bad_option(error) from None
        if record.status != "committed":
            raise switch_not_committed(_json(record))
        return answer(_json(record))

    @router.get("/layout/history")
    async def switch_history(limit: Annotated[int | None, Query(ge=1)] = None) -> Response:
        """The switches that have ended, oldest first; with a limit, the last so many."""
        service.check_ready()
        records = engine.switch_history
        return answer({"switches": [_json(record) for record in records[-limit if limit else 0 :]]})

    @router.delete("/layout/switch")
    async def abort_switch(request: Request) -> Response:
        """Give up the switch under way."""
        service.check_ready()
        record = await unless_client_leaves(request.receive, engine.abort_switch())
        if record is None:
            raise no_switch()
        if record.status != "aborted":
            raise switch_not_aborted(_json(record))
        return answer(_json(record))

    return router


def layout_state(engine: AsyncEngine) -> dict[str, Any]:
    """The layout, who chooses it and why, those that could serve here, and the switch under way, as JSON values."""
    active = engine.active_switch
    return {
        "layout": engine.layout,
        "policy": engine.policy,
        "pinned": engine.pinned,
        "decision": None if engine.decision is None else msgspec.to_builtins(engine.decision),
        "ranks": engine.ranks,
        "hardware": engine.hardware,
        "layouts": [name for name in LAYOUTS if _is_usable(name, engine)],
        "methods": METHODS,
        "active": None if active is None else _json(active),
    }


def _is_usable(name: str, engine: AsyncEngine) -> bool:
    try:
        check_layout(LAYOUTS[name], engine.model_config.spec.num_heads, engine.ranks)
    except ConfigError:
        return False
    return True


def _json(record: SwitchRecord) -> dict[str, Any]:
    """A record as JSON values, taken at once: the engine goes on writing the record of a switch under way."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return fields
