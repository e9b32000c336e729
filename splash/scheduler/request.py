"""A request as the scheduler sees it, and what a step brought for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from splash.core.pages import HeldPages
from splash.core.request import SamplingParams, TokenLogprob
from splash.core.step import NewRequest
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.page_keys import Keys
from splash.scheduler.prefix_cache import PrefixCache

Order = tuple[int, int]  # priority, arrival


class Progress(msgspec.Struct, frozen=True, gc=False):
    """One new token of one request. As nothing in it can be part of a cycle, the garbage collector does not look at it.

    Attributes:
        id: the request.
        token: its new token, the end-of-sequence or stop token included.
        logprob: as the request asked for, else None.
        finish_reason: None while running; "stop" (end of sequence or stop token), "length", or "error" where the ranks
            could not go on with the request. The token of an error means nothing.
        stop_reason: the stop token that ended the request, None for an end of sequence, or what the error was.
        num_cached: tokens of the prompt that were found in the cache when the request first ran.
        num_output: tokens that the request has generated, this one included.
        prompt_logprobs: with the first token, of the prompt's tokens after the first, where the request asked for them.
    """

    id: int
    token: int
    logprob: TokenLogprob | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached: int = 0
    num_output: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, eq=False)
class Rebase:
    """What the scheduler was before it went on in another layout.

    Attributes:
        pool: the pages of the state before.
        requests: each running request with its pages and computed positions then.
    """

    pool: PrefixCache
    requests: tuple[tuple[Request, HeldPages | None, int], ...]


@dataclass(slots=True, eq=False)
class Request:
    """A live request. It runs while it has `held`, and waits otherwise.

    Attributes:
        id: the engine's number for it.
        priority: the lower, the earlier it is served.
        arrival: its place in the order of arrival.
        new: what the ranks are told when they first hear of it; ranks that are started anew hear of it anew.
        num_prompt: tokens in the prompt.
        max_tokens: most tokens to generate, clipped to the model's length.
        tokens: prompt and output so far, the last of it perhaps `PENDING_TOKEN` while a step after it is planned.
        stops: tokens that end it, once it has as many as it must: those that it names, and those that end a sequence.
        num_computed: positions whose keys are cached, or will be by the steps in flight.
        held: its pages, for all of `tokens` as of its admission and those since; None while it waits.
        announced: whether the ranks have heard of it.
        keys: what its first pages are known by in the cache, as far as that was asked for.
        num_cached: tokens of the prompt that were found in the cache when it first ran on these ranks.
        scores: log-probabilities of its prompt's tokens after the first, as far as they are known.
        live: False once it has finished or was aborted.
        order: its place in the order of service: by priority, then by arrival.
        most_tokens: of prompt and output together.
        is_greedy: see `SamplingParams`.
    """

    id: int
    priority: int
    arrival: int
    new: NewRequest
    num_prompt: int
    max_tokens: int
    tokens: list[int]
    stops: frozenset[int] = frozenset()
    num_computed: int = 0
    held: HeldPages | None = None
    announced: bool = False
    keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)
    live: bool = True
    order: Order = field(init=False)
    most_tokens: int = field(init=False)
    is_greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        self.order = (self.priority, self.arrival)
        self.most_tokens = self.num_prompt + self.max_tokens
        self.is_greedy = self.new.params.is_greedy

    @classmethod
    def of(cls, new: NewRequest, priority: int, arrival: int, config: SchedulerConfig, keys: Keys = ()) -> Request:
        """A request that has just come, under the limits of `config`. `keys` are those of its pages that are known."""
        params, num_prompt = new.params, len(new.prompt)
        max_tokens = min(params.max_tokens, config.max_model_len - num_prompt)
        stops = frozenset(params.stop_token_ids).union(() if params.ignore_eos else config.eos_token_ids)
        return cls(new.id, priority, arrival, new, num_prompt, max_tokens, list(new.prompt), stops, keys=list(keys))

    @property
    def params(self) -> SamplingParams:
        return self.new.params

    @property
    def is_unscored(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all known. The cache is of no use then."""
        return self.params.prompt_logprobs is not None and len(self.scores) < self.num_prompt - 1

    def take_scores(self, position: int, scores: Sequence[TokenLogprob]) -> None:
        """Take log-probabilities of the tokens from `position` on. After a preemption some of them come again."""
        self.scores += scores[len(self.scores) + 1 - position :]

    @property
    def max_positions(self) -> int:
        """Positions cached if it runs to its end. The last token is returned, not computed on."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def has_all_tokens(self) -> bool:
        """Whether it has as many output tokens as it may."""
        return len(self.tokens) >= self.most_tokens

    def finish(self, eos_token_ids: frozenset[int]) -> tuple[str | None, int | None]:
        """(finish_reason, stop_reason) as of the last output token."""
        params = self.new.params
        num_outputs = len(self.tokens) - self.num_prompt
        token = self.tokens[-1]
        if num_outputs > params.min_tokens and token in self.stops:
            is_eos = token in eos_token_ids and not params.ignore_eos
            return "stop", None if is_eos else token
        return ("length", None) if self.has_all_tokens else (None, None)


def held_pages(request: Request) -> HeldPages:
    """The pages of a running request."""
    assert request.held is not None
    return request.held
