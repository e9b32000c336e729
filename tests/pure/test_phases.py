"""Workloads one after another: each begins when the one before has ended, and is what it would be alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.workload import from_mapping
from splash.workload.draws import fold
from splash.workload.load import KINDS
from tests.workloads import VOCAB, agentic, check_sharing, distributions, replay

workloads = st.one_of(
    agentic,
    st.builds(
        KINDS["fixed"],
        num_requests=st.integers(1, 9),
        input=distributions,
        output=distributions,
        concurrency=st.none() | st.integers(1, 4),
    ),
    st.builds(
        KINDS["poisson"],
        num_requests=st.integers(1, 9),
        rate=st.floats(0.1, 10),
        input=distributions,
        output=distributions,
        shared_prefix=st.integers(0, 30),
    ),
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(workloads, min_size=1, max_size=4), block_size=st.integers(1, 50), seed=st.integers(0, 2**63 - 1))
def test_a_phase_is_its_workload_once_the_one_before_has_ended(parts: list[Any], block_size: int, seed: int) -> None:
    workload = KINDS["phases"](seed=seed, priority=3, parts={f"part{n}": part for n, part in enumerate(parts)})  # type: ignore[call-arg]
    requests = workload.requests()
    check_sharing(requests, block_size)
    served = replay(requests, 0.5)
    done, began_s, most = 0, 0.0, 0
    for number, part in enumerate(parts):
        alone = dataclasses.replace(part, seed=fold(seed, number, part.seed)).requests()
        phase = slice(done, done + len(alone))
        for name in ("input_len", "output_len", "delay_s"):
            np.testing.assert_array_equal(getattr(requests, name)[phase], getattr(alone, name))
        assert np.all(requests.priority[phase] == part.priority + 3)
        for index, times in replay(alone, 0.5).items():
            assert served[done + index] == pytest.approx([began_s + time_s for time_s in times])
        assert requests.tokens(done, VOCAB).tolist() == alone.tokens(0, VOCAB).tolist()
        assert requests.output_tokens(done, VOCAB).tolist() == alone.output_tokens(0, VOCAB).tolist()
        began_s = max(served[index][1] for index in range(phase.start, phase.stop))
        done, most = phase.stop, max(most, alone.most_in_flight)
    assert done == len(requests) and requests.most_in_flight == most
    assert len(np.unique(requests.session)) == sum(len(np.unique(part.requests().session)) for part in parts)


def test_parts_of_one_kind_and_seed_draw_different_requests() -> None:
    part = {"kind": "fixed", "num_requests": 3, "input": 50, "output": 4}
    requests = from_mapping({"kind": "phases", "parts": {"one": part, "two": part}}).requests()
    assert len(requests) == 6 and requests.shared_len.sum() == 0
