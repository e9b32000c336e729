"""The grammar that an answer has to follow, from what a request asks for; None where it may be any text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splash.core.errors import RequestError
from splash.engine.grammar import Notation, check_grammar, json_rule, json_schema_grammar
from splash.engine.tokenizer import Tokenizer
from splash.server.chat_format import THINK, THINK_END, ChatFormat, Reasoning
from splash.server.tool_formats import ANY_OBJECT, Tool

_TEXT = "/(?s:.*)/"
_TEXT_NOT_JSON = r"/([^{\[<\s](?s:.*))?/"  # nor reasoning, which comes before
_SPACE = r"/[ \n]{0,4}/"


@dataclass(frozen=True)
class Demand:
    """What an answer must be.

    Attributes:
        tools: those that may be called; empty where calls are not looked at.
        must_call: the answer is calls and nothing else.
        one_call: at most one.
        content: a grammar's rule for what the answer says where it calls nothing, None for any text.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    one_call: bool = False
    content: str | None = None


def checked_tool(tool: Tool, strict: bool, param: str) -> Tool:
    """A tool whose parameters can be enforced. Only those of strict tools have to be; others fall back to any object.

    Raises:
        RequestError: the tool is strict, and its parameters cannot be enforced.
    """
    try:
        json_schema_grammar(tool.parameters)
    except ValueError as error:
        if strict:
            raise RequestError(param, f"cannot be enforced: {error}") from None
        return Tool(tool.name, ANY_OBJECT)
    return tool


def answer_grammar(demand: Demand, format: ChatFormat, reasoning: Reasoning, tokenizer: Tokenizer) -> str:
    """The grammar of a whole answer: reasoning as the model likes, then what is demanded.

    Raises:
        RequestError: the tools together make no grammar, or too large a one.
    """
    try:
        # With every marker as text the grammar means the same, and can be checked without the model's vocabulary.
        check_grammar(_grammar(demand, format, reasoning, Notation(lambda marker: None)))
        return _grammar(demand, format, reasoning, Notation(tokenizer.special_token))
    except ValueError as error:
        raise RequestError("tools", f"cannot be enforced: {error}") from None


def _grammar(demand: Demand, format: ChatFormat, reasoning: Reasoning, notation: Notation) -> str:
    parts = []
    if reasoning == "open":
        parts.append(f"{notation.until(THINK_END)} {_SPACE}")
    elif reasoning == "maybe":
        parts.append(f"({_SPACE} {notation.marker(THINK)} {notation.until(THINK_END)} {_SPACE})?")
    parts.append(f"({_answer(demand, format, notation)})")
    return notation.grammar(" ".join(parts))


def _answer(demand: Demand, format: ChatFormat, notation: Notation) -> str:
    if not demand.tools:
        return demand.content or _TEXT
    tools = format.tools
    call = f"({tools.rule(demand.tools, notation)})"
    if not tools.begin:
        if demand.must_call:
            return call
        return f"{demand.content or _TEXT_NOT_JSON} | {call}"
    begin, end = notation.marker(tools.begin), notation.marker(tools.end)
    more = "" if demand.one_call else f"({_SPACE} {begin} {call} {end})*"
    first = tools.frame[0] or tools.begin
    if tools.frame[0]:
        rest = f"{_SPACE} {begin} {call} {end} {more} {_SPACE} {notation.marker(tools.frame[1])}"
    else:
        rest = f"{call} {end} {more}"
    if demand.must_call:
        return f"{notation.marker(first)} {rest}"
    if demand.content is not None:
        return f"{demand.content} | {notation.marker(first)} {rest}"
    return f"{notation.until(first)} {rest} | {_TEXT}"


def content_rule(schema: object, param: str) -> str:
    """The rule for content that is JSON of a schema.

    Raises:
        RequestError: the schema cannot be enforced.
    """
    try:
        json_schema_grammar(schema)
        return json_rule(schema)
    except ValueError as error:
        raise RequestError(param, f"cannot be enforced: {error}") from None
