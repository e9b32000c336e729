"""What the server tells about itself, clients that leave, and stopping under load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

HANG = {"prompt": "<|hang|>", "max_tokens": 10}


def test_models_and_state(served: Any) -> None:
    models = served.client.models.list().data
    assert [model.id for model in models] == ["scripted"]
    assert served.client.models.retrieve("scripted").owned_by == "splash"
    assert served.http.get("/v1/models/other/one").status_code == 404
    health = served.http.get("/health").json()
    assert health.items() >= {"status": "ok", "ready": True, "live": 0, "running": 0, "waiting": 0}.items()
    assert served.http.get("/ready").json() == {"status": "ready"}
    assert served.http.get("/version").json() == {"version": "1.2.3"}
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/layout", "/layout/history", "/layout/switch"} <= set(paths)


def test_not_ready_while_ranks_are_replaced_but_requests_are_taken(served: Any) -> None:
    served.engine.restarting = True
    response = served.http.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "restarting")
    assert response.headers["retry-after"] == "5"
    assert served.http.get("/health").status_code == 200
    assert served.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_aborts_its_requests(served: Any, n: int) -> None:
    with served.http.stream("POST", "/v1/completions", json={**HANG, "stream": True, "n": n, "echo": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert served.engine.hanging.wait(10)
        assert served.http.get("/health").json()["running"] >= 1
    assert served.engine.aborted.wait(10)
    until_idle(served)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_any_text_aborts_its_requests(served: Any, n: int, stream: bool) -> None:
    with httpx.Client(base_url=served.url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/v1/completions", json={**HANG, "prompt": "<|silent|>", "n": n, "stream": stream})
    assert served.engine.aborted.wait(10)
    until_idle(served)


def until_idle(served: Any) -> None:
    """Ask until nothing runs; the server answers each time, so this waits for no clock."""
    for _ in range(1000):
        if served.http.get("/health").json()["running"] == 0:
            return
    raise AssertionError(f"still running: {served.engine.running}")


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_ends_requests_after_their_grace(serve: Callable[..., Any], stream: bool) -> None:
    served = serve(grace_s=1)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{served.url}/v1/completions", json={**HANG, "stream": stream}, timeout=20))

    asking = threading.Thread(target=ask)
    asking.start()
    assert served.engine.hanging.wait(10)
    served.stop()
    asking.join(20)
    assert "the server is shutting down" in answers[0].text
    assert "[DONE]" not in answers[0].text
    assert not served.engine.running
