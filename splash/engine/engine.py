"""Engine: the whole of serving. A loop has the ranks carry out what is scheduled; tokens are turned into text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from splash.core.capacity import activation_bytes, geometry_for_budget, other_weight_bytes
from splash.core.decision import Decision
from splash.core.errors import CapacityError, ConfigError, RequestError
from splash.core.layout import Layout, check_layout, parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.request import TokenLogprob
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.engine.config import DUMMY_FORMATS, EngineConfig
from splash.engine.executor import LocalGroup
from splash.engine.history import History, SwitchEvent
from splash.engine.loop import Loop
from splash.engine.memory import memory_lines
from splash.engine.metrics import EngineMetrics, RequestTimes
from splash.engine.outputs import GenerationRequest, Live, RequestOutput
from splash.engine.picture import picture
from splash.engine.restarts import Restarts
from splash.engine.text import OutputText
from splash.engine.tokenizer import Tokenizer
from splash.model.config import (
    DEFAULT_MODEL,
    ModelConfig,
    check_servable,
    parse_model_config,
    read_model_config,
    resolve_model_path,
)
from splash.platform import registry
from splash.platform.base import Platform
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.cost_model import CostModel
from splash.scheduler.policies import make_policy
from splash.scheduler.policy import Limits, Policy
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler
from splash.switch.orders import SwitchRecord

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for people and for metrics.

    Page counts are by rank; pages that only the prefix cache holds are free. Of `prefix_queried_tokens`, those of all
    prompts so far, `prefix_hit_tokens` were found in the prefix cache.
    """

    layout: str
    running: int
    waiting: int
    free_pages: tuple[int, ...]
    total_pages: tuple[int, ...]
    preemptions: int
    restarts: int
    steps: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int


@dataclass
class _Live:
    """A request between its arrival and its last output."""

    request: GenerationRequest
    number: int
    text: OutputText
    times: RequestTimes
    num_output: int = 0
    num_cached: int = 0

    def output(
        self,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> RequestOutput:
        """An output of this request."""
        return RequestOutput(
            id=self.request.id,
            tokens=tokens,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(self.request.prompt),
            num_output_tokens=self.num_output,
            num_cached_tokens=self.num_cached,
            prompt_logprobs=prompt_logprobs,
            times=None if finish_reason is None else self.times,
        )


class Engine:
    """Serves requests in one layout on one group of ranks. Not thread-safe: one thread calls everything.

    The step after is planned and sent before the text of the step before is made, with `async_scheduling` before that
    step is over, so that ranks do not wait for it.

    Attributes:
        loop: serves token ids by request number.
        scheduler, switcher: those of the loop.
        ready: what each rank said of itself when it was.
        metrics: counts and times.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the configuration, start the group and load the model.

        Args:
            config: what to serve and how.
            progress: receives a line for each thing that start-up does.
            clock: the seconds that the policy and switches go by, from any origin.

        Raises:
            ConfigError: an option cannot work, alone or with this model.
            CheckpointError: the model directory cannot be served.
            CapacityError: the model does not fit.
            PlatformUnavailable: the hardware asked for is not usable here.
            WorkerError: a rank failed to start.
        """
        started = time.monotonic()
        contents = read_model_config(config.model) if config.model_config is None else config.model_config
        self.model_config: ModelConfig = parse_model_config(contents, config.model)
        check_servable(self.model_config)
        self._model_path = resolve_model_path(config.model)
        if config.load_format in DUMMY_FORMATS and not self._model_path.is_dir():
            self._model_path = resolve_model_path(DEFAULT_MODEL)
        self.tokenizer = Tokenizer.load(self._model_path)
        self._platform: Platform = registry.require(config.hardware) if config.hardware else registry.detect()
        spec = self.model_config.spec
        self.ranks = config.ranks or self._platform.default_ranks()
        layout: Layout = parse_layout(config.layout)
        check_layout(layout, spec.num_heads, self.ranks)
        self.max_model_len = _model_len(config, spec.max_position_embeddings)
        progress(f"platform {self._platform.name}: {self._platform.availability().reason}")
        progress(
            f"model {config.model}: {spec.architecture}, {spec.num_layers} layers, {spec.num_heads} heads, "
            f"context {self.max_model_len}"
        )
        geometry = self._geometry_of(config)
        pool = PrefixCache.of_geometry(geometry, layout)
        progress(
            f"memory a rank: {geometry.arena_bytes * spec.num_layers / GIB:.2f} GiB of arenas, "
            f"{min(pool.num_total)} pages of {config.page_size} tokens in layout {layout}"
        )
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_batched_tokens=config.max_batched_tokens,
                max_model_len=self.max_model_len,
                page_size=config.page_size,
                eos_token_ids=frozenset(self.model_config.eos_token_ids),
                prefix_cache=config.prefix_cache,
            ),
            pool,
        )
        copy_mib = self._platform.copy_mib if config.switch_copy_mib is None else config.switch_copy_mib
        staging_bytes, step_bytes = int(config.switch_staging_mib * MIB), int(copy_mib * MIB)
        policy = self._policy(
            config, Limits(geometry, config.max_num_seqs, config.max_batched_tokens, staging_bytes, step_bytes)
        )
        progress(f"starting {self.ranks} ranks")
        is_async = self._platform.is_queued if config.async_scheduling is None else config.async_scheduling
        group = LocalGroup(config, str(self._model_path), contents, self._platform, self.ranks, geometry, is_async)
        self.ready = group.start(self.max_model_len)
        self.loop = Loop(
            scheduler,
            group,
            geometry,
            staging_bytes,
            step_bytes,
            policy,
            clock,
            timer=time.thread_time,  # a decision that waits for a core takes nothing from ranks that use it
            restarts=Restarts(config.max_restarts, config.restart_window_s, progress),
            async_scheduling=is_async,
            streams=self._platform.is_queued,
        )
        self.scheduler, self.switcher = self.loop.scheduler, self.loop.switcher
        self._geometry = geometry
        self._history = History(scheduler, self.switcher, time.monotonic())
        for line in memory_lines(self.ready, geometry):
            progress(line)
        progress(f"ready in {time.monotonic() - started:.1f} s")
        self.metrics = EngineMetrics()
        self.loop.on_step, self.switcher.on_end = self.metrics.step, self.metrics.switched
        self._seed = config.seed
        self._next_number = 0
        self._live: dict[int, _Live] = {}
        self._numbers: dict[str, int] = {}
        self._aborted: list[RequestOutput] = []

    def _geometry_of(self, config: EngineConfig) -> ArenaGeometry:
        """The largest arenas that the memory allows."""
        spec, ranks = self.model_config.spec, self.ranks
        kv, weight_bytes = kv_format(spec, config.dtype), DTYPE_BYTES[config.dtype]
        if config.kv_cache_gib is not None:
            what, budget = f"kv_cache_gib={config.kv_cache_gib}", int(config.kv_cache_gib * GIB)
        else:
            beside = sum(other_weight_bytes(spec, config.dtype, ranks).values()) + self._workspace_bytes(config)
            what = f"mem_fraction={config.mem_fraction}"
            budget = self._platform.arena_budget(ranks, beside, config.mem_fraction)
        try:
            return geometry_for_budget(spec, kv, config.page_size, weight_bytes, ranks, budget)
        except CapacityError as error:
            raise CapacityError(f"{what}: {error}") from None

    def _workspace_bytes(self, config: EngineConfig) -> int:
        """Bytes a rank that a step needs beside weights and arenas, and the staging of a switch."""
        rows, samples = config.max_batched_tokens, min(config.max_num_seqs, config.max_batched_tokens)
        activations = activation_bytes(self.model_config.spec, config.dtype, rows, samples, self.ranks)
        return activations + int(config.switch_staging_mib * MIB)

    def _policy(self, config: EngineConfig, limits: Limits) -> Policy:
        model = None
        if config.policy.kind == "cost" and config.description is not None:
            spec = limits.geometry.spec
            model = CostModel(
                spec,
                config.description,
                self.ranks,
                config.dtype,
                config.page_size,
                graph_rows=config.graph_rows,
            )
        return make_policy(config.policy, limits, model)

    @property
    def layout(self) -> str:
        """Name of the layout that steps run in."""
        return self.loop.layout

    def switch(
        self,
        layout: str,
        method: str = "auto",
        *,
        rebalance: bool = False,
        done: Callable[[SwitchRecord], None] = lambda record: None,
    ) -> SwitchRecord:
        """Ask for another layout, or with `rebalance` for other owners. Steps carry it out; requests go on meanwhile.

        Pins the layout: the policy leaves it alone until `follow_policy`.

        Args:
            layout: name of the layout to serve in from the commit on.
            method: "auto", "precopy", "layerwise" or "blocking".
            rebalance: deal the requests out to owners anew.
            done: called with the final record, by `step` or at once.

        Returns:
            the record, which is kept up to date until the switch has ended.

        Raises:
            ConfigError: the layout or the method is unknown, or the layout cannot work with this model and group.
        """
        record = self.switcher.request(parse_layout(layout), method, rebalance, done)
        self.loop.steering.pin()
        return record

    def follow_policy(self) -> None:
        """Let the policy choose the layout again after a switch by hand."""
        self.loop.steering.release()

    @property
    def pinned(self) -> bool:
        """Whether the layout was chosen by hand, and the policy leaves it alone."""
        return self.loop.steering.pinned

    @property
    def decision(self) -> Decision | None:
        """The last answer of the policy."""
        return self.loop.steering.decision

    def check(self) -> None:
        """See that the ranks are alive while nothing runs, and start them anew if they are not.

        Raises:
            WorkerError: the group died once too often; the engine can only be closed.
        """
        self.loop.check()

    @property
    def restarting(self) -> bool:
        """Whether the ranks are being started anew. Any thread may ask."""
        return self.loop.restarts.under_way

    @property
    def hardware(self) -> str:
        """Name of the platform."""
        return self._platform.name

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: naming the parameter that cannot be served; nothing else is affected.
        """
        request.params.validate()
        if request.id in self._numbers:
            raise RequestError("request_id", f"{request.id!r} is in use by a live request")
        vocab = self.model_config.spec.vocab_size
        for token in request.prompt:
            if not 0 <= token < vocab:
                raise RequestError("prompt", f"token id {token} is outside the vocabulary of {vocab}")
        for field, tokens in (
            ("stop_token_ids", request.params.stop_token_ids),
            ("logit_bias", [token for token, _ in request.params.logit_bias]),
        ):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise RequestError(field, f"token id {token} is outside the vocabulary of {vocab}")
        number = self._next_number
        seed = request.params.seed if request.params.seed is not None else self._seed + number
        self.loop.add(number, request.prompt, request.params, seed, request.priority)
        self._next_number += 1
        self._numbers[request.id] = number
        text = OutputText(
            self.tokenizer, request.prompt, request.params.stop, request.params.min_tokens, request.visible
        )
        self._live[number] = _Live(request, number, text, RequestTimes(request.arrived))

    def abort(self, request_id: str) -> None:
        """Stop a request; its last output says "abort". Unknown and finished requests are passed over."""
        number = self._numbers.get(request_id)
        if number is not None:
            live = self._live[number]
            self.loop.abort(number)
            self._forget(live, "abort", time.monotonic())
            self._aborted.append(live.output(text=live.text.finish(), finish_reason="abort"))

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._aborted) or self.loop.has_work

    def step(self) -> list[RequestOutput]:
        """Finish the step in flight, begin the next one before or after, and return what the finished one brought.

        Raises:
            WorkerError: the group died once too often; the engine can only be closed.
        """
        num_steps = self.loop.num_steps
        progress = self.loop.step()
        now = time.monotonic()
        self._history.stepped(now, self.loop.num_steps > num_steps, self.layout)
        outputs, self._aborted = self._aborted, []
        for number in self.loop.begun:
            live = self._live.get(number)
            if live is not None:
                self.metrics.start(live.times, len(live.request.prompt), now)
        for item in progress:
            live = self._live.get(item.id)
            if live is not None:
                if item.finish_reason != "error":  # whose token means nothing
                    self._note_token(live, now)
                outputs.append(self._advance(live, item, now))
        if not self.loop.has_work:
            self._history.idle(now)
        return outputs

    def _note_token(self, live: _Live, now: float) -> None:
        times = live.times
        if times.first is None:
            self._history.first_token(now - times.arrived, len(live.request.prompt))
        else:
            self._history.next_token(now - times.last)

    def _advance(self, live: _Live, item: Progress, now: float) -> RequestOutput:
        """Turn one new token into an output, ending the request where a stop string says so."""
        live.num_cached = item.num_cached
        reason = item.finish_reason
        if reason == "error":
            self._forget(live, reason, now)
            return live.output(text=live.text.finish(), finish_reason=reason, stop_reason=item.stop_reason)
        live.num_output += 1
        self.metrics.token(live.times, now)
        stop_reason: str | int | None = item.stop_reason
        # The token that ended the request is not part of its text.
        text, stop_string = ("", None) if reason == "stop" else live.text.push((item.token,))
        if stop_string is not None:
            if reason is None:
                self.loop.abort(live.number)
                self.loop.steering.finished(live.num_output)
            reason, stop_reason = "stop", stop_string
        elif reason is not None:
            text += live.text.finish()
        if reason is not None:
            self._forget(live, reason, now)
        logprobs = () if item.logprob is None else (item.logprob,)
        return live.output((item.token,), text, logprobs, reason, stop_reason, item.prompt_logprobs)

    def _forget(self, live: _Live, reason: str, now: float) -> None:
        self.metrics.finish(live.times, reason, len(live.request.prompt), live.num_output, now)
        del self._live[live.number]
        del self._numbers[live.request.id]

    def stats(self) -> EngineStats:
        """A snapshot of load and memory."""
        return EngineStats(
            layout=self.layout,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_pages=tuple(self.scheduler.pool.num_free),
            total_pages=tuple(self.scheduler.pool.num_total),
            preemptions=self.scheduler.num_preemptions,
            restarts=self.loop.restarts.num_restarts,
            steps=self.loop.num_steps,
            prefix_queried_tokens=self.scheduler.num_queried,
            prefix_hit_tokens=self.scheduler.num_hit,
        )

    @property
    def switch_events(self) -> list[SwitchEvent]:
        """The last switches that have ended, oldest first. Any thread may ask."""
        return self._history.events

    def live(self) -> Live:
        """The last minutes, and what each rank holds now."""
        names = {number: live.request.id for number, live in self._live.items()}
        history = self._history
        return Live(
            now_s=round(time.monotonic(), 3),
            picture=picture(self.scheduler, self._geometry, names),
            samples=history.samples,
            events=history.events,
            step_times=history.step_times(),
        )

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self.loop.close()


def _model_len(config: EngineConfig, supported: int) -> int:
    if config.max_model_len is None:
        return supported
    if config.max_model_len > supported:
        raise ConfigError(
            "max_model_len", f"the model supports at most {supported} positions, not {config.max_model_len}"
        )
    return config.max_model_len
