"""The benchmark client sends what a workload asks for, when it asks for it, and reports what it saw."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.client import Call, Endpoint, Timing, drive, make_prompts, replay, run
from perf.serve import call_of, made_here, main, named_workload, parser
from perf.serve_result import parse_objectives, summarise
from splash.core.errors import ConfigError
from splash.workload import Requests

SMALL = ("input=20", "tool=5", "output=6", "think=0.01", "system_prompt=8", "num_sessions=6", "rate=200", "turns=3")
# What `vllm bench serve --save-result` writes of a run, and of each of its four latencies.
FIELDS = """backend model_id num_prompts request_rate max_concurrency duration completed failed total_input_tokens
    total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
    max_output_tokens_per_s max_concurrent_requests""".split()
FIELDS += [f"{what}_{name}_ms" for what in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")]


def sent(endpoint: Endpoint, requests: Requests) -> list[Timing]:
    return asyncio.run(replay(endpoint, requests, lambda index: call_of(requests, index, 300, False)))


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["perf.serve", "--vocab-size", "300", "--warmup", "1", *arguments])
    main()


def test_a_closed_loop_sends_every_prompt(served: Any) -> None:
    prompts = make_prompts("tokens", 9, 12, 300, seed=0)
    timings = run(Endpoint(served.url, "scripted"), [Call(prompt, 5) for prompt in prompts], 3)
    assert sorted(list(request.prompt) for request in served.engine.requests) == sorted(prompts)
    assert [(timing.prompt_tokens, timing.output_tokens, timing.late) for timing in timings] == [(12, 5, 0.0)] * 9
    assert summarise(timings)["max_concurrent_requests"] == 3


def test_turns_follow_each_other_and_bring_the_workloads_tokens(served: Any) -> None:
    requests = named_workload("agentic", (*SMALL, "priority=-2")).requests()
    timings = sent(Endpoint(served.url, "scripted"), requests)
    assert len(timings) == len(requests) == 18
    start = min(timing.due - requests.time_s[i] for i, timing in enumerate(timings) if requests.after[i] < 0)
    for index, timing in enumerate(timings):
        after = int(requests.after[index])
        due = start + requests.time_s[index] if after < 0 else timings[after].events[-1] + requests.delay_s[index]
        assert timing.due >= due - 1e-6
        assert timing.sent >= timing.due
        assert timing.prompt_tokens == requests.input_len[index] and timing.output_tokens == 6
    prompts = {tuple(request.prompt) for request in served.engine.requests}
    assert prompts == {tuple(requests.tokens(i, 300).tolist()) for i in range(18)}
    assert {request.priority for request in served.engine.requests} == {-2}


def test_a_workload_bounds_what_is_in_flight(served: Any) -> None:
    requests = named_workload("fixed", ["num_requests=8", "input=10", "output=4", "concurrency=2"]).requests()
    timings = sent(Endpoint(served.url, "scripted"), requests)
    moments = sorted([(t.sent, 1) for t in timings] + [(t.events[-1], -1) for t in timings])
    assert np.cumsum([step for _, step in moments]).max() == 2


def test_what_is_streamed_is_read_as_it_is(served: Any) -> None:
    text = "hello there, the quick brown fox"
    for chat in (False, True):
        served.engine.script = text
        endpoint = Endpoint(served.url, "scripted", chat=chat, ignore_eos=False)
        (timing,) = run(endpoint, [Call("hello world", 100)], 1)
        assert timing.text == text and len(timing.events) >= 2
        assert timing.output_tokens == len(served.engine.tokenizer.encode(text, add_special_tokens=False)) + 1
        assert list(timing.events) == sorted(timing.events) and timing.events[0] > timing.sent


def test_failures_are_counted_and_do_not_end_the_others(serve: Callable[..., Any]) -> None:
    served = serve(api_key="secret")
    calls = [Call([20] * 600, 4), Call([20] * 6, 4)]
    with_key = Endpoint(served.url, "scripted", api_key="secret")
    failed, done = asyncio.run(drive(with_key, calls, 1))
    assert "answered 400" in failed.error and not failed.events and not done.error
    summary = summarise([failed, done], detailed=True)
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (1, 1, 4)
    assert summary["errors"] == [failed.error, ""]
    with pytest.raises(SystemExit, match="answered 401"):
        run(Endpoint(served.url, "scripted"), calls, 1)


def test_an_endpoint_that_is_not_there_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (timing,) = asyncio.run(drive(Endpoint(f"http://127.0.0.1:{port}", "any"), [Call("hello", 1)], 1))
    assert "Connect" in timing.error or "refused" in timing.error
    with pytest.raises(SystemExit, match="not the address of an endpoint"):
        run(Endpoint("localhost:8000", "any"), [Call("hello", 1)], 1)


def test_a_stream_that_breaks_off_is_a_failure(served: Any) -> None:
    served.engine.hanging.clear()
    (timing,) = asyncio.run(drive(Endpoint(served.url, "scripted", timeout_s=0.2), [Call("hello <|hang|>", 4)], 1))
    assert timing.error == "TimeoutError"
    (timing,) = asyncio.run(drive(Endpoint(served.url, "scripted"), [Call("hello <|die|>", 4)], 1))
    assert "failed while streaming" in timing.error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "random", "--max-concurrency", "2"],
        ["--workload", "random", "--request-rate", "500", "--goodput", "ttft:60000", "e2el:60000"],
        ["--workload", "prefix-repetition", "--prefix-len", "24", "--num-prefixes", "2", "--save-detailed"],
        ["--workload", "random", "--backend", "openai-chat"],
    ],
)
def test_the_command_writes_the_fields_of_the_field(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    shape = ["--num-prompts", "8", "--input-len", "6", "--output-len", "4", "--out", str(tmp_path / "r")]
    command(monkeypatch, "--url", f"{served.url}/v1", *shape, *arguments)
    record = json.loads((tmp_path / "r").read_text())
    assert set(FIELDS) <= set(record)
    assert (record["completed"], record["failed"], record["total_output_tokens"]) == (8, 0, 32)
    assert record["request_goodput"] == (record["request_throughput"] if "--goodput" in arguments else None)
    if "--max-concurrency" in arguments:
        assert record["max_concurrent_requests"] <= 2
    if "--save-detailed" in arguments:
        assert record["output_lens"] == [4] * 8 and record["input_lens"] == [30] * 8
        assert len({tuple(request.prompt[:24]) for request in served.engine.requests[1:]}) <= 2


def test_lengths_like_those_of_shared_conversations() -> None:
    args = parser().parse_args(["--workload", "sharegpt", "--num-prompts", "20000", "--request-rate", "5"])
    requests = made_here(args).requests()
    assert requests.input_len.mean() == pytest.approx(220, rel=0.15)
    assert requests.output_len.mean() == pytest.approx(200, rel=0.15)
    assert requests.input_len.max() <= 1024 and np.median(requests.input_len) < 0.7 * requests.input_len.mean()
    assert len(requests) / requests.time_s[-1] == pytest.approx(5, rel=0.05)


def test_the_command_takes_a_trace(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "a trace, of ours.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 4, "hash_ids": [0]}\n' * 3)
    out = str(tmp_path / "r")
    command(monkeypatch, "--url", served.url, "--workload", str(trace), "--set", "max_output_len=3", "--out", out)
    record = json.loads(Path(out).read_text())
    assert record["completed"] == 3 and record["workload"]["output_tokens"] == 9
    assert record["workload"]["shared_prefix_fraction"] == pytest.approx(2 / 3, abs=1e-4)
    assert "late" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "rate=2"], "shaped by options of its own"),
        (["--workload", "agentic", "--request-rate", "2"], "says itself when requests arrive"),
        (["--max-concurrency", "0"], "must be at least 1"),
        (["--backend", "openai-chat", "--prompts", "tokens"], "a chat is made of text"),
        (["--goodput", "itl:5"], "METRIC one of ttft, tpot, e2el"),
        (["--goodput", "ttft:soon"], "must be METRIC:MILLISECONDS"),
        (["--goodput", "ttft:0"], "a limit above 0"),
        (["--request-rate", "-1"], "workload.rate"),
        (["--workload", "poison"], "unknown workload 'poison'"),
    ],
)
def test_mistakes_on_the_command_line_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, *arguments)
    assert said in capsys.readouterr().err


def test_a_workload_may_be_a_file_and_mistakes_are_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("kind: poisson\nnum_requests: 5\nrate: 2\ninput: {kind: uniform, low: 1, high: 4}\noutput: 3\n")
    requests = named_workload(str(mine), ["input.high=2", "num_requests=50"]).requests()
    assert len(requests) == 50 and requests.input_len.max() == 2
    with pytest.raises(ConfigError, match=r"workload.rtae: unknown option; did you mean rate"):
        named_workload(str(mine), ["rtae=2"])
    with pytest.raises(ConfigError, match="there is no file"):
        named_workload(str(tmp_path / "other.yaml"), [])


@given(st.lists(st.tuples(st.floats(0, 10), st.lists(st.floats(0.001, 1), min_size=1, max_size=5)), min_size=1))
def test_a_summary_is_what_the_stamps_say(requests: list[tuple[float, list[float]]]) -> None:
    timings = []
    for began, gaps in requests:
        events = tuple(began + sum(gaps[: count + 1]) for count in range(len(gaps)))
        timings.append(Timing(began, events, 3, len(gaps), "", began))
    limit_ms = 400.0
    summary = summarise(timings, {"ttft": limit_ms})
    duration = max(t.events[-1] for t in timings) - min(t.sent for t in timings)
    assert summary["duration"] == pytest.approx(duration, abs=1e-4)
    assert summary["output_throughput"] == pytest.approx(sum(len(gaps) for _, gaps in requests) / duration, abs=1e-3)
    ttfts = [events[0] * 1e3 for _, events in requests]
    assert summary["mean_ttft_ms"] == pytest.approx(np.mean(ttfts), abs=0.01)
    assert summary["p99_ttft_ms"] == pytest.approx(np.percentile(ttfts, 99), abs=0.01)
    tpots = [sum(gaps[1:]) / (len(gaps) - 1) * 1e3 for _, gaps in requests if len(gaps) > 1]
    assert summary["median_tpot_ms"] == pytest.approx(np.median(tpots) if tpots else 0.0, abs=0.01)
    itls = [gap * 1e3 for _, gaps in requests for gap in gaps[1:]]
    assert summary["median_itl_ms"] == pytest.approx(np.median(itls) if itls else 0.0, abs=0.01)
    assert summary["mean_e2el_ms"] == pytest.approx(np.mean([sum(gaps) * 1e3 for _, gaps in requests]), abs=0.01)
    good = sum(t.ttft * 1e3 <= limit_ms for t in timings)
    assert summary["request_goodput"] == pytest.approx(good / duration, abs=1e-3)


def test_objectives() -> None:
    assert parse_objectives(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
