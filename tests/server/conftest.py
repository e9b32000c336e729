"""A real HTTP server on a free port over an engine that follows a script instead of a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from splash.core.decision import Decision
from splash.core.errors import ConfigError, SplashError, WorkerError
from splash.core.layout import LAYOUTS, check_layout, parse_layout
from splash.core.request import SamplingParams, TokenLogprob
from splash.engine.engine import EngineStats
from splash.engine.history import Sample, StepTime, SwitchEvent
from splash.engine.metrics import EngineMetrics, RequestTimes
from splash.engine.outputs import GenerationRequest, Live, RequestOutput
from splash.engine.picture import picture
from splash.engine.stream import Stream
from splash.engine.text import OutputText
from splash.engine.tokenizer import Tokenizer
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from splash.server.app import create_app
from splash.server.auth import ApiKey
from splash.server.settings import ServerSettings
from splash.switch.orders import METHODS, SwitchRecord
from tests.arenas import tiny_geometry

SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|hang|>", "<|silent|>", "<|die|>", "<|fail|>")
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are unknown here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ opening | default('') }}{% endif %}"
)


def train_tokenizer(folder: Path, template: str = TEMPLATE, specials: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE with a chat template, and further special tokens."""
    specials = SPECIALS + specials
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, hello there, the quick brown fox"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "additional_special_tokens": list(specials), "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE, trained here."""
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@dataclass
class ScriptedEngine:
    """Has the interface of `AsyncEngine`. Output token i is prompt token i, over and over, up to max_tokens.

    A prompt with <|hang|> brings one token and then nothing for ever, one with <|silent|> nothing at all, and one with
    <|die|> kills the engine after a token. One with <|fail|> fails as a grammar does.

    With a `script` the output is its text and then an end of sequence, whatever the prompt.

    A switch commits at once, unless `switch_ends` gives another status and reason for its target. With "copying" it
    lasts until it is aborted or superseded, with "committing" until it is superseded; with "dead" it kills the engine.
    """

    tokenizer: Tokenizer
    max_model_len: int = 512
    layout: str = "tp"
    ranks: int = 4
    hardware: str = "cpu"
    error: SplashError | None = None
    restarting: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    samples: list[Sample] = field(default_factory=list)
    events: list[SwitchEvent] = field(default_factory=list)
    looks: int = 0  # how often it was asked what is to be seen
    hanging: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)
    switch_ends: dict[str, tuple[str, str]] = field(default_factory=dict)
    switch_history: list[SwitchRecord] = field(default_factory=list)
    active_switch: SwitchRecord | None = None
    rebalanced: list[int] = field(default_factory=list)  # ids of the switches asked to
    script: str | None = None
    policy: str = "static"
    pinned: bool = False
    decision: Decision | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def __post_init__(self) -> None:
        spec = SimpleNamespace(vocab_size=self.tokenizer.vocab_size + 10, num_heads=6)
        self.model_config = SimpleNamespace(spec=spec, eos_token_ids=(0,))
        self._num_switches = 0
        self._switch_ended = asyncio.Event()

    def stats(self) -> EngineStats:
        pages = (8,) * self.ranks
        return EngineStats(self.layout, len(self.running), 0, pages, pages, 0, 0, 0, 0, 0)

    @property
    def switch_events(self) -> list[SwitchEvent]:
        return self.events

    async def live(self) -> Live:
        self.looks += 1
        geometry = tiny_geometry(self.ranks, 8, 4, 16, 32)
        scheduler = Scheduler(
            SchedulerConfig(8, 16, 64, frozenset(), 4, False), PrefixCache.of_geometry(geometry, LAYOUTS[self.layout])
        )
        for number in range(2):
            scheduler.add(number, [1] * 9, SamplingParams(max_tokens=5), seed=0)
        scheduler.schedule()
        return Live(
            now_s=10.0,
            picture=picture(scheduler, geometry, {0: "cmpl-secret"}),
            samples=self.samples,
            events=self.events,
            step_times={self.layout: StepTime(2.5, 9.5, 100)},
        )

    @contextlib.contextmanager
    def open(self, requests: Sequence[GenerationRequest]) -> Iterator[Stream]:
        if self.error is not None:
            raise self.error
        stream = Stream(len(requests))
        self.requests += requests
        self.running |= {request.id for request in requests}
        tasks = [asyncio.create_task(self._bring(stream, *item)) for item in enumerate(requests)]
        try:
            yield stream
        finally:
            for task in tasks:
                task.cancel()
            self.running -= {request.id for request in requests}
            if len(stream.ends) < len(requests):
                self.aborted.set()

    async def _bring(self, stream: Stream, number: int, request: GenerationRequest) -> None:
        try:
            async for output in self._outputs(request):
                await asyncio.sleep(0)
                stream.put(number, output)
        except SplashError as error:
            stream.fail(error)

    async def _outputs(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        params, prompt = request.params, request.prompt
        hang, silent, die = map(self.tokenizer.backend.token_to_id, ("<|hang|>", "<|silent|>", "<|die|>"))
        fail = self.tokenizer.backend.token_to_id("<|fail|>")
        script = None if self.script is None else self.tokenizer.encode(self.script, add_special_tokens=False)
        text = OutputText(self.tokenizer, prompt, params.stop, visible=request.visible)
        times = RequestTimes(request.arrived)
        times.started = time.monotonic()
        for count in range(1, params.max_tokens + 1):
            if silent in prompt or (count == 2 and hang in prompt):
                self.hanging.set()
                await asyncio.Event().wait()
            if count == 2 and die in prompt:
                self.error = WorkerError("rank 1 died", rank=1)
                raise self.error
            if count == 2 and fail in prompt:
                yield RequestOutput(request.id, (), text.finish(), (), "error", "too costly", len(prompt), count)
                return
            token, piece, stop, finish = prompt[(count - 1) % len(prompt)], "", None, None
            if script is not None:
                token = script[count - 1] if count <= len(script) else 0
            if script is not None and count > len(script):
                finish = "stop"
            else:
                piece, stop = text.push([token])
                finish = "stop" if stop is not None else "length" if count == params.max_tokens else None
            if finish is not None and stop is None:
                piece += text.finish()
            scores: tuple[TokenLogprob, ...] = ()
            if params.logprobs is not None:
                top = tuple((token + i, -0.5 * (i + 1)) for i in range(params.logprobs))
                scores = (TokenLogprob(token, -0.5, top),)
            scored: tuple[TokenLogprob, ...] = ()
            if count == 1 and (num := params.prompt_logprobs) is not None:
                scored = tuple(TokenLogprob(t, -0.25, tuple((t + i, -0.25) for i in range(num))) for t in prompt[1:])
            times.last = time.monotonic()
            times.first = times.first or times.last
            yield RequestOutput(
                request.id,
                (token,),
                piece,
                scores,
                finish,
                stop,
                len(prompt),
                count,
                prompt_logprobs=scored,
                times=times if finish is not None else None,
            )
            if finish is not None:
                return

    async def switch(self, layout: str, method: str = "auto", *, rebalance: bool = False) -> SwitchRecord:
        if method not in METHODS:
            raise ConfigError("method", f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        check_layout(parse_layout(layout), self.model_config.spec.num_heads, self.ranks)
        self._num_switches += 1
        record = SwitchRecord(id=self._num_switches, source=self.layout, target=layout, asked=method)
        if rebalance:
            self.rebalanced.append(record.id)
        self.pinned = True
        if self.active_switch is not None:
            self.finish_switch("superseded", f"by switch {record.id}, to {layout}")
        record.status, record.reason = self.switch_ends.get(layout, ("committed", ""))
        record.method = "layerwise" if method == "auto" else method
        if record.status == "dead":
            self.error = WorkerError("rank 1 died", rank=1)
            raise self.error
        self.active_switch = record
        ended = self._switch_ended
        if record.status in ("copying", "committing"):
            await ended.wait()
        else:
            self.finish_switch(record.status, record.reason)
        return record

    def finish_switch(self, status: str, reason: str) -> None:
        """End the switch under way."""
        record, self.active_switch = self.active_switch, None
        assert record is not None
        record.status, record.reason = status, reason
        if status == "committed":
            self.layout = record.target
        self.switch_history.append(record)
        self._switch_ended.set()
        self._switch_ended = asyncio.Event()

    async def follow_policy(self) -> None:
        self.pinned = False

    def policy_switches(self, decision: Decision) -> None:
        """What a policy does by itself."""
        self.decision = decision
        self._num_switches += 1
        self.active_switch = SwitchRecord(
            id=self._num_switches,
            source=self.layout,
            target=decision.target,
            asked=decision.method,
            method=decision.method,
            decision=decision,
        )
        self.finish_switch("committed", "")

    async def abort_switch(self) -> SwitchRecord | None:
        record = self.active_switch
        if record is not None and record.status != "committing":
            self.finish_switch("aborted", "")
        return record


TLS = ssl.create_default_context()  # nothing here needs it, and each client would load it anew, for longer than a test
LOOK_S = 0.005  # how often a server sees whether it is to stop


class _Server(uvicorn.Server):
    """Says when it listens, and stops soon after it was told to."""

    listening: threading.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(LOOK_S)


@dataclass
class Served:
    """A running server and its clients. The fixture closes it."""

    engine: ScriptedEngine
    url: str
    http: httpx.Client
    client: openai.OpenAI
    stop: Callable[[], None]


@contextlib.contextmanager
def serving(engine: ScriptedEngine, grace_s: int | None = None, **options: Any) -> Iterator[Served]:
    """Serve an engine on a free port, on a thread of its own."""
    loaded = options.pop("loaded", lambda: True)
    api_key, tracing = options.pop("api_key", None), options.pop("tracing", None)
    if api_key is not None:
        options["api_keys"] = (ApiKey(api_key, admin=True),)
    app = create_app(engine, ServerSettings("scripted", "1.2.3", **options), loaded, tracing=tracing)  # type: ignore[arg-type]
    server = _Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=grace_s))
    server.listening = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"

    assert server.listening.wait(20), "the server did not start"
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with (
            httpx.Client(base_url=url, timeout=20, verify=TLS) as http,
            openai.OpenAI(
                base_url=f"{url}/v1",
                api_key=api_key or "none",
                max_retries=0,
                timeout=20,
                http_client=openai.DefaultHttpxClient(verify=TLS),
            ) as client,
        ):
            yield Served(engine, url, http, client, stop)
    finally:
        stop()


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    """A server over a fresh scripted engine."""
    with serving(ScriptedEngine(tokenizer)) as running:
        yield running


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., Served]]:
    """Starts servers with options of `serving`."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(ScriptedEngine(tokenizer), **options))
