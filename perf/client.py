"""A light client for OpenAI-compatible endpoints that stamps what is streamed as its bytes arrive.

The machine that serves often runs the client too, so it does as little as it can while a stream runs: a protocol on
uvloop, httptools for the framing, and all JSON after the stream has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from splash.workload import Feed, Requests

WORDS = "page rank step row head group layout token batch cache owner shard gather reduce merge slot".split()
FIRST_TOKEN_ID = 16  # below are often special tokens
REUSE_S = 2.0  # servers close connections that have been idle for a few seconds

Prompt = str | list[int]


@dataclass(frozen=True)
class Endpoint:
    """Where to send requests, and how.

    Attributes:
        url: without /v1.
        model: name to ask for.
        chat: use /v1/chat/completions, with each prompt as one message of a user.
        api_key: bearer token, None for none.
        ignore_eos: generate exactly as many tokens as asked for; a request that gets another number has failed.
        timeout_s: the longest that a request may take.
    """

    url: str
    model: str
    chat: bool = False
    api_key: str | None = None
    ignore_eos: bool = True
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Call:
    """One request. `priority` is sent unless it is 0."""

    prompt: Prompt
    output_len: int
    priority: int = 0


@dataclass(frozen=True)
class Timing:
    """One request: seconds on the monotonic clock, tokens as the server counted them, and the text.

    `due` is when the request should have been sent: when it was, in a closed loop. `error` says how it failed, and is
    empty where it did not; only then there are events.
    """

    sent: float
    events: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    text: str
    due: float
    error: str = ""

    @property
    def late(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.events[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float:
        return (self.events[-1] - self.events[0]) / max(1, self.output_tokens - 1)


def make_prompts(kind: str, count: int, length: int, vocab_size: int, seed: int) -> list[Prompt]:
    """`count` different random prompts of `length` token ids ("tokens") or words ("text")."""
    draw = random.Random(seed)
    if kind == "text":
        return [" ".join(draw.choices(WORDS, k=length)) for _ in range(count)]
    return [[draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(length)] for _ in range(count)]


class _Failed(Exception):
    """A request did not bring what was asked for."""


class _Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        self._done: asyncio.Future[None] | None = None

    def send(self, request: bytes) -> asyncio.Future[None]:
        """Send a request. The future is done when its whole answer is there: `status` and `pieces`, with stamps."""
        self.pieces: list[tuple[float, bytes]] = []
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(_Failed(f"what came is no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.reusable = self._parser.should_keep_alive()
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(_Failed(f"the connection was lost: {error or 'closed by the server'}"))

    @property
    def is_fresh(self) -> bool:
        """Whether it is open, and will not be closed by a server that waits for no more requests."""
        return not self._transport.is_closing() and time.perf_counter() - self._now < REUSE_S

    def close(self) -> None:
        self._transport.close()

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Client:
    """Sends requests to an endpoint over connections that are used again. Close it with `close`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SystemExit(f"--url: {endpoint.url!r} is not the address of an endpoint")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        path = f"{parts.path.rstrip('/')}/v1/{'chat/' if endpoint.chat else ''}completions"
        key = f"Authorization: Bearer {endpoint.api_key}\r\n" if endpoint.api_key else ""
        self._head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}Content-Type: application/json\r\n"
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """End all connections."""
        for connection in self._idle:
            connection.close()

    async def call(self, call: Call, due: float | None = None) -> Timing:
        """Send one request and wait for the end of its stream. A request that fails says so in its timing."""
        body = json.dumps(self._body(call)).encode()
        request = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        connection: _Connection | None = None
        sent = time.perf_counter()
        due = sent if due is None else due
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                connection = await self._connect()
                await connection.send(request)
            timing = self._read(call, connection, sent, due)
        except (OSError, TimeoutError, ValueError, _Failed) as error:
            if connection is not None:
                connection.close()
            return Timing(sent, (), 0, 0, "", due, str(error) or type(error).__name__)
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return timing

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return connection

    def _body(self, call: Call) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": call.prompt}
        if self._endpoint.chat:
            prompt = {"messages": [{"role": "user", "content": call.prompt}]}
        return {
            "model": self._endpoint.model,
            **prompt,
            "max_tokens": call.output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._endpoint.ignore_eos else {}),
            **({"priority": call.priority} if call.priority else {}),
        }

    def _read(self, call: Call, connection: _Connection, sent: float, due: float) -> Timing:
        if connection.status != 200:
            said = b"".join(body for _, body in connection.pieces).decode(errors="replace")
            raise _Failed(f"{self._endpoint.url} answered {connection.status}: {said[:500]}")
        times: list[float] = []
        text: list[str] = []
        usage: dict[str, int] = {}
        for stamp, event in _events(connection.pieces):
            if "error" in event:
                raise _Failed(f"{self._endpoint.url} failed while streaming: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice.get("text") if not self._endpoint.chat else choice["delta"].get("content")
                # A chat begins with an event that has no token; elsewhere an event without text has one.
                if self._endpoint.chat and not piece:
                    continue
                times.append(stamp)
                text.append(piece or "")
        if not times:
            raise _Failed(f"{self._endpoint.url} streamed no token")
        output_tokens = usage.get("completion_tokens", len(times))
        if self._endpoint.ignore_eos and output_tokens != call.output_len:
            raise _Failed(f"{self._endpoint.url} generated {output_tokens} tokens, {call.output_len} were asked for")
        return Timing(
            sent, tuple(times), usage.get("prompt_tokens", len(call.prompt)), output_tokens, "".join(text), due
        )


def _events(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """The JSON events of a stream, each with the stamp of the piece that completed it."""
    events = []
    pending = b""
    for stamp, body in pieces:
        *lines, pending = (pending + body).split(b"\n")
        events += [(stamp, json.loads(line[len(b"data: ") :])) for line in lines if line.startswith(b"data: {")]
    return events


async def drive(endpoint: Endpoint, calls: Sequence[Call], concurrency: int) -> list[Timing]:
    """Send every call once, `concurrency` at a time; timings in their order."""
    results: dict[int, Timing] = {}
    waiting = iter(enumerate(calls))
    with contextlib.closing(Client(endpoint)) as client:

        async def worker() -> None:
            for index, call in waiting:
                results[index] = await client.call(call)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(calls))):
                group.create_task(worker())
    return [results[index] for index in range(len(calls))]


async def replay(endpoint: Endpoint, requests: Requests, make_call: Callable[[int], Call]) -> list[Timing]:
    """Send the requests of a workload as they fall due, whether or not earlier ones are done; timings in their order.

    Args:
        endpoint: where to.
        requests: what falls due when.
        make_call: request `index` as it is sent.
    """
    results: dict[int, Timing] = {}
    feed = Feed(requests)
    finished = asyncio.Event()
    start = time.perf_counter()
    with contextlib.closing(Client(endpoint)) as client:

        async def send(index: int, due_s: float) -> None:
            results[index] = await client.call(make_call(index), start + due_s)
            feed.finish(index, time.perf_counter() - start)
            finished.set()

        async with asyncio.TaskGroup() as group:
            while not feed.exhausted:
                finished.clear()
                for index, due_s in feed.take(time.perf_counter() - start):
                    group.create_task(send(index, due_s))
                pause = feed.next_time() - (time.perf_counter() - start)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(finished.wait(), None if math.isinf(pause) else max(0.0, pause))
    return [results[index] for index in range(len(requests))]


def run(endpoint: Endpoint, calls: Sequence[Call], concurrency: int) -> list[Timing]:
    """`drive` to its end, where no call may fail.

    Raises:
        SystemExit: a call failed.
    """
    timings = uvloop.run(drive(endpoint, calls, concurrency))
    if failed := [timing.error for timing in timings if timing.error]:
        raise SystemExit(failed[0])
    return timings


def served_model(url: str, api_key: str | None = None) -> str:
    """The first model that the endpoint lists."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    response = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False, headers=headers)
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])
