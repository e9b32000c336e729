"""The doctor: honest about what works, and its self-test notices what does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from splash import doctor
from splash.core.errors import SplashError
from splash.platform.cpu.platform import CpuPlatform
from splash.platform.registry import PLATFORMS


def failing_self_test(name: str, timeout_s: float) -> str:
    raise SplashError("rank 1 exited with 1")


def test_json_from_the_command_line_has_everything() -> None:
    command = [sys.executable, "-m", "splash.doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    platforms = {platform["name"]: platform for platform in report["platforms"]}
    assert set(platforms) == set(PLATFORMS)
    assert platforms["cpu"]["ok"] and "2 ranks exchanged data" in platforms["cpu"]["reason"]
    assert platforms["cpu"]["devices"][0]["total_bytes"] > 0
    assert all(platform["ok"] or (platform["reason"] and platform["remedy"]) for platform in report["platforms"])
    assert set(report["packages"]) == set(doctor.PACKAGES) and report["packages"]["torch"]
    assert report["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


def test_tables_show_pass_and_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda name, timeout_s: "2 ranks exchanged data")
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert "PASS" in shown and "FAIL" in shown and "nvidia-ml-py" in shown


def test_a_platform_that_fails_its_self_test_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "self_test", failing_self_test)
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (cpu,) = [platform for platform in report["platforms"] if platform["name"] == "cpu"]
    assert cpu["reason"] == "self-test failed: rank 1 exited with 1"


def test_the_self_test_reports_a_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that find no torch exit with an error, which the message carries."""
    environment = {"PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"}
    monkeypatch.setattr(CpuPlatform, "rank_environment", lambda self, ranks: environment)
    with pytest.raises(SplashError, match="rank 0 exited with 1: "):
        doctor.self_test("cpu", timeout_s=60.0)


def test_the_self_test_reports_a_rank_that_hangs() -> None:
    with pytest.raises(SplashError, match=r"rank 0 did not finish within 0\.01 s"):
        doctor.self_test("cpu", timeout_s=0.01)
