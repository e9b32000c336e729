"""POST /v1/completions, through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest

EMOJI = "👩‍👩‍👧‍👦 hé"


def complete(served: Any, **options: Any) -> Any:
    return served.client.completions.create(model="scripted", **{"prompt": "hello world", "max_tokens": 4, **options})


def streamed(served: Any, **options: Any) -> list[Any]:
    return list(complete(served, stream=True, **options))


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def finish_of(chunks: list[Any], index: int = 0) -> list[str]:
    found = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.index == index]
    return [reason for reason in found if reason is not None]


@pytest.mark.parametrize(
    ("options", "text", "finish"),
    [
        ({"prompt": EMOJI, "max_tokens": 100}, None, "length"),
        ({"prompt": "hello there world", "max_tokens": 100, "stop": "re wo"}, "hello the", "stop"),
        ({"prompt": "hello there world", "max_tokens": 100, "stop": ["zz", "re w", "world"]}, "hello the", "stop"),
        ({"prompt": "hello there", "max_tokens": 3, "stop": "zzz"}, None, "length"),
        ({"prompt": "hello", "echo": True, "max_tokens": 1}, None, "length"),
    ],
)
def test_a_stream_is_the_whole_in_pieces(served: Any, options: dict[str, Any], text: str | None, finish: str) -> None:
    whole, chunks = complete(served, **options), streamed(served, **options)
    assert whole.choices[0].text == text_of(chunks)
    assert finish_of(chunks) == [whole.choices[0].finish_reason] == [finish]
    assert "\ufffd" not in "".join(chunk.choices[0].text for chunk in chunks[:-2])
    if text is not None:
        assert whole.choices[0].text == text
        assert whole.choices[0].stop_reason in ("re wo", "re w")


def test_stop_strings_never_show_in_a_stream(served: Any) -> None:
    shown = ""
    for chunk in streamed(served, prompt="hello there world", max_tokens=100, stop="re wo"):
        shown += chunk.choices[0].text
        assert "hello the".startswith(shown)


def test_max_tokens_defaults_to_16_and_to_what_fits(served: Any) -> None:
    def generated(prompt: list[int]) -> int:
        body = {"prompt": prompt}
        return served.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]

    assert generated([70] * 5) == 16
    assert generated([70] * 505) == 7


def test_every_form_of_prompt_and_n(served: Any) -> None:
    tokens = served.engine.tokenizer.encode("hello world")
    for prompt in ("hello world", tokens):
        assert complete(served, prompt=prompt, max_tokens=len(tokens)).choices[0].text == "hello world"
    for prompt in (["hello", "the fox"], [served.engine.tokenizer.encode(text) for text in ("hello", "the fox")]):
        answer = complete(served, prompt=prompt, n=2, max_tokens=1, echo=True, seed=2**63 - 1)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        starts = ["hello", "hello", "the fox", "the fox"]
        assert all(choice.text.startswith(start) for choice, start in zip(answer.choices, starts, strict=True))
        assert [r.params.seed for r in served.engine.requests[-4:]] == [2**63 - 1, -(2**63), -(2**63) + 1, -(2**63) + 2]
        chunks = streamed(served, prompt=prompt, n=2, max_tokens=1, echo=True)
        assert [text_of(chunks, index) for index in range(4)] == [choice.text for choice in answer.choices]


def test_usage_counts_each_prompt_once(served: Any) -> None:
    usage = complete(served, prompt=[[70] * 3, [71] * 5], n=3, max_tokens=4).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 24, 32)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_usage_comes_last_in_a_stream_that_asks_for_it(served: Any) -> None:
    chunks = streamed(served, prompt=[70] * 3, n=2, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 8)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert all("usage" not in chunk.model_fields_set for chunk in streamed(served))


def test_the_stream_is_well_formed_on_the_wire(served: Any) -> None:
    body = {"prompt": EMOJI, "max_tokens": 30, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("logprobs", [0, 2])
def test_logprobs(served: Any, logprobs: int) -> None:
    options = {"prompt": EMOJI, "max_tokens": 30, "logprobs": logprobs}
    scores = complete(served, **options).choices[0].logprobs
    pieces = [c.choices[0].logprobs for c in streamed(served, **options) if c.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(scores, name) == [value for piece in pieces for value in getattr(piece, name)]
        assert len(getattr(scores, name)) == 30
    assert scores.token_logprobs == [-0.5] * 30
    assert scores.tokens[0] == r"bytes:\xf0"
    assert all(len(top) >= max(1, logprobs) for top in scores.top_logprobs)
    assert scores.text_offset == sorted(scores.text_offset)


def test_a_prompt_is_scored_with_its_echo(served: Any) -> None:
    text = "<|user|>hé the fox"
    tokens = served.engine.tokenizer.encode(text)
    for prompt in (text, tokens):
        choice = complete(served, prompt=prompt, echo=True, logprobs=1, max_tokens=2).choices[0]
        scores = choice.logprobs
        assert len(scores.tokens) == len(tokens) + 2
        assert scores.token_logprobs == [None] + [-0.25] * (len(tokens) - 1) + [-0.5] * 2
        assert scores.top_logprobs[0] is None
        assert scores.text_offset[:2] == [0, len("<|user|>")]
        assert scores.text_offset[len(tokens)] == len(text)
        assert choice.text.startswith(text)
        assert served.engine.requests[-1].params.prompt_logprobs == 1
    assert complete(served, logprobs=1).choices[0].logprobs.token_logprobs[0] == -0.5
    assert served.engine.requests[-1].params.prompt_logprobs is None


def test_sampling_parameters_reach_the_engine(served: Any) -> None:
    extra = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "priority": -3,
    }
    complete(served, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=3, extra_body=extra)
    params = served.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty) == (0.5, 0.9, 1, -1)
    assert (params.top_k, params.min_p, params.repetition_penalty, params.ignore_eos) == (0, 0.1, 1.2, True)
    assert (params.min_tokens, params.stop_token_ids, params.seed, params.max_tokens) == (2, (5,), 3, 4)
    assert served.engine.requests[-1].priority == -3
    complete(served)
    assert served.engine.requests[-1].priority == 0
    assert served.engine.requests[-1].params.temperature == 1.0
