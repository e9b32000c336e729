"""ServerSettings: what the HTTP server needs beside an engine."""

from __future__ import annotations

from dataclasses import dataclass

from splash.server.auth import ApiKey


@dataclass(frozen=True)
class ServerSettings:
    """How the server presents itself.

    Attributes:
        model: name under which clients ask for the model.
        version: of SPLASH, as `/version` gives it.
        api_keys: of which clients must send one, or none to ask for none.
        tool_format: how the model writes calls of tools, "auto" for as its chat template shows.
        max_body_bytes: largest body that is accepted.
        max_concurrent_requests: requests that are taken at once, running and waiting; more are answered 429.
        request_timeout_s: how long a request may take, in seconds; its `timeout` may only be shorter. None is no limit.
        log_requests: a line of log for every request, without its text.
        cors_origins: origins of web pages that may use the server, "*" for all; its own always may.
    """

    model: str
    version: str
    api_keys: tuple[ApiKey, ...] = ()
    tool_format: str = "auto"
    max_body_bytes: int = 16 << 20
    max_concurrent_requests: int = 1024
    request_timeout_s: float | None = None
    log_requests: bool = False
    cors_origins: tuple[str, ...] = ()
