"""Priorities through the real engine: important requests take the room of others, whose tokens stay the same."""

from __future__ import annotations

import pytest

from splash.core.layout import LAYOUTS
from splash.core.request import SamplingParams
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM
from tests.cpu.replica import Job
from tests.cpu.switch_cases import Reference, jobs_of
from tests.cpu.test_switch import engine_for

JOBS = jobs_of((40, 65, 30, 90, 33, 70), (40, 35, 44, 30, 38, 33), seed=31)
URGENT = jobs_of((50, 20), (8, 10), seed=32)


def serve(llm: LLM) -> tuple[dict[str, list[int]], list[str]]:
    """Fill the engine with jobs, then add urgent ones. Tokens by name, and names in the order in which they ended."""
    engine = llm.engine
    tokens: dict[str, list[int]] = {}
    finished: list[str] = []

    def add(name: str, job: Job, priority: int) -> None:
        params = SamplingParams(max_tokens=job.count, temperature=0.0, ignore_eos=True)
        engine.add_request(GenerationRequest(name, job.prompt, params, priority))
        tokens[name] = []

    def step() -> None:
        for output in engine.step():
            tokens[output.id] += output.tokens
            if output.finish_reason:
                finished.append(output.id)

    for number, job in enumerate(JOBS):
        add(f"batch-{number}", job, 5)
    while engine.stats().waiting:
        step()
    for number, job in enumerate(URGENT):
        add(f"urgent-{number}", job, 0)
    while engine.has_work:
        step()
    return tokens, finished


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_urgent_requests_are_served_at_once(model: str, reference: Reference, prefix_cache: bool) -> None:
    expected = {f"batch-{number}": tokens for number, tokens in reference(JOBS).items()}
    expected |= {f"urgent-{number}": tokens for number, tokens in reference(URGENT).items()}
    with engine_for(model, 2, "tp", prefix_cache) as llm:
        for count, layout in enumerate(LAYOUTS if prefix_cache else ("tp", "dp"), 1):
            assert llm.switch(layout).status == "committed"
            tokens, finished = serve(llm)
            assert tokens == expected
            assert set(finished[:2]) == {"urgent-0", "urgent-1"}
            assert llm.engine.stats().preemptions == 2 * count, "six may run"
        assert llm.engine.stats().free_pages == llm.engine.stats().total_pages
