"""Answers taken apart: the same parts for any chunking, in every family's notation, and nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.server.chat_format import ChatFormat, Content, Part, Reply, Thought
from splash.server.tool_formats import DeepSeek, Glm, PlainJson, TaggedJson, Tool, ToolCall, ToolFormat, tool_format

TOOLS = {
    "weather": Tool(
        "weather",
        {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "all": {}}},
    ),
    "now": Tool("now", {"type": "object"}),
}
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo",  "days": 3}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo",  "days": 3}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
GLM_45 = (
    "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
GLM_47 = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
)
TAGGED = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
PLAIN = '[{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}, {"name": "now", "arguments": "{}"}]'
FAMILIES: list[tuple[ToolFormat, str]] = [
    (DeepSeek(True), V3),
    (DeepSeek(False), V31),
    (Glm(), GLM_45),
    (Glm(), GLM_47),
    (TaggedJson(), TAGGED),
    (PlainJson(), PLAIN),
]


def chat_format(tools: ToolFormat) -> ChatFormat:
    return ChatFormat(True, tools, True, frozenset())


def parts_of(format: ToolFormat, reasoning: Any, text: str, cuts: list[int], tools: Any = TOOLS) -> list[Part]:
    """All parts, with neighbours of one kind joined."""
    reply = Reply(chat_format(format), reasoning, tools)
    parts: list[Part] = []
    turn = 0
    while text:
        length = cuts[turn % len(cuts)]
        parts += reply.push(text[:length])
        text, turn = text[length:], turn + 1
    return joined(parts + reply.finish())


def joined(parts: list[Part]) -> list[Part]:
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Content | Thought) and type(part) is type(last):
            result[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            result.append(part)
    return result


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize(("format", "text"), FAMILIES, ids=["v3", "v3.1", "glm4.5", "glm4.7", "tagged_json", "json"])
@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
def test_every_family_is_read(format: ToolFormat, text: str, cut: int) -> None:
    expected = [("weather", {"city": "Oslo", "days": 3}), ("now", {})]
    parts = parts_of(format, "never", text, [cut])
    assert calls_of(parts) == expected
    assert len(parts) == 2
    thought = parts_of(format, "open", f"\nI need\nthe weather.\n</think>\n\n{text}\n", [cut])
    assert thought[0] == Thought("I need\nthe weather.")
    assert calls_of(thought) == expected
    assert len(thought) == 3
    thought = parts_of(format, "maybe", f"\n<think>hm</think>{text}", [cut])
    assert thought[0] == Thought("hm")
    assert calls_of(thought) == expected
    if format.begin:
        said = parts_of(format, "never", f"Let me see. \n{text}", [cut])
        assert said[0] == Content("Let me see.")
        assert calls_of(said) == expected


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        V3,
        V31,
        GLM_45,
        TAGGED,
        PLAIN,
        "now",
        "{}",
        '{"name": "now"}',
        "[",
        " ",
        "\n",
        "<",
        "hi",
        "é",
        "</",
        "```json\n",
    ),
]
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from([family for family, _ in FAMILIES]),
    reasoning=st.sampled_from(["never", "maybe", "open"]),
    text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    cuts=CUTS,
    offers=st.booleans(),
)
def test_parts_do_not_depend_on_the_cuts(
    family: ToolFormat, reasoning: Any, text: str, cuts: list[int], offers: bool
) -> None:
    tools = TOOLS if offers else None
    whole = parts_of(family, reasoning, text, [len(text) + 1], tools)
    assert parts_of(family, reasoning, text, cuts, tools) == whole
    if not any(isinstance(part, ToolCall) for part in whole):
        said = "".join(part.text for part in whole)  # type: ignore[union-attr]
        marked = reasoning == "maybe" and text.lstrip().startswith("<think>")
        without = text.replace("<think>", "", 1) if marked else text
        without = without.replace("</think>", "", 1) if marked or reasoning == "open" else without
        assert "".join(said.split()) == "".join(without.split())
        if reasoning == "never":
            assert said == text
    if not offers:
        assert not calls_of(whole)


def test_what_is_no_call_is_content() -> None:
    for format, text in (
        (TaggedJson(), "a <tool_call>\nnot json</tool_call> b"),
        (TaggedJson(), '<tool_call>{"name": 3}</tool_call>'),
        (TaggedJson(), '<tool_call>{"name": "now", "arguments": NaN}</tool_call>'),
        (Glm(), "<tool_call>now<arg_key>x</arg_key>oops</tool_call>"),
        (DeepSeek(True), "<｜tool▁calls▁begin｜> and then"),
        (DeepSeek(True), "x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜>"),
        (DeepSeek(True), "no calls<｜tool▁calls▁end｜> here"),
        (PlainJson(), '{"name": "unknown", "arguments": {}}'),
        (PlainJson(), '{"a": 1}\n'),
        (PlainJson(), "[" * 100_000),
    ):
        assert parts_of(format, "never", text, [5]) == [Content(text)]


def test_an_unfinished_call_is_a_call_only_where_it_is_complete() -> None:
    assert parts_of(TaggedJson(), "never", '<tool_call>{"name": "now"}', [3]) == [ToolCall("now", "{}")]
    assert parts_of(TaggedJson(), "never", 'a <tool_call>{"name": "no', [3]) == [Content('a <tool_call>{"name": "no')]
    assert parts_of(TaggedJson(), "open", "still thinking </thi", [3]) == [Thought("still thinking </thi")]


def test_values_of_text_stay_as_they_are_written() -> None:
    text = (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>12\n<b>é</arg_value>"
        '<arg_key>all</arg_key><arg_value>{"a": [1]}</arg_value>'
        "<arg_key>other</arg_key><arg_value>so</arg_value></tool_call>"
    )
    expected = {"city": "12\n<b>é", "all": {"a": [1]}, "other": "so"}
    assert calls_of(parts_of(Glm(), "never", text, [4])) == [("weather", expected)]


def test_work_is_linear_in_a_long_call() -> None:
    reply = Reply(chat_format(TaggedJson()), "never", TOOLS)
    reply.push("<tool_call>")
    searched: list[int] = []

    class Watched(str):
        def find(self, text: str, start: int = 0) -> int:  # type: ignore[override]
            searched.append(len(self) - start)
            return str.find(self, text, start)

        def __add__(self, text: str) -> Watched:
            return Watched(str(self) + text)

    reply._text = Watched()
    for _ in range(1000):
        reply.push("0123456789")
    assert len(searched) == 1000
    assert max(searched) < 50


def test_templates_tell_the_format() -> None:
    assert tool_format("auto", "... '<｜tool▁call▁begin｜>' ... ```json").fenced is True  # type: ignore[attr-defined]
    assert tool_format("auto", "... '<｜tool▁call▁begin｜>' ...").fenced is False  # type: ignore[attr-defined]
    assert tool_format("auto", "<tool_call> <arg_key>").name == "glm"
    assert tool_format("auto", "<tool_call>").name == "tagged_json"
    assert tool_format("auto", "").name == "json"
    assert tool_format("glm", "").name == "glm"
