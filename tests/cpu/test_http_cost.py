"""The comparison of HTTP with the offline engine runs both, and says what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from perf.http_cost import main

pytestmark = pytest.mark.timeout(240)


def test_both_sides_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "--hardware cpu --ranks 2 --streams 3 --input-len 8 --output-len 4 --firsts 2 --repeats 1".split()
    monkeypatch.setattr(sys, "argv", ["perf.http_cost", *shape, "--out", str(tmp_path / "r")])
    main()
    record = json.loads((tmp_path / "r").read_text())
    (offline,), (http,) = record["turns"]["offline"], record["turns"]["http"]
    assert record["throughput_loss"] == pytest.approx(1 - http["tok_s"] / offline["tok_s"], abs=1e-3)
    assert record["added_ttft_ms"] == pytest.approx(http["ttft_ms"] - offline["ttft_ms"], abs=1e-2)
    assert min(offline["tok_s"], http["tok_s"], offline["ttft_ms"], http["ttft_ms"], http["client_cores"]) > 0
    printed = capsys.readouterr().out
    assert "throughput lost" in printed and "time to first token added" in printed
