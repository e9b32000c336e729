"""Workloads: frozen descriptions that yield the same requests whenever they are asked with the same seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from splash.core.errors import ConfigError
from splash.workload.distributions import Distribution
from splash.workload.draws import Bits, Draw, Floats, exponential, fold, hashed
from splash.workload.requests import Ints, Requests, segments

MAX_REQUESTS = 2**30


def require(field: str, value: object, ok: bool, accepted: str) -> None:
    """Raise a `ConfigError` that names `field`, `value` and what is accepted, unless `ok`."""
    if not ok:
        raise ConfigError(field, f"must be {accepted}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """Base of all kinds. `seed` decides every draw; `priority` is given to every request."""

    kind: ClassVar[str]
    seed: int = 0
    priority: int = 0

    @abstractmethod
    def requests(self) -> Requests:
        """All requests. Equal descriptions give equal requests, to the last token."""

    def key(self, draw: Draw) -> int:
        """The key under which `draw` is made."""
        return fold(self.seed, draw)


@dataclass(frozen=True, kw_only=True)
class Independent(Workload):
    """Base of the kinds whose requests wait for none: `num_requests` of them with lengths drawn one by one.

    Every prompt starts with one of `prefix_groups` shared prefixes of `shared_prefix` tokens, as with a system prompt;
    a prompt of `input` tokens that is shorter holds the start of it only.
    """

    num_requests: int
    input: Distribution
    output: Distribution
    shared_prefix: int = 0
    prefix_groups: int = 1

    def __post_init__(self) -> None:
        require("num_requests", self.num_requests, 1 <= self.num_requests <= MAX_REQUESTS, "at least 1")
        require("shared_prefix", self.shared_prefix, self.shared_prefix >= 0, "at least 0")
        require("prefix_groups", self.prefix_groups, self.prefix_groups >= 1, "at least 1")

    @abstractmethod
    def times(self) -> Floats:
        """Arrival of each request in seconds, ascending, float64 [num_requests]."""

    def requests(self) -> Requests:
        numbers = np.arange(self.num_requests)
        length = self.input.counts(self.key(Draw.INPUT_LEN), numbers)
        shared = np.minimum(length, self.shared_prefix)
        group = hashed(self.key(Draw.GROUP), numbers) % np.uint64(self.prefix_groups)
        prompts = segments(
            (hashed(self.key(Draw.SHARED), group), shared),
            (hashed(self.key(Draw.OWN), numbers), length - shared),
        )
        output_len = self.output.counts(self.key(Draw.OUTPUT_LEN), numbers)
        return independent(self, self.times(), output_len, numbers, prompts)


@dataclass(frozen=True, kw_only=True)
class Fixed(Independent):
    """Everything is there from the start; with `concurrency`, so many at a time: a closed loop."""

    kind: ClassVar[str] = "fixed"
    concurrency: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require("concurrency", self.concurrency, self.concurrency is None or self.concurrency >= 1, "at least 1")

    def times(self) -> Floats:
        return np.zeros(self.num_requests)

    def requests(self) -> Requests:
        everything = super().requests()
        return everything if self.concurrency is None else everything.limited(self.concurrency)


@dataclass(frozen=True, kw_only=True)
class Poisson(Independent):
    """`rate` requests a second, each independent of the others."""

    kind: ClassVar[str] = "poisson"
    rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require("rate", self.rate, 0 < self.rate < np.inf, "above 0")

    def times(self) -> Floats:
        return unit_poisson(self.key(Draw.ARRIVAL), self.num_requests) / self.rate


@dataclass(frozen=True, kw_only=True)
class Bursts(Independent):
    """A Poisson process of `rate_on` requests a second for `on_s` seconds, `rate_off` for `off_s`, and again."""

    kind: ClassVar[str] = "bursts"
    rate_on: float
    rate_off: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require("rate_on", self.rate_on, 0 < self.rate_on < np.inf, "above 0")
        require("rate_off", self.rate_off, 0 <= self.rate_off < np.inf, "at least 0")
        require("on_s", self.on_s, 0 < self.on_s < np.inf, "above 0")
        require("off_s", self.off_s, 0 <= self.off_s < np.inf, "at least 0")

    def times(self) -> Floats:
        # A process of varying rate is one of rate 1 whose clock runs at that rate.
        in_on, in_off = self.rate_on * self.on_s, self.rate_off * self.off_s
        period, left = np.divmod(unit_poisson(self.key(Draw.ARRIVAL), self.num_requests), in_on + in_off)
        on = np.minimum(left, in_on) / self.rate_on
        off = np.maximum(left - in_on, 0) / self.rate_off if self.rate_off else np.zeros_like(left)
        # Rounding may put the last of a period a hair after the first of the next.
        return np.maximum.accumulate(period * (self.on_s + self.off_s) + on + off)


@dataclass(frozen=True, kw_only=True)
class RlRollout(Workload):
    """One step of reinforcement learning: `samples` generations of each of `num_prompts` prompts, launched together.

    A prompt and its samples are one session. The step lasts as long as its longest generation, so `output` is what
    matters: give it a long tail and a cap.
    """

    kind: ClassVar[str] = "rl_rollout"
    num_prompts: int
    samples: int
    input: Distribution
    output: Distribution

    def __post_init__(self) -> None:
        require("num_prompts", self.num_prompts, self.num_prompts >= 1, "at least 1")
        require("samples", self.samples, self.samples >= 1, "at least 1")
        total = self.num_prompts * self.samples
        require("samples", self.samples, total <= MAX_REQUESTS, f"at most {MAX_REQUESTS} in all")

    def requests(self) -> Requests:
        prompts = np.arange(self.num_prompts)
        prompt_of = np.repeat(prompts, self.samples)
        length = self.input.counts(self.key(Draw.INPUT_LEN), prompts)
        streams = hashed(self.key(Draw.OWN), prompts)
        output_len = self.output.counts(self.key(Draw.OUTPUT_LEN), np.arange(len(prompt_of)))
        parts = segments((streams[prompt_of], length[prompt_of]))
        return independent(self, np.zeros(len(prompt_of)), output_len, prompt_of, parts)


@dataclass(frozen=True, kw_only=True)
class Agentic(Workload):
    """Sessions of several turns whose prompt grows: all so far, what was generated, and what a tool or the user adds.

    Sessions start as a Poisson process of `rate` a second. The first prompt is one of `num_systems` shared system
    prompts of `system_prompt` tokens, then `input` tokens. Each later turn adds `tool` tokens and comes `think`
    seconds after the turn before has finished. A session has `turns` turns, fewer where the next would not fit
    `max_context` tokens, output included; a first turn that does not fit is cut.
    """

    kind: ClassVar[str] = "agentic"
    num_sessions: int
    rate: float
    turns: Distribution
    input: Distribution
    tool: Distribution
    output: Distribution
    think: Distribution
    system_prompt: int = 0
    num_systems: int = 1
    max_context: int = 131072

    def __post_init__(self) -> None:
        require("num_sessions", self.num_sessions, 1 <= self.num_sessions <= MAX_REQUESTS, "at least 1")
        require("rate", self.rate, 0 < self.rate < np.inf, "above 0")
        require("system_prompt", self.system_prompt, self.system_prompt >= 0, "at least 0")
        require("num_systems", self.num_systems, self.num_systems >= 1, "at least 1")
        least = self.system_prompt + 2
        require("max_context", self.max_context, self.max_context >= least, f"at least {least}")

    def requests(self) -> Requests:
        sessions = np.arange(self.num_sessions)
        turns = self.turns.counts(self.key(Draw.TURNS), sessions)
        require("turns", self.turns, turns.sum() <= MAX_REQUESTS, f"at most {MAX_REQUESTS} in all")
        session = np.repeat(sessions, turns)
        first = np.cumsum(turns) - turns
        turn = np.arange(len(session)) - first[session]
        address = (session << 32) + turn  # a turn's draws do not depend on how many turns others have

        output_len = self.output.counts(self.key(Draw.OUTPUT_LEN), address)
        added = self.tool.counts(self.key(Draw.TOOL_LEN), address, least=0)
        pause_s = self.think.values(self.key(Draw.THINK), address)
        pause_s[first] = 0.0
        room = self.max_context - self.system_prompt
        added[first] = np.minimum(self.input.counts(self.key(Draw.INPUT_LEN), sessions), room - 1)
        output_len[first] = np.minimum(output_len[first], room - added[first])

        grown = added.copy()
        grown[1:] += np.where(turn[1:] > 0, output_len[:-1], 0)
        own_len = _running_sum(grown, first, session)
        start_s = unit_poisson(self.key(Draw.ARRIVAL), self.num_sessions) / self.rate
        time_s = start_s[session] + _running_sum(pause_s, first, session)

        fits = np.flatnonzero(own_len + output_len <= room)  # lengths ascend: the first turns of every session
        order = fits[np.lexsort((turn[fits], session[fits], time_s[fits]))]
        place = np.full(len(session), -1)
        place[order] = np.arange(len(order))
        later = turn[order] > 0
        system = hashed(self.key(Draw.GROUP), session[order]) % np.uint64(self.num_systems)
        start, stream, length = segments(
            (hashed(self.key(Draw.SHARED), system), np.full(len(order), self.system_prompt)),
            (hashed(self.key(Draw.OWN), session[order]), own_len[order]),
        )
        return Requests(
            time_s=time_s[order],
            after=np.where(later, place[order - 1], -1),
            delay_s=pause_s[order],
            output_len=output_len[order],
            priority=np.full(len(order), self.priority),
            session=session[order],
            segment_start=start,
            segment_stream=stream,
            segment_len=length,
            output_stream=hashed(self.key(Draw.OWN), session[order]),
        )


def independent(
    workload: Workload, time_s: Floats, output_len: Ints, session: Ints, prompts: tuple[Ints, Bits, Ints]
) -> Requests:
    """Requests that wait for none, each of which generates tokens of its own. `prompts` is what `segments` returns."""
    start, stream, length = prompts
    count = len(time_s)
    return Requests(
        time_s=time_s,
        after=np.full(count, -1),
        delay_s=np.zeros(count),
        output_len=output_len,
        priority=np.full(count, workload.priority),
        session=session,
        segment_start=start,
        segment_stream=stream,
        segment_len=length,
        output_stream=hashed(workload.key(Draw.OUTPUT), np.arange(count)),
    )


def unit_poisson(key: int, count: int) -> Floats:
    """The first `count` arrivals of a Poisson process of rate 1, float64 [count]. More of them start alike."""
    return np.cumsum(exponential(key, np.arange(count)))


def _running_sum(values: Any, first: Ints, session: Ints) -> Any:
    """Running sums that start afresh at `first[session]`."""
    total = np.cumsum(values)
    return total - (total[first] - values[first])[session]
