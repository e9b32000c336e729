"""A stream adds up to what the same request answers as a whole: text, log-probabilities, finish reasons and usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PIECES = [
    "hello ",
    "the fox",
    "👩‍👩‍👧‍👦",
    "e\u0301",
    "<think>",
    "</think>",
    "\n",
    "é",
    "{",
    '{"name": "f"}',
    "<|user|>",
    "\ufffd",
]
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 60),
    "n": st.integers(1, 3),
    "stop": st.lists(st.sampled_from(["fox", "o t", "👧", "é", "\n", "}"]), min_size=1, max_size=2),
    "seed": st.integers(0, 9),
}
BODY = st.fixed_dictionaries({}, optional=OPTIONS)
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)


def events_of(served: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = served.http.post(path, json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def put_together(events: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """The choices of a stream, each with all its text, log-probabilities and calls."""
    choices: list[dict[str, Any]] = [
        {"text": "", "thought": "", "logprobs": {}, "calls": []} for _ in range(num_choices)
    ]
    for event in events:
        for piece in event["choices"]:
            choice, delta = choices[piece["index"]], piece.get("delta", piece)
            choice["text"] += delta.get("text") or delta.get("content") or ""
            choice["thought"] += delta.get("reasoning_content", "")
            choice["calls"] += [call["function"] for call in delta.get("tool_calls", [])]
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + (values or [])
            for name in ("finish_reason", "stop_reason"):
                assert choice.get(name) is None, "a choice ends once"
                choice[name] = piece.get(name)
    return choices


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXTS, script=st.none() | TEXTS, body=BODY, logprobs=st.none() | st.integers(0, 2), echo=st.booleans())
def test_completions(
    served: Any, prompt: str, script: str | None, body: dict[str, Any], logprobs: int | None, echo: bool
) -> None:
    served.engine.script = script
    body = {
        "prompt": [prompt, "the"],
        **body,
        "echo": echo,
        "logprobs": logprobs,
    }
    whole = served.http.post("/v1/completions", json=body).json()
    events = events_of(served, "/v1/completions", body)
    assert events[-1]["usage"] == whole["usage"]
    for choice, expected in zip(put_together(events, len(whole["choices"])), whole["choices"], strict=True):
        assert choice["text"] == expected["text"]
        assert choice["logprobs"] == (expected["logprobs"] or {})
        assert (choice["finish_reason"], choice["stop_reason"]) == (expected["finish_reason"], expected["stop_reason"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXTS, script=st.none() | TEXTS, body=BODY, logprobs=st.booleans(), tools=st.booleans())
def test_chat(served: Any, prompt: str, script: str | None, body: dict[str, Any], logprobs: bool, tools: bool) -> None:
    served.engine.script = script
    offered = {"tools": [{"type": "function", "function": {"name": "f"}}]} if tools else {}
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "logprobs": logprobs,
        "max_tokens": 60,
        **body,
        **offered,
    }
    whole = served.http.post("/v1/chat/completions", json=body).json()
    events = events_of(served, "/v1/chat/completions", body)
    assert events[-1]["usage"] == whole["usage"]
    for choice, expected in zip(put_together(events, len(whole["choices"])), whole["choices"], strict=True):
        message = expected["message"]
        assert choice["text"] == (message["content"] or "")
        assert choice["thought"] == message.get("reasoning_content", "")
        assert choice["calls"] == [call["function"] for call in message.get("tool_calls", [])]
        scores = {key: value for key, value in (expected["logprobs"] or {}).items() if value}
        assert {key: value for key, value in choice["logprobs"].items() if value} == scores
        assert (choice["finish_reason"], choice["stop_reason"]) == (expected["finish_reason"], expected["stop_reason"])


@pytest.fixture
def served(serve: Callable[..., Any], tmp_path: Any, request: pytest.FixtureRequest) -> Any:
    """A server whose template thinks."""
    conftest: Any = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    running = serve()
    template = conftest.TEMPLATE.replace("<|assistant|>", "<|assistant|>{# </think> #}")
    running.engine.tokenizer = conftest.train_tokenizer(tmp_path, template)
    return running
