"""How far serving had come by when, from when requests had their first and last tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splash.sweep.served import STRETCHES, clairvoyant_s, served_s
from splash.workload import Requests


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 20), st.integers(0, 30), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    )
)
def test_shares_of_the_work_are_served_when_they_were(requests: list[tuple[int, int, int, int]]) -> None:
    inputs, outputs, first, more = (np.array(column) for column in zip(*requests, strict=True))
    count = len(requests)
    load = Requests(
        time_s=np.zeros(count),
        after=np.full(count, -1),
        delay_s=np.zeros(count),
        output_len=outputs,
        priority=np.zeros(count, np.int64),
        session=np.arange(count),
        segment_start=np.arange(count + 1),
        segment_stream=np.arange(count, dtype=np.uint64),
        segment_len=inputs,
        output_stream=np.arange(count, dtype=np.uint64) + np.uint64(count),
    )
    finish = first + np.where(outputs > 1, more, 0)
    marks = served_s(load, first.astype(float), finish.astype(float))
    total = (inputs + outputs).sum()

    def served(time_s: float, margin_s: float) -> float:
        """Tokens served at `time_s`, give or take what comes at once."""
        since = np.clip(time_s - first, 0, finish - first) / np.maximum(finish - first, 1)
        here = first <= time_s + margin_s
        rest = np.where(finish > first, (outputs - 1) * since, outputs - 1)
        return float((here * (inputs + 1 + rest)).sum())

    assert (np.diff(marks) >= 0).all() and marks[-1] <= finish.max() and marks[0] >= first.min()
    for share, mark in enumerate(marks.tolist(), 1):
        wanted = total * share / STRETCHES
        assert served(mark, -1e-9) - 1e-6 <= wanted <= served(mark, 1e-9) + 1e-6


def test_the_clairvoyant_takes_the_fastest_layout_over_each_stretch() -> None:
    assert clairvoyant_s([[1.0, 2.0, 10.0], [4.0, 8.0, 9.0]]) == 1 + 1 + 1
    assert clairvoyant_s([[2.0, 3.0]]) == 3
