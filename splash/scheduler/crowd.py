"""Crowd: the requests that are there and that are expected, and how their number changes as steps go by.

Running requests end without memory, at the rate that the expected remaining tokens of each give; whoever ends is
replaced from the queue; arrivals add what Little's law says, rate times the time that each stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from splash.scheduler.pace import Coming
from splash.scheduler.situation import Situation
from splash.scheduler.traffic import Arrivals, Floats, Outputs

_HALVINGS = 12  # of the horizon, at most, to find where half of the load has gone


class Phase(NamedTuple):
    """A batch that decodes.

    Attributes:
        requests: that are wanted at once, by all layouts; a share of one where the engine is idle in between.
        context: keys that one of them sees, on average.
        kept: share of them that run already and keep their owners.
    """

    requests: float
    context: float
    kept: float


class Prompts(NamedTuple):
    """Prompts that are to be computed.

    Attributes:
        rows: tokens left.
        requests: how many prompts.
        position: where the rows are, on average.
        found: tokens besides, which need not be computed as they are in the prefix cache.
    """

    rows: float
    requests: float
    position: float
    found: float = 0.0


@dataclass(frozen=True)
class Crowd:
    """The requests that are there and that are expected, in numbers that change as steps go by.

    Attributes:
        ending_n: how many times each running request is expected to end, a step.
        tokens_n: tokens of each.
        tokens: of all of them.
        running: how many they are.
        wanted: how many would run now if memory allowed it.
        decoding, prefilling: how many of them decode, and have prompts left.
        rows_left, start: rows of those prompts, and where on average they are to be computed.
        queue, prompt: waiting requests, and their mean tokens.
        again: mean tokens of those that they had generated when they were preempted, which are computed again.
        rate, arriving: arrivals a second, and their mean tokens.
        lasting_s: how long more they are expected.
        found: share of a prompt that need not be computed, since it is in the prefix cache.
        output: tokens that a new request is expected to generate.
        most: requests that may run at once.
    """

    ending_n: Floats
    tokens_n: Floats
    tokens: float
    running: int
    wanted: float
    decoding: int
    prefilling: int
    rows_left: float
    start: float
    queue: int
    prompt: float
    again: float
    rate: float
    arriving: float
    lasting_s: float
    found: float
    output: float
    most: int
    _known: dict[float, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, situation: Situation, arrivals: Arrivals, outputs: Outputs, most: int) -> Crowd:
        """The crowd of a situation, with what traffic has been like, where at most `most` run at once."""
        expected, new = outputs.remaining(situation.outputs_n)
        left = situation.length_n - situation.computed_n
        prefilling, rows_left, start = 0, 0.0, 0.0
        if int(left.max(initial=0)) > 1:
            is_prefill = left > 1
            prefilling, rows_left = int(np.count_nonzero(is_prefill)), float(left[is_prefill].sum())
            start = float((left * (situation.computed_n + left / 2))[is_prefill].sum()) / rows_left
        waiting = [len(request.tokens) for request in situation.waiting]
        again = sum(waiting) - sum([request.num_prompt for request in situation.waiting])
        allowed = [request.max_tokens for request in situation.waiting]
        tokens_n = situation.length_n.astype(np.float64)
        return cls(
            ending_n=1 / np.minimum(expected, situation.allowed_n),
            tokens_n=tokens_n,
            tokens=float(tokens_n.sum()),
            running=len(left),
            wanted=float(min(most, len(left) + situation.num_waiting)),
            decoding=len(left) - prefilling,
            prefilling=prefilling,
            rows_left=rows_left,
            start=start,
            queue=situation.num_waiting,
            prompt=sum(waiting) / len(waiting) if waiting else arrivals.prompt_tokens,
            again=again / max(1, len(waiting)),
            rate=arrivals.rate(situation.now),
            arriving=arrivals.prompt_tokens,
            lasting_s=arrivals.lasting_s(situation.now),
            found=arrivals.found_share,
            output=min(new, sum(allowed) / len(allowed)) if allowed else new,
            most=most,
        )

    def _survivors(self, steps: float) -> tuple[float, float]:
        """(running requests left after so many steps, their tokens then)."""
        if not steps:
            return float(self.running), self.tokens
        known = self._known.get(steps)
        if known is None:
            alive_n = np.exp(-steps * self.ending_n)
            left = float(alive_n.sum())
            known = self._known[steps] = left, float(alive_n @ self.tokens_n) + left * steps
        return known

    def _newcomers(self, steps: float, step_s: float, left: float) -> tuple[float, float, float]:
        """After so many steps: (those admitted now that are left, those that replaced others, arrivals that run)."""
        admitted, gone = self.wanted - self.running, 1 - math.exp(-steps / self.output)
        ended = self.running - left + admitted * gone
        arrived = 0.0
        if self.rate and step_s:
            while_they_come = min(steps, self.lasting_s / step_s)
            arrived = 1 - math.exp(-while_they_come / self.output)
            arrived *= self.rate * step_s * self.output * math.exp((while_they_come - steps) / self.output)
        return admitted * (1 - gone), min(self.queue - admitted, ended), arrived

    def _requests(self, steps: float, step_s: float) -> float:
        left, _ = self._survivors(steps)
        return min(float(self.most), left + sum(self._newcomers(steps, step_s, left)))

    def steps_to_half(self, most: float, seconds: Callable[[float], float]) -> float:
        """Steps until half of what is wanted now has gone, at most `most`, to within a factor of 2.

        `seconds` tells how long so many steps take.
        """
        for _ in range(_HALVINGS):
            if self._requests(most, seconds(most) / most) >= self.wanted / 2:
                break
            most /= 2
        return max(1.0, most)

    def later(self, steps: float, step_s: float) -> Phase:
        """The batch after so many steps."""
        left, tokens = self._survivors(steps)
        admitted, replaced, arrived = self._newcomers(steps, step_s, left)
        there = left + admitted + replaced + arrived
        grown = min(steps, self.output) / 2
        tokens += (admitted + replaced) * (self.prompt + grown) + arrived * (self.arriving + grown)
        return Phase(min(float(self.most), there), tokens / max(there, 1e-9), left / max(there, 1e-9))

    def backlog(self) -> Prompts:
        """The prompts that can be computed together at once: those of running requests and of those admitted now."""
        admitted = self.wanted - self.running
        found = self._found_waiting
        rows = self.rows_left + admitted * (self.prompt - found)
        position = self.rows_left * self.start + admitted * _positions(self.prompt, found)
        return Prompts(rows, self.prefilling + admitted, position / max(1.0, rows), admitted * found)

    @property
    def _found_waiting(self) -> float:
        """Tokens of a waiting request that are found: others have computed its prompt, but not what it generated."""
        return (self.prompt - self.again) * self.found

    def stream(self, steps: float, step_s: float) -> Prompts:
        """The prompts that come one by one in so many steps: those of the queue and of arrivals that find a place."""
        left, _ = self._survivors(steps)
        admitted = self.wanted - self.running
        ended = self.running - left + admitted * (1 - math.exp(-steps / self.output))
        queue, arrived = self.queue - admitted, self.rate * min(step_s * steps, self.lasting_s)
        begun = min(queue + arrived, self.most - self.wanted + ended)
        return self._prompts(min(queue, begun), max(0.0, begun - queue))

    def coming(self) -> Coming:
        """The same as it begins."""
        admitted = self.wanted - self.running
        return Coming(
            queue=self.queue - admitted,
            rate=self.rate if self.arriving else 0.0,
            lasting_s=self.lasting_s,
            places=self.most - self.wanted,
            ending=float(self.ending_n.sum()) + admitted / self.output,
        )

    def typical(self, seconds: float) -> Prompts:
        """One of those that come in so many seconds, as they are on average; without rows where none comes."""
        queue, arrived = self.queue - (self.wanted - self.running), self.rate * min(seconds, self.lasting_s)
        if queue + arrived <= 0:
            return Prompts(0.0, 1.0, 0.0)
        return self._prompts(queue / (queue + arrived), arrived / (queue + arrived))

    def _prompts(self, waiting: float, arriving: float) -> Prompts:
        """So many prompts of the queue and of those that arrive."""
        found, coming = self._found_waiting, self.arriving * self.found
        rows = waiting * (self.prompt - found) + arriving * (self.arriving - coming)
        position = waiting * _positions(self.prompt, found) + arriving * _positions(self.arriving, coming)
        # Of a small part of a prompt there may be less than a row.
        return Prompts(rows, waiting + arriving, position / max(1e-9, rows), waiting * found + arriving * coming)


def _positions(tokens: float, found: float) -> float:
    """The sum of the positions of the rows of a prompt that are computed: those behind what is found."""
    return (tokens**2 - found**2) / 2
