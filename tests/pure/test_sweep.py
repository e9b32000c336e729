"""Sweeps: which points there are, that an interrupted one goes on where it was, and what rows and report hold."""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.errors import ConfigError
from splash.core.layout import LAYOUTS
from splash.scheduler.load import StepLoad
from splash.settings import Composer, alternatives, compose, options
from splash.sweep.__main__ import main
from splash.sweep.measure import basis_of
from splash.sweep.outcome import cost_model
from splash.sweep.points import Point, read_sweep
from splash.sweep.report import families, leaders, report
from splash.sweep.runner import run_sweep
from splash.sweep.simulate import run_simulated
from splash.sweep.store import RowStore, encode, read_rows
from splash.sweep.svg import Scale, round_ticks, tokens

B200 = (
    "sweep=quick", "+hardware=b200", "model=glm_5", "dtype=fp8", "kv_cache_gib=null", "serving=disaggregated",
    "workload.output=4",
)  # fmt: skip
PLOTS = (
    "Throughput by input", "Throughput by batch", "Leading layout", "KV capacity", "Admission", "load, memory and",
)  # fmt: skip


class Counter:
    """Counts the rows that a run adds."""

    def __init__(self) -> None:
        self.known, self.added = 0, 0

    def began(self, total: int, known: int) -> None:
        self.known = known

    def advanced(self, label: str, share: float) -> None:
        pass

    def finished(self, row: dict[str, Any]) -> None:
        self.added += 1


def points_of(*arguments: str) -> list[Point]:
    return read_sweep(arguments)[1]


def sweep(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], Counter]:
    counter = Counter()
    run, points = read_sweep([*B200, *arguments, f"out={folder}"])
    return run_sweep(run, points, counter), counter


# --- points ---


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        ("layout=dp,dop", "layout", ["layout=dp", "layout=dop"]),
        ("+hardware=b200,h200", "hardware", ["+hardware=b200", "+hardware=h200"]),
        ("ranks=choice(2,4)", "ranks", ["ranks=2", "ranks=4"]),
        ("workload.input=range(1,4)", "workload.input", [f"workload.input={n}" for n in (1, 2, 3)]),
        ("model=glob(deepseek*,exclude=*_2)", "model", ["model=deepseek_v3"]),
        ("model.path='a,b'", "model.path", ["model.path='a,b'"]),
        ("dtype=fp8", "dtype", ["dtype=fp8"]),
    ],
)
def test_an_override_stands_for_what_hydra_says(override: str, key: str, values: list[str]) -> None:
    assert alternatives(override) == (key, values)


def test_a_composer_composes_as_compose_does() -> None:
    overrides = ["hardware=dcu", "model=glm_5", "model.config.n_routed_experts=64", "ranks=4", "workload.input=7"]
    composer = Composer("sweep")
    composer.compose(["hardware=dcu", "model=glm_5"])["model"]["config"]["n_routed_experts"] = 1  # does not stay
    assert composer.compose(overrides) == compose("sweep", overrides)
    distribution = "workload.input={kind:uniform,low:1,high:2}"
    assert composer.compose([distribution]) == compose("sweep", [distribution])
    for wrong in ("rank=4", "model.config.layers=4", "model.nothing.at=4"):
        with pytest.raises(ConfigError, match="unknown option"):
            composer.compose([*overrides, wrong])


def test_points_are_every_combination_in_order() -> None:
    points = points_of("sweep=quick", "+hardware=b200,h200", "layout=dp,dop", "workload.input=8,16", "--multirun")
    places = [(p.hardware.name, p.settings.workload["input"], p.settings.workload["num_requests"]) for p in points]
    assert places == [(h, i, n) for h in ("b200", "h200") for i in (8, 16) for n in (1, 8) for _ in range(2)]
    assert [p.settings.layout for p in points] == ["dp", "dop"] * 8
    again = points_of("sweep=quick", "hardware=b200,h200", "layout=dp,dop", "workload.input=8,16")
    assert [p.digest for p in again] == [p.digest for p in points]


def test_a_grid_is_for_its_hardware_only() -> None:
    both = points_of("sweep=paper", "+hardware=h200,dcu")
    named = {(p.hardware.name, p.settings.model.name) for p in both}
    assert named == {("h200", "deepseek_v3_2"), ("dcu", "flash_stand_in")}
    everything = points_of("sweep=paper")
    assert {p.hardware.name for p in everything} == {"b200", "h200", "dcu"}
    with pytest.raises(ConfigError, match="no grid for cpu, only for b200, dcu, h200"):
        points_of("sweep=paper", "+hardware=cpu")


@pytest.mark.parametrize("name", options("sweep"))
def test_every_sweep_that_ships_has_points_of_different_names(name: str) -> None:
    run, points = read_sweep([f"sweep={name}", *(["+hardware=cpu"] if name == "quick" else [])])
    assert run.sweep.name == name and run.folder == Path("sweeps") / name
    assert len({(p.grid, p.digest) for p in points}) == len(points) > 1


def test_a_digest_changes_with_all_that_decides_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = points_of(*B200, "layout=dp", "workload.input=128", "workload.num_requests=1")
    others = [
        dataclasses.replace(point, settings=dataclasses.replace(point.settings, max_num_seqs=7)),
        dataclasses.replace(point, hardware=dataclasses.replace(point.hardware, memory_gb_s=7000.0)),
        points_of(*B200, "layout=dp", "workload.input=129", "workload.num_requests=1")[0],
    ]
    digests = {point.digest, *(other.digest for other in others)}
    monkeypatch.setattr("splash.__version__", "999")
    digests.add(dataclasses.replace(point).digest)
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sweep=paper", "+hardware=b300"], ["hardware", "b300", "b200, cpu, dcu, h200"]),
        (["sweep=papers"], ["sweep", "papers", "paper"]),
        (["sweep=quick"], ["hardware", "+hardware=NAME"]),
        (["hardware=b200", "layout=tp,xp"], ["layout", "xp", "tp, dp, cp, dop, dcp"]),
        (["hardware=b200", "workers=1,2"], ["workers", "one value"]),
        (["hardware=b200", "workers=0"], ["workers", "between 1"]),
        (["hardware=b200", "rank=1,2"], ["rank", "did you mean ranks"]),
        (["hardware=b200", "ranks=0"], ["ranks", "between 1"]),
        (["hardware=b200", "dtype=int4"], ["dtype", "int4"]),
        (["hardware=b200", "workload.num_requests=0"], ["workload.num_requests", "0"]),
        (["hardware=b200", "workload.nothing=1"], ["workload.nothing", "unknown option"]),
        (["hardware=b200", "model=glob(nothing*)"], ["model", "no value"]),
        (["hardware=b200", "workload.seed=range(0,100001)"], ["100,000 points"]),
        (["hardware=b200", "run=measure"], ["run", "cannot be measured"]),
        (["hardware=b200", "layout=(("], ["layout", "cannot be parsed"]),
        (["hardware=b200", "--verbose"], ["--verbose", "--help"]),
        (["hardware=b200", "out=/proc/nothing/here"], ["out", "/proc/nothing/here"]),
    ],
)
def test_what_cannot_work_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("splash.sweep: ")]
    assert printed.out == "" and len(lines) == 1 and all(part in lines[0] for part in expected), printed.err


def test_help_lists_options_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("workers:", "timeline:", "sweep=", "paper", "workload="))


# --- rows ---


def test_an_interrupted_sweep_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    rows, counter = sweep(tmp_path / "whole")
    whole = (tmp_path / "whole" / "rows.jsonl").read_bytes()
    assert counter.added == len(rows) == 20 and {row["basis"] for row in rows} == {"simulated"}
    assert whole == b"".join(map(encode, rows))
    lines = whole.splitlines(keepends=True)
    # Two rows out of order, and one that was being written.
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "rows.jsonl").write_bytes(lines[5] + lines[2] + lines[7][:40])
    again, counter = sweep(tmp_path / "cut")
    assert (counter.known, counter.added) == (2, 18) and again == rows
    assert (tmp_path / "cut" / "rows.jsonl").read_bytes() == whole
    _, counter = sweep(tmp_path / "cut")
    assert (counter.known, counter.added) == (20, 0)
    _, counter = sweep(tmp_path / "cut", "fresh=true")
    assert (counter.known, counter.added) == (0, 20)


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    arguments = ("workload.num_requests=1", "layout=dp,dop")
    one, _ = sweep(tmp_path / "one", *arguments)
    two, _ = sweep(tmp_path / "two", *arguments, "workers=2")
    assert one == two
    assert (tmp_path / "one" / "rows.jsonl").read_bytes() == (tmp_path / "two" / "rows.jsonl").read_bytes()


class Impatient(Counter):
    """Interrupts after three rows."""

    def finished(self, row: dict[str, Any]) -> None:
        super().finished(row)
        if self.added == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interruption_keeps_the_rows_that_are_there_and_leaves_no_process(tmp_path: Path, workers: int) -> None:
    run, points = read_sweep([*B200, f"workers={workers}", f"out={tmp_path}"])
    with pytest.raises(KeyboardInterrupt):
        run_sweep(run, points, Impatient())
    assert len(read_rows(tmp_path / "rows.jsonl")) == 3 and not multiprocessing.active_children()
    rows, counter = sweep(tmp_path)
    assert counter.known == 3 and len(rows) == 20


def test_rows_of_other_points_stay_behind_those_asked_for(tmp_path: Path) -> None:
    dp, _ = sweep(tmp_path, "layout=dp", "workload.num_requests=1")
    both, counter = sweep(tmp_path, "layout=dop,dp", "workload.num_requests=1")
    assert counter.known == len(dp) and [row["layout"] for row in both] == ["dop", "dp"] * 2
    sweep(tmp_path, "layout=dop", "workload.num_requests=1")
    assert [row["layout"] for row in read_rows(tmp_path / "rows.jsonl")] == ["dop", "dop", "dp", "dp"]


def test_a_row_is_on_the_disk_at_once_and_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.add({"key": "a", "n": 1})
    assert read_rows(tmp_path / "rows.jsonl") == [{"key": "a", "n": 1}]
    store.close()
    foreign = b'{"timestamp": 3}\n{"timestamp": 4}\n'
    (tmp_path / "rows.jsonl").write_bytes(foreign)
    with pytest.raises(ConfigError, match="line 1, is no row of a sweep"):
        RowStore(tmp_path)
    assert (tmp_path / "rows.jsonl").read_bytes() == foreign


def test_what_does_not_fit_is_a_row_with_the_reason(tmp_path: Path) -> None:
    rows, _ = sweep(tmp_path, "model=deepseek_v3", "dtype=float32", "layout=dp", "workload.num_requests=1")
    assert {row["status"] for row in rows} == {"infeasible"} and "GiB" in rows[0]["reason"]
    rows, _ = sweep(tmp_path / "heads", "model=glm_4_7_flash", "layout=tp,dp", "workload.num_requests=1")
    by_layout = {row["layout"]: row for row in rows}
    assert by_layout["dp"]["status"] == "ok" and "do not divide 20 heads" in by_layout["tp"]["reason"]


# --- prefill and decode on two groups ---


def test_one_chunk_takes_what_the_cost_model_says() -> None:
    for point in points_of(*B200, "workload.input=512", "workload.num_requests=1", "workload.output=1"):
        outcome = run_simulated(point, point.workload.requests())
        load = StepLoad.of_arrays([0], [512], [0], 8, 1)
        assert outcome.steps == 1
        assert outcome.seconds == pytest.approx(cost_model(point).step(LAYOUTS[point.settings.layout], load).seconds)


def test_owners_prefill_side_by_side() -> None:
    """Eight requests take dp as long as one, whose owner has an eighth of the chunk budget; tp has all of it."""
    arguments = (*B200, "workload.input=8192", "workload.output=1", "layout=tp,dp")
    tp_1, dp_1 = (run_simulated(p, p.workload.requests()) for p in points_of(*arguments, "workload.num_requests=1"))
    tp_8, dp_8 = (run_simulated(p, p.workload.requests()) for p in points_of(*arguments, "workload.num_requests=8"))
    assert (tp_1.steps, dp_1.steps, tp_8.steps, dp_8.steps) == (1, 8, 8, 8)
    assert dp_8.seconds < 4 * dp_1.seconds and tp_8.seconds == pytest.approx(8 * tp_1.seconds, rel=0.01)


@given(
    count=st.integers(1, 40),
    length=st.integers(1, 3000),
    output=st.integers(1, 40),
    layout=st.sampled_from(sorted(LAYOUTS)),
    budget=st.integers(8, 4096),
)
def test_everything_ends_in_order(count: int, length: int, output: int, layout: str, budget: int) -> None:
    (base,) = points_of(*B200, "layout=dp", "workload.input=1", "workload.num_requests=1")
    settings = dataclasses.replace(base.settings, layout=layout, max_batched_tokens=budget)
    workload = dataclasses.replace(
        base.workload,
        num_requests=count,
        input=dataclasses.replace(base.workload.input, value=length),  # type: ignore[attr-defined]
        output=dataclasses.replace(base.workload.output, value=output),  # type: ignore[attr-defined]
    )
    outcome = run_simulated(dataclasses.replace(base, settings=settings, workload=workload), workload.requests())
    assert (outcome.first_token_s > 0).all() and (outcome.finish_s >= outcome.first_token_s).all()
    assert (outcome.finish_s > outcome.first_token_s).all() == (output > 1)
    assert outcome.seconds == outcome.finish_s.max() and 1 <= outcome.peak_running <= count
    assert outcome.steps >= -(-count * length // budget) + (output - 1)


def test_pages_bound_who_is_resident() -> None:
    """32 requests of 240K: an owner has room for as many as its tokens hold."""
    layouts = ("dp", "dop")
    arguments = ("workload.input=245760", "workload.num_requests=40", "model.config.max_position_embeddings=1048576")
    for point in points_of(*B200, *arguments, f"layout={','.join(layouts)}", "workload.output=1"):
        plan = cost_model(point).planned_geometry(point.settings.mem_fraction)
        slots = len(plan.page_slots(LAYOUTS[point.settings.layout], 0))
        assert run_simulated(point, point.workload.requests()).peak_running == min(40, 8 * (slots // (245760 // 64)))


# --- report ---


def test_the_report_is_one_page_with_every_plot_that_reaches_for_nothing(tmp_path: Path) -> None:
    arguments = ["workload.input=65536,131072", "workload.num_requests=1,128", "layout=tp,dp,dop"]
    rows, _ = sweep(tmp_path, *arguments)
    timed = {**rows[0], "policy": "cost", "workload": "bursts", "key": "timed"}
    timed["timeline"] = [[0.1, "tp", 3, 0, 0.2], [0.5, "dop", 9, 4, 0.9], [2.0, "dop", 1, 0, 0.1]]
    refused = {**rows[1], "status": "infeasible", "reason": "5 < 6 & no room", "key": "refused", "grid": "other"}
    del refused["tokens_per_s"]
    run, _ = read_sweep([*B200])
    page = report(run.sweep, [*rows, timed, refused])
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    labels = [node.get("aria-label", "") for node in root.iter("svg")]
    assert all(any(plot in label for label in labels) for plot in PLOTS), labels
    assert not re.search(r"https?:|//[a-z]|src=|@import|url\(", page)
    assert "simulated" in page and "5 &lt; 6 &amp; no room" in page and "prefers-color-scheme:dark" in page
    assert len(list(root.iter("tr"))) == len(rows) + 3
    classes = set(re.findall(r'class="line (\w+)"', page))
    assert classes >= {"tp", "dp", "dop"} and all(f".line.{name}{{" in page for name in classes - {"kv"})


def test_leaders_say_by_how_much() -> None:
    row = {"status": "ok", "policy": "static", "input": 8.0, "batch": 1}
    rows = [{**row, "layout": name, "tokens_per_s": rate} for name, rate in (("tp", 10.0), ("dp", 30.0), ("cp", 20.0))]
    assert leaders(rows) == {(8.0, 1): ("dp", 30.0, 0.5)}
    assert leaders(rows[:1]) == {} and leaders([{**rows[0], "status": "infeasible"}, rows[1]]) == {}


def test_the_command_writes_rows_csv_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*B200, f"out={tmp_path}", "layout=dp,dop", "--multirun"]
    assert main(arguments) == 0
    assert "glm_5 on 8 x b200" in capsys.readouterr().out
    rows = read_rows(tmp_path / "rows.jsonl")
    with (tmp_path / "rows.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["key"] for row in table] == [row["key"] for row in rows]
    assert [float(row["tokens_per_s"]) for row in table] == [row["tokens_per_s"] for row in rows]
    assert len(families(rows)) == 1 and (tmp_path / "report.html").stat().st_size < 200_000
    for row in rows:
        total = row["requests"] * (row["input"] + row["output"])
        assert row["tokens_per_s"] == pytest.approx(total / row["seconds"], rel=1e-4)
    assert main([*arguments, "format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path), "points": 8, "measured": 0}


def test_points_are_simulated_where_their_hardware_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = ("sweep=cpu", "layout=tp", "workload.input=64")
    assert {basis_of(point).name for point in points_of(*cpu)} == {"measured"}
    for change, why in (
        ("run=simulate", "as asked"),
        ("dtype=fp8", "not fp8"),
        ("model=youtu", "without weights"),
        ("kv_cache_gib=null", "kv_cache_gib"),
        ("serving=disaggregated", "only simulated"),
    ):
        assert {why in basis_of(point).why for point in points_of(*cpu, change)} == {True}, change
    assert {basis_of(point).name for point in points_of(*B200)} == {"simulated"}


@given(st.floats(1e-6, 1e12))
def test_ticks_are_round_and_reach_the_highest_value(high: float) -> None:
    ticks = round_ticks(high)
    assert ticks[0] == 0 and ticks[-1] >= high * (1 - 1e-9) and 3 <= len(ticks) <= 7
    scale = Scale(0, ticks[-1], 100, 0)
    assert scale(0) == 100 and -1e-9 <= scale(high) <= 100


def test_token_counts_read_as_people_write_them() -> None:
    assert [tokens(n) for n in (512, 1024, 6144, 393216, 1 << 20, 1000, 245760)] == [
        "512", "1K", "6K", "384K", "1M", "1,000", "240K",
    ]  # fmt: skip
