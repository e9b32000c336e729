"""The server in production: overload, signals, ranks that die, clients that do not read, and what metrics say of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.served import (
    HTTP,
    NOTICE_TIMEOUT_S,
    PROMPT,
    STOP_TIMEOUT_S,
    Process,
    alive,
    cmdline,
    family,
    generating,
    serving,
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("base")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Process]:
    with serving(f"model.path={checkpoint}", "layout=tp", "ranks=2", "page_size=4", "kv_cache_gib=0.0026") as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_dropped(server: Process, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 190, "n": 8, "ignore_eos": True, "timeout": 0.02, "stream": stream}
    answer = HTTP.post(f"{server.url}/v1/completions", json=body)
    if stream and answer.status_code == 200:
        error = json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]
    else:
        assert answer.status_code == 408, answer.text
        error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout")
    assert "within 0.02 s" in error["message"]
    for _ in range(1000):
        health = server.health()
        if health["running"] + health["waiting"] == 0:
            break
    assert health["running"] + health["waiting"] == 0
    assert HTTP.post(f"{server.url}/v1/completions", json={**body, "timeout": 0}).status_code == 400


def test_who_does_not_read_holds_up_nobody_and_is_cut_off(checkpoint: Path) -> None:
    """Answers that fit in no buffer, to clients that take nothing of them."""
    body = json.dumps(
        {"prompt": "hello", "max_tokens": 1900, "n": 64, "logprobs": 20, "stream": True, "ignore_eos": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(f"model.path={checkpoint}", "ranks=1", "stalled_timeout_s=1") as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect((host, int(port)))
            stalled.sendall((head + body).encode())
            while running.health()["running"] < 64:
                pass
            ask = {"prompt": "hello", "max_tokens": 3}
            assert HTTP.post(f"{running.url}/v1/completions", json=ask).status_code == 200
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while running.health()["live"]:
                assert time.monotonic() < deadline, "it is not cut off"


def scrape(server: Process) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples of /metrics by name and labels, the model's aside."""
    response = HTTP.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {}
    for metric in text_string_to_metric_families(response.text):
        for sample in metric.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("splash:"):
                assert labels.pop("model_name") == "base"
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def test_metrics_count_what_was_asked(server: Process) -> None:
    target = "dcp"
    before = scrape(server)
    with generating(server, 600):
        assert server.switch(target).status_code == 200
        running = scrape(server)
    while server.health()["running"]:
        pass
    ask = {"prompt": PROMPT, "max_tokens": 5, "n": 2, "ignore_eos": True}
    usage = HTTP.post(f"{server.url}/v1/completions", json=ask).json()["usage"]
    after = scrape(server)

    def grew(name: str, **labels: str) -> float:
        key = f"splash:{name}", tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert running["splash:num_requests_running", ()] == running["splash:requests_live", ()] == 1
    assert all(0 < running["splash:kv_cache_usage_perc", (("rank", str(rank)),)] <= 1 for rank in range(2))
    assert [running["splash:layout", (("layout", name),)] for name in ("tp", target)] == [0, 1]
    assert grew("request_success_total", finished_reason="length") == 2
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        assert grew(f"{name}_count") == 3
        assert grew(f"{name}_bucket", le="+Inf") == 3
    assert grew("generation_tokens_total") >= grew("inter_token_latency_seconds_count") + 3
    assert grew("request_generation_tokens_bucket", le="5.0") == 2
    assert grew("prompt_tokens_total") >= usage["prompt_tokens"]
    steps_s = sum(grew("step_seconds_sum", layout=layout) for layout in ("tp", target))
    assert 0 < grew("forward_seconds_total") < steps_s
    committed = {key: value for key, value in after.items() if key[0] == "splash:switches_total"}
    assert sum(committed.values()) == len(server.history())
    steps = [value for (name, _), value in after.items() if name == "splash:step_seconds_count"]
    assert sum(steps) == server.health()["steps"]
    assert after["process_resident_memory_bytes", ()] > 0


def test_a_key_press_stops_an_idle_server_and_leaves_no_process(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "max_model_len=200") as running:
        members = family(running.process.pid)
        assert len(members) >= 3, "the server and two ranks"
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
        assert running.process.wait(STOP_TIMEOUT_S) == 0, running.lines
        assert not any(map(alive, members))
        assert not any("Traceback" in line for line in running.lines), running.lines


def test_stopping_under_load_tells_clients_and_leaves_no_process(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "shutdown_grace_s=0") as running:
        members = family(running.process.pid)
        body = {"prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with HTTP.stream("POST", f"{running.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.killpg(running.process.pid, signal.SIGINT)
            assert "the server is shutting down" in "".join(lines)
        assert running.process.wait(STOP_TIMEOUT_S) == 0, running.lines
        assert not any(map(alive, members))
        assert not any("Traceback" in line for line in running.lines), running.lines


def test_sigterm_lets_requests_finish_and_takes_no_more(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "shutdown_grace_s=60", "log_format=json") as running:
        members = family(running.process.pid)
        body = {"prompt": "hello", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        with HTTP.stream("POST", f"{running.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(running.process.pid, signal.SIGTERM)
            for answer in iter(lambda: HTTP.get(f"{running.url}/ready"), None):
                if answer.status_code == 503:
                    break
            assert answer.json()["error"]["code"] == "shutting_down"
            refused = HTTP.post(f"{running.url}/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            rest = "\n".join(lines)
        assert '"finish_reason":"length"' in rest
        assert rest.rstrip().endswith("data: [DONE]")
        assert running.process.wait(STOP_TIMEOUT_S) == 0, running.lines
        assert not any(map(alive, members))
        assert not any("Traceback" in line for line in running.lines), running.lines


def test_a_second_signal_ends_what_runs(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "ranks=1", "shutdown_grace_s=600") as running:
        body = {"prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with HTTP.stream("POST", f"{running.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(running.process.pid, signal.SIGINT)
            while HTTP.get(f"{running.url}/ready").status_code == 200:
                pass
            os.kill(running.process.pid, signal.SIGINT)
            assert "the server is shutting down" in "".join(lines)
        assert running.process.wait(STOP_TIMEOUT_S) == 0, running.lines


def test_a_dead_rank_ends_an_idle_server_with_an_error(checkpoint: Path) -> None:
    with serving(f"model.path={checkpoint}", "ranks=2", "max_restarts=0") as running:
        members, ranks = family(running.process.pid), ranks_of(running)
        assert len(ranks) == 2, list(map(cmdline, members))
        os.kill(ranks[1], signal.SIGKILL)
        deadline = time.monotonic() + NOTICE_TIMEOUT_S
        while healthy(running):
            assert time.monotonic() < deadline, "an idle server does not notice that a rank is dead"
        assert running.process.wait(STOP_TIMEOUT_S) == 1, running.lines
        assert any(line.startswith("splash: the engine died") for line in running.lines), running.lines
        assert not any(map(alive, members))


def test_a_dead_rank_is_replaced_under_a_stream_and_the_next_ends_the_server(checkpoint: Path) -> None:
    """Nobody sees more of the first than a pause; once restarts are spent, clients are told at once."""
    body = {"prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    with serving(f"model.path={checkpoint}", "ranks=2", "max_restarts=1") as running:
        whole = HTTP.post(f"{running.url}/v1/completions", json=body).json()["choices"][0]["text"]
        first = ranks_of(running)
        with running.client() as client:
            chunks = client.completions.create(
                model="base", prompt=PROMPT, max_tokens=600, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            pieces = [next(chunks).choices[0].text]
            os.kill(first[0], signal.SIGKILL)
            for status in iter(lambda: HTTP.get(f"{running.url}/ready").status_code, 503):
                assert status == 200
            for status in iter(lambda: HTTP.get(f"{running.url}/ready").status_code, 200):
                assert status == 503
            pieces += [chunk.choices[0].text for chunk in chunks]
        assert "".join(pieces) == whole
        assert running.health()["restarts"] == 1
        assert any("rank 0 was killed by signal 9; starting the ranks anew" in line for line in running.lines)
        assert not any(map(alive, first))

        body = {"prompt": "hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        with HTTP.stream("POST", f"{running.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            members = family(running.process.pid)
            os.kill(ranks_of(running)[1], signal.SIGKILL)
            deadline = time.monotonic() + NOTICE_TIMEOUT_S
            while readiness(running) not in ("engine_dead", "refused"):
                assert time.monotonic() < deadline, "it does not say that it is over"
            with contextlib.suppress(httpx.HTTPError):
                end = "".join(lines)
                assert "rank 1 was killed by signal 9; restarts are spent (1 in 600 s)" in end
                assert "[DONE]" not in end
        assert running.process.wait(STOP_TIMEOUT_S) == 1, running.lines
        assert any(line.startswith("splash: the engine died") for line in running.lines), running.lines
        assert not any(map(alive, members))


def ranks_of(server: Process) -> list[int]:
    return [pid for pid in family(server.process.pid) if b"splash.engine.worker" in cmdline(pid)]


def readiness(server: Process) -> str:
    """What /ready says: "ready", the code of why not, or "refused" where nobody listens any more."""
    try:
        response = HTTP.get(f"{server.url}/ready")
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return "refused"
    return response.json()["status"] if response.status_code == 200 else response.json()["error"]["code"]


def healthy(server: Process) -> bool:
    """Whether probes are told that all is well. A server that stops refuses the connection."""
    try:
        response = HTTP.get(f"{server.url}/health")
    except httpx.TransportError:
        return False
    assert response.status_code == 200 or response.json()["error"]["code"] == "engine_dead", response.text
    return response.status_code == 200
