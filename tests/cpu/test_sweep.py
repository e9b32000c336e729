"""A small sweep of the CPU platform is measured with a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from splash.sweep.__main__ import main
from splash.sweep.store import read_rows


@pytest.mark.timeout(240)
def test_the_cpu_platform_is_measured(tmp_path: Path) -> None:
    arguments = [
        "sweep=quick", "+hardware=cpu", "layout=tp,dop", "workload.input=24", "workload.num_requests=1,3",
        "workload.output=5", "max_batched_tokens=64", "kv_cache_gib=0.1", "timeline=true", f"out={tmp_path}",
        "format=json", "run=measure", "ranks=2",
    ]  # fmt: skip
    assert main(arguments) == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [(row["batch"], row["layout"]) for row in rows] == [(1, "tp"), (1, "dop"), (3, "tp"), (3, "dop")]
    for row in rows:
        assert row["basis"] == "measured" and row["why"] and row["status"] == "ok"
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 29 / row["seconds"], rel=1e-4)
        assert 0 < row["first_token_p50_s"] < row["completion_mean_s"] <= row["seconds"]
        assert row["steps"] >= 5 and row["peak_running"] == row["batch"] and row["switches"] == 0
        assert list(row["layout_seconds"]) == [row["layout"]] and row["timeline"]
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert main(arguments) == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == before, "finished rows are not measured again"
    page = (tmp_path / "report.html").read_text()
    assert "measured" in page and "load, memory and layout over time" in page
