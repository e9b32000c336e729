"""create_app: the routes, tied to an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from splash.server.answers import Models, ServedModel, documented
from splash.server.auth import BearerAuth
from splash.server.chat import chat_router
from splash.server.completions import completions_router
from splash.server.errors import ERRORS, engine_restarting, install_handlers, model_not_found, shutting_down
from splash.server.intake import Intake
from splash.server.layout import layout_router
from splash.server.live import live_router
from splash.server.metrics import metrics_router
from splash.server.middleware import REQUEST_ID, BodyLimit, RequestIds, RequestLog, SameOrigin
from splash.server.requests import Service, answer
from splash.server.settings import ServerSettings
from splash.server.streaming import ClientGone
from splash.server.tokenize import tokenize_router
from splash.server.tracing import Tracing

if TYPE_CHECKING:
    from splash.engine.async_engine import AsyncEngine


def create_app(
    engine: AsyncEngine,
    settings: ServerSettings,
    loaded: Callable[[], bool] = lambda: True,
    intake: Intake | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The HTTP application over an engine, whose start and end are the caller's.

    Args:
        engine: need not be started while `loaded` says False; until then the model's routes answer 503.
        settings: how the server presents itself.
        loaded: whether the engine has started.
        intake: counts what is being served, for a caller that wants to know when all is done.
        tracing: writes spans of requests; closed by the caller.
    """
    # The interactive pages would load scripts from elsewhere; the schema itself stays at /openapi.json.
    app = FastAPI(title="SPLASH", version=settings.version, docs_url=None, redoc_url=None, strict_content_type=False)
    service = Service(engine, settings, loaded, intake or Intake(settings.max_concurrent_requests), tracing)
    install_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(_models_router(service))
    app.include_router(_state_router(service))
    app.include_router(layout_router(service), responses=ERRORS)
    app.include_router(tokenize_router(service))
    app.include_router(live_router(service))
    app.include_router(metrics_router(service))
    # The last that is added sees a request first.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(BearerAuth, keys=settings.api_keys)
    app.add_middleware(SameOrigin, origins=settings.cors_origins, trusts_names=bool(settings.api_keys))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    if settings.log_requests:
        app.add_middleware(RequestLog)
    app.add_middleware(RequestIds)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


def _models_router(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    created = int(time.time())

    def model() -> dict[str, object]:
        service.check_ready()
        return {
            "id": service.settings.model,
            "object": "model",
            "created": created,
            "owned_by": "splash",
            "max_model_len": service.engine.max_model_len,
        }

    @router.get("/v1/models", responses=documented(Models))
    async def list_models() -> Response:
        """The one model that is served."""
        return answer({"object": "list", "data": [model()]})

    @router.get("/v1/models/{name:path}", responses=documented(ServedModel))
    async def get_model(name: str) -> Response:
        """The model of that name."""
        if name != service.settings.model:
            raise model_not_found(name, service.settings.model)
        return answer(model())

    return router


def _state_router(service: Service) -> APIRouter:
    router = APIRouter(responses=ERRORS)
    engine = service.engine

    @router.get("/health")
    async def health() -> Response:
        """200 unless the engine has died; with its load once it is ready."""
        service.check_alive()
        if not service.loaded():
            return answer({"status": "ok", "ready": False})
        stats = msgspec.to_builtins(engine.stats())
        return answer({"status": "ok", "ready": True, "live": service.intake.live, **stats})

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are served; 503 while the model loads, the ranks are replaced or the server stops."""
        service.check_ready()
        if service.intake.draining:
            raise shutting_down()
        if engine.restarting:
            raise engine_restarting()
        return answer({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        """The version of SPLASH."""
        return answer({"version": service.settings.version})

    return router
