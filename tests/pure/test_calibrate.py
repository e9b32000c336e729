"""Calibration without a measurement: files, which file applies, what is fitted to given times, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from splash import calibrate as module
from splash.calibrate import CalibrateSettings, choose, fit_stages, fit_steps, main, read_settings
from splash.core.errors import ConfigError
from splash.core.hardware import (
    Calibration,
    Hardware,
    calibrated,
    calibration_path,
    load_calibration,
    save_calibration,
)
from splash.core.layout import TP
from splash.core.step import REPLAYED_ROWS
from splash.model.config import load_model_config
from splash.plan import ModelChoice
from splash.platform.base import DeviceInfo
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad
from splash.settings import build, compose

SCRIBE = "builtin:scribe"
SPEC = load_model_config(SCRIBE).spec
MEASURED = {
    "gemm_peak": 2e11, "gemm_typical": 1.5e11, "copy": 2e10, "movement": 5e9, "read": 1.6e10, "absorbed": 1e11,
    "decode": 5e10, "decode_read": 1e10,
    "expanded_s": 1e-2, "expanded_rows": 128.0, "expanded_start": 896.0, "tiny_sequence_s": 3e-4, "expert_s": 1e-5,
    "pull_rate": 8e9, "page_pull_rate": 6e9, "pull_s": 5e-5,
} | {
    f"{name}_{figure}": value
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for figure, value in (("latency_s", 2e-5), ("rate", 3e9))
}  # fmt: skip


def description(name: str = "cpu") -> Hardware:
    return build(Hardware, compose("plan", [f"hardware={name}"])["hardware"])


def calibration(**changes: Any) -> Calibration:
    fitted = fit_stages(description(), MEASURED, SPEC, 2, "float32")
    assert fitted.costs is not None
    found = Calibration(
        "cpu",
        "cpu",
        2,
        "float32",
        "a processor",
        "2026-01-01T00:00:00Z",
        None,
        0.2,
        20.0,
        8.0,
        fitted.costs,
        ("overlap",),
    )
    return dataclasses.replace(found, **changes)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file in the default place, whatever this machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "figures.json"
    save_calibration(path, calibration())
    assert load_calibration(path) == calibration()
    assert [entry.name for entry in path.parent.iterdir()] == ["figures.json"]


def test_the_default_place_is_in_the_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibration_path("cpu") == empty_cache / "splash" / "calibration-cpu.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert calibration_path("cuda") == Path.home() / ".cache" / "splash" / "calibration-cuda.json"


def test_measured_figures_take_the_place_of_the_descriptions(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    save_calibration(path, calibration())
    used = calibrated(dataclasses.replace(description(), calibration=str(path)))
    assert used.costs == calibration().costs and used.memory_gb_s == 20 and used.link_gb_s == 8
    assert used.fp32_tflops == 0.2 and used.bf16_tflops == description().bf16_tflops, "only one dtype was measured"
    assert used.memory_gib == description().memory_gib


def test_the_default_file_applies_to_the_hardware_that_it_names() -> None:
    assert calibrated(description()) == description()
    save_calibration(calibration_path("cpu"), calibration())
    assert calibrated(description()).costs == calibration().costs
    other = dataclasses.replace(description(), name="another host")
    assert calibrated(other) == other
    assert calibrated(description("h200")) == description("h200")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read: No such file"),
        ("not json", "is no calibration: JSON is malformed"),
        ("{}", "is no calibration: Object missing required field `name`"),
        ("costs", "must be above 0 and at most 1, not 7"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "figures.json"
    if text == "costs":
        save_calibration(path, calibration())
        contents = json.loads(path.read_text())
        contents["costs"]["gemm"] = 7
        text = json.dumps(contents)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        calibrated(dataclasses.replace(description(), calibration=str(path)))
    assert caught.value.field == "hardware.calibration" and "figures.json" in str(caught.value)


def test_a_file_for_another_platform_is_refused(tmp_path: Path) -> None:
    save_calibration(tmp_path / "figures.json", calibration())
    with pytest.raises(ConfigError, match="is for platform cpu, and h200 is cuda"):
        calibrated(dataclasses.replace(description("h200"), calibration=str(tmp_path / "figures.json")))


def test_stages_are_fitted_to_what_ranks_measured() -> None:
    fitted = fit_stages(description(), MEASURED, SPEC, 2, "float32")
    costs = fitted.costs
    assert costs is not None and fitted.fp32_tflops == 0.2 and fitted.memory_gb_s == 20
    assert costs.gemm == 0.75 and costs.memory == 0.8 and costs.absorbed == 0.5
    assert costs.decode == 0.25 and costs.decode_memory == 0.5
    assert costs.all_gather.latency_us == pytest.approx(20) and costs.all_gather.gb_s == 3
    stages = CostModel(load_model_config(SCRIBE).spec, fitted, 2, "float32").stages
    assert stages.attend_singles(64, 64, 1, stages.spec.num_heads) == pytest.approx(MEASURED["tiny_sequence_s"])
    expanded = stages.attend_expanded(module.Chunk(0, 128, 896), stages.spec.num_heads)
    assert expanded - stages.costs.attention_us * 1e-6 == pytest.approx(MEASURED["expanded_s"])


def test_overheads_are_fitted_to_the_times_of_steps() -> None:
    settings = read_settings([])
    stages = fit_stages(description(), MEASURED, SPEC, 2, "float32")
    times = {"empty": 1e-4, "one": 8e-3, "many": 50e-3, "short": 9e-3}
    fitted = fit_steps(stages, times, settings, 2, "float32")
    model = CostModel(load_model_config(SCRIBE).spec, fitted, 2, "float32", settings.page_size)
    assert model.step(TP, StepLoad.of_arrays([], [], [], 2)).seconds == pytest.approx(times["empty"])
    many = StepLoad.decode(module.BATCH, settings.page_size, 2)
    assert model.step(TP, many).seconds == pytest.approx(times["many"], rel=1e-6)
    assert fitted.costs is not None and fitted.costs.op_us > 0 and fitted.costs.request_us > 0
    assert fitted.costs.launch_us == 0, "the host is the device"


def test_a_prompt_that_is_not_recorded_takes_as_long_as_its_start() -> None:
    described = description("h200")
    settings = read_settings([])
    stages = fit_stages(described, MEASURED, SPEC, 2, "bfloat16")
    fitted = fit_steps(stages, {"empty": 1e-4, "one": 8e-3, "many": 9e-3, "short": 5.0}, settings, 2, "bfloat16")
    model = CostModel(SPEC, fitted, 2, "bfloat16", settings.page_size)
    assert model.step(TP, StepLoad.prefill(1, REPLAYED_ROWS + 1, 0, 2)).seconds == pytest.approx(5.0)
    assert model.step(TP, StepLoad.decode(1, settings.page_size, 2)).seconds == pytest.approx(8e-3)


def test_a_description_is_found_by_the_devices_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(None)[1].platform == choose(None)[0].name

    class Fake:
        name = "cuda"

        def __init__(self, device: str) -> None:
            self.device = device

        def devices(self) -> list[DeviceInfo]:
            return [DeviceInfo(0, self.device, 1, 1)]

    monkeypatch.setattr(module, "detect", lambda: Fake("NVIDIA H200"))
    assert choose(None)[1].name == "h200"
    monkeypatch.setattr(module, "detect", lambda: Fake("NVIDIA A100"))
    with pytest.raises(
        ConfigError, match=r"no description names 'NVIDIA A100'; choose with \+hardware=NAME: b200, h200"
    ):
        choose(None)


@pytest.mark.parametrize("spelling", [[], ["+hardware=auto"], ["hardware=auto"]])
def test_auto_is_the_default(spelling: list[str]) -> None:
    assert read_settings(spelling).hardware is None
    settings = CalibrateSettings(
        3, None, ModelChoice("scribe", SCRIBE), "safetensors", 64, 0.5, 300.0, None, description()
    )
    assert read_settings(["hardware=cpu", "ranks=3"]) == settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hardware=h300"], "unknown hardware 'h300'"),
        (["hardware=h200"], "cuda: "),
        (["ranks=0"], "ranks: must be between 1 and 128"),
        (["budget_s=0"], "budget_s: must be above 0"),
        (["page_size=48"], "page_size: must be a power of two"),
        (["dtype=fp8"], "dtype: must be one of float32, bfloat16"),
        (["model.path=/nowhere", "hardware=cpu"], "/nowhere: no such directory"),
        (["model=youtu"], "model.path: youtu comes without weights"),
        (["outt=x"], "did you mean out?"),
    ],
)
def test_what_cannot_work_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str, tmp_path: Path
) -> None:
    import torch

    if arguments == ["hardware=h200"] and torch.cuda.is_available():
        pytest.skip("an NVIDIA GPU is usable here")
    assert main([*arguments, f"out={tmp_path / 'figures.json'}"]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and len(printed.err.splitlines()) == 1
    assert not (tmp_path / "figures.json").exists()


def test_help_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "budget_s" in capsys.readouterr().out
