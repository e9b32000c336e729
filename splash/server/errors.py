"""Every refusal and failure in the OpenAI API's shape: {"error": {"message", "type", "param", "code"}}.

Where a switch of layouts is what went wrong, the error has its record as well, under "switch".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import Response

from splash.core.errors import CapacityError, ConfigError, DeadlineError, GrammarError, RequestError, SplashError

UNSUPPORTED = {
    "suffix": "inserting before a suffix is not supported",
    "functions": "is not supported any more; use tools",
    "function_call": "is not supported any more; use tool_choice",
    "modalities": "only ['text'] is supported",
    "audio": "only text is supported",
    "web_search_options": "searching the web is not supported",
    "prediction": "predicted outputs are not supported",
    "verbosity": "is not supported",
    "reasoning_effort": "is not supported; templates that know it take it in chat_template_kwargs",
}

_ALTERNATIVES = {
    "prompt": "must be text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "must be text or a list of texts, none of them empty",
    "tool_choice": "must be none, auto, required, or {'type': 'function', 'function': {'name': ...}}",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer other than success."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault."},
    "5XX": {"model": ErrorBody, "description": "The server is at fault, or not ready."},
}


class ApiError(Exception):
    """An answer other than success, ready to be sent.

    Attributes:
        status: HTTP status.
        message: for people.
        type: "invalid_request_error" where the client is at fault, "rate_limit_error" where there are too many of
            them, "server_error" otherwise.
        param: the parameter at fault, or None.
        code: for programs, or None.
        headers: further response headers.
        details: further entries of the error, by name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    def body(self) -> dict[str, Any]:
        """The error as JSON values."""
        # A client's own text may hold lone surrogates, which UTF-8 cannot carry.
        message, param = (_sendable(text) if text is not None else None for text in (self.message, self.param))
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code, **self.details}}

    def response(self) -> Response:
        """The error as an HTTP response."""
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


def from_splash(error: SplashError) -> ApiError:
    """What to answer for an error of the engine: the client's fault, or ours."""
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        return ApiError(400, str(error), param=error.field, code=code)
    if isinstance(error, DeadlineError):
        return ApiError(408, str(error), param="timeout", code="deadline_exceeded")
    if isinstance(error, GrammarError):
        message = f"the output cannot be kept to the format asked for: {error}"
        return ApiError(400, message, code="grammar_failed")
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="request_too_large")
    return ApiError(500, f"the engine failed: {error}", type="server_error", code="engine_error")


class ContextLengthError(RequestError):
    """Prompt and output do not fit in the model's context."""


def engine_dead(error: SplashError) -> ApiError:
    """The group of ranks has died, and nothing can be served any more."""
    return ApiError(503, f"the engine has stopped: {error}", type="server_error", code="engine_dead")


def engine_loading() -> ApiError:
    """The model is not loaded yet."""
    return ApiError(
        503, "the model is still loading", type="server_error", code="loading", headers={"Retry-After": "5"}
    )


def engine_restarting() -> ApiError:
    """Ranks have died and are being replaced. Requests are taken all the same, and wait."""
    return ApiError(
        503, "the ranks are being started anew", type="server_error", code="restarting", headers={"Retry-After": "5"}
    )


def body_too_large(max_bytes: int) -> ApiError:
    """The body has more bytes than are accepted."""
    return ApiError(413, f"the body may have at most {max_bytes} bytes", code="body_too_large")


def shutting_down() -> ApiError:
    """The server stops, and requests have had their time to finish."""
    return ApiError(503, "the server is shutting down", type="server_error", code="shutting_down")


def overloaded(most: int, retry_after_s: int) -> ApiError:
    """As many requests are being served as the server takes."""
    return ApiError(
        429,
        f"the server is busy with as many requests as it takes, {most}; try again in {retry_after_s} s",
        type="rate_limit_error",
        code="overloaded",
        headers={"Retry-After": str(retry_after_s)},
    )


def model_not_found(name: str, served: str) -> ApiError:
    """The client asks for a model that is not served here."""
    return ApiError(
        404, f"model {name!r} does not exist here; {served!r} is served", param="model", code="model_not_found"
    )


def bad_option(error: ConfigError) -> ApiError:
    """A parameter has a value that the engine cannot be switched to."""
    return ApiError(400, str(error), param=error.field, code="invalid_value")


def switch_not_committed(record: Mapping[str, Any]) -> ApiError:
    """A switch has ended otherwise than asked for; the layout from before serves on."""
    status, reason = record["status"], record["reason"]
    ended = status if status == "failed" else f"was {status}"
    message = f"the switch from {record['from']} to {record['to']} {ended}" + (f": {reason}" if reason else "")
    type = "server_error" if status == "failed" else "invalid_request_error"
    return ApiError(409, message, type=type, code=f"switch_{status}", details={"switch": record})


def switch_not_aborted(record: Mapping[str, Any]) -> ApiError:
    """The step in flight commits the switch, and ends it one way or the other."""
    message = f"the switch from {record['from']} to {record['to']} is being committed and ends by itself"
    return ApiError(409, message, code="switch_committing", details={"switch": record})


def no_switch() -> ApiError:
    """There is nothing to abort."""
    return ApiError(404, "no switch is under way", code="no_switch")


def install_handlers(app: FastAPI) -> None:
    """Answer every exception in the one shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(SplashError, _on_splash_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_splash_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SplashError)
    return from_splash(error).response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _invalid(error.errors()).response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            return ApiError(404, f"unknown request URL: {where}", code="unknown_url").response()
        case 405:
            # The exception knows one route only, and a URL may have several.
            methods = request.app.openapi()["paths"].get(request.url.path, {})
            allowed = ", ".join(map(str.upper, methods)) or (error.headers or {}).get("Allow", "")
            message = f"method not allowed: {where}; allowed is {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed}).response()
        case 400:
            return ApiError(400, str(error.detail), code="invalid_body").response()
        case 413:
            return ApiError(413, str(error.detail), code="body_too_large").response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


async def _on_exception(request: Request, error: Exception) -> Response:
    return ApiError(500, "internal error", type="server_error", code="internal_error").response()


def _invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Turn the first problem that validation found into an answer."""
    # Of a union's branches, the one that got furthest into the value names the real problem.
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    error = max(same_field, key=lambda error: len(_path(error)))
    kind, path = error["type"], _path(error)
    param = ".".join(path) or None
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if not path:
        message = error["msg"].removeprefix("Value error, ")
        if kind in ("missing", "model_attributes_type", "dict_type", "model_type"):
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        named = message.split(" ", 1)[0] if kind == "value_error" else None
        return ApiError(400, message, param=named, code="invalid_value")
    if any(error["type"] == "string_unicode" for error in same_field):
        return ApiError(400, f"{param}: is not valid Unicode", param=param, code="invalid_value")
    if path[0] in _ALTERNATIVES and kind != "missing":
        return ApiError(400, f"{path[0]}: {_ALTERNATIVES[path[0]]}", param=path[0], code="invalid_value")
    if kind == "extra_forbidden":
        reason = UNSUPPORTED.get(path[-1])
        message = f"{param}: {reason}" if reason else f"unknown parameter: {param}"
        return ApiError(400, message, param=param, code="unsupported_parameter" if reason else "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"missing required parameter: {param}", param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {error['msg'].removeprefix('Value error, ')}", param=param, code="invalid_value")


def _path(error: Mapping[str, Any]) -> list[str]:
    """Where in the body or the query the problem is, without pydantic's names for the branches of a union."""
    location = error["loc"][1:] if error["loc"] and error["loc"][0] in ("body", "query") else error["loc"]
    if error["type"] == "json_invalid":
        return []
    return [str(part) for i, part in enumerate(location) if isinstance(part, int) or _is_name(part, i)]


def _is_name(part: str, depth: int) -> bool:
    return depth == 0 or not (part in ("str", "int", "float", "bool", "constrained-str") or "[" in part)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
