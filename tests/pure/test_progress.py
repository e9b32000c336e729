"""Who holds up a step, by what the ranks have noted."""

from __future__ import annotations

import os

import pytest

from splash.engine.progress import ProgressBoard


@pytest.mark.parametrize(
    ("received", "done", "behind"),
    [
        ((3, 2, 3), (2, 2, 3), [1]),  # rank 1 has not even received the step; rank 0 waits for it
        ((3, 3, 3), (2, 2, 3), [1]),  # it is in the step, and rank 0 waits for it
        ((3, 3, 3), (2, 2, 2), [1, 2]),
        ((3, 3, 3), (2, 3, 3), [0]),  # nobody else can be
        ((2, 2, 3), (2, 2, 3), [0, 1]),
    ],
)
def test_the_rank_that_is_behind_is_blamed(received: tuple[int, ...], done: tuple[int, ...], behind: list[int]) -> None:
    fd = ProgressBoard.create(3)
    launcher, ranks = ProgressBoard(fd, 3), ProgressBoard(fd, 3)
    os.close(fd)
    for rank in range(3):
        for _ in range(received[rank]):
            ranks.receive(rank)
        for _ in range(done[rank]):
            ranks.finish(rank)
    assert launcher.behind(3) == behind
