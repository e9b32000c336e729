"""ServerSettings: what the HTTP server needs beside an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """How the server presents itself.

    Attributes:
        model: name under which clients ask for the model.
        version: of SPLASH, as `/version` gives it.
        api_key: the bearer token that clients must send, or None to ask for none.
        tool_format: how the model writes calls of tools, "auto" for as its chat template shows.
    """

    model: str
    version: str
    api_key: str | None = None
    tool_format: str = "auto"
