"""The prefix cache through the real engine: nobody can tell from the tokens what was computed and what was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from splash.core.layout import LAYOUTS
from splash.core.request import SamplingParams
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM
from tests.cpu.replica import Job, Limits
from tests.cpu.switch_cases import METHODS, PAGE_SIZE, Reference, check, run
from tests.cpu.test_switch import CIRCUIT, Observed, check_client, engine_for, observed, walk

__all__ = ["observed"]  # a fixture


def alike(lengths: Sequence[tuple[int, int, int]], seed: int) -> tuple[Job, ...]:
    """Jobs (tokens in common with the others, tokens of its own, tokens to generate)."""
    generator = np.random.default_rng(seed)
    common = tuple(generator.integers(5, 512, 200).tolist())
    return tuple(Job(common[:n] + tuple(generator.integers(5, 512, own).tolist()), count) for n, own, count in lengths)


# Whole prompts that others begin with, one that ends with a page, and two that are equal.
JOBS = alike(((150, 0, 40), (100, 33, 60), (96, 0, 30), (64, 70, 44), (128, 1, 25), (128, 1, 25), (0, 40, 52)), seed=20)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with engine_for(model, 2, "tp", prefix_cache=True) as engine:
        yield engine


def serve(llm: LLM, jobs: Sequence[Job]) -> list[tuple[list[int], int]]:
    """Tokens, and prompt tokens found in the cache, of each job. They run side by side."""
    outputs: dict[str, tuple[list[int], int]] = {}
    for number, job in enumerate(jobs):
        params = SamplingParams(max_tokens=job.count, temperature=0.0, ignore_eos=True)
        llm.engine.add_request(GenerationRequest(str(number), job.prompt, params))
        outputs[str(number)] = ([], 0)
    while llm.engine.has_work:
        for output in llm.engine.step():
            outputs[output.id] = (outputs[output.id][0] + list(output.tokens), output.num_cached_tokens)
    return list(outputs.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_the_same_in_every_layout(model: str, reference: Reference, ranks: int) -> None:
    expected = reference(JOBS)
    with engine_for(model, ranks, "tp", prefix_cache=True) as llm:
        for layout in LAYOUTS:
            llm.engine.scheduler.pool.evict()
            llm.switch(layout)
            before = llm.engine.stats()
            for again in range(2):
                found = serve(llm, JOBS)
                assert [tokens for tokens, _ in found] == list(expected.values())
                if again and LAYOUTS[layout].kv.value != "request":  # there an owner may have none of it
                    pages = [(len(job.prompt) - 1) // PAGE_SIZE for job in JOBS]
                    assert [cached for _, cached in found] == [PAGE_SIZE * num for num in pages]
            stats = llm.engine.stats()
            queried = stats.prefix_queried_tokens - before.prefix_queried_tokens
            assert queried == 2 * sum(len(job.prompt) for job in JOBS)
            assert stats.prefix_hit_tokens - before.prefix_hit_tokens > len(JOBS[0].prompt)
            assert stats.free_pages == stats.total_pages


def test_the_cache_can_be_switched_off(model: str, reference: Reference) -> None:
    with engine_for(model, 2, "tp", prefix_cache=False) as llm:
        for _ in range(2):
            assert serve(llm, JOBS[:2]) == [(reference(JOBS)[number], 0) for number in range(2)]
        assert (llm.engine.stats().prefix_hit_tokens, llm.engine.stats().prefix_queried_tokens) == (0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_every_direction_with_shared_pages(llm: LLM, observed: Observed, reference: Reference, method: str) -> None:
    """Bytes are those that the algebra asks for when each page counts once, whoever shares it."""
    before = llm.engine.stats().prefix_hit_tokens
    llm.engine.scheduler.pool.evict()  # or no prompt would be in chunks for longer than a step
    client = walk(llm, observed, method, CIRCUIT, JOBS)
    check_client(client, JOBS, reference(JOBS))
    assert llm.engine.stats().prefix_hit_tokens > before
    shared = [plan for plan, _, _ in observed.plans if len(set(plan.page_c.tolist())) < len(plan.page_c)]
    assert len(shared) > 10, "hardly any switch had shared pages"


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        ("tp", "dp", False),
        ("tp", "dcp", False),
        ("dp", "dop", False),
        ("dcp", "cp", False),
        ("dcp", "tp", True),
        ("cp", "dp", True),
        ("dp", "tp", True),
        ("dop", "cp", True),
    ],
)
def test_idle_pages_are_found_after_a_switch(
    llm: LLM, reference: Reference, source: str, target: str, moves: bool
) -> None:
    """They stay where the target can use them, and move elsewhere; what is found afterwards is right."""
    llm.engine.scheduler.pool.evict()
    llm.switch(source)
    ((_, cached),) = serve(llm, JOBS[:1])
    assert cached == 0
    record = llm.switch(target)
    assert record.status == "committed" and any(record.kv_bytes_received) == moves
    ((tokens, cached),) = serve(llm, JOBS[:1])
    assert tokens == reference(JOBS)[0]
    assert cached == PAGE_SIZE * ((len(JOBS[0].prompt) - 1) // PAGE_SIZE)
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages


# Of three priorities, so that some make way for others.
TIGHT = tuple(
    replace(job, priority=number % 3)
    for number, job in enumerate(
        alike(((100, 0, 30), (80, 10, 40), (60, 2, 34), (90, 9, 30), (100, 0, 25), (16, 60, 20)), seed=21)
    )
)


def test_tokens_are_the_same_under_pressure(model: str, reference: Reference) -> None:
    """Too few pages for all: requests lose theirs and find them again, or what was idle is evicted."""
    cases = [{"layout": layout} for layout in LAYOUTS]
    arguments = {"cases": cases, "jobs": TIGHT * 2, "limits": Limits(budget=64)}
    expected = {number: reference(TIGHT)[number % len(TIGHT)] for number in range(2 * len(TIGHT))}
    summaries = run(model, "serve_each", 2, 12, arguments)[0]
    for summary in summaries:
        check(summary, expected)
    assert sum(summary["preemptions"] for summary in summaries) > 0


@pytest.mark.parametrize(("ranks", "num_pages", "seeds"), [(2, 14, (1, 2)), (2, 40, (3, 4)), (4, 60, (5,))])
def test_random_traffic_with_shared_pages(
    model: str, reference: Reference, ranks: int, num_pages: int, seeds: tuple[int, ...]
) -> None:
    """Arrivals, aborts, preemptions, switches, cancellations and failed reads in any order."""
    arguments = {
        "layouts": list(LAYOUTS),
        "jobs": TIGHT,
        "limits": Limits(max_num_seqs=6, step_bytes=96 << 10),
        "seeds": seeds,
        "num_actions": 160,
    }
    expected = reference(TIGHT)
    for summary in run(model, "traffic", ranks, num_pages, arguments)[0]:
        check(summary, {id: expected[job] for id, job in summary["which"].items()})
        assert "committed" in {record["status"] for record in summary["records"]}
