"""`python -m splash.serve` as people run it: a process, a small random checkpoint, the official client."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.cpu.served import PROMPT, READY, START_TIMEOUT_S, Process, cmdline, command, family, generating, serving

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("base")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Process]:
    with serving(f"model.path={checkpoint}", "layout=dop", "ranks=2") as running:
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
        "policy": "static",
        "pinned": False,
        "decision": None,
    }


def test_the_server_itself_needs_no_torch(server: Process) -> None:
    """Only ranks load it, so that a server starts sooner and takes little memory beside them."""
    ranks = [pid for pid in family(server.process.pid) if b"splash.engine.worker" in cmdline(pid)]
    assert len(ranks) == 2
    loaded = ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, *ranks)]
    assert loaded == [False, True, True]


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
    body = {"prompt": "hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    steps = server.health()["steps"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    for _ in range(1000):
        health = server.health()
        if health["running"] + health["waiting"] == 0:
            break
    assert health["running"] + health["waiting"] == 0
    assert health["steps"] - steps < 1800, "the request ran to its end"
    with server.client() as client:
        assert client.completions.create(model="base", prompt="hello", max_tokens=1).usage.completion_tokens == 1


@pytest.fixture(scope="module")
def switching(checkpoint: Path) -> Iterator[Process]:
    """A server with small pages and little room, so that switches have much to do and can be refused."""
    with serving(f"model.path={checkpoint}", "layout=tp", "ranks=2", "page_size=4", "kv_cache_gib=0.0026") as running:
        yield running


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
