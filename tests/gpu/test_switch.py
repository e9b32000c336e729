"""Switching on GPUs while requests run: every direction, every way, with the CPU's tokens and exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cpu.replica import Job, Limits
from tests.cpu.switch_cases import CIRCUIT, METHODS, check, check_walk, jobs_of, run
from tests.gpu.conftest import MODEL

pytestmark = pytest.mark.gpu
JOBS = jobs_of((100, 37, 16, 5), (170, 165, 160, 155), seed=3)


@pytest.mark.parametrize(("method", "streams"), [*((method, False) for method in METHODS), ("layerwise", True)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_direction_keeps_tokens_and_bytes(
    oracle: Callable[[Sequence[Job]], dict[int, list[int]]], ranks: int, method: str, streams: bool
) -> None:
    limits = Limits(max_model_len=400, step_bytes=1 << 20, staging_bytes=256 << 20, streams=streams)
    arguments = {"hops": CIRCUIT, "method": method, "jobs": JOBS, "limits": limits}
    results = run(MODEL, "walk", ranks, 110, arguments, timeout_s=200.0, platform="cuda")
    check_walk(results, CIRCUIT)
    check(results[0], oracle(JOBS))


def test_little_room_stages(oracle: Callable[[Sequence[Job]], dict[int, list[int]]]) -> None:
    limits = Limits(max_model_len=400, staging_bytes=256 << 20)
    arguments = {"hops": CIRCUIT, "method": "layerwise", "jobs": JOBS, "limits": limits}
    results = run(MODEL, "walk", 2, 70, arguments, timeout_s=200.0, platform="cuda")
    check_walk(results, CIRCUIT)
    check(results[0], oracle(JOBS))
