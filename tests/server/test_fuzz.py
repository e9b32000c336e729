"""Requests made up from our own OpenAPI schema, right and wrong ones: every answer is one that the schema documents.

The short form runs against a scripted engine. The long one, marked soak, runs against a real server as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

OPERATIONS = {
    ("POST", "/v1/completions"): 30,
    ("POST", "/v1/chat/completions"): 39,
    ("POST", "/tokenize"): 8,
    ("POST", "/detokenize"): 5,
    ("POST", "/layout"): 5,
    ("GET", "/layout"): 1,
    ("GET", "/layout/history"): 2,
    ("DELETE", "/layout/switch"): 1,
    ("GET", "/v1/models"): 1,
    ("GET", "/v1/models/{name}"): 4,
    ("GET", "/live"): 1,
    ("GET", "/health"): 1,
    ("GET", "/ready"): 1,
    ("GET", "/version"): 1,
}  # percent of the cases
ANSWER_TIMEOUT_S = 60
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]


def fuzz(url: str, operation: tuple[str, str], cases: int) -> Counter[int]:
    """Send cases of one operation. Returns how often each status was answered."""
    method, path = operation
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    target = schema[path][method]
    modes = [target.as_strategy(GenerationMode.POSITIVE)]
    if method == "POST" or "history" in path:
        modes.append(target.as_strategy(GenerationMode.NEGATIVE))
    statuses: Counter[int] = Counter()
    session = requests.Session()

    @seed(0)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(modes), keep=st.sets(st.sampled_from(COMMON)), terse=st.booleans())
    def send(case: Any, keep: set[str], terse: bool) -> None:
        if isinstance(case.body, dict):
            # Made-up values of many parameters would nearly always be refused for the first of them.
            case.body.pop("model", None)
            if type(case.body.get("n")) is int and 4 < case.body["n"] <= 128:
                case.body["n"] = 4  # more of the same takes only time
            if terse:
                case.body = {key: value for key, value in case.body.items() if key not in COMMON or key in keep}
                if "layout" in case.body:
                    case.body = {"layout": "dp", "rebalance": bool(keep)}
                if isinstance(case.body.get("messages"), list):
                    case.body["messages"] = [plain(message) for message in case.body["messages"]]
        response = case.call(base_url=url, session=session, timeout=ANSWER_TIMEOUT_S)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{case.as_curl_command()}\n{response.text}"
        assert "x-request-id" in response.headers
        case.validate_response(response, checks=CHECKS)

    send()
    return statuses


COMMON = [
    *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "structured_outputs", "response_format", "tools", "tool_choice", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "best_of", "echo", "chat_template_kwargs", "parallel_tool_calls"),
]


def plain(message: Any) -> Any:
    """A message that most templates take."""
    return (
        {"role": "user", "content": message["content"]}
        if isinstance(message, dict) and "content" in message
        else message
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_a_few_cases(serve: Callable[..., Any], operation: tuple[str, str]) -> None:
    served = serve()
    statuses = fuzz(served.url, operation, 2 * OPERATIONS[operation])
    print(*operation, dict(sorted(statuses.items())))
    assert any(status < 300 or status == 404 for status in statuses), "nothing but refusals proves little"
    assert any(served.http.get("/health").json()["running"] == 0 for _ in range(1000))


@contextlib.contextmanager
def real_server() -> Iterator[str]:
    """`splash.serve` with the model that ships, in processes of its own."""
    options = ["port=0", "+hardware=cpu", "ranks=2", "kv_cache_gib=0.1", "max_model_len=64"]
    process = subprocess.Popen(
        [sys.executable, "-m", "splash.serve", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        url = next(match[1] for line in process.stdout if (match := re.match(r"SPLASH is ready: (\S+)", line)))
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_thousand_cases_against_a_real_server() -> None:
    cases = int(os.environ.get("SPLASH_FUZZ_CASES", "5000"))
    started = time.monotonic()
    total: Counter[int] = Counter()
    with real_server() as url:
        for operation, percent in OPERATIONS.items():
            statuses = fuzz(url, operation, max(1, cases * percent // 100))
            total += statuses
            print(*operation, dict(sorted(statuses.items())))
        health = requests.get(f"{url}/health", timeout=ANSWER_TIMEOUT_S).json()
        assert (health["running"], health["waiting"]) == (0, 0)
        assert health["free_pages"] == health["total_pages"]
    print(f"{total.total()} cases in {time.monotonic() - started:.0f} s: {dict(sorted(total.items()))}")
    assert not any(status >= 500 for status in total)
