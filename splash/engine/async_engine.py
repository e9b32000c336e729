"""AsyncEngine: an `Engine` in a thread of its own, for callers on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from splash.core.decision import Decision
from splash.core.errors import DeadlineError, RequestError, SplashError, WorkerError
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine, EngineStats
from splash.engine.history import SwitchEvent
from splash.engine.metrics import EngineMetrics
from splash.engine.outputs import GenerationRequest, Live, RequestOutput
from splash.engine.stream import Stream
from splash.engine.tokenizer import Tokenizer
from splash.model.config import ModelConfig
from splash.switch.orders import SwitchRecord

IDLE_CHECK_S = 1.0  # how often an idle engine sees whether its ranks are alive


@dataclass(frozen=True)
class _Add:
    request: GenerationRequest
    stream: Stream


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Switch:
    layout: str
    method: str
    rebalance: bool
    done: asyncio.Future[SwitchRecord]


@dataclass(frozen=True)
class _FollowPolicy:
    done: asyncio.Future[None]


@dataclass(frozen=True)
class _AbortSwitch:
    done: asyncio.Future[SwitchRecord | None]


@dataclass(frozen=True)
class _Look:
    done: asyncio.Future[Live]


class _Close:
    pass


_Command = _Add | _Abort | _Switch | _FollowPolicy | _AbortSwitch | _Look | _Close


class AsyncEngine:
    """Streams requests through an engine whose loop runs in its own thread.

    The thread sleeps while there is nothing to do. Everything that a step brings crosses to the event loop in one call.
    Attributes of the engine may be read once `start` has returned.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] = lambda line: None) -> None:
        self._config = config
        self._progress = progress
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, tuple[Stream, int]] = {}  # by request, with its number there
        self._waiters: set[asyncio.Future[Any]] = set()
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self.error: SplashError | None = None

    async def start(self) -> None:
        """Start the group and load the model. Raises what `Engine` raises."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="splash-engine", daemon=True)
        self._thread.start()
        await started

    async def close(self) -> None:
        """End the loop and the ranks. Idempotent."""
        if self._thread is not None:
            self._commands.put(_Close())
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    @property
    def _started(self) -> Engine:
        assert self._engine is not None, "start() first"
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._started.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """What config.json said."""
        return self._started.model_config

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._started.max_model_len

    @property
    def layout(self) -> str:
        """Name of the layout that steps run in."""
        return self._started.layout

    @property
    def ranks(self) -> int:
        """T."""
        return self._started.ranks

    @property
    def hardware(self) -> str:
        """Name of the platform."""
        return self._started.hardware

    @property
    def restarting(self) -> bool:
        """Whether the ranks are being started anew; requests wait meanwhile."""
        return self._started.restarting

    @property
    def metrics(self) -> EngineMetrics:
        """Counts and times, which the engine's thread goes on writing."""
        return self._started.metrics

    def stats(self) -> EngineStats:
        """A snapshot of load and memory."""
        return self._started.stats()

    async def live(self) -> Live:
        """The last minutes, and what each rank holds at the next step boundary.

        Raises:
            WorkerError: the group died.
        """
        if self.error is not None:
            raise self.error
        done: asyncio.Future[Live] = asyncio.get_running_loop().create_future()
        self._waiters.add(done)
        done.add_done_callback(self._waiters.discard)
        self._commands.put(_Look(done))
        return await done

    @contextlib.contextmanager
    def open(self, requests: Sequence[GenerationRequest]) -> Iterator[Stream]:
        """Serve requests. The stream brings their outputs; those that have not ended when it is left are aborted.

        Their time, where they have one, is that of the first to be up.

        Raises:
            RequestError: an id is in use by a live request.
            WorkerError: the group died.
        """
        if self.error is not None:
            raise self.error
        stream = Stream(len(requests))
        limits = [request.timeout_s for request in requests if request.timeout_s is not None]
        timer = self._loop.call_later(min(limits), _expire, stream, min(limits)) if limits else None
        added: list[str] = []
        try:
            for number, request in enumerate(requests):
                if request.id in self._streams:
                    raise RequestError("request_id", f"{request.id!r} is in use by a live request")
                self._streams[request.id] = stream, number
                added.append(request.id)
                self._commands.put(_Add(request, stream))
            yield stream
        finally:
            if timer is not None:
                timer.cancel()
            for number, request_id in enumerate(added):
                del self._streams[request_id]
                if number not in stream.ends:
                    self._commands.put(_Abort(request_id))

    async def switch(self, layout: str, method: str = "auto", *, rebalance: bool = False) -> SwitchRecord:
        """Change the layout, or the owners, while requests run. Returns when the switch has ended, however it did.

        Raises:
            ConfigError: the layout or the method is unknown, or the layout cannot work here.
            WorkerError: the group died.
        """
        if self.error is not None:
            raise self.error
        done: asyncio.Future[SwitchRecord] = asyncio.get_running_loop().create_future()
        self._waiters.add(done)
        done.add_done_callback(self._waiters.discard)
        self._commands.put(_Switch(layout, method, rebalance, done))
        return await done

    async def follow_policy(self) -> None:
        """Let the policy choose the layout again after a switch by hand."""
        if self.error is not None:
            raise self.error
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(done)
        done.add_done_callback(self._waiters.discard)
        self._commands.put(_FollowPolicy(done))
        await done

    @property
    def policy(self) -> str:
        """Kind of the policy."""
        return self._config.policy.kind

    @property
    def pinned(self) -> bool:
        """Whether the layout was chosen by hand, and the policy leaves it alone."""
        return self._started.pinned

    @property
    def decision(self) -> Decision | None:
        """The last answer of the policy."""
        return self._started.decision

    async def abort_switch(self) -> SwitchRecord | None:
        """Give up the switch under way. Returns its record, None where there was none to give up."""
        if self.error is not None:
            raise self.error
        done: asyncio.Future[SwitchRecord | None] = asyncio.get_running_loop().create_future()
        self._waiters.add(done)
        done.add_done_callback(self._waiters.discard)
        self._commands.put(_AbortSwitch(done))
        return await done

    @property
    def active_switch(self) -> SwitchRecord | None:
        """The switch under way."""
        return self._started.switcher.active

    @property
    def switch_history(self) -> list[SwitchRecord]:
        """The switches that have ended, oldest first."""
        return list(self._started.switcher.history)

    @property
    def switch_events(self) -> list[SwitchEvent]:
        """The last switches that have ended and when, oldest first."""
        return self._started.switch_events

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish reason "abort"."""
        self._commands.put(_Abort(request_id))

    def _run(self, started: asyncio.Future[None]) -> None:
        """The engine's thread."""
        try:
            engine = Engine(self._config, self._progress)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_fail, started, error)
            return
        self._engine = engine
        self._loop.call_soon_threadsafe(_succeed, started)
        try:
            while self._obey(engine, wait=not engine.has_work):
                if engine.has_work:
                    outputs = engine.step()
                    if outputs:
                        self._loop.call_soon_threadsafe(self._deliver, outputs)
            self._die(WorkerError("the engine has been closed"))
        except BaseException as error:
            self._die(error if isinstance(error, SplashError) else WorkerError(f"the engine failed: {error!r}"))
        finally:
            engine.close()

    def _die(self, error: SplashError) -> None:
        self.error = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed, and then nobody waits
            self._loop.call_soon_threadsafe(self._deliver_error, error)

    def _obey(self, engine: Engine, wait: bool) -> bool:
        """Carry out the commands that have arrived, waiting for one if asked. False once told to close."""
        while True:
            try:
                command = self._commands.get(block=wait, timeout=IDLE_CHECK_S)
            except queue.Empty:
                if wait:
                    engine.check()
                    continue
                return True
            wait = False
            if isinstance(command, _Close):
                return False
            if isinstance(command, _Abort):
                engine.abort(command.request_id)
                continue
            if isinstance(command, _Switch):
                self._switch(engine, command)
                continue
            if isinstance(command, _FollowPolicy):
                engine.follow_policy()
                self._loop.call_soon_threadsafe(_succeed, command.done)
                continue
            if isinstance(command, _AbortSwitch):
                record = engine.switcher.active
                engine.switcher.abort()
                self._loop.call_soon_threadsafe(_succeed, command.done, record)
                continue
            if isinstance(command, _Look):
                self._loop.call_soon_threadsafe(_succeed, command.done, engine.live())
                continue
            try:
                engine.add_request(command.request)
            except SplashError as error:
                self._loop.call_soon_threadsafe(command.stream.fail, error)

    def _switch(self, engine: Engine, command: _Switch) -> None:
        def finish(record: SwitchRecord) -> None:
            self._loop.call_soon_threadsafe(_succeed, command.done, record)

        try:
            engine.switch(command.layout, command.method, rebalance=command.rebalance, done=finish)
        except SplashError as error:
            self._loop.call_soon_threadsafe(_fail, command.done, error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        streams = self._streams
        for output in outputs:
            found = streams.get(output.id)
            if found is not None:
                stream, number = found
                stream.put(number, output)

    def _deliver_error(self, error: SplashError) -> None:
        for stream, _ in self._streams.values():
            stream.fail(error)
        for waiter in list(self._waiters):
            _fail(waiter, error)


def _expire(stream: Stream, timeout_s: float) -> None:
    stream.fail(DeadlineError(f"the request was not done within {timeout_s:g} s"))


def _succeed(future: asyncio.Future[Any], result: object = None) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
