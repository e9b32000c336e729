"""What clients may send: the OpenAI API's parameters that SPLASH serves, vLLM's extra sampling parameters, switches.

A parameter that is null counts as absent. Unknown parameters are refused, except `IGNORED`, which change nothing in
the answer, and those of `NEUTRAL` whose value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from splash.core.errors import RequestError
from splash.core.request import MAX_LOGPROBS, SamplingParams

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "suffix": ("",),
}
MAX_CHOICES = 1024
DEFAULT_COMPLETION_TOKENS = 16

NonEmpty = Annotated[str, Field(min_length=1)]


class Model(BaseModel):
    """Base of everything a client sends: no unknown fields, no silent conversion of types, null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StreamOptions(Model):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported")
        return self


class SamplingFields(Model):
    """Parameters that completions and chat completions share. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: NonEmpty | list[NonEmpty] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            key: value
            for key, value in data.items()
            if key not in IGNORED and not (key in NEUTRAL and value in NEUTRAL[key])
        }

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Parameters of the choice of that index: choices of one request differ by their seeds.

        Args:
            choice: index of the choice.
            max_tokens: most tokens to generate.
            logprobs: alternatives a token to report, or None for no log-probabilities.

        Raises:
            RequestError: a value is out of range.
        """
        seed = self.seed
        if seed is not None and -(2**63) <= seed < 2**63:
            seed = (seed + choice + 2**63) % 2**64 - 2**63
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )
        params.validate()
        return params


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many, as a list.

        Raises:
            RequestError: there is none, or too many choices are asked for.
        """
        prompt: Any = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise RequestError("prompt", "must not be empty")
        if len(prompts) * self.n > MAX_CHOICES:
            raise RequestError("prompt", f"{len(prompts)} prompts x n = {self.n} make more than {MAX_CHOICES} choices")
        return prompts

    def check(self) -> None:
        """Refuse combinations that are not served.

        Raises:
            RequestError: naming the parameter.
        """
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError("best_of", f"must equal n ({self.n}) or be left out, not {self.best_of}")
        if self.echo and self.logprobs is not None:
            raise RequestError("echo", "is not supported together with logprobs: prompt tokens are not scored")


class TextPart(Model):
    """A piece of a message. Only text is served."""

    type: Literal["text"]
    text: str


class Message(Model):
    """One turn of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        """Clients send answers back as they came, with empty fields for what the model did not do."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value != [] or key == "content"}

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: content as one text, and the system's role under its usual name."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for key in ("name", "tool_call_id"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        return message


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a token to report, or None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, under either of its names; None for as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check(self) -> None:
        """Refuse combinations that are not served.

        Raises:
            RequestError: naming the parameter.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "is only allowed with logprobs")
        reserved = {"messages", "add_generation_prompt"} & self.chat_template_kwargs.keys()
        if reserved:
            raise RequestError("chat_template_kwargs", f"must not contain {', '.join(sorted(reserved))}")


class LayoutRequest(Model):
    """Body of POST /layout. Which layouts and methods exist is for the engine to say."""

    layout: str
    method: str = "auto"
    rebalance: bool = False
