"""Tools, reasoning and response formats, through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from splash.engine.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = [{"role": "user", "content": "hello"}]
THINKING_GLM = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>"
    "<arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think | default(true) %}<think>{% else %}<think></think>"
    "{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{{ tools | tojson }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is not none %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ call.function.name + '\n```json\n' + call.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}{% endfor %}"
)
SPECIALS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>")
GLM_CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Tokenizer]:
    conftest: Any = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))

    def folder() -> Path:
        return tmp_path_factory.mktemp("tokenizer")

    return {
        "glm": conftest.train_tokenizer(folder(), THINKING_GLM, SPECIALS),
        "deepseek": conftest.train_tokenizer(folder(), DEEPSEEK),
        "json": conftest.train_tokenizer(folder()),
    }


@pytest.fixture
def served_as(serve: Callable[..., Any], tokenizers: dict[str, Tokenizer]) -> Callable[[str, str], Any]:
    """A server of a family's model that answers with a text."""

    def start(family: str, script: str) -> Any:
        served = serve()
        served.engine.tokenizer = tokenizers[family]
        served.engine.__post_init__()
        served.engine.script = script
        return served

    return start


def chat(served: Any, messages: list[Any] = USER, **options: Any) -> Any:
    return served.client.chat.completions.create(model="scripted", messages=messages, **options)


def streamed(served: Any, **options: Any) -> tuple[dict[str, str], list[tuple[str, str]], str]:
    """(text by field, calls, finish reason) of a stream."""
    texts = {"content": "", "reasoning_content": ""}
    calls: dict[int, list[str]] = {}
    finish = ""
    for chunk in chat(served, stream=True, **options):
        (choice,) = chunk.choices
        for field in texts:
            texts[field] += getattr(choice.delta, field, None) or ""
        for call in choice.delta.tool_calls or []:
            made = calls.setdefault(call.index, ["", ""])
            made[0] += call.function.name or ""
            made[1] += call.function.arguments or ""
            assert call.id.startswith("call_")
        finish = choice.finish_reason or finish
    return texts, [(name, arguments) for name, arguments in calls.values()], finish


@pytest.mark.parametrize(
    ("family", "script", "content", "reasoning"),
    [
        ("glm", f"I wonder.\n</think>\nLet me see.\n{GLM_CALL}", "Let me see.", "I wonder."),
        ("glm", f"</think>{GLM_CALL}", None, ""),
        ("deepseek", f"Let me see.{DEEPSEEK_CALL}", "Let me see.", ""),
        ("json", '{"name": "weather", "arguments": {"city": "Oslo"}}', None, ""),
    ],
)
def test_calls_are_told_from_content(
    served_as: Callable[..., Any], family: str, script: str, content: str | None, reasoning: str
) -> None:
    served = served_as(family, script)
    (choice,) = chat(served, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == content
    assert getattr(choice.message, "reasoning_content", "") == reasoning
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    texts, calls, finish = streamed(served, tools=[WEATHER])
    assert texts == {"content": content or "", "reasoning_content": reasoning}
    assert calls == [("weather", call.function.arguments)]
    assert finish == "tool_calls"


def test_a_conversation_goes_on_after_a_call(served_as: Callable[..., Any]) -> None:
    for family, written in (
        ("glm", GLM_CALL),
        ("deepseek", '<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'),
    ):
        served = served_as(family, "</think>" + GLM_CALL if family == "glm" else DEEPSEEK_CALL)
        answer = chat(served, tools=[WEATHER]).choices[0].message
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "rain"}
        chat(served, [*USER, answer.model_dump(), result], tools=[WEATHER], max_tokens=1)
        prompt = served.engine.tokenizer.decode(served.engine.requests[-1].prompt, skip_special_tokens=False)
        assert written in prompt
        assert "<|tool|>rain" in prompt
        assert '"description": "The weather."' in prompt
        assert "None" not in prompt


def test_without_tools_markers_are_text(served_as: Callable[..., Any]) -> None:
    served = served_as("glm", f"hm</think>{GLM_CALL}")
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = chat(served, **options).choices
        assert (choice.message.content, choice.finish_reason) == (GLM_CALL, "stop")
        assert choice.message.tool_calls is None
        prompt = served.engine.tokenizer.decode(served.engine.requests[-1].prompt)
        assert "weather" not in prompt


def test_reasoning_can_be_off_by_the_template(served_as: Callable[..., Any]) -> None:
    served = served_as("glm", "no thought")
    message = chat(served, extra_body={"chat_template_kwargs": {"think": False}}).choices[0].message
    assert message.content == "no thought"
    assert not hasattr(message, "reasoning_content")
    message = chat(served).choices[0].message
    assert (message.content, message.reasoning_content) == ("", "no thought")


def test_log_probabilities_cover_every_token(served_as: Callable[..., Any]) -> None:
    served = served_as("glm", f"I wonder.</think>{GLM_CALL}")
    options = {"tools": [WEATHER], "logprobs": True}
    whole = chat(served, **options).choices[0].logprobs.content
    pieces = [chunk.choices[0].logprobs for chunk in chat(served, stream=True, **options)]
    assert [score for piece in pieces if piece is not None for score in piece.content] == whole
    assert b"".join(bytes(score.bytes) for score in whole).decode() == f"I wonder.</think>{GLM_CALL}<|end|>"


@pytest.mark.parametrize(
    ("options", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}}, True),
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, True),  # type: ignore[dict-item]
    ],
)
@pytest.mark.parametrize("family", ["glm", "deepseek", "json"])
def test_only_what_is_demanded_is_enforced(
    served_as: Callable[..., Any], family: str, options: dict[str, Any], constrained: bool
) -> None:
    served = served_as(family, "hello")
    chat(served, **{"tools": [WEATHER], **options})
    assert (served.engine.requests[-1].params.grammar is not None) is constrained


def test_parameters_that_cannot_be_enforced_are_any_object_unless_strict(served_as: Callable[..., Any]) -> None:
    served = served_as("json", "hello")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    chat(served, tools=[tool], tool_choice="required")
    assert '"arguments": {"type": "object"}' in served.engine.requests[-1].params.grammar
    tool["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
        chat(served, tools=[tool])


class City(pydantic.BaseModel):
    """Where it rains."""

    name: str
    days: int = 1


def test_the_clients_own_helpers_work(served_as: Callable[..., Any]) -> None:
    served = served_as("json", '{"name": "Oslo", "days": 3}')
    parsed = served.client.chat.completions.parse(model="scripted", messages=USER, response_format=City)
    assert parsed.choices[0].message.parsed == City(name="Oslo", days=3)
    with served.client.chat.completions.stream(model="scripted", messages=USER, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(name="Oslo", days=3)
    served.engine.script = '{"name": "City", "arguments": {"name": "Oslo", "days": 3}}'
    tool = openai.pydantic_function_tool(City)
    parsed = served.client.chat.completions.parse(model="scripted", messages=USER, tools=[tool])
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == City(name="Oslo", days=3)
    with served.client.chat.completions.stream(model="scripted", messages=USER, tools=[tool]) as stream:
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == City(name="Oslo", days=3)


def test_structured_outputs_of_completions(served: Any) -> None:
    for asked in ({"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"json": {"type": "integer"}}, {"json": True}):
        served.client.completions.create(
            model="scripted", prompt="hello", extra_body={"structured_outputs": asked}, max_tokens=2
        )
        assert served.engine.requests[-1].params.grammar


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_on_the_way_is_an_error(served: Any, stream: bool) -> None:
    with pytest.raises(openai.APIError, match="too costly") as failed:
        list(chat(served, [{"role": "user", "content": "<|fail|>"}], stream=stream))
    assert failed.value.code == "grammar_failed"
    assert not served.engine.running


def test_a_template_without_tools_refuses_them(serve: Callable[..., Any], tmp_path: Path, request: Any) -> None:
    conftest: Any = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    served = serve()
    served.engine.tokenizer = conftest.train_tokenizer(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="does not tell the model about tools"):
        chat(served, tools=[WEATHER])
