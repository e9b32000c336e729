"""What clients may send to POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from splash.core.errors import RequestError
from splash.core.request import MAX_LOGPROBS
from splash.server.schemas import Model, SamplingFields
from splash.server.tool_formats import decoded

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
MAX_TOOLS = 128


class TextPart(Model):
    """A piece of a message. Only text is served."""

    type: Literal["text"]
    text: str


class CalledFunction(Model):
    """What an assistant called. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class MadeCall(Model):
    """A call that an assistant made in an earlier turn, as it was answered."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Model):
    """One turn of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MadeCall] = Field(default=[])
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        """Clients send answers back as they came, with empty fields for what the model did not do."""
        if not isinstance(data, dict):
            return data
        message = {key: value for key, value in data.items() if value != [] or key == "content"}
        if message.get("role") == "assistant" and message.get("tool_calls") and message.get("content") is None:
            message["content"] = ""
        return message

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content are for assistants only")
        return self

    def for_template(self, takes_text: bool) -> dict[str, Any]:
        """As chat templates expect it: content as one text, and the system's role under its usual name.

        Args:
            takes_text: the template wants arguments of calls as text, and no content where there is only a call.

        Raises:
            ValueError: arguments of a call are not a JSON object.
        """
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls:
            if takes_text and not content:
                message["content"] = None
            message["tool_calls"] = [_for_template(call, takes_text) for call in self.tool_calls]
        return message


def _for_template(call: MadeCall, takes_text: bool) -> dict[str, Any]:
    arguments = decoded(call.function.arguments or "{}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    function = {"name": call.function.name, "arguments": call.function.arguments if takes_text else arguments}
    return {"id": call.id, "type": call.type, "function": function}


class Function(Model):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = Field(default={})
    strict: bool = False


class ToolSpec(Model):
    """A tool. Only functions are served."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Model):
    """The function that has to be called."""

    name: FunctionName


class ToolChoice(Model):
    """One tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Model):
    """A JSON schema and what it is called. It is always enforced, strict or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    strict: bool = False
    schema_: dict[str, Any] = Field(default={}, alias="schema")


class ResponseFormat(Model):
    """What the answer's content has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and to no other")
        return self

    def schema_asked(self) -> dict[str, Any] | None:
        """The JSON schema to follow, None for any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[ToolSpec] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a token to report, or None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, under either of its names; None for as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def offered(self) -> list[ToolSpec]:
        """The tools that the model hears of."""
        return [] if self.tool_choice == "none" else self.tools

    def check(self) -> None:
        """Refuse combinations that are not served.

        Raises:
            RequestError: naming the parameter.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "is only allowed with logprobs")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise RequestError("tools", "must have different names")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice", "asks for a call, and there are no tools")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise RequestError("tool_choice", f"names no tool: {self.tool_choice.function.name!r}")
        asks = [name for name in ("response_format", "structured_outputs") if _asks(getattr(self, name))]
        if len(asks) == 2:
            raise RequestError("structured_outputs", "cannot be used together with response_format")


def _asks(value: Any) -> bool:
    return value is not None and not (isinstance(value, ResponseFormat) and value.type == "text")
