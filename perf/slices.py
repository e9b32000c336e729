"""Engines that share a machine in slices of time, so that whatever it does from one second to the next it does to all.

A machine that others share as well changes its speed by tens of percent within seconds. Engines that serve a whole
workload one after another are then compared on different machines. Here all are there at once and take turns of a
fraction of a second. Each has a clock that runs in its own slices only, by which its policy, its switches and the
arrivals of its requests go. A slice ends when the step in flight is over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from splash.core.request import SamplingParams
from splash.engine.engine import Engine
from splash.engine.loop import Executor
from splash.engine.messages import Result, Run
from splash.engine.outputs import GenerationRequest
from splash.switch.orders import CopyAhead, Vote
from splash.workload import Feed, Requests


class Clock:
    """Seconds that pass only while it runs, from 0."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._passed + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Let time pass."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Let none pass."""
        self._passed, self._since = self(), None

    def skip(self, seconds: float) -> None:
        """Pass over a time in which nothing would happen."""
        self._passed += max(0.0, seconds)


class Settled(Executor):
    """An executor whose steps can be waited for before they are collected.

    Args:
        inner: carries them out.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._in_flight = 0
        self._results: deque[Result] = deque()

    def settle(self) -> None:
        """Wait for every step in flight."""
        while self._in_flight:
            self._results.append(self._inner.collect())
            self._in_flight -= 1

    def submit(self, run: Run) -> None:
        self._inner.submit(run)
        self._in_flight += 1

    def collect(self) -> Result:
        if self._results:
            return self._results.popleft()
        self._in_flight -= 1
        return self._inner.collect()

    def copy_ahead(self, order: CopyAhead) -> None:
        self._inner.copy_ahead(order)

    def votes(self) -> list[Vote]:
        return self._inner.votes()

    def check(self) -> None:
        self._inner.check()

    def restart(self, layout: str) -> None:
        self._inner.restart(layout)

    def close(self) -> None:
        self._inner.close()


@dataclass
class Turn:
    """One contender through one workload, by its own clock.

    Attributes:
        seconds: from the first arrival to the last token.
        served: (seconds, tokens of prompts and outputs served until then) after each step that brought any.
        latency_s: of each request, from its arrival to its last token.
        switches: layouts that were switched to, and when.
        layout_s: seconds in each layout.
    """

    seconds: float = 0.0
    served: list[tuple[float, int]] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    switches: list[tuple[float, str]] = field(default_factory=list)
    layout_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.served[-1][1] / self.seconds


class Contender:
    """An engine that serves workloads, a slice at a time.

    Args:
        engine: goes by `clock`.
        clock: runs in the slices of this one only.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self._clock = clock
        self._executor = engine.loop.executor = Settled(engine.loop.executor)
        self._serving: Iterator[None] = iter(())
        self.turn = Turn()

    def begin(self, requests: Requests) -> None:
        """Have a workload to serve from the next slice on."""
        self.turn = Turn()
        self._serving = self._serve(requests, self.turn)

    def take(self, seconds: float) -> bool:
        """Take a slice of about so many seconds. Returns whether there is more to serve."""
        clock = self._clock
        clock.start()
        end, more = clock() + seconds, True
        while more and clock() < end:
            more = next(self._serving, self) is None
        self._executor.settle()
        clock.stop()
        return more

    def _serve(self, requests: Requests, turn: Turn) -> Iterator[None]:
        """Serve a workload, a step at a time."""
        engine, clock, feed = self.engine, self._clock, Feed(requests)
        vocab, longest = engine.model_config.spec.vocab_size, int(requests.output_len.max())
        prompts = [tuple(requests.tokens(index, vocab).tolist()) for index in range(len(requests))]
        due: dict[str, float] = {}
        tokens, start = 0, clock()
        layout, since = engine.layout, 0.0
        while not feed.exhausted or due:
            for index, due_s in feed.take(clock() - start):
                most = min(longest, engine.max_model_len - len(prompts[index]))
                params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
                engine.add_request(GenerationRequest(str(index), prompts[index], params))
                due[str(index)] = due_s
            if not engine.has_work:
                clock.skip(feed.next_time() - (clock() - start))
                continue
            outputs = engine.step()
            now = clock() - start
            if engine.layout != layout:
                turn.layout_s[layout] = turn.layout_s.get(layout, 0.0) + now - since
                layout, since = engine.layout, now
                turn.switches.append((round(now, 2), layout))
            for output in outputs:
                if output.finish_reason == "abort":
                    continue
                tokens += len(output.tokens) + (output.num_prompt_tokens if output.num_output_tokens == 1 else 0)
                if output.num_output_tokens == requests.output_len[int(output.id)]:
                    if output.finish_reason is None:
                        engine.abort(output.id)
                        engine.loop.steering.finished(output.num_output_tokens)  # for the policy it ended by itself
                    turn.latency_s.append(now - due.pop(output.id))
                    feed.finish(int(output.id), now)
            if outputs:
                turn.served.append((now, tokens))
            yield
        turn.seconds = clock() - start
        turn.layout_s[layout] = turn.layout_s.get(layout, 0.0) + turn.seconds - since
        while engine.has_work:
            engine.step()


def take_turns(contenders: list[Contender], requests: Requests, slice_s: float) -> list[Turn]:
    """Everybody through the same workload in slices of so many seconds, each time begun by the next."""
    for contender in contenders:
        contender.begin(requests)
    serving, first = list(contenders), 0
    while serving:
        first = (first + 1) % len(serving)
        serving = [one for one in serving[first:] + serving[:first] if one.take(slice_s)]
    return [contender.turn for contender in contenders]
