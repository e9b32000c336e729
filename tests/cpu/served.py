"""`python -m splash.serve` as a process, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import openai

# Made once, since a client loads certificates. Connections are not kept: servers die in tests.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
READY = re.compile(r"SPLASH is ready: (https?://\S+) \(model (\S+), layout (\S+), (\d+) ranks, cpu\)")
PROMPT = "the quick brown fox 👍🏽"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
NOTICE_TIMEOUT_S = 60  # an idle engine looks after its ranks once a second, and the machine may be busy


@dataclass
class Process:
    """A running server, and the lines that it has printed."""

    process: subprocess.Popen[str]
    lines: list[str]
    url: str

    def client(self) -> openai.OpenAI:
        import openai  # not every test needs it, nor has every machine

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def health(self) -> dict[str, Any]:
        return HTTP.get(f"{self.url}/health").json()

    def switch(self, layout: str, **options: Any) -> httpx.Response:
        return HTTP.post(f"{self.url}/layout", json={"layout": layout, **options})

    def history(self) -> list[dict[str, Any]]:
        return HTTP.get(f"{self.url}/layout/history").json()["switches"]

    def layout(self) -> str:
        return HTTP.get(f"{self.url}/layout").json()["layout"]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "splash.serve", "port=0", "+hardware=cpu", "kv_cache_gib=0.05", *options]


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Process]:
    """Start a server in a process group of its own, and wait for its ready line."""
    process = subprocess.Popen(
        command(*options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    lines: list[str] = []
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        match = None
        while match is None:
            line = arrived.get(timeout=START_TIMEOUT_S)
            assert line is not None, f"the server ended with {process.wait()}: {lines}"
            match = READY.search(line)
        yield Process(process, lines, match[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:  # grows while it is walked
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def generating(server: Process, num_tokens: int = 1000) -> Iterator[None]:
    """Generate in the background, and see that it has not ended before what was done meanwhile."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield
        assert server.health()["running"] == 1, "the request ended too early for this test"
