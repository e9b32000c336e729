"""`python -m splash.serve`: serve a model over HTTP until told to stop.

Exit codes: 0 stopped by Ctrl-C or SIGTERM, 1 the engine died, 2 an option, the model or the hardware cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvicorn
import uvloop

import splash
from splash.core.errors import ConfigError, SplashError, WorkerError
from splash.core.hardware import Hardware, calibrated
from splash.core.layout import parse_layout
from splash.engine.async_engine import AsyncEngine
from splash.engine.collector import keep_from_collector
from splash.engine.config import DUMMY_FORMATS, EngineConfig
from splash.machine import with_description
from splash.model.choice import ModelChoice
from splash.server.app import create_app
from splash.server.auth import read_keys
from splash.server.intake import Intake
from splash.server.logs import LOGGER, configure_logging
from splash.server.settings import ServerSettings
from splash.server.tracing import Telemetry, make_tracing
from splash.settings import build, compose, pick, usage

_DEATH_POLL_S = 0.2
_FLUSH_S = 1  # until connections are closed on clients that have not read all that was sent


@dataclass(frozen=True)
class ServeOptions:
    """The options of serving that are not the engine's.

    Raises:
        ConfigError: naming the option that is out of range.
    """

    model: ModelChoice
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_mib: float = 16.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    tool_format: Literal["auto", "deepseek", "glm", "tagged_json", "json"] = "auto"
    shutdown_grace_s: float = 30.0
    max_concurrent_requests: int = 1024
    request_timeout_s: float | None = None
    stalled_timeout_s: float = 60.0
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = False
    telemetry: Telemetry = dataclasses.field(default_factory=Telemetry)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"must be between 0 and 65535, not {self.port}")
        for field, ok, accepted in (
            ("shutdown_grace_s", self.shutdown_grace_s >= 0, "at least 0"),
            ("max_concurrent_requests", self.max_concurrent_requests >= 1, "at least 1"),
            ("request_timeout_s", self.request_timeout_s is None or self.request_timeout_s > 0, "above 0"),
            ("stalled_timeout_s", 1 <= self.stalled_timeout_s <= 86400, "between 1 and 86400"),
            ("max_body_mib", self.max_body_mib > 0, "above 0"),
        ):
            if not ok:
                raise ConfigError(field, f"must be {accepted}, not {getattr(self, field)!r}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile", "and ssl_keyfile must be given together")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with the options of a command line. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(arguments):
        print(usage("python -m splash.serve", "config"))
        return 0
    try:
        options, config = read_options(arguments)
        configure_logging(options.log_format)
        config = with_description(config)
        with bind(options.host, options.port, options.stalled_timeout_s) as listener:
            return uvloop.run(_serve(options, config, listener))
    except SplashError as error:
        LOGGER.error(f"splash: {' '.join(str(error).split())}")
        return 1 if isinstance(error, WorkerError) else 2
    except KeyboardInterrupt:
        return 0


def read_options(arguments: Sequence[str]) -> tuple[ServeOptions, EngineConfig]:
    """Options of a command line, checked.

    Raises:
        ConfigError: naming the option at fault.
    """
    mapping = compose("config", arguments)
    hardware = mapping.pop("hardware", None)
    if hardware is not None and not isinstance(hardware, dict):
        raise ConfigError("hardware", "must name a file of the group, as in +hardware=cpu")
    description = None if hardware is None else calibrated(build(Hardware, hardware, "hardware."))
    engine = pick(EngineConfig, mapping)
    del engine["model"]  # the group of that name, not the engine's directory
    options = build(ServeOptions, {key: value for key, value in mapping.items() if key not in engine})
    model = options.model
    dummy = engine.get("load_format") in DUMMY_FORMATS
    if model.path is None and not dummy:
        raise ConfigError(
            "model.path", f"{model.name} comes without weights; give a checkpoint's directory, or load_format=dummy"
        )
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    if model.path is not None and "model.path" in given and not given & {"model", "model.name"}:
        # The default model's name would be wrong for another checkpoint.
        model = dataclasses.replace(model, name=Path(model.path).expanduser().resolve().name)
        options = dataclasses.replace(options, model=model)
    platform = None if description is None else description.platform
    contents = None if model.path is not None and not model.is_reduced else model.contents()
    values = {"model": model.path or model.name, "model_config": contents, "hardware": platform}
    config = build(EngineConfig, engine | values)
    config = dataclasses.replace(config, description=description)
    parse_layout(config.layout)
    return options, config


def bind(host: str, port: int, stalled_timeout_s: float) -> socket.socket:
    """Listen before the model is loaded, so that a port in use is known at once.

    Args:
        host: name or address of this machine.
        port: 0 takes a free one.
        stalled_timeout_s: the kernel closes a connection whose client takes nothing for so long.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("host", f"{host!r} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stalled_timeout_s * 1000))
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("port", f"{port} is in use on {host}; choose another, or 0 for a free one") from None
        field = "port" if error.errno == errno.EACCES else "host"
        raise ConfigError(field, f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


class _Server(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again after stopping, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(options: ServeOptions, config: EngineConfig, listener: socket.socket) -> int:
    """Load the model while the server already answers probes; stop on a signal or when the engine dies."""
    keys = read_keys(options.api_key, options.api_key_file, os.environ)
    _check_certificate(options)
    if not keys and not _is_loopback(listener):
        _say(f"warning: anybody who reaches {options.host} may use the model and change the layout; see api_key_file")
    tracing = make_tracing(options.telemetry, os.environ, options.model.name, splash.__version__, _say)
    engine = AsyncEngine(config, _say)
    ready = asyncio.Event()
    settings = ServerSettings(
        model=options.model.name,
        version=splash.__version__,
        api_keys=keys,
        tool_format=options.tool_format,
        max_body_bytes=int(options.max_body_mib * (1 << 20)),
        cors_origins=options.cors_origins,
        max_concurrent_requests=options.max_concurrent_requests,
        request_timeout_s=options.request_timeout_s,
        log_requests=options.log_requests,
    )
    intake = Intake(options.max_concurrent_requests)
    app = create_app(engine, settings, ready.is_set, intake, tracing)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            timeout_graceful_shutdown=_FLUSH_S,
        )
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        server.should_exit = stop.is_set()  # who asks twice is in a hurry
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(engine.start())
    dying = asyncio.create_task(_engine_error(engine))
    try:
        await asyncio.wait((serving, loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if serving.done() or stop.is_set():
            _say("stopping before the model is loaded")
            return 0
        await loading
        keep_from_collector()
        ready.set()
        _announce(options, bool(keys), engine, listener)
        await asyncio.wait((serving, dying, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and not dying.done():
            _say(f"stopping: requests that run have {options.shutdown_grace_s:g} s to finish")
            draining = asyncio.create_task(intake.drain())
            await asyncio.wait(
                (serving, dying, draining), timeout=options.shutdown_grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not draining.done():
                draining.cancel()
                server.config.timeout_graceful_shutdown = 0
        if dying.done():
            raise dying.result()
        _say("stopped")
        return 0
    finally:
        server.should_exit = True
        await serving
        for task in (loading, dying, stopping):
            task.cancel()
        await engine.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def _engine_error(engine: AsyncEngine) -> WorkerError:
    """Waits until the engine has died; says of what."""
    while engine.error is None:
        await asyncio.sleep(_DEATH_POLL_S)
    return WorkerError(f"the engine died, so the server stops: {engine.error}")


def _check_certificate(options: ServeOptions) -> None:
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        files = f"{options.ssl_certfile} and {options.ssl_keyfile}"
        raise ConfigError("ssl_certfile", f"{files} are not a certificate and its key: {error}") from None


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _announce(options: ServeOptions, has_keys: bool, engine: AsyncEngine, listener: socket.socket) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http{'s' if options.ssl_certfile else ''}://{host}:{listener.getsockname()[1]}"
    name = options.model.name
    ready = f"SPLASH is ready: {url} (model {name}, layout {engine.layout}, {engine.ranks} ranks, {engine.hardware})"
    body = json.dumps({"model": name, "prompt": "In the beginning", "max_tokens": 32})
    key = " -H 'Authorization: Bearer ...'" if has_keys else ""
    _say(f"{ready}\nTry:  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'")


def _say(line: str) -> None:
    LOGGER.info(line)


if __name__ == "__main__":
    sys.exit(main())
