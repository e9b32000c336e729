"""Every refusal has the right status and the OpenAI API's shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LAYOUT_ROUTES = (("GET", "/layout"), ("POST", "/layout"), ("GET", "/layout/history"), ("DELETE", "/layout/switch"))
USER = [{"role": "user", "content": "hi"}]


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def made_call(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


MADE_CALL = made_call("{}") | {"content": "a"}


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] == ("invalid_request_error" if response.status_code < 500 else "server_error")
    return body["error"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {"prompt": None}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a \ud800"}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a"] * 600, "n": 2}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 512}, "max_tokens", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "4"}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 20}, "min_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "temperature": float("nan")}, "temperature", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "temperature": "warm"}, "temperature", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "top_k": 2**70}, "top_k", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "priority": 2**63}, "priority", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "priority": 1.5}, "priority", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 1025}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [5] * 1025}, "stop_token_ids", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop": ["\ud800"]}, "stop.0", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1_0": 1}}, "logit_bias", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1100)}}, "logit_bias", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, "structured_outputs", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(("}}, "structured_outputs", "invalid_value"),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"json": {"type": "x"}}},
        "structured_outputs",
        "invalid_value",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos",
        "invalid_value",
    ),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "unknown_parameter"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    (CHAT, {}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "pirate", "content": "a"}]}, "messages.0.role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.id",
        "missing_required_parameter",
    ),
    (CHAT, {"messages": [*USER, MADE_CALL | {"role": "user"}]}, "messages.1", "invalid_value"),
    (CHAT, {"messages": [*USER, made_call("[]")]}, "messages.1.tool_calls", "invalid_value"),
    (CHAT, {"messages": [*USER, made_call("{")]}, "messages.1.tool_calls", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "context_length_exceeded"),
    (CHAT, {"messages": USER, "max_tokens": 600}, "max_tokens", "context_length_exceeded"),
    (CHAT, {"messages": USER, "max_completion_tokens": 600}, "max_completion_tokens", "context_length_exceeded"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
    (CHAT, {"messages": USER, "tools": [tool(name="a b")]}, "tools.0.function.name", "invalid_value"),
    (CHAT, {"messages": USER, "tools": [tool(), tool()]}, "tools", "invalid_value"),
    (CHAT, {"messages": USER, "tools": [tool()], "tool_choice": "must"}, "tool_choice", "invalid_value"),
    (CHAT, {"messages": USER, "tools": [tool()], "tool_choice": named("g")}, "tool_choice", "invalid_value"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        CHAT,
        {"messages": USER, "tools": [tool(strict=True, parameters={"type": "x"})]},
        "tools.0.function.parameters",
        "invalid_value",
    ),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    (CHAT, {"messages": USER, "response_format": json_schema({"type": "x"})}, "response_format", "invalid_value"),
    (CHAT, {"messages": USER, "response_format": json_schema({"$ref": "#/x"})}, "response_format", "invalid_value"),
    (CHAT, {"messages": USER, "response_format": json_schema(nested(300))}, "response_format", "invalid_value"),
    (
        CHAT,
        {"messages": USER, "response_format": json_schema({}), "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "invalid_value",
    ),
    (CHAT, {"messages": USER, "response_format": json_schema({}), "min_tokens": 3}, "min_tokens", "invalid_value"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
]


@pytest.fixture(scope="module")
def shared(tokenizer: Any, request: pytest.FixtureRequest) -> Any:
    """One server for all refusals: none of them may harm it."""
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    with conftest.serving(conftest.ScriptedEngine(tokenizer)) as running:  # type: ignore[union-attr]
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED)
def test_bad_requests(shared: Any, path: str, body: dict[str, Any], param: str, code: str, stream: bool) -> None:
    if stream and "stream_options" not in body:
        body = {**body, "stream": True}
    content = json.dumps(body)
    response = shared.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code), error
    assert param in error["message"] or param == "messages.1"
    assert not shared.engine.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"3", b"null", b'{"prompt": "\xff"}', b'{"\\ud800": 1}'])
def test_bodies_that_are_no_request(shared: Any, path: str, content: bytes) -> None:
    response = shared.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error_of(response)


DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = [
    b'{"prompt": %s}' % DEEP,
    b'{"prompt": "a", "max_tokens": 1%s}' % (b"0" * 10_000),
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "structured_outputs": {"json": {"a": %s}}}' % DEEP,
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"opening": %s}}' % DEEP,
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f",'
    b' "parameters": {"a": %s}}}], "tool_choice": "required"}' % DEEP,
    b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f",'
    b' "arguments": "%s"}}]}]}' % DEEP,
    b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema":'
    b' {"name": "a", "schema": {"pattern": "((((((((((a{100}){100}){100}){100}){100}){100}){100}){100}){100})", "type":'
    b' "string"}}}}',
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_bodies_made_to_hurt(shared: Any, content: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        response = shared.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        error_of(response)
    assert not shared.engine.requests


def test_json_needs_no_content_type(shared: Any) -> None:
    response = shared.http.post(COMPLETIONS, content=b'{"prompt": 3}')
    assert error_of(response)["param"] == "prompt"
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = shared.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=form)
    assert response.status_code == 400
    assert "Content-Type" in error_of(response)["message"]


@pytest.mark.parametrize("model", ["gpt-4", "\ud800"])
def test_another_model(shared: Any, model: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        content = json.dumps({**body, "model": model})
        response = shared.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 404
        error = error_of(response)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_unknown_routes_and_methods(shared: Any) -> None:
    response = shared.http.get("/v1/nothing")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    response = shared.http.get(COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "GET" in error_of(response)["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}},
        {"logit_bias": None, "response_format": None, "temperature": None, "stop": None, "never_heard_of": None},
    ],
)
def test_parameters_that_ask_for_nothing_are_accepted(served: Any, extra: dict[str, Any]) -> None:
    response = served.http.post(CHAT, json={"messages": USER, "max_tokens": 1, **extra})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic s3cret", "Bearer", "Bearer s3cret2", "Bearer \xe9"])
def test_without_the_key_nothing_is_served(serve: Callable[..., Any], header: str | None) -> None:
    served = serve(api_key="s3cret")
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/nothing"), *LAYOUT_ROUTES):
        response = served.http.request(method, path, headers=headers, content=b"{")
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert "s3cret" not in response.text
    for path in ("/health", "/ready", "/version"):
        assert served.http.get(path).status_code == 200


def test_with_the_key_all_is_served(serve: Callable[..., Any]) -> None:
    served = serve(api_key="clé")
    headers = {"authorization": "Bearer clé".encode()}
    assert served.http.get("/v1/models", headers=headers).status_code == 200
    served = serve(api_key="s3cret")
    assert served.client.models.list().data[0].id == "scripted"


def test_while_the_model_loads(serve: Callable[..., Any]) -> None:
    served = serve(loaded=lambda: False)
    assert served.http.get("/health").json() == {"status": "ok", "ready": False}
    assert served.http.get("/version").status_code == 200
    for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", COMPLETIONS), *LAYOUT_ROUTES):
        body = {"layout": "dp"} if path == "/layout" else {"prompt": "a"}
        response = served.http.request(method, path, json=body)
        assert (response.status_code, error_of(response)["code"]) == (503, "loading")


@pytest.mark.parametrize("n", [1, 3])
def test_the_engine_dies_under_a_request(served: Any, n: int) -> None:
    response = served.http.post(COMPLETIONS, json={"prompt": "<|die|>", "n": n})
    assert response.status_code == 500
    assert "rank 1 died" in error_of(response)["message"]
    for method, path in (("GET", "/health"), ("GET", "/ready"), *LAYOUT_ROUTES):
        response = served.http.request(method, path, json={"layout": "dp"})
        assert (response.status_code, error_of(response)["code"]) == (503, "engine_dead")
    assert served.http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503


@pytest.mark.parametrize("n", [1, 3])
def test_the_engine_dies_under_a_stream(served: Any, n: int) -> None:
    stream = served.client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "<|die|>"}], stream=True, n=n
    )
    with pytest.raises(openai.APIError, match="rank 1 died"):
        list(stream)
    assert not served.engine.running
