"""As many requests as the server takes, and no more; none once it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from splash.server.errors import ApiError
from splash.server.intake import Intake
from splash.server.logs import JsonFormatter, TextFormatter

HANG = {"prompt": "<|hang|>", "max_tokens": 10, "stream": True, "echo": True}
ASK = {"prompt": "hello", "max_tokens": 2}


@contextlib.contextmanager
def hanging(served: Any) -> Iterator[None]:
    """A stream that has begun and does not end."""
    with httpx.stream("POST", f"{served.url}/v1/completions", json=HANG, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_more_than_are_taken_are_told_when_to_come_again(serve: Callable[..., Any], path: str) -> None:
    served = serve(max_concurrent_requests=3)
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    ask = chat if "chat" in path else ASK
    with contextlib.ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(hanging(served))
        for stream in (False, True):
            refused = served.http.post(path, json={**ask, "stream": stream})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "overloaded"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
        assert len(served.engine.requests) == 3
    for _ in range(1000):
        if served.http.get("/health").json()["live"] == 0:
            break
    assert served.http.post(path, json=ask).status_code == 200
    # One answer alone may have more choices.
    assert served.http.post(path, json={**ask, "n": 5}).status_code == 200


def test_choices_that_do_not_fit_beside_others_are_refused(serve: Callable[..., Any]) -> None:
    served = serve(max_concurrent_requests=3)
    with hanging(served):
        assert served.http.post("/v1/completions", json={**ASK, "n": 3}).status_code == 429
        assert served.http.post("/v1/completions", json={**ASK, "n": 2}).status_code == 200


def test_a_client_that_hangs_keeps_nobody_waiting(served: Any) -> None:
    with hanging(served):
        assert served.http.post("/v1/completions", json=ASK).status_code == 200


def test_room_is_expected_as_fast_as_requests_have_ended() -> None:
    now = [0.0]
    intake = Intake(1, clock=lambda: now[0])
    assert intake.retry_after_s == 1
    for end in (0.0, 2.5, 5.0, 7.5):
        with intake.taken(1):
            now[0] = end
            with pytest.raises(ApiError) as refused:
                intake.check()
    assert intake.retry_after_s == 3
    assert refused.value.status == 429
    assert intake.num_refused == 4
    with intake.taken(1):
        now[0] = 1e6
    assert intake.retry_after_s == 60


def test_draining_waits_for_what_is_live_and_takes_no_more() -> None:
    async def drain() -> None:
        intake = Intake(8)
        first, second = intake.taken(2), intake.taken(1)
        first.__enter__()
        second.__enter__()
        draining = asyncio.create_task(intake.drain())
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            intake.check()
        assert (refused.value.status, refused.value.code) == (503, "shutting_down")
        first.__exit__(None, None, None)
        await asyncio.sleep(0)
        assert not draining.done()
        second.__exit__(None, None, None)
        await draining

    asyncio.run(drain())


def test_logs_are_objects_or_lines_and_requests_show_no_text(serve: Callable[..., Any], caplog: Any) -> None:
    served = serve(log_requests=True)
    with caplog.at_level(logging.INFO, "splash"):
        served.http.post("/v1/completions", json={**ASK, "prompt": "a secret"}, headers={"x-request-id": "r1"})
        served.http.get("/nothing")
        for _ in range(1000):  # a request is logged once its answer is out
            served.http.get("/version")
            records = [record for record in caplog.records if "/version" not in TextFormatter().format(record)]
            if len(records) == 2:
                break
    first, second = (msgspec.json.decode(JsonFormatter().format(record)) for record in records)
    assert (first["request_id"], first["method"], first["path"], first["status"]) == (
        "r1",
        "POST",
        "/v1/completions",
        200,
    )
    assert (first["level"], first["message"], second["status"]) == ("info", "request", 404)
    assert first["seconds"] > 0
    assert "secret" not in caplog.text + str(first)
    assert TextFormatter().format(records[0]).startswith("request request_id=r1 method=POST path=/v1/completions")
