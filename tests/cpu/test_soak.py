"""Two hundred streams at once, with all that clients, operators and hardware do to a server. Ten minutes with -m soak.

    pytest -m soak tests/cpu/test_soak.py --soak-summary perf/results/soak.json

Clients leave, read slowly and send nonsense, layouts switch, a rank is killed now and then. Every stream that is read
to its end has the text of the quiet run, and when all is over nothing is held that was not held before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from perf.common import report
from splash.core.layout import LAYOUTS
from tests.cpu.served import PROMPT, STOP_TIMEOUT_S, Process, alive, cmdline, family, serving

SHORT_S = 21
WANTED = ("whole", "slow", "leaves", "bad", "switch committed", "killed")
NUM_STREAMS = 200
KILL_EVERY_S = 12.0
MAX_GROWTH_MIB = 48.0
PAUSE_S = 0.05  # of a slow reader after each event
BAD: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": [10**6]},
    {"prompt": "x", "max_tokens": 10**6},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"no": "prompt"},
]


def bodies() -> list[dict[str, Any]]:
    """Requests of every kind, whose answers are known from the quiet run."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[a-z]{12,20}"}, "ignore_eos": False},
    ]
    prompts = [PROMPT, "hello there " * 20, f"{PROMPT} again " * 9]
    common = {"stream": True, "ignore_eos": True}
    return [
        {**common, "prompt": prompt, "max_tokens": 8 + 7 * number, **kind}
        for prompt in prompts
        for number, kind in enumerate(kinds)
    ]


class Soak:
    """The clients, and what became of them."""

    def __init__(self, server: Process, seconds: float, wanted: Sequence[str] = ()) -> None:
        self.server = server
        self.seconds = seconds
        self.wanted = wanted  # what has to happen at least once, however slow the machine
        self.ends = 0.0
        self.counts: Counter[str] = Counter()
        self.texts: list[str] = []
        self.random = random.Random(5)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.ends or not all(self.counts[kind] for kind in self.wanted)

    async def read(
        self, http: httpx.AsyncClient, body: dict[str, Any], leave_after: int = 10**9, pause: float = 0
    ) -> str:
        text, finished = "", False
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            num_events = 0
            async for line in response.aiter_lines():
                if line in ("", "data: [DONE]"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                finished = finished or event["choices"][0]["finish_reason"] is not None
                num_events += 1
                if num_events > leave_after:
                    return ""
                await asyncio.sleep(pause)
        assert finished
        return text

    async def client(self, http: httpx.AsyncClient, once: httpx.AsyncClient) -> None:
        known = bodies()
        while self.goes_on:
            number = self.random.randrange(len(known))
            kind = self.random.choices(("whole", "slow", "leaves", "bad"), (6, 1, 2, 1))[0]
            if kind == "bad":
                response = await http.post("/v1/completions", json=self.random.choice(BAD))
                assert response.status_code == 400, response.text
            elif kind == "leaves":
                await self.read(once, known[number], leave_after=self.random.randrange(5))
            else:
                text = await self.read(once, known[number], pause=PAUSE_S if kind == "slow" else 0)
                assert text == self.texts[number], f"request {number} differs from the quiet run"
            self.counts[kind] += 1

    async def operator(self, http: httpx.AsyncClient) -> None:
        while self.goes_on:
            body = {"layout": self.random.choice([*LAYOUTS]), "method": self.random.choice(["auto", "layerwise"])}
            response = await http.post("/layout", json=body)
            status = response.json().get("status") or response.json()["error"]["code"]
            assert response.status_code in (200, 409), response.text
            self.counts[f"switch {status}"] += 1
            await asyncio.sleep(0.5)

    async def killer(self) -> None:
        pause = min(KILL_EVERY_S, self.seconds / 2)
        while time.monotonic() + pause < self.ends or ("killed" in self.wanted and not self.counts["killed"]):
            await asyncio.sleep(pause)
            ranks = ranks_of(self.server)
            if len(ranks) == 2:
                os.kill(self.random.choice(ranks), signal.SIGKILL)
                self.counts["killed"] += 1

    async def run(self) -> None:
        # A server closes a connection that has been idle for a while, as it sees it: a slow reader may be about to use
        # it again then. So streams have connections of their own, and the others are let go before the server would.
        kept = httpx.Limits(max_connections=None, keepalive_expiry=2)
        none = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=240, limits=kept) as http,
            httpx.AsyncClient(base_url=self.server.url, timeout=240, limits=none) as once,
        ):
            self.texts = [await self.read(once, body) for body in bodies()]
            self.ends = time.monotonic() + self.seconds
            everyone = [self.client(http, once) for _ in range(NUM_STREAMS)]
            await asyncio.gather(*everyone, self.operator(http), self.killer())


def ranks_of(server: Process) -> list[int]:
    return [pid for pid in family(server.process.pid) if b"splash.engine.worker" in cmdline(pid) and alive(pid)]


def held(server: Process) -> dict[str, Any]:
    """What a server holds that it could leak, with one connection of ours open."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        health = http.get("/health").json()
        sockets = [fd for fd in Path(f"/proc/{server.process.pid}/fd").iterdir() if is_socket(fd)]
    return {
        "live": health["live"] + health["running"] + health["waiting"],
        "pages": sum(health["total_pages"]) - sum(health["free_pages"]),
        "sockets": len(sockets),
        "processes": len([pid for pid in family(server.process.pid) if alive(pid)]),
    }


def is_socket(fd: Path) -> bool:
    try:
        return "socket" in os.readlink(fd)
    except OSError:  # closed meanwhile
        return False


def let_go(server: Process, quiet: dict[str, Any]) -> dict[str, Any]:
    """What a server holds once it has had the time to notice that all clients have gone."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (found := held(server)) != quiet and time.monotonic() < deadline:
        pass
    return found


def resident_mib(server: Process) -> float:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["short", pytest.param("long", marks=pytest.mark.soak)])
def test_nothing_differs_and_nothing_leaks(
    tiny_checkpoint: Callable[[str], Path], pytestconfig: pytest.Config, form: str
) -> None:
    seconds = SHORT_S if form == "short" else pytestconfig.getoption("soak_seconds")
    options = ("ranks=2", "page_size=8", "kv_cache_gib=0.02", "max_num_seqs=64", "max_restarts=1000")
    with serving(f"model.path={tiny_checkpoint('base')}", *options) as server:
        before = held(server)
        assert (before["live"], before["pages"], before["processes"]) == (0, 0, 3)
        warm = Soak(server, seconds / 3)
        asyncio.run(warm.run())
        memory = resident_mib(server)
        soak = Soak(server, seconds * 2 / 3, WANTED)
        asyncio.run(soak.run())
        after, grown = let_go(server, before), resident_mib(server) - memory
        health = server.health()
        summary = {
            "seconds": seconds,
            "streams": NUM_STREAMS,
            "requests": dict(sorted((warm.counts + soak.counts).items())),
            "restarts": health["restarts"],
            "steps": health["steps"],
            "preemptions": health["preemptions"],
            "held_before": before,
            "held_after": after,
            "resident_mib_after_a_third": round(memory, 1),
            "resident_mib_grown_since": round(grown, 1),
        }
        print(json.dumps(summary))
        assert after == before
        assert grown < MAX_GROWTH_MIB
        assert min(soak.counts[kind] for kind in WANTED) > 0
        assert 0 < health["restarts"] <= warm.counts["killed"] + soak.counts["killed"]
        members = family(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0, server.lines
        assert not any(map(alive, members))
    if form == "long" and (path := pytestconfig.getoption("soak_summary")) is not None:
        report("soak", {**summary, "texts_that_differ": 0, "exit_code": 0}, path)
