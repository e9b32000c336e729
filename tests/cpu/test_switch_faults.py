"""Switching where memory is short, under random traffic, and with faults: it waits, is refused or fails, and says so.

Nobody can tell from the tokens, and no page is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from splash.core.layout import LAYOUTS
from tests.cpu.replica import Fault, Job, Limits
from tests.cpu.switch_cases import JOBS, METHODS, Reference, check, jobs_of, run

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
    ("ranks", "num_pages", "seeds", "streams"),
    [
        (2, 14, (1, 2, 3), False),
        (2, 40, (4, 5), False),
        (4, 14, (6,), False),
        (4, 60, (7,), False),
        (2, 14, (8, 9), True),
        (2, 40, (10,), True),
    ],
)
def test_random_traffic(
    model: str, reference: Reference, ranks: int, num_pages: int, seeds: tuple[int, ...], streams: bool
) -> None:
    """Arrivals, aborts, preemptions, switches, cancellations and failed reads in any order."""
    jobs = jobs_of((1, 9, 30, 70, 110, 45), (30, 12, 40, 9, 20, 33), seed=8)
    arguments = {
        "layouts": list(LAYOUTS),
        "jobs": jobs,
        "limits": Limits(max_num_seqs=6, step_bytes=96 << 10, streams=streams),
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


@pytest.mark.parametrize(("source", "target"), [("dop", "tp"), ("dcp", "cp"), ("dp", "cp")])
def test_a_prepared_commit_by_layers_that_fails_leaves_the_source_serving(
    model: str, reference: Reference, source: str, target: str
) -> None:
    """Ranks vote on what they could copy ahead, and on how they would read the rest."""
    faults = [Fault("read", 0, 0), Fault("read", 1, 0), *IDENTITY, Fault("validate")]
    jobs = jobs_of((70, 33, 20, 45), (24, 28, 20, 26), seed=9)
    arguments = {"source": source, "target": target, "method": "layerwise", "faults": faults, "jobs": jobs}
    results = run(model, "inject", 2, 60, {**arguments, "limits": Limits(streams=True)})
    check_faults(results[0], faults, source, reference(jobs))


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
        if source != target and num_pages == 60:
            assert summary["records"][0]["background_steps"] > 5, summary["records"]


def test_a_plan_that_does_not_fit_at_the_commit_waits(model: str, reference: Reference) -> None:
    events = [(5, ("fault", Fault("capacity"))), (5, ("switch", "dp", "precopy")), (5, ("settle",))]
    summary = run(model, "serve", 2, 60, arguments_for("dop", JOBS, events))[0]
    check(summary, reference(JOBS))
    (record,) = summary["records"]
    assert record["status"] == "committed" and record["waited_steps"] == 1 and summary["layout"] == "dp"


@pytest.mark.parametrize(("method", "streams"), [("precopy", False), ("layerwise", True)])
def test_a_commit_that_was_not_fully_prepared_moves_the_rest(
    model: str, reference: Reference, method: str, streams: bool
) -> None:
    """With a manifest, of all layers: also of those that were to be streamed, of which nothing was copied ahead."""
    events = [(5, ("fault", Fault("unsettled"))), (5, ("switch", "tp", method)), (5, ("settle",))]
    arguments = arguments_for("dop", JOBS, [*events, (20, ("drain",))], step_bytes=20_000, streams=streams)
    summary = run(model, "serve", 2, 60, arguments)[0]
    check(summary, reference(JOBS))
    (record,) = summary["records"]
    assert (record["status"], record["method"], summary["layout"]) == ("committed", method, "tp")
    assert record["background_steps"] > 0


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
