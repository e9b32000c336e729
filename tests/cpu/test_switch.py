"""Switching while requests run: nobody can tell from the tokens, nothing is lost, and no more is moved than must be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splash.core.diff import Diff, diff
from splash.core.layout import LAYOUTS, Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State, page_holders, weight_holders
from splash.core.request import SamplingParams
from splash.engine import ahead, switching
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM
from splash.switch.manifest import Occupancy, plan_switch
from splash.switch.orders import SwitchRecord
from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for
from tests.cpu.switch_programs import Fault, Job, Limits

PAGE_SIZE = 16
METHODS = ("blocking", "layerwise", "precopy")
PROGRAMS = "tests.cpu.switch_programs"

# Every direction between two of five layouts once, ending where it begins.
CIRCUIT = "tp dp tp cp tp dop tp dcp dp cp dp dop dp dcp cp dop cp dcp dop dcp tp".split()


def jobs_of(lengths: Sequence[int], counts: Sequence[int], seed: int = 0) -> tuple[Job, ...]:
    generator = np.random.default_rng(seed)
    prompts = [tuple(generator.integers(5, 512, length).tolist()) for length in lengths]
    return tuple(Job(prompt, count) for prompt, count in zip(prompts, counts, strict=True))


JOBS = jobs_of((150, 1, 17, 64, 90, 33), (40, 60, 30, 44, 25, 52))


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
            arguments = {"layout": "dop", "jobs": key, "limits": Limits(budget=256, max_num_seqs=32)}
            known[key] = run(model, "serve", 2, 400, arguments)[0]["tokens"]
        return known[key]

    return tokens


def run(
    model: str, program: str, ranks: int, num_pages: int, arguments: Mapping[str, object], timeout_s: float = 120.0
) -> list[Any]:
    """A program of `switch_programs` on arenas with room for the weights and `num_pages` pages."""
    geometry = geometry_for(model, ranks, PAGE_SIZE, num_pages)
    return run_group(
        f"{PROGRAMS}:{program}",
        ranks,
        {"model": model, "geometry": geometry, **arguments},
        num_layers=geometry.spec.num_layers,
        geometry=geometry,
        timeout_s=timeout_s,
    )


def check(summary: Mapping[str, Any], expected: Mapping[int, list[int]]) -> None:
    """Outputs are those of the reference, and all pages are back."""
    for id, tokens in summary["tokens"].items():
        assert tokens == expected[id], f"request {id}: {summary['records']}"
    assert summary["pages_back"], summary["records"]
    assert summary["layout"] == summary["pool_layout"]


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
        old = State(occupancy.layout, geometry.ranks, numbers, np.repeat(np.array(occupancy.owners, dtype=int), counts))
        new = State(target, geometry.ranks, numbers, np.repeat(np.array(owners, dtype=int), counts))
        return diff(old, new), numbers


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    seen = Observed()

    def spy(occupancy: Occupancy, target: Layout, owners: Sequence[int], *rest: Any) -> Any:
        seen.plans.append((occupancy, target, tuple(owners)))
        return plan_switch(occupancy, target, owners, *rest)

    monkeypatch.setattr(switching, "plan_switch", spy)
    monkeypatch.setattr(ahead, "plan_switch", spy)
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


def engine_for(model: str, ranks: int, layout: str) -> LLM:
    return LLM(
        model,
        ranks=ranks,
        layout=layout,
        kv_cache_gib=0.02,
        page_size=PAGE_SIZE,
        max_batched_tokens=40,
        max_num_seqs=6,
        switch_copy_mib=0.1,
    )


@pytest.fixture(scope="module", params=[2, 4], ids="T{}".format)
def llm(model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine_for(model, request.param, "tp") as engine:
        yield engine


Reference = Callable[[Sequence[Job]], dict[int, list[int]]]


@pytest.mark.parametrize("method", METHODS)
def test_every_direction(llm: LLM, observed: Observed, reference: Reference, method: str) -> None:
    """Mixed lengths, some prompts still in chunks: tokens do not change, bytes are those the algebra asks for."""
    assert len(set(itertools.pairwise(CIRCUIT))) == 20
    client = walk(llm, observed, method, CIRCUIT, JOBS)
    check_client(client, JOBS, reference(JOBS))


@pytest.mark.parametrize("method", METHODS)
def test_one_request_leaves_ranks_idle(llm: LLM, observed: Observed, reference: Reference, method: str) -> None:
    jobs = jobs_of((70,), (45,), seed=1)
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
    tokens = client.engine.scheduler.tokens_per_rank
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
    written = results[0]["written"]
    first: dict[Any, str] = {}
    for hop, layout in enumerate(CIRCUIT):
        seen = [result["seen"][hop] for result in results]
        assert {one["layout"] for one in seen} == {layout}, results[0]["records"]
        for rank, one in enumerate(seen):
            groups = np.flatnonzero(weight_holders(LAYOUTS[layout], ranks)[:, rank])
            assert sorted(one["weights"]) == groups.tolist()
            for key, digest in itertools.chain(one["pages"].items(), one["weights"].items()):
                assert first.setdefault(key, digest) == digest, f"{key} on rank {rank} after hop {hop} to {layout}"
        assert hop < 5 or seen[0]["running"]
        for request in seen[0]["running"]:
            positions = written[request]
            numbers = np.arange(-(-positions // PAGE_SIZE))
            owner = next((rank for rank, one in enumerate(seen) if (request, 0) in one["pages"]), 0)
            rule = page_holders(numbers, np.full(len(numbers), owner), LAYOUTS[layout], ranks)
            held = [[(request, int(number)) in one["pages"] for one in seen] for number in numbers]
            assert held == rule.tolist(), f"request {request} in {layout}"
    check(results[0], reference(jobs))


# -- little memory -----------------------------------------------------------------------------------------------------


def arguments_for(
    layout: str, jobs: Sequence[Job], events: Sequence[tuple[int, tuple[Any, ...]]], **limits: Any
) -> dict:
    return {"layout": layout, "jobs": jobs, "events": events, "limits": Limits(**limits)}


SMALL = jobs_of((100, 80, 60, 90), (14, 30, 24, 20), seed=4)
TIGHT = [("dop", "dp"), ("dcp", "cp"), ("dp", "cp"), ("dp", "dcp"), ("dp", "tp"), ("cp", "dop")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_pages", [9, 12])
def test_copies_are_staged_where_memory_is_short(model: str, reference: Reference, num_pages: int, method: str) -> None:
    """Arenas that are nearly full, with pages where weights have to come and the other way round."""
    cases = []
    for source, target in TIGHT:
        events = [(5, ("switch", target, method)), (5, ("settle",)), (8, ("switch", source, method)), (8, ("settle",))]
        cases.append({"layout": source, "events": events})
    arguments = {"cases": cases, "jobs": SMALL, "limits": Limits(budget=128)}
    summaries = run(model, "serve_each", 2, num_pages, arguments)[0]
    for (source, target), summary in zip(TIGHT, summaries, strict=True):
        check(summary, reference(SMALL))
        statuses = [record["status"] for record in summary["records"]]
        assert statuses == ["committed"] * 2, f"{source} -> {target}: {summary['records']}"
    assert sum(summary["staged"] for summary in summaries), "memory was not short enough to show anything"


@pytest.mark.parametrize("method", METHODS)
def test_a_switch_waits_for_room(model: str, reference: Reference, method: str) -> None:
    """Nothing may be staged, or the running requests do not fit together: nobody is admitted until they do."""
    jobs = SMALL
    events = [(4, ("switch", "dp", method)), (5, ("status",)), (5, ("add", 3)), (6, ("status",)), (6, ("settle",))]
    summary = run(model, "serve", 2, 9, arguments_for("dop", jobs, events, budget=256, staging_bytes=0))[0]
    check(summary, reference(jobs))
    (record,) = summary["records"]
    assert record["status"] == "committed" and record["waited_steps"] > 1
    assert [status for status, _, _ in summary["noted"]] == ["waiting"] * 2
    assert all("admission is held" in reason for _, reason, _ in summary["noted"])
    assert summary["noted"][1][2] == 1, "the request that came meanwhile waits"
    assert not summary["staged"]


def test_a_target_in_which_a_live_request_can_never_fit_is_refused(model: str, reference: Reference) -> None:
    jobs = jobs_of((300, 20), (30, 30), seed=5)
    events = [(3, ("switch", "dp", "auto")), (3, ("settle",)), (4, ("switch", "dcp", "auto")), (4, ("settle",))]
    summary = run(model, "serve", 2, 12, arguments_for("dop", jobs, events, budget=128))[0]
    check(summary, reference(jobs))
    refused, committed = summary["records"]
    assert refused["status"] == "refused"
    assert "room for [12, 12] pages" in refused["reason"] and "grow to 21 pages of 16 tokens" in refused["reason"]
    assert committed["status"] == "committed" and summary["layout"] == "dcp"


def test_a_request_that_comes_while_pages_are_copied_ahead_may_refuse_the_switch(
    model: str, reference: Reference
) -> None:
    jobs = jobs_of((100, 20, 300), (60, 60, 10), seed=6)
    events = [(3, ("switch", "dp", "precopy")), (5, ("status",)), (5, ("add", 2)), (5, ("settle",))]
    summary = run(model, "serve", 2, 12, arguments_for("dop", jobs, events, budget=128, step_bytes=40_000))[0]
    check(summary, reference(jobs))
    assert summary["noted"][0][0] == "copying"
    assert summary["records"][0]["status"] == "refused" and "grow to 20 pages" in summary["records"][0]["reason"]


def test_a_request_that_comes_during_a_commit_that_fails_fits_the_source(model: str) -> None:
    """While the step after a switch is in flight a request must fit on either side, since the switch may yet fail."""
    jobs = jobs_of((100, 300), (40, 10), seed=7)
    events = [
        (3, ("fault", Fault("read", 1, 2))),
        (3, ("switch", "dop", "blocking")),
        (4, ("refuses", 1)),
        (4, ("fault", None)),
    ]
    summary = run(model, "serve", 2, 12, arguments_for("dp", jobs, events, budget=128))[0]
    assert summary["noted"] == [("committing", "", 0)], summary["noted"]


# -- traffic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "num_pages", "seeds"), [(2, 14, (1, 2, 3)), (2, 40, (4, 5)), (4, 14, (6,)), (4, 60, (7,))]
)
def test_random_traffic(model: str, reference: Reference, ranks: int, num_pages: int, seeds: tuple[int, ...]) -> None:
    """Arrivals, aborts, preemptions, switches, cancellations and failed reads in any order."""
    jobs = jobs_of((1, 9, 30, 70, 110, 45), (30, 12, 40, 9, 20, 33), seed=8)
    arguments = {
        "layouts": list(LAYOUTS),
        "jobs": jobs,
        "limits": Limits(max_num_seqs=6, step_bytes=96 << 10),
        "seeds": seeds,
        "num_actions": 160,
    }
    expected = reference(jobs)
    for summary in run(model, "traffic", ranks, num_pages, arguments)[0]:
        check(summary, {id: expected[job] for id, job in summary["which"].items()})
        statuses = {record["status"] for record in summary["records"]}
        assert "committed" in statuses and statuses <= {"committed", "failed", "aborted", "superseded", "refused"}


# -- faults ------------------------------------------------------------------------------------------------------------

EVERY_READ = [Fault("read", rank, layer) for rank in range(2) for layer in range(4)]
IDENTITY = [Fault("manifest", 1), Fault("table", 0), Fault("table", 1), Fault("memory", 1)]


def check_faults(
    results: Sequence[Any], faults: Sequence[Fault], source: str, expected: Mapping[int, list[int]]
) -> None:
    for fault, summary in zip(faults, results, strict=True):
        failed, later = summary["records"]
        assert failed["status"] == "failed", f"{fault}: {failed}"
        assert summary["after"] == source, f"{fault}: {failed}"
        if fault.kind != "validate":
            assert f"rank {fault.rank} " in failed["reason"], f"{fault}: {failed}"
        assert later["status"] == "committed", f"{fault}: {later}"
        check(summary, expected)


@pytest.mark.parametrize(
    ("source", "target"), [("dop", "tp"), ("dcp", "cp"), ("dp", "cp"), ("dp", "tp"), ("dop", "dp"), ("cp", "dop")]
)
@pytest.mark.parametrize("method", METHODS)
def test_a_switch_that_fails_leaves_the_source_serving(
    model: str, reference: Reference, source: str, target: str, method: str
) -> None:
    faults = [
        *(EVERY_READ if method != "precopy" else EVERY_READ[1::3]),
        *IDENTITY[:: 1 if method == "blocking" else 2],
    ]
    faults.append(Fault("validate"))
    jobs = jobs_of((70, 33, 20, 45), (24, 28, 20, 26), seed=9)
    arguments = {
        "source": source,
        "target": target,
        "method": method,
        "faults": faults,
        "jobs": jobs,
        "limits": Limits(),
    }
    check_faults(run(model, "inject", 2, 60, arguments)[0], faults, source, reference(jobs))


def test_a_rank_among_four_is_named(model: str, reference: Reference) -> None:
    faults = [Fault(kind, rank, 2) for rank in range(4) for kind in ("manifest", "table", "read")]
    jobs = jobs_of((70, 33, 20, 45), (24, 28, 20, 26), seed=9)
    arguments = {
        "source": "dop",
        "target": "tp",
        "method": "layerwise",
        "faults": faults,
        "jobs": jobs,
        "limits": Limits(),
    }
    check_faults(run(model, "inject", 4, 60, arguments)[0], faults, "dop", reference(jobs))


@pytest.mark.parametrize("method", ["blocking", "layerwise"])
def test_a_staged_switch_that_fails_late_computes_all_again(model: str, reference: Reference, method: str) -> None:
    """Layers were written back when a read failed: the cache is lost, nobody's tokens are."""
    faults = [Fault("read", 0, 1), Fault("read", 1, 3)]
    lost = set()
    for source, target in TIGHT:
        arguments = {"source": source, "target": target, "method": method, "faults": faults, "jobs": SMALL}
        results = run(model, "inject", 2, 9, {**arguments, "limits": Limits(budget=128)})
        for number, summary in enumerate(results[0]):
            failed_reads = [result[number]["failed_reads"] for result in results]
            failed, later = summary["records"]
            where = f"{source} -> {target}: {failed}"
            check(summary, reference(SMALL))
            if failed["status"] == "committed":
                assert not any(failed_reads), where
                continue
            assert (failed["status"], later["status"], summary["layout"]) == ("failed", "committed", target), where
            spoils = bool(summary["staged"] or (summary["lossy"] and method == "layerwise"))
            assert ("the cache is lost" in failed["reason"]) == spoils, where
            if spoils:
                lost.add((source, target))
    assert len(lost) > 2, f"only {lost} were staged"


@pytest.mark.parametrize(
    ("source", "target"), [("dcp", "dop"), ("cp", "dp"), ("dop", "tp"), ("dop", "dop"), ("dp", "dp")]
)
def test_requests_come_and_go_while_pages_are_copied_ahead(
    model: str, reference: Reference, source: str, target: str
) -> None:
    """Owners that were chosen stay, and copies for pages that a request lost are not taken for those it has now."""
    jobs = jobs_of((100, 20, 60, 90, 10, 50), (20, 44, 12, 30, 8, 25), seed=10)
    events = [(6, ("switch", target, "precopy", True)), (9, ("add", 3)), (13, ("add", 4)), (16, ("add", 5))]
    for num_pages in (10, 60) if source in ("cp", "dp") else (0, 60):
        limits = {"budget": 64, "step_bytes": 12_000, "max_num_seqs": 6}
        arguments = arguments_for(source, jobs, [*events, (16, ("settle",))], **limits)
        summary = run(model, "serve", 2, num_pages, arguments)[0]
        check(summary, reference(jobs))
        assert summary["records"][0]["status"] == "committed"
        assert summary["records"][0]["background_steps"] > 5 or num_pages < 60, summary["records"]


def test_a_plan_that_does_not_fit_at_the_commit_waits(model: str, reference: Reference) -> None:
    events = [(5, ("fault", Fault("capacity"))), (5, ("switch", "dp", "precopy")), (5, ("settle",))]
    summary = run(model, "serve", 2, 60, arguments_for("dop", JOBS, events))[0]
    check(summary, reference(JOBS))
    (record,) = summary["records"]
    assert record["status"] == "committed" and record["waited_steps"] == 1 and summary["layout"] == "dp"


def test_a_failure_to_copy_ahead_concerns_one_switch_only(model: str, reference: Reference) -> None:
    """A precopy that failed on a rank and was given up does not make the next switch fail."""
    events = [
        (4, ("fault", Fault("read", 1, 0))),
        (4, ("switch", "tp", "precopy")),
        (6, ("status",)),
        (6, ("cancel",)),
        (6, ("fault", None)),
        (7, ("switch", "tp", "blocking")),
        (7, ("settle",)),
        (8, ("switch", "dop", "precopy")),
        (8, ("settle",)),
        (9, ("switch", "tp", "precopy")),
        (9, ("settle",)),
    ]
    summary = run(model, "serve", 2, 60, arguments_for("dop", JOBS, events, step_bytes=20_000))[0]
    check(summary, reference(JOBS))
    assert summary["noted"][0][0] == "copying"
    assert [record["status"] for record in summary["records"]] == ["aborted", "committed", "committed", "committed"]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_thousand_switches_under_load(model: str) -> None:
    jobs = jobs_of((1, 9, 30, 70, 110, 45), (30, 12, 40, 9, 20, 33), seed=8)
    arguments = {"layouts": list(LAYOUTS), "jobs": jobs, "limits": Limits(), "num_switches": 1000}
    for summary in run(model, "soak", 2, 60, arguments, timeout_s=1000.0):
        assert summary["counts"] == {"committed": 1000}
        assert summary["pages_back"] and not summary["wrong"]
        memory = summary["memory"]
        assert memory[-1] - memory[3] < 4 << 10, f"memory of a rank grows, in KiB: {memory}"
