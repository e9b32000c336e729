"""API keys: who may ask for what.

A request needs one of the keys, where there are any, and one with the admin scope to change the layout. Probes stay
open, and so does the live page itself, which shows nothing until it is given a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from splash.core.errors import ConfigError
from splash.server.errors import ApiError

_OPEN = frozenset({"/", "/health", "/ready", "/version"})
_OPEN_FOLDER = "/page/"
_STATE = "may_change_layout"
_ADMIN = frozenset({("POST", "/layout"), ("DELETE", "/layout/switch")})


@dataclass(frozen=True)
class ApiKey:
    """A secret that clients send as a bearer token. `admin` lets them change the layout."""

    secret: str = field(repr=False)
    admin: bool = False


def read_keys(option: str | None, file: str | None, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """All keys of a server.

    Args:
        option: the one key of a server that one person runs: it has every scope.
        file: path of a file with a key on each line, followed by `admin` where it has that scope. Empty lines and
            those that begin with # do not count.
        environment: SPLASH_API_KEYS and SPLASH_ADMIN_KEYS hold keys, separated by commas.

    Raises:
        ConfigError: a key is empty, or the file cannot be read or has a line of another form.
    """
    keys = [] if option is None else [ApiKey(option, admin=True)]
    for name, admin in (("SPLASH_API_KEYS", False), ("SPLASH_ADMIN_KEYS", True)):
        keys += [ApiKey(secret, admin) for text in environment.get(name, "").split(",") if (secret := text.strip())]
    if file is not None:
        keys += _read_file(Path(file).expanduser())
        if not keys:
            raise ConfigError("api_key_file", f"{file} has no keys")
    if any(not key.secret for key in keys):
        raise ConfigError("api_key", "must not be empty; null asks for none")
    return tuple(keys)


def _read_file(path: Path) -> list[ApiKey]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", f"{path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[1:] not in ([], ["admin"]):
            raise ConfigError("api_key_file", f"{path} line {number} must be a key, or a key and the word admin")
        keys.append(ApiKey(words[0], admin=len(words) > 1))
    return keys


class BearerAuth:
    """Middleware that answers 401 unless the request carries a key, and 403 where the key's scope is too small.

    It runs before routing and before the body is read, so that nobody without a key learns anything.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._keys = [(_digest(key.secret.encode()), key.admin) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        path = scope["path"]
        needs_key = scope["type"] == "http" and path not in _OPEN and not path.startswith(_OPEN_FOLDER)
        if needs_key and (refusal := self._refusal(scope)) is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are Latin-1; a key beyond that arrives as UTF-8 bytes. Digests have one length, and every key is
        # compared with, so that the time taken tells nothing.
        digest = _digest(secret.strip().encode("latin-1"))
        matches = [(hmac.compare_digest(digest, expected), admin) for expected, admin in self._keys]
        if scheme.lower() != "bearer" or not any(matched for matched, _ in matches):
            return ApiError(
                401,
                "missing or wrong API key; send `Authorization: Bearer <api_key>`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        is_admin = any(matched and admin for matched, admin in matches)
        scope.setdefault("state", {})[_STATE] = is_admin
        if (scope["method"], scope["path"]) in _ADMIN and not is_admin:
            return ApiError(403, "this API key may not change the layout; an admin's may", code="insufficient_scope")
        return None


def may_change_layout(scope: Scope) -> bool:
    """Whether a request that was let in has a key of the admin scope; anybody has, where there are no keys."""
    allowed: bool = scope.get("state", {}).get(_STATE, True)
    return allowed


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
