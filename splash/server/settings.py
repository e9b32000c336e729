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
        cors_origins: origins of web pages that may use the server, "*" for all; its own always may.
    """

    model: str
    version: str
    api_keys: tuple[ApiKey, ...] = ()
    tool_format: str = "auto"
    max_body_bytes: int = 16 << 20
    cors_origins: tuple[str, ...] = ()
