"""POST /v1/chat/completions, through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

HELLO = [{"role": "system", "content": "hello"}, {"role": "user", "content": "the quick fox"}]


def chat(served: Any, messages: list[Any] = HELLO, **options: Any) -> Any:
    return served.client.chat.completions.create(model="scripted", messages=messages, **options)


def prompt_of(served: Any) -> str:
    return served.engine.tokenizer.decode(served.engine.requests[-1].prompt, skip_special_tokens=False)


def test_a_stream_has_role_text_end_usage(served: Any) -> None:
    whole = chat(served, max_tokens=8)
    chunks = list(chat(served, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    body = chunks[1:-2]
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None for chunk in body)
    assert "".join(chunk.choices[0].delta.content for chunk in body) == whole.choices[0].message.content
    assert chunks[-2].choices[0].delta.model_fields_set == set()
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"


def test_the_template_makes_the_prompt(served: Any) -> None:
    chat(served, max_completion_tokens=1)
    assert prompt_of(served) == "<|system|>hello<|end|><|user|>the quick fox<|end|><|assistant|>"
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    chat(served, [{"role": "developer", "content": "hello"}, {"role": "user", "content": parts}], max_tokens=1)
    assert prompt_of(served) == "<|system|>hello<|end|><|user|>the fox<|end|><|assistant|>"
    chat(served, HELLO[1:], max_tokens=1, extra_body={"chat_template_kwargs": {"opening": "hello"}})
    assert prompt_of(served) == "<|user|>the quick fox<|end|><|assistant|>hello"
    chat(served, HELLO[1:], max_tokens=1, extra_body={"add_generation_prompt": False})
    assert prompt_of(served) == "<|user|>the quick fox<|end|>"


def test_an_answer_can_be_sent_back_as_it_came(served: Any) -> None:
    answer = chat(served, max_tokens=3).choices[0].message
    chat(served, [*HELLO, answer.model_dump(), HELLO[1]], max_tokens=1)
    assert f"<|assistant|>{answer.content}<|end|>" in prompt_of(served)


def test_without_a_limit_the_rest_of_the_context_is_used(served: Any) -> None:
    usage = chat(served).usage
    assert usage.total_tokens == served.engine.max_model_len


def test_n_choices_have_their_own_seeds(served: Any) -> None:
    answer = chat(served, n=3, max_tokens=4, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert sorted(request.params.seed for request in served.engine.requests) == [7, 8, 9]
    chunks = list(chat(served, n=3, max_tokens=4, stream=True))
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason == "length"
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == answer.choices[index].message.content


def test_logprobs_carry_exact_bytes(served: Any) -> None:
    text = "👍🏽"
    options = {"messages": [{"role": "user", "content": text}], "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    scores = chat(served, **options).choices[0].logprobs.content
    assert bytes(byte for score in scores for byte in score.bytes) == b"<|user|>" + text.encode()
    assert scores[1].token == r"bytes:\xf0"
    assert [len(score.top_logprobs) for score in scores] == [2] * 9
    chunks = chat(served, stream=True, **options)
    pieces = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    assert [score for piece in pieces for score in piece.content] == scores
    assert chat(served, max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(served, max_tokens=2).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_may_refuse(served: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="tools are unknown here") as refused:
        chat(served, [{"role": "tool", "content": "x", "tool_call_id": "1"}], stream=stream)
    assert refused.value.param == "messages"
