"""An engine under a constant load, taken from layout to layout, every step of it timed."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from perf.common import busy_cores
from perf.filled import fill_ranks, take_for_computed
from splash.core.request import SamplingParams
from splash.engine.collector import keep_from_collector
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.engine.loop import Executor
from splash.engine.messages import Result, Run
from splash.engine.outputs import GenerationRequest
from splash.model.choice import ModelChoice
from splash.settings import build, compose
from splash.switch.orders import CopyAhead, SwitchRecord, Vote

MARGIN = 64  # tokens that requests may grow on after they should have begun anew and are still compared
READY_STEPS = 4  # steps after a commit whose median is the time of a step in the destination
MATCHED_CHUNKS = 2  # the same for prefill
AROUND = 4  # steps that a switch may hold up: the committing one, two before it and one after it
HOME = "dp"  # where requests are prefilled between walks: any layout would do, this one is quick at it
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
FILLED_GROWTH = 4096  # tokens that contexts which nobody computes may grow by

Direction = tuple[str, str]
Cell = tuple[Direction, str]  # and the way


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds: from submission to answer, as `Loop.on_step` has it, and from the answer before. `rows`
    that it computed, and whether it commits a switch or runs while one copies ahead."""

    seconds: float
    gap: float
    rows: int
    commits: bool
    copies: bool


class TimedExecutor(Executor):
    """Another executor with a stopwatch."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._done = time.perf_counter()
        self._sent: deque[tuple[float, Run]] = deque()
        self.steps: list[StepTime] = []

    def submit(self, run: Run) -> None:
        self._sent.append((time.perf_counter(), run))
        self._inner.submit(run)

    def copy_ahead(self, order: CopyAhead) -> None:
        self._inner.copy_ahead(order)

    def votes(self) -> list[Vote]:
        return self._inner.votes()

    def collect(self) -> Result:
        result = self._inner.collect()
        now = time.perf_counter()
        sent, run = self._sent.popleft()
        rows = sum(len(query.tokens) for query in run.plan.queries)
        self.steps.append(
            StepTime(
                now - max(sent, self._done),
                now - self._done,
                rows,
                run.switch is not None or run.commit is not None,
                run.copying > 0,
            )
        )
        self._done = now
        return result

    def check(self) -> None:
        self._inner.check()

    def restart(self, layout: str) -> None:
        self._inner.restart(layout)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Sample:
    """One switch, in seconds.

    `added` is how much longer the committing step, the two before it and the one after it took together than they would
    have: where steps are planned ahead, planning a switch and launching a long step hold up the answers before.
    `added_step` counts the committing step alone. `slowdown` is how much longer tokens took while copying ahead, as a
    share, None without.
    """

    added: float
    added_step: float
    ready: float
    slowdown: float | None
    record: SwitchRecord

    def __str__(self) -> str:
        slowdown = (
            "" if self.slowdown is None else f", {self.slowdown:.1%} slower in {self.record.background_steps} steps"
        )
        return (
            f"{self.added * 1e3:.2f} ms added to {self.ready * 1e3:.2f} ms, {self.added_step * 1e3:.2f} to the step, "
            f"{self.record.added_ms:.2f} waited by the ranks, planned in {self.record.planning_ms:.2f} ms{slowdown}"
        )


Samples = defaultdict[Cell, list[Sample]]


class Walk:
    """An engine under a constant load of decoding requests, taken from layout to layout.

    Requests start anew whenever they have grown by `growth` tokens, half below and half above the context asked for.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._growth = growth = min(max(128, args.context // 2), FILLED_GROWTH if args.filled else args.context)
        draw = random.Random(0)
        prompt_len = max(1, args.context - growth // 2)
        lengths = [prompt_len] * args.batch + [args.prefill_chunk]
        *self._prompts, self._chunk = (tuple(draw.choices(range(16, args.vocab_size), k=num)) for num in lengths)
        # Requests never end by themselves: one more switch may begin when they have grown, and copy ahead for long.
        self._params = SamplingParams(max_tokens=3 * growth, temperature=0.0, ignore_eos=True)
        longest = max(prompt_len + 3 * growth, args.prefill_chunk + 1)
        options = {"model": args.model, "ranks": args.ranks, "dtype": args.dtype, "layout": HOME, "hardware": "cpu"}
        options |= {"max_model_len": longest, "kv_cache_gib": args.kv_cache_gib, "prefix_cache": False}
        options |= {"max_batched_tokens": max(2048, args.prefill_chunk + args.batch), "max_num_seqs": args.batch + 1}
        if args.shapes is not None:
            options |= {"load_format": "dummy", "model_config": shapes(args.shapes, longest)}
        if args.filled:
            fill_ranks()
        options |= dict(args.option)
        self.engine = Engine(EngineConfig(**options), lambda line: print(line, file=sys.stderr))
        keep_from_collector()  # as servers do
        if args.filled:
            take_for_computed(self.engine.scheduler, prompt_len)
        self._clock = self.engine.loop.executor = TimedExecutor(self.engine.loop.executor)
        self._tokens: dict[str, list[int]] = defaultdict(list)
        self._load: list[str] = []
        self._num_requests = 0
        self._settled: list[StepTime] = []
        self.others_busy: list[float] = []
        self.num_tokens, self.num_wrong = 0, 0
        self._restart()
        self._is_compared = not args.filled
        if self._is_compared:
            while len(self._tokens[self._load[0]]) < growth + MARGIN:
                self._step()
            self._expected = [self._tokens[id] for id in self._load]
            self._expected_of_chunk = self._compute_chunk()
            self._restart()

    def _step(self) -> None:
        for output in self.engine.step():
            self._tokens[output.id].extend(output.tokens)

    def _add(self, prompt: tuple[int, ...], params: SamplingParams) -> str:
        self._num_requests += 1
        id = str(self._num_requests)
        self.engine.add_request(GenerationRequest(id, prompt, params))
        return id

    def _restart(self) -> None:
        """Drop the requests, see what else keeps the machine busy, and prefill the requests again."""
        for id in self._load:
            self.engine.abort(id)
        while self.engine.has_work:
            self._step()
        if self.engine.layout != HOME:
            self._commit(self.engine.switch(HOME, "blocking"))
        self.others_busy.append(busy_cores(0.3))
        self._tokens.clear()
        self._load = [self._add(prompt, self._params) for prompt in self._prompts]
        while not all(self._tokens[id] for id in self._load):
            self._step()
        self._settle()

    def check_tokens(self) -> None:
        """Count the tokens that differ from those of the run without switches, where those mean anything."""
        if not self._is_compared:
            return
        for id, expected in zip(self._load, self._expected, strict=True):
            common = min(len(self._tokens[id]), len(expected))
            self.num_tokens += common
            self.num_wrong += sum(a != b for a, b in zip(self._tokens[id][:common], expected, strict=False))

    def _settle(self) -> None:
        first = len(self._clock.steps)
        while len(self._clock.steps) < first + READY_STEPS:
            self._step()
        self._settled = self._clock.steps[first:]

    def _commit(self, record: SwitchRecord) -> StepTime:
        """Run until the switch has ended; its committing step."""
        while self.engine.switcher.active is not None:
            self._step()
        if record.status != "committed":
            raise SystemExit(f"{record.source} -> {record.target}, {record.asked}: {record.status}: {record.reason}")
        return self._clock.steps[-1]

    def go(self, layout: str) -> None:
        """Be in `layout`, with requests that have not grown too much, and steady."""
        if len(self._tokens[self._load[0]]) >= self._growth:
            self.check_tokens()
            self._restart()
        if self.engine.layout != layout:
            self._commit(self.engine.switch(layout, "blocking"))
            self._settle()

    def decode(self, target: str, way: str) -> Sample:
        """Switch while every step decodes one token of each request."""
        ordinary = statistics.median(step.gap for step in self._settled)
        first = len(self._clock.steps)
        record = self.engine.switch(target, way)
        commit = self._commit(record)
        steps = self._clock.steps[first:]
        assert commit.commits and not any(step.commits for step in steps[:-1])
        copying = [step.gap for step in steps if step.copies]
        index = len(self._clock.steps) - 1
        self._settle()
        slowdown = statistics.fmean(copying) / ordinary - 1 if copying else None
        ready = statistics.median(step.gap for step in self._settled)
        added_step = commit.seconds - statistics.median(step.seconds for step in self._settled)
        return Sample(self._around(index) - AROUND * ready, added_step, ready, slowdown, record)

    def _around(self, index: int) -> float:
        """Seconds of a step, the two before it and the one after it."""
        return sum(step.gap for step in self._clock.steps[index - 2 : index - 2 + AROUND])

    def prefill(self, target: str, way: str) -> Sample:
        """Switch with a step that computes a whole prompt beside the decodes, then compute that prompt again."""
        switcher, record = self.engine.switcher, self.engine.switch(target, way)
        while switcher.active is not None and not switcher.commits_next:
            self._step()
        id = self._add(self._chunk, ONE_TOKEN)
        commit = self._commit(record)
        index, outputs = len(self._clock.steps) - 1, [self._tokens[id]]
        for _ in range(MATCHED_CHUNKS):
            self._settle()
            outputs.append(self._compute_chunk())
        if self._is_compared:
            self.num_tokens += len(outputs)
            self.num_wrong += sum(tokens != self._expected_of_chunk for tokens in outputs)
        self._settle()
        steps = self._clock.steps
        matched = [at for at in range(index + 1, len(steps)) if steps[at].rows == commit.rows]
        if commit.rows != len(self._load) + len(self._chunk) or len(matched) != MATCHED_CHUNKS:
            raise SystemExit(f"prefill: the committing step has {commit.rows} rows; nothing may cut or cache the chunk")
        decode = statistics.median(step.gap for step in self._settled)
        around = statistics.median(self._around(at) for at in matched)
        added_step = commit.seconds - statistics.median(steps[at].seconds for at in matched)
        return Sample(self._around(index) - around, added_step, around - (AROUND - 1) * decode, None, record)

    def _compute_chunk(self) -> list[int]:
        id = self._add(self._chunk, ONE_TOKEN)
        while not self._tokens[id]:
            self._step()
        return self._tokens[id]


def shapes(model: str, max_positions: int) -> dict[str, Any]:
    """The config.json of "NAME,LAYERS,EXPERTS": a model of `conf/model`, reduced, and for contexts of such a length."""
    name, layers, experts = model.split(",")
    overrides = [f"model={name}", f"model.num_layers={layers}", f"model.num_experts={experts}"]
    contents = build(ModelChoice, compose("config", overrides)["model"], "model.").contents()
    return {**contents, "max_position_embeddings": max(max_positions, contents["max_position_embeddings"])}
