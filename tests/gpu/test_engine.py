"""The whole engine on GPUs: text, memory as it was planned, and what is left when a rank dies or the engine closes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from splash.core.errors import CapacityError, WorkerError
from splash.core.request import SamplingParams
from splash.engine.executor import LocalGroup
from splash.llm import LLM
from splash.platform.cuda import nvml
from splash.platform.cuda.platform import CONTEXT_BYTES, CudaPlatform
from tests.cpu.replica import Job
from tests.cpu.switch_cases import jobs_of

pytestmark = pytest.mark.gpu
JOBS = jobs_of((120, 7, 40), (24, 24, 24), seed=9)
OPTIONS: dict[str, Any] = {"hardware": "cuda", "kv_cache_gib": 0.5, "max_batched_tokens": 64}


def pids_of(llm: LLM) -> list[int]:
    group = llm.engine.loop.executor
    assert isinstance(group, LocalGroup)
    return group.pids


def uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


def gone(pids: Sequence[int]) -> bool:
    """Neither the processes nor their device memory are left, within the seconds that the driver takes to notice."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        if not alive and not nvml.process_bytes(uuid(), set(pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_the_cpus_and_nothing_is_left(
    oracle: Callable[[Sequence[Job]], dict[int, list[int]]], ranks: int
) -> None:
    with LLM(ranks=ranks, layout="dop", **OPTIONS) as llm:
        params = [SamplingParams(max_tokens=job.count, temperature=0.0, ignore_eos=True) for job in JOBS]
        pids = pids_of(llm)
        for layout in ("dop", "tp", "cp"):
            llm.switch(layout)
            outputs = llm.generate([job.prompt for job in JOBS], params)
            assert {number: list(output.tokens) for number, output in enumerate(outputs)} == oracle(JOBS), layout
    assert gone(pids)


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_ahead_of_the_device_changes_nothing(ranks: int) -> None:
    """Many requests of all kinds, some of which end before their time, in layouts that split rows and that do not."""
    kinds = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=33, temperature=1.0, seed=7, top_k=40, logprobs=2),
        SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
        SamplingParams(max_tokens=40, temperature=0.0, stop=("e",), min_tokens=2),
        SamplingParams(max_tokens=1, temperature=0.0),
    ]
    jobs = jobs_of([5 + 17 * (number % 9) for number in range(25)], [1] * 25, seed=3)
    params = [kinds[number % len(kinds)] for number in range(25)]
    found: list[list[tuple[tuple[int, ...], str | None]]] = []
    for is_async in (False, True):
        with LLM(ranks=ranks, layout="tp", async_scheduling=is_async, max_num_seqs=16, **OPTIONS) as llm:
            found.append([])
            for layout in ("tp", "dp"):
                llm.switch(layout)
                outputs = llm.generate([job.prompt for job in jobs], params)
                found[-1] += [(output.tokens, output.finish_reason) for output in outputs]
    assert found[0] == found[1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_named(how: signal.Signals) -> None:
    with LLM(ranks=2, layout="tp", step_timeout_s=5.0, max_restarts=0, **OPTIONS) as llm:
        llm.generate([5, 6, 7], SamplingParams(max_tokens=2))
        pids = pids_of(llm)
        os.kill(pids[1], how)
        started = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1"):
            llm.generate([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
        assert time.monotonic() - started < 10.0
    assert gone(pids)


def test_memory_is_what_the_device_reports() -> None:
    """Everything that is not asked for goes to the arenas; what is accounted for is what is in use, within 2 %."""
    lines: list[str] = []
    with LLM(hardware="cuda", ranks=1, mem_fraction=0.6, progress=lines.append) as llm:
        (rank,) = llm.engine.ready
        geometry = llm.engine.switcher._geometry
        accounted = rank.held_bytes + geometry.arena_bytes * geometry.spec.num_layers + CONTEXT_BYTES
        assert abs(accounted / rank.device_used_bytes - 1) < 0.02, lines
        total = CudaPlatform().devices()[0].total_bytes
        assert 0.55 * total < rank.device_used_bytes <= 0.6 * total, lines
        assert any("in use" in line for line in lines)


def test_more_than_the_gpu_has_is_refused_with_numbers() -> None:
    with pytest.raises(CapacityError, match=r"rank 0 .* on GPU 0 needs 4 arenas of .* GiB are free"):
        LLM(hardware="cuda", ranks=1, kv_cache_gib=2000.0)
