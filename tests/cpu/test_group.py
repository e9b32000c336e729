"""The harness itself: a rank that fails, dies or hangs is named."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from splash.platform.base import Rank
from tests.cpu.group import GroupError, run_group

HERE = "tests.cpu.test_group"


def answer(rank: Rank, offset: int) -> tuple[int, int, int]:
    return rank.rank + offset, rank.size, os.getpid()


def fail_on_one(rank: Rank, how: str) -> None:
    if rank.rank != 1:
        return
    if how == "raise":
        raise ValueError("on purpose")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def test_results_come_by_rank_from_processes_of_their_own() -> None:
    results = run_group(f"{HERE}:answer", 3, {"offset": 10})
    assert [(number, size) for number, size, _ in results] == [(10, 3), (11, 3), (12, 3)]
    assert len({pid for _, _, pid in results} | {os.getpid()}) == 4


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", r"rank 1 failed:(?s:.*)on purpose"), ("die", "rank 1 died: signal SIGKILL")],
)
def test_a_rank_that_ends_early_is_named(how: str, message: str) -> None:
    with pytest.raises(GroupError, match=message) as caught:
        run_group(f"{HERE}:fail_on_one", 2, {"how": how})
    assert "rank 0" not in str(caught.value)


def test_a_rank_that_hangs_is_named_with_the_place_and_leaves_no_process() -> None:
    with pytest.raises(GroupError, match=r"rank 1 hung(?s:.*)in fail_on_one") as caught:
        run_group(f"{HERE}:fail_on_one", 2, {"how": "hang"}, timeout_s=2.0)
    assert "rank 0" not in str(caught.value)
    assert run_group(f"{HERE}:answer", 2, {"offset": 0})  # the next group is not disturbed
