"""Calibration on this machine: every figure is there and usable, and ranks that fail or hang are named and end."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from splash import calibrate as module
from splash.calibrate import calibrate, measure_ranks, read_settings
from splash.calibrate_steps import StepBench
from splash.core.errors import WorkerError
from splash.core.hardware import calibrated, load_calibration
from splash.core.layout import LAYOUTS
from splash.model.choice import ModelChoice
from splash.model.config import read_model_config
from splash.platform.cpu.platform import CpuPlatform
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad

pytestmark = pytest.mark.timeout(120)
SCRIBE = ModelChoice("scribe", "builtin:scribe")


def children() -> set[str]:
    """Processes that this one started and that live."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_quick_calibration_has_every_figure_and_predicts_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    out, before = tmp_path / "figures.json", children()
    assert module.main(["hardware=cpu", f"ranks={ranks}", "budget_s=0.01", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "measuring steps" in printed and f"hardware.calibration={out}" in printed
    assert children() == before
    found = load_calibration(out)
    assert (found.platform, found.ranks, found.dtype, found.bf16_tflops) == ("cpu", ranks, "float32", None)
    assert found.fp32_tflops and found.costs.op_us >= 0 and found.costs.step_us > 0
    assert found.costs.all_reduce.gb_s > 0 and "overlap" in found.kept

    hardware = calibrated(dataclasses.replace(module.choose(None)[1], calibration=str(out)))
    spec = SCRIBE.spec()
    model = CostModel(spec, hardware, ranks, "float32")
    costs = model.steps(StepLoad.decode(4, 256, ranks))
    # A prediction in the right order of magnitude of a few milliseconds, whatever the machine does meanwhile.
    assert set(costs) == set(LAYOUTS.values()) and all(1e-4 < cost.seconds < 1 for cost in costs.values())


def test_ranks_that_hang_are_named_and_end() -> None:
    settings, before = read_settings(["hardware=cpu"]), children()
    with pytest.raises(WorkerError, match="rank 0 did not finish measuring in time; timeout_s can be raised"):
        measure_ranks(settings, CpuPlatform(), 2, "float32", deadline=0.0)
    assert children() == before


def test_ranks_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CpuPlatform,
        "rank_environment",
        lambda self, ranks: {"PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"},
    )
    before = children()
    with pytest.raises(WorkerError, match="rank 0 exited with 1 while measuring: "):
        calibrate(read_settings(["hardware=cpu"]), lambda line: None)
    assert children() == before


@pytest.mark.parametrize("is_queued", [False, True], ids=["one by one", "each sent while one runs"])
def test_steps_of_every_layout_and_kind_can_be_measured(is_queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "is_queued", is_queued)
    loads = (StepLoad.of_arrays([], [], [], 2), StepLoad.decode(3, 100, 2), StepLoad.prefill(2, 70, 30, 2))
    before = children()
    with StepBench(SCRIBE, "safetensors", CpuPlatform(), 2, "float32", 64, 16, 60.0) as bench:
        for layout in bench.layouts():
            assert all(0 < bench.measure(layout, load, 2) < 60 for load in loads)
    assert children() == before


def test_random_weights_need_no_checkpoint() -> None:
    shape = ModelChoice("shape", config=read_model_config("builtin:scribe"), num_layers=1)
    with StepBench(shape, "dummy", CpuPlatform(), 2, "float32", 64, 16, 60.0) as bench:
        assert bench.geometry.spec.num_layers == 1
        assert bench.measure(LAYOUTS["dp"], StepLoad.decode(3, 100, 2), 1) > 0
