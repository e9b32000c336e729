"""How a model answers, as its chat template tells, and answers taken apart: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from splash.engine.tokenizer import Tokenizer
from splash.server.tool_formats import Tool, ToolCall, ToolFormat, markers, tool_format

THINK, THINK_END = "<think>", "</think>"

Reasoning = Literal["never", "maybe", "open"]


@dataclass(frozen=True)
class ChatFormat:
    """How the model that is served answers.

    Attributes:
        takes_tools: the template tells the model about tools.
        tools: how the model writes calls.
        thinks: answers may begin with reasoning.
        visible: special tokens that mean something in an answer.
    """

    takes_tools: bool
    tools: ToolFormat
    thinks: bool
    visible: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str = "auto") -> ChatFormat:
        """Read off a tokenizer's chat template.

        Args:
            tokenizer: of the model.
            tools: "auto", or the name of a format of `splash.server.tool_formats` that the template does not show.
        """
        template = tokenizer.chat_template or ""
        format = tool_format(tools, template)
        thinks = THINK_END in template
        meaningful = [*markers(format), *((THINK, THINK_END) if thinks else ())]
        ids = [tokenizer.special_token(text) for text in meaningful]
        return cls("tools" in template, format, thinks, frozenset(token for token in ids if token is not None))

    def reasoning(self, prompt: str) -> Reasoning:
        """What an answer to this prompt begins with: reasoning that the prompt has opened, maybe some, or none."""
        if not self.thinks:
            return "never"
        end = prompt.rstrip()
        return "open" if end.endswith(THINK) else "never" if end.endswith(THINK_END) else "maybe"


@dataclass(frozen=True)
class Thought:
    """A piece of the reasoning before an answer."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of an answer's text."""

    text: str


Part = Thought | Content | ToolCall
_State = Literal["start", "thinking", "body", "content", "call", "json"]


class Reply:
    """Takes one answer apart as it comes. However it is cut into pieces, the parts add up to the same.

    White space around reasoning and around calls is dropped; nothing else is: what begins like a call and is none is
    content.

    Args:
        format: how the model answers.
        reasoning: what the answer begins with.
        tools: those that may be called, by name; None where markers of calls are text like any other.
    """

    def __init__(self, format: ChatFormat, reasoning: Reasoning, tools: Mapping[str, Tool] | None) -> None:
        self._format = format.tools
        self._tools = tools
        self._state: _State = "start" if reasoning == "maybe" else "thinking" if reasoning == "open" else "body"
        self._text = ""  # not taken apart yet
        self._searched = 0  # that much of it has no end of a call
        self._pending = ""  # content, should no call follow
        self._strips = reasoning == "open"  # white space comes first and is dropped
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that a further piece of the answer makes certain."""
        self._text += text
        parts: list[Part] = []
        steps = {
            "start": self._start,
            "thinking": self._thinking,
            "body": self._body,
            "content": self._content,
            "call": self._call,
            "json": lambda parts: False,
        }
        while self._text and steps[self._state](parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The rest, now that nothing follows."""
        rest, self._text = self._text, ""
        if self._state == "thinking":
            return [Thought(text)] if (text := self._stripped(rest).rstrip()) else []
        calls = self._parse(rest) if self._state in ("call", "json") else []
        if calls:
            return calls
        text = self._stripped(self._pending + rest)
        return [Content(text)] if text else []

    def _start(self, parts: list[Part]) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text, self._strips, self._state = text.removeprefix(THINK), True, "thinking"
        elif THINK.startswith(text):
            return False
        else:
            self._state = "body"
        return True

    def _thinking(self, parts: list[Part]) -> bool:
        self._text = self._stripped(self._text)
        thought, end, rest = self._text.partition(THINK_END)
        if end:
            thought, self._text = thought.rstrip(), rest
            self._strips, self._state = True, "body"
        else:
            held = _undecided(self._text, (THINK_END,))
            thought, self._text = self._text[:held], self._text[held:]
            self._strips = self._strips and not thought
        if thought:
            parts.append(Thought(thought))
        return bool(end)

    def _body(self, parts: list[Part]) -> bool:
        self._text = self._stripped(self._text)
        if self._tools is None or self._format.begin:
            self._state = "content"
            return True
        begin = self._text.lstrip()[:1]
        if begin:
            self._state = "json" if begin in "{[" else "content"
        return bool(begin)

    def _content(self, parts: list[Part]) -> bool:
        if self._pending and not self._expects_call(parts):
            return False
        self._text = self._stripped(self._text)
        if self._state == "call" or not self._text:
            return True
        markers = [text for text in (self._format.begin, *self._format.frame) if text and self._tools is not None]
        place, marker = min(((at, text) for text in markers if (at := self._text.find(text)) >= 0), default=(-1, ""))
        if place < 0:
            end = _undecided(self._text, markers) if markers else len(self._text)
            self._emit(parts, self._text[:end])
            self._text = self._text[end:]
            return False
        content = self._text[:place].rstrip()
        self._emit(parts, content)
        self._pending = self._text[len(content) : place + len(marker)]
        self._text = self._text[place + len(marker) :]
        if marker == self._format.begin:
            self._state = "call"
        elif marker == self._format.frame[1]:
            if not self.num_calls:
                self._emit(parts, self._pending)
            self._pending, self._strips = "", bool(self.num_calls)
        return True

    def _expects_call(self, parts: list[Part]) -> bool:
        """After the marker before all calls: whether it is certain what follows. What is no call makes it content."""
        text = self._text.lstrip()
        if text.startswith(self._format.begin):
            self._pending += self._text[: len(self._text) - len(text)] + self._format.begin
            self._text, self._state = text.removeprefix(self._format.begin), "call"
        elif self._format.begin.startswith(text):
            return False
        else:
            self._emit(parts, self._pending)
            self._pending = ""
        return True

    def _call(self, parts: list[Part]) -> bool:
        end = self._format.end
        place = self._text.find(end, self._searched)
        if place < 0:
            self._searched = max(0, len(self._text) - len(end) + 1)
            return False
        calls = self._parse(self._text[:place])
        if calls:
            parts += calls
        else:
            self._emit(parts, self._pending + self._text[: place + len(end)])
        self._text = self._text[place + len(end) :]
        self._pending, self._searched = "", 0
        self._strips, self._state = bool(calls), "content"
        return True

    def _parse(self, block: str) -> list[Part]:
        calls = list(self._format.parse(block, self._tools or {}) or ())
        self.num_calls += len(calls)
        return list(calls)

    def _emit(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Content(text))
            self._strips = False

    def _stripped(self, text: str) -> str:
        return text.lstrip() if self._strips else text


def _undecided(text: str, markers: Sequence[str]) -> int:
    """Where the end of `text` begins that may be white space before a marker, or the marker's beginning."""
    place = len(text)
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            place -= length
            break
    return len(text[:place].rstrip())
