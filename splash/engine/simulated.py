"""Simulation: serving a workload on hardware that is not there, on a virtual clock.

    result = simulate(SimulationConfig(spec, hardware, ranks=8, dtype="fp8", layout="dop"), requests)

The loop, the scheduler, the prefix cache, the memory, the policy and the switches are those that serve; only the
executor is another (`splash.engine.virtual`). Requests arrive as `splash.workload.Feed` says, and are seen when a
server would see them: before a step is collected. Nothing is drawn, so the same workload gives the same result, to the
last digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from splash.core.capacity import geometry_for_budget
from splash.core.errors import ConfigError, RequestError
from splash.core.hardware import GIB, Hardware
from splash.core.layout import check_layout, parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.core.spec import ModelSpec
from splash.core.step import StepPlan
from splash.engine.loop import Loop
from splash.engine.recorder import Recorder, TimelineRow
from splash.engine.virtual import END_TOKEN, TOKEN, SimulatedExecutor, VirtualClock
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.cost_model import CostModel
from splash.scheduler.decode_times import DecodeTimes
from splash.scheduler.load import StepLoad
from splash.scheduler.policies import make_policy
from splash.scheduler.policy import Limits, PolicyConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from splash.scheduler.step_run import StepRun
from splash.switch.orders import SwitchRecord
from splash.workload import Feed, Requests

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIB = 1 << 20
BOUNDLESS = 1 << 62  # bytes
KEYED_TOGETHER = 1024  # requests whose page keys are made at once
KEY_BYTES = 8
STEPS_AT_ONCE = 1024  # at most, so that callers may look now and then


@dataclass(frozen=True)
class SimulationConfig:
    """What to simulate. Fields that an engine has as well mean the same as in `EngineConfig`,
    `switch_copy_mib` apart.

    Attributes:
        spec: the model.
        hardware: every rank's device; `costs` must be there.
        ranks: T.
        dtype: of weights: "float32", "bfloat16" or "fp8".
        kv_dtype: of the cache; None takes `dtype`.
        layout: name of the layout to serve in, at first where the policy chooses others.
        policy: how the layout is chosen while serving.
        mem_fraction: share of the hardware's memory that may be used; what weights and the reserve leave is for arenas.
        kv_cache_gib: memory a rank for arenas in GiB, in the place of that.
        switch_copy_mib: most that a rank copies ahead of a switch after one step, in MiB. None takes what fits in the
            time of the last step at the hardware's `trickle` share of its rate, so that copies never hold up a step.
        max_output_len: what every request gives as the most tokens that it may generate, so that nothing but serving it
            tells how many it will be. None lets each give just as many as it generates.
        cheapest_forms: see `CostModel`.

    Raises:
        ConfigError: naming the field that is out of range.
    """

    spec: ModelSpec
    hardware: Hardware
    ranks: int
    dtype: str
    kv_dtype: str | None = None
    layout: str = "tp"
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    page_size: int = 64
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_model_len: int | None = None
    prefix_cache: bool = True
    mem_fraction: float = 1.0
    kv_cache_gib: float | None = None
    switch_staging_mib: float = 256.0
    switch_copy_mib: float | None = None
    max_output_len: int | None = None
    graphs: bool = True
    cheapest_forms: bool = False

    def __post_init__(self) -> None:
        longest = self.spec.max_position_embeddings
        for name, ok, accepted in (
            ("ranks", self.ranks >= 1, "at least 1"),
            ("page_size", self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0, "a power of two"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_batched_tokens", self.max_batched_tokens >= 1, "at least 1"),
            (
                "max_model_len",
                self.max_model_len is None or 1 <= self.max_model_len <= longest,
                f"between 1 and the model's {longest}",
            ),
            ("mem_fraction", 0 < self.mem_fraction <= 1, "above 0 and at most 1"),
            ("kv_cache_gib", self.kv_cache_gib is None or self.kv_cache_gib > 0, "above 0"),
            ("switch_staging_mib", self.switch_staging_mib >= 0, "at least 0"),
            ("switch_copy_mib", self.switch_copy_mib is None or self.switch_copy_mib > 0, "above 0"),
            ("max_output_len", self.max_output_len is None or self.max_output_len >= 1, "at least 1"),
        ):
            if not ok:
                raise ConfigError(name, f"must be {accepted}, not {getattr(self, name)!r}")
        check_layout(parse_layout(self.layout), self.spec.num_heads, self.ranks)


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """What a simulation brought. Arrays have an entry for each request of the workload; times are seconds.

    Attributes:
        seconds: time of the last finish.
        arrival_s, admitted_s, first_token_s, finish_s: float64 [N]; nan for what did not happen.
        num_prompt, num_output, num_cached, num_preempted: int64 [N]; `num_cached` of the prompt's tokens were found in
            the prefix cache when the request first ran.
        refused: requests that could never be served, with the reason.
        admissions: requests in the order in which they first ran.
        preemptions: (step, request) of each time that a request lost its pages to another.
        steps: steps that ran.
        request_steps: queries of all steps: a request counts in each step in which it has rows.
        peak_running: most requests with rows in one step.
        timeline: rows over time, at most `splash.engine.recorder.MAX_ROWS`.
        switches: the last ones that have ended, oldest first.
        layout_seconds: seconds of steps by layout.
    """

    seconds: float
    arrival_s: Floats
    admitted_s: Floats
    first_token_s: Floats
    finish_s: Floats
    num_prompt: Ints
    num_output: Ints
    num_cached: Ints
    num_preempted: Ints
    refused: dict[int, str]
    admissions: list[int]
    preemptions: list[tuple[int, int]]
    steps: int
    request_steps: int
    peak_running: int
    timeline: list[TimelineRow]
    switches: list[SwitchRecord]
    layout_seconds: dict[str, float]

    @property
    def input_tokens_per_s(self) -> float:
        """Prompt tokens of the requests that finished, a second."""
        return self._rate(int(self.num_prompt[~np.isnan(self.finish_s)].sum()))

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens generated a second."""
        return self._rate(int(self.num_output.sum()))

    @property
    def total_tokens_per_s(self) -> float:
        """Both together."""
        return self.input_tokens_per_s + self.output_tokens_per_s

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0


def simulate(
    config: SimulationConfig,
    requests: Requests,
    *,
    max_seconds: float | None = None,
    progress: Callable[[int, float], None] = lambda finished, now_s: None,
) -> SimulationResult:
    """Serve `requests` on virtual hardware.

    Args:
        config: what serves them.
        requests: the workload. Each generates exactly its `output_len`, or what `max_output_len` and the model's length
            allow.
        max_seconds: end at the first step boundary from this time on; None serves everything.
        progress: told now and then how many requests have finished, and the time.

    Raises:
        CapacityError: the model does not fit.
        ConfigError: the hardware has no costs, or no rate for `dtype`.
    """
    simulation = Simulation(config, requests)
    limit = math.inf if max_seconds is None else max_seconds
    told_s = 0.0
    while simulation.clock.now < limit and simulation.step(limit):
        if simulation.recorder.next_row_s > told_s:
            told_s = simulation.recorder.next_row_s
            progress(simulation.num_finished, simulation.clock.now)
    return simulation.result()


class Simulation:
    """A simulation under way, a step at a time.

    Args:
        config: what serves.
        requests: the workload.
        every_step: let the scheduler plan every step, instead of taking most without a plan. The result is the same.

    Attributes:
        clock: the virtual time.
        loop: serves.
        recorder: takes notes.
        num_finished: requests that have ended.
        refused: requests that could never be served, with the reason.

    Raises:
        CapacityError: the model does not fit.
        ConfigError: the hardware has no costs, or no rate for the dtype.
    """

    def __init__(self, config: SimulationConfig, requests: Requests, every_step: bool = False) -> None:
        model = CostModel(
            config.spec,
            config.hardware,
            config.ranks,
            config.dtype,
            config.page_size,
            config.kv_dtype,
            config.max_num_seqs if config.graphs else 0,
            config.cheapest_forms,
        )
        geometry = _geometry(config, model)
        self._model = model
        self._requests = requests
        self._every_step = every_step
        self._max_model_len = config.max_model_len or config.spec.max_position_embeddings
        self._max_output_len = config.max_output_len
        self._copy_bytes = None if config.switch_copy_mib is None else int(config.switch_copy_mib * MIB)
        self._feed = Feed(requests)
        self._keys = _PageKeys(requests, config.page_size) if config.prefix_cache else None
        self.clock = VirtualClock()
        self.refused: dict[int, str] = {}
        self.num_finished = 0
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_batched_tokens=config.max_batched_tokens,
                max_model_len=self._max_model_len,
                page_size=config.page_size,
                eos_token_ids=frozenset({END_TOKEN}),
                prefix_cache=config.prefix_cache,
            ),
            PrefixCache.of_geometry(geometry, parse_layout(config.layout)),
        )
        self.recorder = Recorder(len(requests), scheduler)
        self._total_tokens: list[int] = (requests.input_len + requests.output_len).tolist()
        self._executor = SimulatedExecutor(model, geometry, self.clock, self._total_tokens, self._submitted)
        staging_bytes = int(config.switch_staging_mib * MIB)
        # Where the hardware sets the pace of copying ahead, the cost of a switch has it, and nothing else bounds it.
        copy_bytes = BOUNDLESS if self._copy_bytes is None else self._copy_bytes
        limits = Limits(
            geometry, config.max_num_seqs, config.max_batched_tokens, staging_bytes, copy_bytes, config.mem_fraction
        )
        policy = make_policy(config.policy, limits, model)
        step_bytes = self._copy_bytes or 0
        self.loop = Loop(scheduler, self._executor, geometry, staging_bytes, step_bytes, policy, self.clock)
        self._prompt = (0,) * int(requests.input_len.max(initial=0))
        self._params: dict[int, SamplingParams] = {}

    def step(self, limit_s: float = math.inf) -> bool:
        """Let requests arrive, then finish the step in flight and begin the next. False where all have finished.

        Some steps are taken in one go, without plans, until one takes a plan or the time has come to `limit_s`: see
        `splash.scheduler.step_run`.
        """
        feed, loop = self._feed, self.loop
        if not loop.has_work and feed.next_time() > self.clock.now:
            if feed.exhausted:
                return False
            self.clock.now = feed.next_time()
        self._let_arrive()
        for request in self.recorder.progressed(loop.finish(), self.clock.now):
            self._end(request)
        if not (self._every_step or loop.switcher.active is not None):
            self._run(min(limit_s, loop.steering.next_s))
        loop.begin()
        if self._copy_bytes is None:
            loop.switcher.step_bytes = self._executor.copy_bytes
        if self.clock.now >= self.recorder.next_row_s:
            self.recorder.sample(self.clock.now, loop.layout)
        return True

    def _run(self, until_s: float) -> None:
        """Take some steps that begin before `until_s`, as long as they take no plan."""
        clock, recorder, feed, steering = self.clock, self.recorder, self._feed, self.loop.steering
        if clock.now >= until_s:
            return
        layout, times = self.loop.switcher.layout, None
        run = StepRun(self.loop.scheduler, TOKEN, END_TOKEN, self._total_tokens)

        def take_place(seconds: float) -> bool:
            """A step that has begun. Returns whether somebody has come before it is collected."""
            recorder.began(layout.name, run.num_queries, run.num_rows, seconds)
            if clock.now >= recorder.next_row_s:
                recorder.sample(clock.now, layout.name)
            has_come = feed.next_time() <= clock.now
            if has_come:
                self._let_arrive()
                run.arrived()
            clock.now += seconds
            return has_come

        while clock.now < until_s and run.num_steps < STEPS_AT_ONCE and run.begin():
            if not run.is_next:
                load = run.load()
                times = DecodeTimes(self._model, layout, load) if run.is_decode else None
            if run.new:
                recorder.admitted(run.new, clock.now)
            take_place(self._model.step(layout, load).seconds if times is None else times.next())
            num_tokens, progress = run.num_tokens, run.finish()
            recorder.decoded(num_tokens - len(progress))
            if progress:
                for item in progress:
                    if item.finish_reason is not None:
                        steering.finished(item.num_output, cut_off=item.finish_reason != "stop")
                for request in recorder.progressed(progress, clock.now):
                    self._end(request)
            elif times is not None:
                num_passed = 0
                for _ in range(run.num_void):
                    if clock.now >= until_s:
                        break
                    has_come = take_place(times.next())
                    recorder.decoded(num_tokens)
                    num_passed += 1
                    if has_come:
                        break
                run.pass_over(num_passed)
        run.end()
        self.loop.num_steps += run.num_steps

    def _let_arrive(self) -> None:
        while self._feed.next_time() <= self.clock.now:  # again where some are refused
            for index, due_s in self._feed.take(self.clock.now):
                self._arrive(index, due_s)

    def _submitted(self, plan: StepPlan, load: StepLoad, seconds: float) -> None:
        self.recorder.planned(plan, load, self.clock.now, seconds)

    def _arrive(self, index: int, due_s: float) -> None:
        requests, recorder = self._requests, self.recorder
        length, output = int(requests.input_len[index]), self._max_output_len or int(requests.output_len[index])
        recorder.arrival_s[index] = due_s
        priority = int(requests.priority[index])
        params = self._params.get(output)
        if params is None:
            params = self._params[output] = SamplingParams(max_tokens=output, temperature=0.0)
        keys = [] if self._keys is None else self._keys.take(index)
        try:
            self.loop.add(index, self._prompt[:length], params, seed=0, priority=priority, keys=keys)
        except RequestError as error:
            self.refused[index] = str(error)
            self._end(index)

    def _end(self, index: int) -> None:
        self.num_finished += 1
        self._feed.finish(index, self.clock.now)

    def result(self) -> SimulationResult:
        """What there is so far."""
        recorder, requests = self.recorder, self._requests
        done = ~np.isnan(recorder.finish_s)
        allowed = np.maximum(0, self._max_model_len - requests.input_len)
        if self._max_output_len is not None:
            allowed = np.minimum(allowed, self._max_output_len)
        num_output = np.where(done, np.minimum(requests.output_len, allowed), 0)
        for request in self.loop.scheduler.requests:
            num_output[request.id] = len(request.tokens) - request.num_prompt
        return SimulationResult(
            seconds=float(recorder.finish_s[done].max(initial=0.0)) if not self.loop.has_work else self.clock.now,
            arrival_s=recorder.arrival_s,
            admitted_s=recorder.admitted_s,
            first_token_s=recorder.first_token_s,
            finish_s=recorder.finish_s,
            num_prompt=requests.input_len,
            num_output=num_output,
            num_cached=recorder.num_cached,
            num_preempted=recorder.num_preempted,
            refused=self.refused,
            admissions=recorder.admissions,
            preemptions=recorder.preemptions,
            steps=recorder.steps,
            request_steps=recorder.request_steps,
            peak_running=recorder.peak_running,
            timeline=recorder.timeline,
            switches=list(self.loop.switcher.history),
            layout_seconds=recorder.layout_seconds,
        )


def _geometry(config: SimulationConfig, model: CostModel) -> ArenaGeometry:
    if config.kv_cache_gib is None:
        return model.planned_geometry(config.mem_fraction)
    stages, budget = model.stages, int(config.kv_cache_gib * GIB)
    return geometry_for_budget(config.spec, stages.kv, config.page_size, stages.weight_size, config.ranks, budget)


class _PageKeys:
    """Names the pages of each request's prompt and output, a range of requests at a time.

    Args:
        requests: the workload.
        page_size: token positions a page.
    """

    def __init__(self, requests: Requests, page_size: int) -> None:
        self._requests = requests
        self._page_size = page_size
        self._ranges: dict[int, tuple[list[int], bytes]] = {}
        self._left: dict[int, int] = {}  # of a range, requests to come

    def take(self, index: int) -> list[bytes]:
        """The names of the full pages of a request, which is asked for once."""
        number = index // KEYED_TOGETHER
        first = number * KEYED_TOGETHER
        if number not in self._ranges:
            last = min(first + KEYED_TOGETHER, len(self._requests))
            starts, names = self._requests.block_keys(self._page_size, first, last, output=True)
            self._ranges[number] = starts.tolist(), names.tobytes()
            self._left[number] = last - first
        offsets, keys = self._ranges[number]
        self._left[number] -= 1
        if not self._left[number]:
            del self._ranges[number], self._left[number]
        begin, end = offsets[index - first] * KEY_BYTES, offsets[index - first + 1] * KEY_BYTES
        return [keys[at : at + KEY_BYTES] for at in range(begin, end, KEY_BYTES)]
