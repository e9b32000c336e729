"""Benchmarks that are meant for GPUs, on the CPU: they run to the end, and their records have what they are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from splash.core.layout import LAYOUTS


def record_of(benchmark: str, out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"perf.{benchmark}", *arguments, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["benchmark"] == benchmark and record["machine"] and record["versions"]
    return record


def test_primitives(tmp_path: Path) -> None:
    """The benchmark itself refuses to time other bytes than those of the ownership difference."""
    shape = ("--model", "scribe", "--num-layers", "2", "--tokens", "1024", "--requests", "4", "--page-size", "16")
    record = record_of("primitives", tmp_path / "out.json", "--hardware", "cpu", "--dtype", "float32", *shape)
    directions = record["directions"]
    assert len(directions) == len(LAYOUTS) * (len(LAYOUTS) - 1)
    assert directions["tp->dp"]["allocated"]["gb_s"] > 0 and not any(directions["tp->dop"]["allocated"]["kv_bytes"])


def test_layouts_with_rows_that_choose_the_same_experts(tmp_path: Path) -> None:
    options = ("+hardware=cpu", "load_format=dummy_same_experts", "max_num_seqs=4", "kv_cache_gib=0.1")
    limits = ("--cases", "3x40x6", "--layouts", "tp,dp", "--copy-gb-s", "10", "--product-tflops", "0.1")
    record = record_of("layouts", tmp_path / "out.json", *limits, *options)
    (row,) = record["rows"]
    assert row["case"] == "3x40x6" and row["ceiling"]["step_ms"] > 0
    assert all(figures["step_ms"] > 0 and figures["prefill_tok_s"] > 0 for figures in row["layouts"].values())
