"""From a conversation as clients send it to the prompt that the model reads, and what its answer may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splash.core.errors import RequestError
from splash.engine.tokenizer import Tokenizer
from splash.server.chat_format import ChatFormat, Reasoning, Reply
from splash.server.chat_schemas import ChatCompletionRequest, Message, ToolChoice, ToolSpec
from splash.server.structured import Demand, answer_grammar, checked_tool, content_rule
from splash.server.tool_formats import Tool


@dataclass(frozen=True)
class Conversation:
    """A conversation as the model reads it, and how its answer is to be read.

    Attributes:
        prompt: token ids.
        format: how the model answers.
        reasoning: what the answer begins with.
        tools: those that may be called, by name; None where markers of calls are text like any other.
        grammar: what the answer has to follow, None for nothing.
    """

    prompt: list[int]
    format: ChatFormat
    reasoning: Reasoning
    tools: dict[str, Tool] | None
    grammar: str | None

    def reply(self) -> Reply:
        """Takes one answer apart."""
        return Reply(self.format, self.reasoning, self.tools)


def read_conversation(tokenizer: Tokenizer, format: ChatFormat, body: ChatCompletionRequest) -> Conversation:
    """Apply the chat template, and work out what the answer may be.

    Raises:
        RequestError: the template refuses the messages, or a format that is asked for cannot be enforced.
    """
    text = prompt_text(
        tokenizer, format, body.messages, body.offered, body.add_generation_prompt, body.chat_template_kwargs
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    reasoning = format.reasoning(text)
    tools = {tool.function.name: Tool(tool.function.name, tool.function.parameters) for tool in body.offered}
    grammar = _grammar(tokenizer, format, body, reasoning, tools)
    return Conversation(prompt, format, reasoning, tools or None, grammar)


def prompt_text(
    tokenizer: Tokenizer,
    format: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """What the chat template makes of a conversation.

    Raises:
        RequestError: it refuses the messages, knows no tools, or would have its own variables overridden.
    """
    if reserved := {"messages", "add_generation_prompt", "tools"} & variables.keys():
        raise RequestError("chat_template_kwargs", f"must not contain {', '.join(sorted(reserved))}")
    if tools and not format.takes_tools:
        raise RequestError("tools", "this model's chat template does not tell the model about tools")
    turns = []
    for number, message in enumerate(messages):
        try:
            turns.append(message.for_template(format.tools.takes_text))
        except ValueError as error:
            raise RequestError(f"messages.{number}.tool_calls", f"arguments are not a JSON object: {error}") from None
    offered = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
    return tokenizer.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, **variables, **offered)


def _grammar(
    tokenizer: Tokenizer,
    format: ChatFormat,
    body: ChatCompletionRequest,
    reasoning: Reasoning,
    tools: dict[str, Tool],
) -> str | None:
    if body.structured_outputs is not None:
        if tools:
            raise RequestError("structured_outputs", "cannot be used together with tools; use response_format")
        return body.structured_outputs.grammar()
    schema = None if body.response_format is None else body.response_format.schema_asked()
    content = None if schema is None else content_rule(schema, "response_format")
    must_call = body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)
    strict = any(tool.function.strict for tool in body.offered)
    if not (content or must_call or (tools and (strict or not body.parallel_tool_calls))):
        return None
    callable_tools = [
        checked_tool(tools[tool.function.name], tool.function.strict, f"tools.{number}.function.parameters")
        for number, tool in enumerate(body.offered)
        if not isinstance(body.tool_choice, ToolChoice) or tool.function.name == body.tool_choice.function.name
    ]
    one_call = not body.parallel_tool_calls or isinstance(body.tool_choice, ToolChoice)
    return answer_grammar(Demand(callable_tools, must_call, one_call, content), format, reasoning, tokenizer)
