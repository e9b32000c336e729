"""How families of models write calls of tools: reading a call, and the grammar that one follows.

deepseek      <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then the arguments between ```json and ```   (V3, R1)
              <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS                                             (V3.1)
              both end in <｜tool▁call▁end｜> and stand between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>
glm           <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>
tagged_json   <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>
json          the whole answer is {"name": NAME, "arguments": ARGUMENTS}, or a list of such objects
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splash.engine.grammar import Notation, json_rule

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema that its arguments are to follow."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has made. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolFormat(ABC):
    """One family's way to write calls.

    Attributes:
        name: as options name it.
        begin, end: what stands around each call; empty where the whole answer is calls or is none.
        frame: what stands around all calls together; empty where nothing does.
        inner: what has a meaning within a call.
        takes_text: chat templates of the family want arguments as JSON text, and no content beside calls.
    """

    name: str
    begin: str = ""
    end: str = ""
    frame: tuple[str, str] = ("", "")
    inner: tuple[str, ...] = ()
    takes_text = False

    @abstractmethod
    def parse(self, block: str, tools: Mapping[str, Tool]) -> Sequence[ToolCall] | None:
        """The calls in what stands between `begin` and `end`, or None where it is no call."""

    @abstractmethod
    def rule(self, tools: Sequence[Tool], notation: Notation) -> str:
        """What a grammar says of a call of one of `tools`, between `begin` and `end`. ValueError where it cannot."""


class DeepSeek(ToolFormat):
    """`fenced` tells V3's form, with the arguments in a fence, from V3.1's. Reading takes both."""

    name = "deepseek"
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    frame = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner = ("<｜tool▁sep｜>",)
    takes_text = True

    _FENCED = re.compile(r"\s*(?P<name>[^\n]+?)\s*\n```(?:json)?\s*\n(?P<arguments>.*?)\n?```\s*\Z", re.DOTALL)

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced

    def parse(self, block: str, tools: Mapping[str, Tool]) -> Sequence[ToolCall] | None:
        head, separator, rest = block.partition(self.inner[0])
        if not separator:
            return None
        if fenced := self._FENCED.match(rest):
            return _call(fenced["name"], fenced["arguments"])
        return _call(head.strip(), rest)

    def rule(self, tools: Sequence[Tool], notation: Notation) -> str:
        separator = notation.marker(self.inner[0])
        if self.fenced:
            fence, fence_end = json.dumps("\n```json\n"), json.dumps("\n```")
            forms = [
                f'"function" {separator} {json.dumps(tool.name)} {fence} {json_rule(tool.parameters)} {fence_end}'
                for tool in tools
            ]
        else:
            forms = [f"{json.dumps(tool.name)} {separator} {json_rule(tool.parameters)}" for tool in tools]
        return " | ".join(forms)


class Glm(ToolFormat):
    """Values of text are written bare, all others as JSON."""

    name = "glm"
    begin, end = "<tool_call>", "</tool_call>"
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    _PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def parse(self, block: str, tools: Mapping[str, Tool]) -> Sequence[ToolCall] | None:
        name, _, _ = block.partition(self.inner[0])
        position, name = len(name), name.strip()
        if not name or "\n" in name or name[0] in "{[":
            return None
        properties = _properties(tools[name].parameters) if name in tools else {}
        arguments: dict[str, Any] = {}
        while pair := self._PAIR.match(block, position):
            key, position = pair[1].strip(), pair.end()
            arguments[key] = pair[2] if _is_text(properties.get(key)) else _value(pair[2])
        if block[position:].strip():
            return None
        return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]

    def rule(self, tools: Sequence[Tool], notation: Notation) -> str:
        return " | ".join(f"({self._tool_rule(tool, notation)})" for tool in tools)

    def _tool_rule(self, tool: Tool, notation: Notation) -> str:
        key, key_end, value, value_end = map(notation.marker, self.inner)
        gap = json.dumps("\n") + "?"
        parts = [json.dumps(tool.name), gap]
        required = tool.parameters.get("required", [])
        for name, schema in _properties(tool.parameters).items():
            if _is_text(schema):
                body = notation.until(self.inner[3])
            else:
                body = f"{json_rule(_within(schema, tool))} {value_end}"
            pair = f"{key} {json.dumps(name)} {key_end} {gap} {value} {body} {gap}"
            parts.append(pair if name in required else f"({pair})?")
        return " ".join(parts)


class TaggedJson(ToolFormat):
    """The form of Hermes, which many models have taken over."""

    name = "tagged_json"
    begin, end = "<tool_call>", "</tool_call>"

    def parse(self, block: str, tools: Mapping[str, Tool]) -> Sequence[ToolCall] | None:
        return _json_calls(block)

    def rule(self, tools: Sequence[Tool], notation: Notation) -> str:
        line = json.dumps("\n") + "?"
        return f"{line} {json_rule(_call_schema(tools))} {line}"


class PlainJson(ToolFormat):
    """No markers: an answer that is JSON of this form, and names tools that exist, is calls."""

    name = "json"

    def parse(self, block: str, tools: Mapping[str, Tool]) -> Sequence[ToolCall] | None:
        calls = _json_calls(block)
        return calls if calls and all(call.name in tools for call in calls) else None

    def rule(self, tools: Sequence[Tool], notation: Notation) -> str:
        return json_rule(_call_schema(tools))


NAMES = ("deepseek", "glm", "tagged_json", "json")


def tool_format(name: str, template: str) -> ToolFormat:
    """The format of that name, one of `NAMES`, or for "auto" the one in which a chat template writes calls."""
    if name == "deepseek" or (name == "auto" and "<｜tool▁call▁begin｜>" in template):
        return DeepSeek(fenced="```json" in template)
    if name == "glm" or (name == "auto" and "<arg_key>" in template):
        return Glm()
    if name == "tagged_json" or (name == "auto" and "<tool_call>" in template):
        return TaggedJson()
    assert name in ("auto", "json"), name
    return PlainJson()


def markers(format: ToolFormat) -> list[str]:
    """Every text that the format gives a meaning."""
    return [text for text in (format.begin, format.end, *format.frame, *format.inner) if text]


def decoded(text: str) -> Any:
    """A JSON text's value. ValueError where it is none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _call(name: str, arguments: str) -> list[ToolCall] | None:
    arguments = arguments.strip()
    try:
        is_object = isinstance(decoded(arguments), dict)
    except ValueError:
        return None
    return [ToolCall(name, arguments)] if name and is_object else None


def _json_calls(text: str) -> list[ToolCall] | None:
    try:
        value = decoded(text)
    except ValueError:
        return None
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        call = _call(
            item["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        if call is None:
            return None
        calls += call
    return calls or None


def _call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON object that is a call of one of the tools."""
    calls = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        for name, definition in tool.parameters.get("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ValueError(f"tools have different definitions under $defs/{name}")
        parameters = {key: value for key, value in tool.parameters.items() if key != "$defs"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _is_text(schema: Any) -> bool:
    """Whether a property's value is any text."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _within(schema: Any, tool: Tool) -> Any:
    """A property's schema with the definitions that its references mean."""
    if isinstance(schema, dict) and "$defs" in tool.parameters:
        return {**schema, "$defs": tool.parameters["$defs"]}
    return schema


def _value(text: str) -> Any:
    try:
        return decoded(text)
    except ValueError:
        return text
