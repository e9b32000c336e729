"""Switching while requests run: nobody can tell from the tokens, nothing is lost, and no more is moved than must be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from splash.core.diff import Diff, diff
from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State
from splash.core.request import SamplingParams
from splash.engine import ahead, switching
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM
from splash.switch.manifest import Occupancy, plan_switch
from splash.switch.orders import SwitchRecord
from tests.cpu.replica import Job, Limits
from tests.cpu.switch_cases import CIRCUIT, JOBS, METHODS, PAGE_SIZE, Reference, check, check_walk, jobs_of, run

NUM_LAYERS = 4  # of the model

# -- every direction, every way, through the real engine ---------------------------------------------------------------


@dataclass
class Observed:
    """What each plan of a switch started from: the last one a switch is the one that was committed."""

    plans: list[tuple[Occupancy, Layout, tuple[int, ...]]] = field(default_factory=list)

    def expected(self, geometry: ArenaGeometry) -> tuple[Diff, np.ndarray]:
        """The ownership difference of the written pages of the last plan, from the algebra alone."""
        occupancy, target, owners = self.plans[-1]
        counts = [-(-written // geometry.page_size) for written in occupancy.written]
        numbers = np.concatenate([np.arange(count) for count in counts] or [np.empty(0, dtype=np.int64)])
        assert occupancy.pages is not None
        claims = [page for pages, count in zip(occupancy.pages, counts, strict=True) for page in pages[:count]]
        pages = np.unique(np.array(claims, dtype=np.int64), return_inverse=True)[1]
        old_owners, new_owners = (np.repeat(np.array(own, dtype=int), counts) for own in (occupancy.owners, owners))
        old = State(occupancy.layout, geometry.ranks, numbers, old_owners, pages)
        new = State(target, geometry.ranks, numbers, new_owners, pages)
        return diff(old, new), numbers


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    seen = Observed()

    plan = ahead.AheadCopies.plan

    def spy(occupancy: Occupancy, target: Layout, owners: Sequence[int], *rest: Any) -> Any:
        seen.plans.append((occupancy, target, tuple(owners)))
        return plan_switch(occupancy, target, owners, *rest)

    def spy_ahead(copies: ahead.AheadCopies, occupancy: Occupancy, owners: Sequence[int], epoch: int) -> Any:
        seen.plans.append((occupancy, copies._target, tuple(owners)))
        return plan(copies, occupancy, owners, epoch)

    monkeypatch.setattr(switching, "plan_switch", spy)
    monkeypatch.setattr(ahead.AheadCopies, "plan", spy_ahead)
    return seen


class Client:
    """Feeds an engine and keeps what comes back."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.tokens: dict[str, list[int]] = {}
        self.jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        name = f"{id(self)}-{len(self.jobs)}"
        self.jobs[name], self.tokens[name] = job, []
        params = SamplingParams(max_tokens=job.count, temperature=0.0, ignore_eos=True)
        self.engine.add_request(GenerationRequest(name, job.prompt, params))

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.id] += output.tokens

    def settle(self, record: SwitchRecord) -> None:
        for _ in range(300):
            if record.status in ("committed", "refused", "failed", "aborted", "superseded"):
                return
            self.step()
        raise AssertionError(f"a switch does not end: {record}")

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()


def walk(llm: LLM, observed: Observed, method: str, hops: Sequence[str], jobs: Sequence[Job]) -> Client:
    """Follow `hops` with requests running, checking each record against the ownership difference."""
    client = Client(llm)
    llm.switch(hops[0])
    geometry = llm.engine.switcher._geometry
    arriving = itertools.cycle(jobs)
    for _ in range(len(jobs)):
        client.add(next(arriving))
    mid_prefill = mid_decode = copied_ahead = 0
    client.step()
    for source, target in itertools.pairwise(hops):
        while len(client.engine.scheduler.requests) < len(jobs):
            client.add(next(arriving))
        client.step()
        client.step()
        record = client.engine.switch(target, method)
        client.settle(record)
        where = f"{source} -> {target}, {method}: {record}"
        assert (record.source, record.target, record.status) == (source, target, "committed"), where
        expected, _ = observed.expected(geometry)
        occupancy = observed.plans[-1][0]
        layers = geometry.spec.num_layers
        group_bytes = geometry.attention_bytes // geometry.ranks
        kv_bytes = (expected.pages.received * geometry.slot_bytes * layers).tolist()
        weight_bytes = (expected.weights.received * group_bytes * layers).tolist()
        assert record.kv_bytes_planned == kv_bytes, where
        assert record.weight_bytes_planned == weight_bytes, where
        assert record.pages_fetched == expected.pages.received.tolist(), where
        assert record.pages_dropped == expected.pages.drop.sum(axis=0).tolist(), where
        if record.method != "precopy":
            assert record.method == method or method == "precopy", where
            assert record.kv_bytes_received == kv_bytes, where
            assert record.weight_bytes_received == weight_bytes, where
        elif occupancy.requests:
            assert record.weight_bytes_received == weight_bytes, where
        if (
            method == "precopy"
            and (any(kv_bytes) or any(weight_bytes))
            and "no room to copy ahead" not in record.reason
        ):
            assert record.method == "precopy" and record.background_steps > 0, where
            copied_ahead += 1
            # Settled pages come without their unwritten tail, and those of requests that ended meanwhile came as well.
            assert all((got > 0) >= (want > 0) for got, want in zip(record.kv_bytes_received, kv_bytes, strict=True)), (
                where
            )
        for request, positions in zip(occupancy.requests, occupancy.written, strict=True):
            running = next((r for r in client.engine.scheduler.requests if r.id == request), None)
            if running is not None:
                mid_prefill += positions < running.num_prompt
                mid_decode += positions >= running.num_prompt
    client.drain()
    assert client.engine.stats().free_pages == client.engine.stats().total_pages
    assert mid_decode
    assert mid_prefill or len(jobs) == 1 or method == "precopy"
    assert copied_ahead or method != "precopy"
    return client


def check_client(client: Client, jobs: Sequence[Job], expected: Mapping[int, list[int]]) -> None:
    for name, job in client.jobs.items():
        assert client.tokens[name] == expected[jobs.index(job)]


def engine_for(model: str, ranks: int, layout: str, prefix_cache: bool = False) -> LLM:
    return LLM(
        model,
        ranks=ranks,
        layout=layout,
        kv_cache_gib=0.02,
        page_size=PAGE_SIZE,
        max_batched_tokens=40,
        max_num_seqs=6,
        switch_copy_mib=0.1,
        prefix_cache=prefix_cache,
    )


@pytest.fixture(scope="module", params=[2, 4], ids="T{}".format)
def llm(model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine_for(model, request.param, "tp") as engine:
        yield engine


@pytest.mark.parametrize("method", METHODS)
def test_every_direction(llm: LLM, observed: Observed, reference: Reference, method: str) -> None:
    """Mixed lengths, some prompts still in chunks: tokens do not change, bytes are those the algebra asks for."""
    assert len(set(itertools.pairwise(CIRCUIT))) == 20
    client = walk(llm, observed, method, CIRCUIT, JOBS)
    check_client(client, JOBS, reference(JOBS))


@pytest.mark.parametrize(("ranks", "step_bytes", "layers"), [(2, 20_000, {1}), (4, 100_000, {1, 2, 3})])
def test_layers_that_are_not_copied_ahead_are_streamed(
    model: str, reference: Reference, ranks: int, step_bytes: int, layers: set[int]
) -> None:
    """A commit layer by layer that was prepared brings the bytes of every direction, cached pages included.

    The first layers are read ahead of the step that commits, as many as the orders have bytes for, the others in it,
    and none twice.
    """
    jobs = jobs_of((100, 37, 16, 5), (170, 165, 160, 155), seed=3)
    limits = Limits(max_model_len=400, streams=True, step_bytes=step_bytes)
    arguments = {"hops": CIRCUIT, "method": "layerwise", "jobs": jobs, "limits": limits}
    results = run(model, "walk", ranks, 120, arguments)
    check(results[0], reference(jobs))
    check_walk(results, CIRCUIT)
    ways = [record["method"] for record in results[0]["records"]]
    assert ways == ["layerwise"] * len(ways)
    assert sum(record["background_steps"] > 0 for record in results[0]["records"]) > 10
    numbers_ahead = set()
    for read_ahead, read_in_step in itertools.chain.from_iterable(result["layers"] for result in results):
        if read_ahead or read_in_step:
            num_ahead = len(read_ahead)
            assert read_ahead == set(range(num_ahead)) and read_in_step == set(range(num_ahead, NUM_LAYERS))
            numbers_ahead.add(num_ahead)
    assert numbers_ahead == layers


@pytest.mark.parametrize("method", METHODS)
def test_one_request_leaves_ranks_idle(llm: LLM, observed: Observed, reference: Reference, method: str) -> None:
    jobs = jobs_of((70,), (110,), seed=1)
    client = walk(llm, observed, method, CIRCUIT, jobs)
    check_client(client, jobs, reference(jobs))


def test_three_ranks_that_do_not_divide_the_heads(model: str, observed: Observed, reference: Reference) -> None:
    with engine_for(model, 3, "dp") as engine:
        for method in METHODS:
            client = walk(engine, observed, method, ["dp", "cp", "dp", "cp", "dp"], JOBS)
            check_client(client, JOBS, reference(JOBS))
        with pytest.raises(ValueError, match="3 ranks do not divide 8 heads"):
            engine.switch("tp")


def test_an_idle_engine_switches(llm: LLM) -> None:
    for source, target in itertools.pairwise(CIRCUIT):
        llm.switch(source)
        record = llm.switch(target)
        assert record.status == "committed" and not any(record.kv_bytes_received)
        assert llm.engine.layout == target
        assert llm.engine.stats().free_pages == llm.engine.stats().total_pages
    assert llm.generate([5, 6, 7], SamplingParams(max_tokens=3))[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("layout", ["dp", "dop"])
@pytest.mark.parametrize("method", METHODS)
def test_rebalance(llm: LLM, observed: Observed, reference: Reference, layout: str, method: str) -> None:
    """Short requests end, which leaves ranks uneven; owners are dealt anew, and only what moves is fetched."""
    ranks = llm.engine.ranks
    jobs = jobs_of([60] * 6, [90 if number % ranks == 0 else 12 for number in range(6)], seed=2)
    llm.switch(layout)
    client = Client(llm)
    for job in jobs:
        client.add(job)
    while len(client.engine.scheduler.requests) > sum(job.count == 90 for job in jobs):
        client.step()
    before = {request.id: request.held.owner for request in client.engine.scheduler.running}
    record = client.engine.switch(layout, method, rebalance=True)
    client.settle(record)
    assert record.status == "committed"
    expected, _ = observed.expected(client.engine.switcher._geometry)
    occupancy, _, owners = observed.plans[-1]
    moved = {id for id, owner in zip(occupancy.requests, owners, strict=True) if owner != before[id]}
    pages = dict(zip(occupancy.requests, occupancy.written, strict=True))
    assert sum(record.pages_fetched) == sum(-(-pages[id] // PAGE_SIZE) for id in moved)
    assert record.pages_fetched == expected.pages.received.tolist()
    assert not any(record.weight_bytes_planned) and not any(record.weight_bytes_received)
    tokens = client.engine.scheduler._tokens
    assert max(tokens) < sum(tokens), "one rank still has everything"
    client.drain()
    assert client.engine.stats().free_pages == client.engine.stats().total_pages
    check_client(client, jobs, reference(jobs))


# -- what lies where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "method", "num_pages"),
    [(2, "blocking", 110), (2, "layerwise", 28), (2, "precopy", 110), (4, "layerwise", 110), (4, "precopy", 60)],
)
def test_bytes_survive_every_direction(
    model: str, reference: Reference, ranks: int, method: str, num_pages: int
) -> None:
    """After every hop each rank holds what the layout says, bit for bit what was there at first."""
    jobs = jobs_of((100, 37, 16, 5), (170, 165, 160, 155), seed=3)
    arguments = {
        "hops": CIRCUIT,
        "method": method,
        "jobs": jobs,
        "limits": Limits(max_model_len=400, step_bytes=256 << 10),
    }
    results = run(model, "walk", ranks, max(num_pages, 70), arguments)
    check_walk(results, CIRCUIT)
    check(results[0], reference(jobs))
