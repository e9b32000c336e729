"""What clients may send: the OpenAI API's parameters that SPLASH serves, vLLM's extra sampling parameters, switches.

A parameter that is null counts as absent. Unknown parameters are refused, except `IGNORED`, which change nothing in
the answer, and those of `NEUTRAL` whose value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from splash.core.errors import RequestError
from splash.core.request import MAX_LOGPROBS, SamplingParams
from splash.engine.grammar import choice_grammar, json_schema_grammar, regex_grammar

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
NEUTRAL: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
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


def _range(**limits: float) -> Any:
    """Limits of a number, for the OpenAPI schema."""
    return Field(json_schema_extra=dict(limits))


class StreamOptions(Model):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported")
        return self


class StructuredOutputs(Model):
    """What the output must be, as vLLM takes it: a JSON schema, a regular expression, or one of some texts."""

    json_: dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.choice)) != 1:
            raise ValueError("exactly one of json, regex and choice must be given")
        return self

    def grammar(self) -> str:
        """The grammar of the output.

        Raises:
            RequestError: it cannot be enforced.
        """
        try:
            if self.regex is not None:
                return regex_grammar(self.regex)
            return choice_grammar(self.choice) if self.choice is not None else json_schema_grammar(self.json_)
        except ValueError as error:
            raise RequestError("structured_outputs", f"cannot be enforced: {error}") from None


class SamplingFields(Model):
    """Parameters that completions and chat completions share.

    `SamplingParams` checks the ranges; the OpenAPI schema only tells them.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: Annotated[int, _range(minimum=1)] | None = None
    min_tokens: Annotated[int, _range(minimum=0)] = 0
    temperature: Annotated[float, _range(minimum=0, maximum=100)] = 1.0
    top_p: Annotated[float, _range(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, _range(minimum=-1)] = 0
    min_p: Annotated[float, _range(minimum=0, maximum=1)] = 0.0
    presence_penalty: Annotated[float, _range(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[float, _range(minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[float, _range(exclusiveMinimum=0, maximum=100)] = 1.0
    seed: Annotated[int, _range(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    stop: NonEmpty | list[NonEmpty] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[str, float] = {}
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)

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

    def sampling(
        self,
        choice: int,
        max_tokens: int,
        logprobs: int | None,
        grammar: str | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Parameters of the choice of that index: choices of one request differ by their seeds.

        Args:
            choice: index of the choice.
            max_tokens: most tokens to generate.
            logprobs: alternatives a token to report, or None for no log-probabilities.
            grammar: what the output has to follow, None for nothing.
            prompt_logprobs: as `logprobs`, for the prompt.

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
            logit_bias=_biases(self.logit_bias),
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
        )
        params.validate()
        return params


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    by_token = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise RequestError("logit_bias", f"must have token ids as keys, not {token[:20]!r}")
        by_token[int(token)] = bias
    return tuple(by_token.items())


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    best_of: int | None = None
    logprobs: Annotated[int, _range(minimum=0, maximum=MAX_LOGPROBS)] | None = None
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


class LayoutRequest(Model):
    """Body of POST /layout. Which layouts and methods exist is for the engine to say."""

    layout: str
    method: str = "auto"
    rebalance: bool = False
