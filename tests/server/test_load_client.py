"""The benchmark client sends what a workload asks for, when it asks for it, and reports what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.serve import Load, Replay, main, make_prompts, named_workload, run, summarise
from splash.core.errors import ConfigError

SMALL = ("input=20", "tool=5", "output=6", "think=0.01", "system_prompt=8", "num_sessions=6", "rate=200", "turns=3")


def test_a_closed_loop_sends_every_prompt(served: Any) -> None:
    prompts = make_prompts("tokens", 9, 12, 300, seed=0)
    timings = run(Load(served.url, "scripted", prompts, 5, 3))
    assert sorted(list(request.prompt) for request in served.engine.requests) == sorted(prompts)
    summary = summarise(timings)
    assert summary["requests"] == 9 and summary["output_tok_s"] > 0 and "late_ms" not in summary


def test_turns_follow_each_other_and_bring_the_workloads_tokens(served: Any) -> None:
    requests = named_workload("agentic", SMALL).requests()
    timings = run(Replay(served.url, "scripted", requests, 300))
    assert len(timings) == len(requests) == 18
    start = min(timing.due - requests.time_s[i] for i, timing in enumerate(timings) if requests.after[i] < 0)
    for index, timing in enumerate(timings):
        after = int(requests.after[index])
        due = start + requests.time_s[index] if after < 0 else timings[after].events[-1] + requests.delay_s[index]
        assert timing.due >= due - 1e-6
        assert timing.sent >= timing.due
        assert timing.prompt_tokens == requests.input_len[index] and timing.output_tokens == 6
    sent = {tuple(request.prompt) for request in served.engine.requests}
    assert sent == {tuple(requests.tokens(i, 300).tolist()) for i in range(18)}


def test_a_workload_bounds_what_is_in_flight(served: Any) -> None:
    requests = named_workload("fixed", ["num_requests=8", "input=10", "output=4", "concurrency=2"]).requests()
    timings = run(Replay(served.url, "scripted", requests, 300))
    moments = sorted([(t.sent, 1) for t in timings] + [(t.events[-1], -1) for t in timings])
    assert np.cumsum([step for _, step in moments]).max() == 2


def test_the_first_refusal_ends_a_replay(served: Any) -> None:
    requests = named_workload("fixed", ["num_requests=4", "input=600", "output=4"]).requests()
    with pytest.raises(SystemExit, match="answered 400"):
        run(Replay(served.url, "scripted", requests, 300))


def test_the_command_takes_a_trace_and_writes_a_record(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "a trace, of ours.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 4, "hash_ids": [0]}\n' * 3)
    arguments = [
        "--url",
        served.url,
        "--workload",
        str(trace),
        "--set",
        "max_output_len=3",
        "--out",
        str(tmp_path / "r"),
    ]
    monkeypatch.setattr(sys, "argv", ["perf.serve", *arguments, "--vocab-size", "300", "--warmup", "1"])
    main()
    record = json.loads((tmp_path / "r").read_text())
    assert record["requests"] == 3 and record["workload"]["output_tokens"] == 9
    assert record["workload"]["shared_prefix_fraction"] == pytest.approx(2 / 3, abs=1e-4)
    assert "late" in capsys.readouterr().out


def test_a_workload_may_be_a_file_and_mistakes_are_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("kind: poisson\nnum_requests: 5\nrate: 2\ninput: {kind: uniform, low: 1, high: 4}\noutput: 3\n")
    requests = named_workload(str(mine), ["input.high=2", "num_requests=50"]).requests()
    assert len(requests) == 50 and requests.input_len.max() == 2
    with pytest.raises(ConfigError, match=r"workload.rtae: unknown option; did you mean rate"):
        named_workload(str(mine), ["rtae=2"])
    with pytest.raises(ConfigError, match="there is no file"):
        named_workload(str(tmp_path / "other.yaml"), [])
    with pytest.raises(ConfigError, match="unknown workload 'poison'"):
        named_workload("poison", [])
