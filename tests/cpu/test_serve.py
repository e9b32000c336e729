"""`python -m splash.serve` as people run it: a process, a small random checkpoint, the official client."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
import torch
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

from splash.core.layout import LAYOUTS
from splash.switch.orders import METHODS

pytestmark = pytest.mark.timeout(240)

READY = re.compile(r"SPLASH is ready: (https?://\S+) \(model (\S+), layout (\S+), (\d+) ranks, cpu\)")
PROMPT = "the quick brown fox 👍🏽"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
NOTICE_TIMEOUT_S = 5  # an idle engine looks after its ranks once a second


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("base")


@dataclass
class Process:
    """A running server, and the lines that it has printed."""

    process: subprocess.Popen[str]
    lines: list[str]
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", timeout=60).json()

    def switch(self, layout: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/layout", json={"layout": layout, **options}, timeout=60)

    def history(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/layout/history", timeout=60).json()["switches"]

    def layout(self) -> str:
        return httpx.get(f"{self.url}/layout", timeout=60).json()["layout"]


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
            match = READY.match(line)
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


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Process]:
    with serving(f"model.path={checkpoint}", "layout=dop", "ranks=2", "max_model_len=200") as running:
        yield running


def greedy(checkpoint: Path, prompt: str, num_tokens: int) -> str:
    """What transformers says, token by token without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = tokenizer.encode(prompt)
    start = len(tokens)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokenizer.decode(tokens[start:], skip_special_tokens=True)


def test_the_ready_line_names_what_serves(server: Process) -> None:
    match = next(match for line in server.lines if (match := READY.match(line)))
    assert match.groups()[1:] == ("base", "dop", "2")
    assert any(line.startswith("Try:  curl") for line in server.lines)
    layout = httpx.get(f"{server.url}/layout").json()
    assert layout == {
        "layout": "dop",
        "ranks": 2,
        "hardware": "cpu",
        "layouts": [*LAYOUTS],
        "methods": [*METHODS],
        "active": None,
    }


def test_completion_equals_transformers_and_its_own_stream(server: Process, checkpoint: Path) -> None:
    options = {
        "model": "base",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    with server.client() as client:
        whole = client.completions.create(**options).choices[0]
        chunks = list(client.completions.create(stream=True, **options))
    assert whole.text == greedy(checkpoint, PROMPT, 24)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"


def test_chat_streams_and_counts(server: Process) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    with server.client() as client:
        whole = client.chat.completions.create(model="base", messages=messages, max_tokens=8, temperature=0, n=2)
        stream = client.chat.completions.create(
            model="base",
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [choice.message.content for choice in whole.choices] == [text, text]
    assert 2 * chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_an_answer_follows_its_schema_streamed_or_whole(server: Process) -> None:
    options: dict[str, Any] = {
        "model": "base",
        "messages": [{"role": "user", "content": "hello there"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}},
        "seed": 5,
    }
    with server.client() as client:
        whole = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(stream=True, **options))
        with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
            options["response_format"]["json_schema"]["schema"] = {"type": "city"}
            client.chat.completions.create(**options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert whole.finish_reason == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(whole.message.content))


def test_https_and_keys(checkpoint: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    certificate, key, keys = tmp_path / "certificate.pem", tmp_path / "key.pem", tmp_path / "keys"
    request = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request, *names], check=True, capture_output=True)
    keys.write_text("reader\nboss admin\n", encoding="utf-8")
    with serving(
        f"model.path={checkpoint}", "ranks=2", "layout=tp", "max_model_len=200", f"api_key_file={keys}",
        f"ssl_certfile={certificate}", f"ssl_keyfile={key}",
    ) as running:  # fmt: skip
        assert running.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=running.url, verify=ssl.create_default_context(cafile=str(certificate))) as client:
            body = {"prompt": "hello", "max_tokens": 2}
            for name, answers in (("nobody", (401, 401)), ("reader", (200, 403)), ("boss", (200, 200))):
                client.headers["authorization"] = f"Bearer {name}"
                statuses = (
                    client.post("/v1/completions", json=body, timeout=60).status_code,
                    client.post("/layout", json={"layout": "dop"}, timeout=60).status_code,
                )
                assert statuses == answers, name


def test_a_client_that_leaves_frees_its_request(server: Process) -> None:
    body = {"prompt": "hello", "max_tokens": 190, "stream": True, "ignore_eos": True}
    steps = server.health()["steps"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    for _ in range(1000):
        health = server.health()
        if health["running"] + health["waiting"] == 0:
            break
    assert health["running"] + health["waiting"] == 0
    assert health["steps"] - steps < 150, "the request ran to its end"
    with server.client() as client:
        assert client.completions.create(model="base", prompt="hello", max_tokens=1).usage.completion_tokens == 1


@pytest.fixture(scope="module")
def switching(checkpoint: Path) -> Iterator[Process]:
    """A server with small pages and little room, so that switches have much to do and can be refused."""
    with serving(f"model.path={checkpoint}", "layout=tp", "ranks=2", "page_size=4", "kv_cache_gib=0.0026") as running:
        yield running


@contextlib.contextmanager
def generating(server: Process, num_tokens: int = 1000) -> Iterator[None]:
    """Generate in the background, and see that it has not ended before what was done meanwhile."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield
        assert server.health()["running"] == 1, "the request ended too early for this test"


def test_layouts_switch_under_a_stream_and_change_no_token(switching: Process) -> None:
    options = {
        "model": "base",
        "prompt": PROMPT,
        "max_tokens": 600,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    walk = [
        ("dcp", "auto"),
        ("dp", "layerwise"),
        ("dop", "blocking"),
        ("cp", "auto"),
        ("tp", "precopy"),
        ("dp", "auto"),
    ]
    assert {layout for layout, _ in walk} == set(LAYOUTS)
    known = len(switching.history())
    records = []
    with switching.client() as client:
        unswitched = client.completions.create(**options).choices[0].text
        chunks = client.completions.create(stream=True, **options)
        pieces = [next(chunks).choices[0].text]
        for layout, method in walk:
            pieces += [chunk.choices[0].text for chunk in itertools.islice(chunks, 5)]
            response = switching.switch(layout, method=method)
            assert response.status_code == 200, response.text
            records.append(response.json())
            assert switching.layout() == layout
        assert switching.health()["running"] == 1, "the request ended before the last switch"
        pieces += [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == unswitched
    assert switching.history()[known:] == records
    assert [(record["to"], record["asked"]) for record in records] == walk
    assert [record["from"] for record in records] == ["tp", *(layout for layout, _ in walk[:-1])]
    assert {record["status"] for record in records} == {"committed"}
    assert [record["method"] for record in records][1:3] == ["layerwise", "blocking"]
    moved = [(any(record["kv_bytes_received"]), any(record["weight_bytes_received"])) for record in records]
    assert moved == [(False, False), (True, True), (False, False), (True, True), (True, False), (False, True)]


def test_a_layout_without_room_is_refused_and_all_goes_on(switching: Process) -> None:
    assert switching.switch("dcp").status_code == 200
    total = switching.health()["total_pages"]
    room = max(total) * 4  # positions of one request in tp, where each rank has every page
    with generating(switching, room + 4):
        response = switching.switch("tp")
        assert response.status_code == 409, response.text
        error = response.json()["error"]
        assert error["code"] == "switch_refused"
        assert "layout tp has room for" in error["message"]
        assert switching.history()[-1] == error["switch"]
        assert switching.layout() == "dcp"
        assert switching.switch("nowhere").status_code == 400
        with switching.client() as client:
            assert client.completions.create(model="base", prompt="hello", max_tokens=3).usage.completion_tokens == 3
    assert httpx.delete(f"{switching.url}/layout/switch", timeout=60).status_code == 404


def test_the_last_of_concurrent_switches_wins(switching: Process) -> None:
    targets = ["dp", "cp", "dop", "dcp"] * 2
    with generating(switching, 600), ThreadPoolExecutor(len(targets)) as pool:
        answers = [response.json() for response in pool.map(switching.switch, targets)]
        records = [answer["error"]["switch"] if "error" in answer else answer for answer in answers]
        ended = {"committed", "superseded"}
        assert all(record["status"] in ended for record in records), records
        assert ["error" in answer for answer in answers] == [record["status"] == "superseded" for record in records]
        assert any("error" in answer for answer in answers), records
        last = max(records, key=lambda record: record["id"])
        assert (last["status"], switching.layout()) == ("committed", last["to"])


def test_a_layout_that_cannot_shard_the_heads_is_refused(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "layout=dp", "ranks=3") as running:
        with generating(running):
            response = running.switch("tp")
            assert (response.status_code, response.json()["error"]["param"]) == (400, "layout")
            assert "3 ranks do not divide 8 heads; use dp, cp" in response.json()["error"]["message"]
            assert running.switch("cp").status_code == 200
        assert [record["to"] for record in running.history()] == ["cp"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_cleanly_and_leave_no_process(checkpoint: Path, number: signal.Signals) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "max_model_len=200") as running:
        members = family(running.process.pid)
        assert len(members) >= 3, "the server and two ranks"
        os.killpg(running.process.pid, number)  # as a terminal does
        assert running.process.wait(STOP_TIMEOUT_S) == 0, running.lines
        assert not any(map(alive, members))
        assert not any("Traceback" in line for line in running.lines), running.lines


def test_stopping_under_load_tells_clients_and_leaves_no_process(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "shutdown_grace_s=0") as running:
        members = family(running.process.pid)
        body = {"prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.killpg(running.process.pid, signal.SIGINT)
            assert "the server is shutting down" in "".join(lines)
        assert running.process.wait(STOP_TIMEOUT_S) == 0, running.lines
        assert not any(map(alive, members))
        assert not any("Traceback" in line for line in running.lines), running.lines


@pytest.mark.parametrize("load", [False, True])
def test_a_dead_rank_ends_the_server_with_an_error(checkpoint: Path, load: bool) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "max_restarts=0") as running:
        members = family(running.process.pid)
        ranks = [pid for pid in members if b"splash.engine.worker" in cmdline(pid)]
        assert len(ranks) == 2, list(map(cmdline, members))
        if load:
            body = {"prompt": "hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                os.kill(ranks[1], signal.SIGKILL)
                with contextlib.suppress(httpx.HTTPError):
                    assert "rank 1 was killed by signal 9" in "".join(lines)
        else:
            os.kill(ranks[1], signal.SIGKILL)
            deadline = time.monotonic() + NOTICE_TIMEOUT_S
            while healthy(running):
                assert time.monotonic() < deadline, "an idle server does not notice that a rank is dead"
        assert running.process.wait(STOP_TIMEOUT_S) == 1, running.lines
        assert any(line.startswith("splash: the engine died") for line in running.lines), running.lines
        assert not any(map(alive, members))


def test_a_dead_rank_is_replaced_under_a_stream(checkpoint: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    with serving(f"model.path={checkpoint}", "ranks=2", "max_restarts=1") as running:
        whole = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        members = family(running.process.pid)
        ranks = [pid for pid in members if b"splash.engine.worker" in cmdline(pid)]
        with running.client() as client:
            chunks = client.completions.create(
                model="base", prompt=PROMPT, max_tokens=600, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            pieces = [next(chunks).choices[0].text]
            os.kill(ranks[0], signal.SIGKILL)
            for status in iter(lambda: httpx.get(f"{running.url}/ready", timeout=60).status_code, 503):
                assert status == 200
            for status in iter(lambda: httpx.get(f"{running.url}/ready", timeout=60).status_code, 200):
                assert status == 503
            pieces += [chunk.choices[0].text for chunk in chunks]
        assert "".join(pieces) == whole
        assert running.health()["restarts"] == 1
        assert any("rank 0 was killed by signal 9; starting the ranks anew" in line for line in running.lines)
        assert not any(map(alive, ranks))


def healthy(server: Process) -> bool:
    """Whether probes are told that all is well. A server that stops refuses the connection."""
    try:
        response = httpx.get(f"{server.url}/health", timeout=NOTICE_TIMEOUT_S)
    except httpx.TransportError:
        return False
    assert response.status_code == 200 or response.json()["error"]["code"] == "engine_dead", response.text
    return response.status_code == 200


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def failing(*options: str) -> str:
    """The one line that a command prints when it refuses, with exit code 2."""
    done = subprocess.run(command(*options), capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_refusals_are_one_line(checkpoint: Path, tmp_path: Path) -> None:
    assert failing(f"model.path={tmp_path}").startswith("splash: ")
    assert "layout: unknown layout 'zig'" in failing(f"model.path={checkpoint}", "layout=zig")
    assert "prot: unknown option; did you mean port?" in failing("prot=1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port: {port} is in use" in failing(f"model.path={checkpoint}", f"port={port}")
