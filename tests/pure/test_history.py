"""The last minutes of an engine: what a sample says of its steps, what is noted of switches, and bounds to both."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import TP
from splash.engine.history import MAX_EVENTS, MAX_SAMPLES, SAMPLE_S, History
from splash.switch.orders import SwitchRecord
from tests.fake_group import make


def history() -> tuple[History, Any]:
    switcher = SimpleNamespace(layout=TP, history=deque(maxlen=4))
    return History(make()[0], switcher, 0.0), switcher  # type: ignore[arg-type]


def test_a_sample_is_what_its_steps_brought() -> None:
    seen, _ = history()
    seen.stepped(5.0, False, "tp")  # the first step begins
    seen.stepped(5.25, True, "tp")
    seen.first_token(0.75, 12)
    seen.first_token(0.25, 8)
    seen.stepped(5.375, True, "tp")
    seen.next_token(0.125)
    seen.next_token(0.125)
    seen.idle(5.375)
    (sample,) = seen.samples
    assert (sample.time_s, sample.seconds, sample.layout, sample.steps) == (5.375, 0.375, "tp", 2)
    assert (sample.step_ms, sample.step_max_ms) == (187.5, 250.0)
    assert (sample.output_tokens, sample.prompt_tokens) == (4, 20)
    assert (sample.ttft_ms, sample.ttft_max_ms, sample.itl_ms, sample.itl_max_ms) == (500.0, 750.0, 125.0, 125.0)
    assert (sample.running, sample.waiting, sample.used_pages) == (0, 0, (0, 0))
    times = seen.step_times()["tp"]
    assert (times.step_ms, times.time_s, times.steps) == (187.5, 5.375, 2)


def test_nothing_is_known_of_what_did_not_happen() -> None:
    seen, _ = history()
    seen.stepped(1.0, False, "tp")
    seen.idle(1.0)
    assert not seen.samples and not seen.step_times()
    seen.stepped(1.5, True, "tp")
    seen.idle(1.5)
    assert seen.samples[0].ttft_ms is None and seen.samples[0].itl_max_ms is None


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.sampled_from(["tp", "dp"]), st.integers(0, 3)), min_size=1))
def test_samples_share_out_all_steps_and_tokens(steps: list[tuple[float, str, int]]) -> None:
    seen, _ = history()
    now_s = 1.0
    seen.stepped(now_s, False, "tp")
    for seconds, layout, tokens in steps:
        now_s += seconds
        seen.stepped(now_s, True, layout)
        for _ in range(tokens):
            seen.next_token(seconds)
    seen.idle(now_s)
    samples = seen.samples
    assert sum(sample.steps for sample in samples) == len(steps)
    assert sum(sample.output_tokens for sample in samples) == sum(tokens for _, _, tokens in steps)
    assert sum(sample.seconds for sample in samples) == pytest.approx(now_s - 1.0, abs=1e-3 * len(samples))
    layouts = [layout for _, layout, _ in steps]
    for sample in samples:
        assert [sample.layout] * sample.steps == layouts[: sample.steps]
        del layouts[: sample.steps]
        assert sample.steps == 1 or sample.seconds < SAMPLE_S + 1e-6
    assert samples == sorted(samples, key=lambda sample: sample.time_s)


def test_switches_are_noted_once_with_who_asked() -> None:
    seen, switcher = history()
    one = SwitchRecord(id=1, source="tp", target="dp", asked="auto", status="committed", kv_bytes_received=[3, 4])
    two = SwitchRecord(id=2, source="dp", target="cp", asked="auto", status="refused", reason="no room")
    switcher.history += [one, two]
    seen.stepped(1.0, False, "tp")
    seen.stepped(2.0, True, "tp")
    assert [(event.id, event.time_s, event.status, event.bytes_received) for event in seen.events] == [
        (1, 1.0, "committed", 7),
        (2, 1.0, "refused", 0),
    ]
    assert not seen.events[0].by_policy and seen.events[1].reason == "no room"


def test_it_is_bounded() -> None:
    seen, switcher = history()
    for number in range(MAX_SAMPLES + 5):
        switcher.history.append(SwitchRecord(id=number, source="tp", target="dp", asked="auto"))
        seen.stepped(float(number), True, "tp")
        seen.idle(float(number))
    assert len(seen.samples) == MAX_SAMPLES and len(seen.events) == MAX_EVENTS
    assert seen.events[-1].id == MAX_SAMPLES + 4
