"""Grammars of answers let through what the family's notation allows, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from splash.engine.grammar import Grammars, Notation, json_rule
from splash.server.chat_format import ChatFormat
from splash.server.structured import Demand, _grammar
from splash.server.tool_formats import DeepSeek, Glm, PlainJson, TaggedJson, Tool, ToolFormat, markers

TOOLS = [
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"$ref": "#/$defs/Days"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"Days": {"type": "integer"}},
        },
    ),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]
# One call, what a second adds, and what ends both.
CALLS: list[tuple[ToolFormat, str, str, str]] = [
    (
        DeepSeek(True),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜>',
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    (
        DeepSeek(False),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    (
        Glm(),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a <b>\nc</arg_value>\n"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "\n<tool_call>now</tool_call>",
        "",
    ),
    (
        TaggedJson(),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
    ),
    (PlainJson(), '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}', "", ""),
]
SPECIALS = sorted({"<think>", "</think>", *(text for format, *_ in CALLS for text in markers(format))})
EOS = 256


class Vocabulary:
    """Bytes, an end of sequence, and markers that are special tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = []
        while text:
            found = next((special for special in SPECIALS if text.startswith(special)), None)
            tokens += [EOS + 1 + SPECIALS.index(found)] if found else text[0].encode()
            text = text[len(found or " ") :]
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else ["<eos>", *SPECIALS][token - EOS].encode()

    def is_special(self, token: int) -> bool:
        return token >= EOS


SIZE = EOS + 1 + len(SPECIALS)
GRAMMARS = Grammars(Vocabulary, SIZE, (EOS,))


def special_token(text: str) -> int | None:
    return EOS + 1 + SPECIALS.index(text) if text in SPECIALS else None


def lets_through(grammar: str, tokens: list[int]) -> bool:
    """Whether the tokens, and then the end, may come one after the other."""
    constraint = GRAMMARS.begin(grammar)
    for token in [*tokens, EOS]:
        if not constraint.mask()[token // 32] >> token % 32 & 1:
            return False
        constraint.accept(token)
    return True


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize(("format", "one", "two", "end"), CALLS, ids=["v3", "v3.1", "glm", "tagged_json", "json"])
@pytest.mark.parametrize("reasoning", ["never", "maybe", "open"])
def test_answers_are_held_to_what_is_demanded(
    format: ToolFormat, one: str, two: str, end: str, reasoning: str, special: bool
) -> None:
    chat = ChatFormat(True, format, True, frozenset())
    notation: Callable[[str], int | None] = special_token if special else lambda text: None
    before = {"never": "", "maybe": "\n<think>a [b</think>\n", "open": "abc\n</think>\n\n"}[reasoning]
    plain = isinstance(format, PlainJson)
    for must, single, content in itertools.product((False, True), (False, True), (None, json_rule({"type": "array"}))):
        grammar = _grammar(Demand(TOOLS, must, single, content), chat, reasoning, Notation(notation))  # type: ignore[arg-type]

        def allowed(text: str, grammar: str = grammar) -> bool:
            text = before + text
            return lets_through(grammar, Vocabulary().encode(text) if special else list(text.encode()))

        free = not must and content is None
        assert allowed(one + end)
        if two:
            assert allowed(one + two + end) is not single
        assert allowed("hello there") is free
        assert allowed("hello " + one + end) is free
        assert allowed("[1]") is (not must and (content is not None or not plain))
        for wrong in (one.replace("weather", "wether"), one.replace("3", '"x"'), one.replace("city", "town")):
            assert not allowed(wrong + end)


def test_content_alone_is_held_to_its_schema() -> None:
    grammar = _grammar(
        Demand(content=json_rule({"enum": [5]})), ChatFormat(False, PlainJson(), True, frozenset()), "maybe",
        Notation(lambda text: None),
    )  # fmt: skip
    assert lets_through(grammar, list(b"5"))
    assert lets_through(grammar, list(b"<think>why</think>\n5"))
    assert not lets_through(grammar, list(b"hm 5"))
