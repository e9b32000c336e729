"""Benchmarks of kernels run through, with the smallest shapes: on the CPU that is all they can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.triton.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU the benchmarks themselves can be run")


def test_experts_with_every_choice_of_tiles(tmp_path: Path) -> None:
    from perf.experts import ROUTINGS, main

    out = tmp_path / "experts.json"
    main(["--tiny", "--rows", "20", "--rounds", "1", "--repeats", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {(row["routing"], row["tiles"]) for row in rows} == {
        (routing, tiles) for routing in ROUTINGS for tiles in ("chosen", "one height", "heights")
    }
    assert {row["most_rows"] for row in rows if row["routing"] == "same"} == {20}


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_prefill_in_both_forms(tmp_path: Path) -> None:
    from perf.prefill import main

    out = tmp_path / "prefill.json"
    main([*"--tiny --cases 6x19 --heads 4 2 --rounds 1 --out".split(), str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["form"], row["heads"]) for row in rows] == [
        ("absorbed", 4), ("expanded", 4), ("absorbed", 2), ("expanded", 2)
    ]  # fmt: skip
    assert all(row["error"] < 1e-4 for row in rows)


def test_nucleus(tmp_path: Path) -> None:
    from perf.nucleus import main

    out = tmp_path / "nucleus.json"
    main([*"--tiny --rows 2 --spreads 0.5 6 --rounds 1 --out".split(), str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["by"], row["spread"]) for row in rows] == [
        ("torch", 0.5), ("kernel", 0.5), ("torch", 6.0), ("kernel", 6.0)
    ]  # fmt: skip
    assert rows[0]["kept"] > rows[2]["kept"]


def test_sums_by_two_ranks(tmp_path: Path) -> None:
    from perf.sums import main

    out = tmp_path / "sums.json"
    main([*"--ranks 2 --bytes 512 --parts 256 --rounds 1 --repeats 1 --out".split(), str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["operation"], row["by"]) for row in rows] == [
        (operation, by) for operation in ("all_reduce", "reduce_scatter") for by in ("host", "parts of 256")
    ]
