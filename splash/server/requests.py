"""From validated parameters to the engine's requests, and from the engine's outputs to whole choices."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from splash.core.errors import RequestError
from splash.core.request import TokenLogprob
from splash.engine.outputs import GenerationRequest, RequestOutput
from splash.server.errors import ContextLengthError, engine_dead, engine_loading, model_not_found
from splash.server.intake import Intake
from splash.server.schemas import SamplingFields
from splash.server.settings import ServerSettings
from splash.server.tracing import HEADERS, Tracing

if TYPE_CHECKING:
    from splash.engine.async_engine import AsyncEngine
    from splash.engine.stream import Stream


@dataclass(frozen=True)
class Service:
    """What the routes work with.

    Attributes:
        engine: generates; its attributes may be read once it is loaded.
        settings: how the server presents itself.
        loaded: whether the engine has started.
        intake: counts the requests that are being served.
        tracing: writes their spans, where anybody wants them.
    """

    engine: AsyncEngine
    settings: ServerSettings
    loaded: Callable[[], bool]
    intake: Intake
    tracing: Tracing | None = None

    def trace(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What of a request's headers says to which trace it belongs."""
        return {name: headers[name] for name in HEADERS if name in headers} if self.tracing is not None else {}

    def check(self, asked_model: str | None) -> None:
        """Refuse what cannot be served now, or not by this model.

        Raises:
            ApiError: 503 while the model loads, once the engine has died or while the server stops, 429 where there are
                too many requests, 404 for another model.
        """
        self.check_ready()
        self.intake.check()
        if asked_model is not None and asked_model != self.settings.model:
            raise model_not_found(asked_model, self.settings.model)

    def check_ready(self) -> None:
        """Refuse while nothing can be served.

        Raises:
            ApiError: 503 while the model loads or once the engine has died.
        """
        self.check_alive()
        if not self.loaded():
            raise engine_loading()

    def check_alive(self) -> None:
        """Refuse once nothing will be served any more.

        Raises:
            ApiError: 503, the engine has died.
        """
        if self.engine.error is not None:
            raise engine_dead(self.engine.error)


@dataclass
class Choice:
    """What one prompt was continued with, so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def take(self, output: RequestOutput) -> None:
        """Add what a step brought."""
        self.text.append(output.text)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.num_output_tokens = output.num_output_tokens
        self.num_cached_tokens = output.num_cached_tokens


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def check_prompt(engine: AsyncEngine, prompt: Sequence[int], param: str) -> None:
    """Refuse a prompt that cannot be continued.

    Raises:
        RequestError: it is empty, leaves no room for output, or has token ids outside the model's vocabulary.
    """
    if not prompt:
        raise RequestError(param, "must have at least one token")
    if len(prompt) >= engine.max_model_len:
        raise ContextLengthError(
            param, f"has {len(prompt)} tokens, and prompt and output may have {engine.max_model_len} together"
        )
    check_vocabulary(engine, prompt, param)


def check_vocabulary(engine: AsyncEngine, tokens: Sequence[int], param: str) -> None:
    """Refuse what are no tokens of the model.

    Raises:
        RequestError: a token id is outside the vocabulary.
    """
    vocabulary = engine.model_config.spec.vocab_size
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise RequestError(param, f"token id {token} is not below the vocabulary's size {vocabulary}")


def output_limit(engine: AsyncEngine, prompt: Sequence[int], asked: int | None, default: int | None, param: str) -> int:
    """The most tokens to generate: what is asked for, else `default` or as many as fit.

    Raises:
        RequestError: more are asked for than fit after the prompt.
    """
    room = engine.max_model_len - len(prompt)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthError(
            param,
            f"must be at most {room} after a prompt of {len(prompt)} tokens, not {asked}: "
            f"prompt and output may have {engine.max_model_len} tokens together",
        )
    return asked


def fan_out(
    fields: SamplingFields,
    answer_id: str,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    logprobs: int | None,
    grammar: str | None = None,
    visible: frozenset[int] = frozenset(),
    prompt_logprobs: int | None = None,
    longest_s: float | None = None,
    trace: Mapping[str, str] | None = None,
) -> list[GenerationRequest]:
    """The engine's requests: `n` for each prompt, in order of prompts. Choice i samples with seed + i.

    Args:
        fields: the parameters that all share.
        answer_id: what their ids begin with.
        prompts: token ids of each.
        limits: most tokens to generate, for each prompt.
        logprobs: alternatives a token to report, or None for no log-probabilities.
        grammar: what every output has to follow, None for nothing.
        visible: special tokens that output text shows.
        prompt_logprobs: as `logprobs`, for the prompts.
        longest_s: how long any request may take, in seconds; None is no limit.
        trace: headers that say to which trace they belong.

    Raises:
        RequestError: a sampling parameter is out of range.
    """
    allowed = [seconds for seconds in (fields.timeout, longest_s) if seconds is not None]
    timeout_s = min(allowed, default=None)
    requests = []
    for number, prompt in enumerate(prompts):
        for sample in range(fields.n):
            index = number * fields.n + sample
            params = fields.sampling(index, limits[number], logprobs, grammar, prompt_logprobs)
            id = f"{answer_id}-{index}"
            requests.append(
                GenerationRequest(id, tuple(prompt), params, fields.priority, visible, timeout_s, trace=trace or {})
            )
    return requests


@contextlib.contextmanager
def opened(service: Service, requests: Sequence[GenerationRequest]) -> Iterator[Stream]:
    """What the engine brings for requests. Leaving it aborts those that have not ended.

    Raises:
        SplashError: a request is refused, its time is up, or the engine died.
        ApiError: there are too many requests.
    """
    with service.intake.taken(len(requests)), service.engine.open(requests) as stream:
        if service.tracing is None:
            yield stream
            return
        with service.tracing.watching(requests, stream, lambda: service.engine.switch_events):
            yield stream


async def collect(service: Service, requests: Sequence[GenerationRequest]) -> list[Choice]:
    """The whole outputs of all requests.

    Raises:
        SplashError: a request is refused, its time is up, its grammar cannot be followed, or the engine died.
        ApiError: there are too many requests.
    """
    choices = [Choice() for _ in requests]
    with opened(service, requests) as stream:
        while outputs := await stream.take():
            for index, output in outputs:
                choices[index].take(output)
    return choices


def usage(
    num_prompt_tokens: int, num_output_tokens: Sequence[int], num_cached_tokens: Sequence[int], num_samples: int
) -> dict[str, Any]:
    """Token counts as the API gives them.

    Args:
        num_prompt_tokens: of all prompts.
        num_output_tokens: of each choice.
        num_cached_tokens: of each choice, what its prompt found in the cache; each prompt counts once.
        num_samples: choices a prompt.
    """
    num_outputs = sum(num_output_tokens)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_outputs,
        "total_tokens": num_prompt_tokens + num_outputs,
        "prompt_tokens_details": {"cached_tokens": sum(num_cached_tokens[::num_samples])},
    }


def renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """The error under the parameter's name in the API, where the engine calls it otherwise."""
    name = names.get(error.field)
    if name is None:
        return error
    return type(error)(name, str(error).removeprefix(f"{error.field}: "))


def answer(content: object) -> Response:
    """A successful answer as JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")
