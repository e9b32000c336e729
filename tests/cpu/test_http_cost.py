"""The comparison of HTTP with the offline engine runs both, and says what it measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from perf.http_cost import main, share_cores

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
    assert min(*offline.values(), *http.values()) > 0
    assert set(http) - set(offline) == {"http_us", "client_us"}
    assert record["cores"] == dict.fromkeys(("ranks", "engine", "client"), len(os.sched_getaffinity(0)))
    printed = capsys.readouterr().out
    assert "throughput lost" in printed and "time to first token added" in printed and "the client, " in printed


def test_cores_that_are_apart_belong_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 8, 9, 11, 12})
    cores = share_cores(ranks=2, threads=2, apart=True)
    assert (cores.ranks, cores.engine, cores.client) == ({2, 3, 5, 7}, {8, 9}, {11, 12})
    with pytest.raises(SystemExit, match="2 ranks of 3 threads need 9 cores, and there are 8"):
        share_cores(ranks=2, threads=3, apart=True)
