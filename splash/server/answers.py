"""The shape of successful answers, for the OpenAPI schema. Answers themselves are written as they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Base of everything that is answered: no field is left out of the schema."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(Answer):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion's tokens: one entry a token in each list, null for the first of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None


class Completion(Answer):
    """Answer of POST /v1/completions. In a stream, each event is one with a piece of a choice's text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatToken(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    """A chosen token, and the likeliest ones in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprobs]
    refusal: None


class CalledFunction(Answer):
    """The function that is called, and the text of the JSON object that are its arguments."""

    name: str
    arguments: str


class Call(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """An answer. Reasoning and calls are there where the model wrote some."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"required": ["role", "content", "refusal"]})

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Call] = Field(default=[])


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | int | None


class ChatCompletion(Answer):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ServedModel(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Answer):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ServedModel]


class Tokens(Answer):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(Answer):
    """Answer of POST /detokenize."""

    prompt: str


# `data` is one of these answers as JSON, with a `delta` in place of a chat choice's message, an error, or [DONE].
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def documented(model: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What a route says of its success in the OpenAPI schema.

    Args:
        model: shape of the answer.
        streams: the answer may be a stream of server-sent events instead.
    """
    success: dict[str, Any] = {"model": model, "description": "Success."}
    if streams:
        success["content"] = {"text/event-stream": {"schema": EVENT}}
    return {200: success}
