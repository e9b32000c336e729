"""The reproduction page is what its generator makes of the rows that are committed."""

from __future__ import annotations

import json

import pytest

from perf.reproduction import ROOT, SWEEPS, _off, page
from splash.settings import options
from splash.sweep.points import read_sweep
from splash.sweep.store import read_rows


def test_the_page_is_up_to_date_and_has_every_statement() -> None:
    text = page()
    written = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert text == written, "run python -m perf.reproduction --write docs/reproduction.md"
    statements = json.loads((ROOT / "perf" / "paper.json").read_text(encoding="utf-8"))["statements"]
    shown = [name for name, stated in statements.items() if f"| {stated['says']} |" in text]
    assert set(statements) - set(shown) == {"adaptive"}, "which has a table of its own"


@pytest.mark.parametrize("name", sorted({path.parent.name for path in SWEEPS.glob("*/rows.jsonl")}))
def test_committed_rows_are_the_points_of_their_sweep(name: str) -> None:
    assert name in options("sweep")
    rows = read_rows(SWEEPS / name / "rows.jsonl")
    _, points = read_sweep([f"sweep={name}"])
    layouts = [(point.grid, point.hardware.name, point.settings.layout) for point in points]
    assert [(row["grid"], row["hardware"], row["layout"]) for row in rows] == layouts
    assert {row["basis"] for row in rows} == {"simulated"}, "no such hardware was at hand"


@pytest.mark.parametrize(
    ("stated", "found", "off"),
    [
        (100, 110, "+10.0%"),
        (100, 100, "0"),
        ([10, 20], 15, "0"),
        ([10, 20], 5, "-50.0%"),
        ([10, 20], (5, 15), "-50.0% to 0"),
        ([10, 20], (5, 30), "-50.0% to +50.0%"),
    ],
)
def test_how_far_off(stated: object, found: object, off: str) -> None:
    assert _off({"value": stated, "says": "a figure, ms"}, found) == off


def test_percentages_are_off_by_points() -> None:
    assert _off({"value": [3.4, 10.6], "says": "ahead, %"}, (-21.4, 5.0)) == "-24.8 points to 0"
