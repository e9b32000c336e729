"""Shared by the tests of switching: a model, and what it says when nobody switches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cpu.replica import Job, Limits
from tests.cpu.switch_cases import run


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("base"))


@pytest.fixture(scope="module")
def reference(model: str) -> Callable[[Sequence[Job]], dict[int, list[int]]]:
    """Greedy tokens of jobs that are served without a switch, on two ranks with memory to spare."""
    known: dict[tuple[Job, ...], dict[int, list[int]]] = {}

    def tokens(jobs: Sequence[Job]) -> dict[int, list[int]]:
        key = tuple(jobs)
        if key not in known:
            arguments = {
                "layout": "dop",
                "jobs": key,
                "limits": Limits(budget=256, max_num_seqs=32, prefix_cache=False),
            }
            known[key] = run(model, "serve", 2, 400, arguments)[0]["tokens"]
        return known[key]

    return tokens
