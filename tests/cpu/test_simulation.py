"""The simulator against the real engine: the same workload gives the same steps, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from splash.core.hardware import Hardware
from splash.core.layout import parse_layout
from splash.core.request import SamplingParams
from splash.engine.loop import Executor, Loop
from splash.engine.messages import Result, Run
from splash.engine.outputs import GenerationRequest
from splash.engine.simulated import Simulation, SimulationConfig
from splash.llm import LLM
from splash.settings import build, compose
from splash.switch.orders import CopyAhead
from splash.workload import Requests, load

PAGE_SIZE, MAX_SEQS, MAX_ROWS = 16, 24, 96
ROOMY_GIB = 0.008  # arenas that hold all requests at once
SWITCHES = {20: ("dp", "blocking"), 45: ("tp", "layerwise"), 70: ("dcp", "precopy"), 90: ("cp", "auto")}  # by step


class Recording:
    """An executor that keeps what it is told to run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.runs: list[Run | CopyAhead] = []
        self.collect, self.check, self.close = executor.collect, executor.check, executor.close
        self.votes = executor.votes

    collect: Callable[[], Result]

    def submit(self, run: Run) -> None:
        self.runs.append(run)
        self._executor.submit(run)

    def copy_ahead(self, order: CopyAhead) -> None:
        self.runs.append(order)
        self._executor.copy_ahead(order)


def workload() -> Requests:
    """Everything there from the start, some prompts beginning alike."""
    overrides = ["num_requests=30", "concurrency=null", "shared_prefix=40", "prefix_groups=3", "seed=4"]
    overrides += ["input={kind: uniform, low: 45, high: 230}", "output={kind: uniform, low: 20, high: 120}"]
    return load("fixed", [f"workload.{override}" for override in overrides]).requests()


def maybe_switch(loop: Loop, switches: dict[int, tuple[str, str]], step: int) -> None:
    if step in switches:
        target, method = switches[step]
        loop.switcher.request(parse_layout(target), method, False, lambda record: None)


def without_tokens(run: Run | CopyAhead) -> Any:
    """A run as plain values, with the number of tokens in the place of those that were generated; an order as it is."""
    if isinstance(run, CopyAhead):
        return msgspec.to_builtins(run)
    plan = run.plan
    queries = [(q.request, q.start, len(q.tokens), q.owner, q.sample, q.new_pages) for q in plan.queries]
    new = [item.id for item in plan.new]
    head = (plan.step, plan.epoch, plan.layout, queries, new, plan.released, plan.finished)
    return head, msgspec.to_builtins((run.switch, run.commit, run.copying))


def engine_runs(llm: LLM, requests: Requests, switches: dict[int, tuple[str, str]]) -> list[Run | CopyAhead]:
    engine = llm.engine
    engine.loop.executor = recording = Recording(engine.loop.executor)
    for index in range(len(requests)):
        prompt = tuple(requests.tokens(index, engine.model_config.spec.vocab_size).tolist())
        params = SamplingParams(max_tokens=int(requests.output_len[index]), temperature=0.0, ignore_eos=True)
        engine.add_request(GenerationRequest(str(index), prompt, params))
    step = 0
    while engine.has_work:
        maybe_switch(engine.loop, switches, step)
        engine.step()
        step += 1
    return recording.runs


@pytest.mark.parametrize(
    ("layout", "ranks", "kv_cache_gib", "switches"),
    [
        ("tp", 2, 0.002, {}),
        ("dp", 2, 0.003, {}),
        ("cp", 4, 0.0025, {}),
        ("dop", 2, 0.0025, SWITCHES),
        ("dop", 2, ROOMY_GIB, SWITCHES),
    ],
)
def test_every_step_is_that_of_the_engine(
    tiny_checkpoint: Callable[[str], Path],
    layout: str,
    ranks: int,
    kv_cache_gib: float,
    switches: dict[int, tuple[str, str]],
) -> None:
    """Admission, chunks, pages, owners, preemptions and switches, all but one under pressure on the pages."""
    requests = workload()
    limits: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "max_num_seqs": MAX_SEQS,
        "max_batched_tokens": MAX_ROWS,
        "kv_cache_gib": kv_cache_gib,
    }
    with LLM(str(tiny_checkpoint("base")), ranks=ranks, layout=layout, **limits) as llm:
        expected = engine_runs(llm, requests, switches)
        spec, longest = llm.engine.model_config.spec, llm.engine.max_model_len
        num_preemptions, records = llm.engine.scheduler.num_preemptions, list(llm.engine.switcher.history)
    hardware = build(Hardware, compose("plan", ["+hardware=cpu"])["hardware"])
    config = SimulationConfig(
        spec, hardware, ranks, "float32", layout=layout, max_model_len=longest, switch_copy_mib=2.0, **limits
    )
    simulation = Simulation(config, requests, every_step=True)
    simulation.loop.executor = recording = Recording(simulation.loop.executor)
    step, more = 0, True
    while more:
        maybe_switch(simulation.loop, switches, step)
        more = simulation.step()
        step += 1

    found = [without_tokens(run) for run in recording.runs]
    assert found == [without_tokens(run) for run in expected]
    result = simulation.result()
    assert len(result.preemptions) == num_preemptions
    assert bool(num_preemptions) == (kv_cache_gib < ROOMY_GIB)
    assert sorted(result.admissions) == list(range(len(requests)))
    assert result.num_cached.sum() > 0
    kinds = [(record.source, record.target, record.method, record.status) for record in records]
    assert [(record.source, record.target, record.method, record.status) for record in result.switches] == kinds
    assert len(kinds) == len(switches)
    for one, other in zip(result.switches, records, strict=True):
        assert one.kv_bytes_received == other.kv_bytes_received
        assert one.weight_bytes_received == other.weight_bytes_received
        assert (one.added_ms > 0) == (one.status == "committed")
