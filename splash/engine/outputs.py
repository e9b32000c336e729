"""What a caller of the engine sends and receives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from splash.core.request import SamplingParams, TokenLogprob
from splash.engine.history import Sample, StepTime, SwitchEvent
from splash.engine.metrics import RequestTimes
from splash.engine.picture import Picture


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        id: the caller's, unique among live requests.
        prompt: token ids.
        params: how tokens are chosen.
        priority: requests of a lower number are served earlier, equal ones in order of arrival.
        visible: special tokens that the output's text shows all the same.
        timeout_s: `AsyncEngine` drops the request after so long, in seconds; None never does.
        arrived: when it was made, by the monotonic clock.
        trace: headers of W3C trace context that it came with.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    visible: frozenset[int] = frozenset()
    timeout_s: float | None = None
    arrived: float = field(default_factory=time.monotonic, compare=False)
    trace: Mapping[str, str] = field(default_factory=dict, compare=False)


class RequestOutput(msgspec.Struct, frozen=True):
    """What one step brought for one request. A struct, because there is one for each token.

    Concatenating `tokens`, `text` and `logprobs` over a request's outputs gives the whole. `text` is withheld while
    it may be part of a stop string or of an unfinished character, so it can be empty, or cover several tokens.

    Attributes:
        id: the request's id.
        tokens: new token ids, the end-of-sequence or stop token included.
        text: new text, without stop strings and special tokens.
        logprobs: one for each new token where the request asked for them, else empty.
        finish_reason: None while running; "stop" (end of sequence, stop token or stop string), "length", "abort", or
            "error" where the request's grammar could not be followed.
        stop_reason: the stop string or stop token id that ended the request, what went wrong where it ended in an
            error, None otherwise.
        num_prompt_tokens: tokens in the prompt.
        num_output_tokens: tokens generated so far.
        num_cached_tokens: tokens of the prompt that were not computed but found in the prefix cache.
        prompt_logprobs: in the first output, one for each token of the prompt after the first, where asked for.
        times: with the last output, when the request came, was computed and brought its tokens.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    times: RequestTimes | None = None


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody who watches an engine sees.

    Attributes:
        now_s: the time on the engine's clock, in seconds from any origin.
        picture: what each rank holds now.
        samples, events: the last minutes of work and the last switches, oldest first.
        step_times: by layout that steps have run in.
    """

    now_s: float
    picture: Picture
    samples: list[Sample]
    events: list[SwitchEvent]
    step_times: dict[str, StepTime]
