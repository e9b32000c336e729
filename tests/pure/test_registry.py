"""Which platforms there are, which one serves here, and what the others say."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from splash.core.errors import CapacityError, ConfigError, PlatformUnavailable
from splash.platform import registry
from splash.platform.base import Availability, Platform
from splash.platform.cpu.platform import CpuPlatform
from splash.platform.rocm.platform import has_aiter


def on(monkeypatch: pytest.MonkeyPatch, cuda: str | None = None, hip: str | None = None, devices: int = 0) -> None:
    """Pretend that torch is built for that vendor and sees so many devices."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    properties = SimpleNamespace(name="Pretend 9000", total_memory=64 << 30, uuid="0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (60 << 30, 64 << 30))


def test_every_platform_is_what_its_name_says() -> None:
    assert set(registry.PLATFORMS) == {"cpu", "cuda", "rocm"}
    for name in registry.PLATFORMS:
        platform = registry.get_platform(name)
        assert isinstance(platform, Platform) and platform.name == name


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    for ask in (registry.get_platform, registry.require):
        with pytest.raises(ConfigError, match="unknown platform 'tpu'; choose one of cuda, rocm, cpu"):
            ask("tpu")


def test_loading_platforms_loads_neither_torch_nor_vendors() -> None:
    code = (
        "import sys; from splash.platform import registry;"
        "[registry.get_platform(name) for name in registry.PLATFORMS];"
        "sys.exit(bool({'torch', 'pynvml', 'pyrsmi', 'aiter'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_cpu_build_of_torch_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    for name in ("cuda", "rocm"):
        availability = registry.get_platform(name).availability()
        assert not availability.ok
        assert availability.reason == f"this torch is a CPU build ({torch.__version__})"
        assert "+hardware=cpu" in availability.remedy
        assert registry.get_platform(name).devices() == []
        assert registry.get_platform(name).default_ranks() == 1
        with pytest.raises(PlatformUnavailable, match=f"{name}: this torch is a CPU build"):
            registry.require(name)
    assert registry.detect().name == "cpu"


@pytest.mark.parametrize(("name", "build"), [("cuda", {"cuda": "13.0"}), ("rocm", {"hip": "7.0"})])
def test_a_build_without_a_device_says_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, name: str, build: dict[str, str]
) -> None:
    on(monkeypatch, **build)
    availability = registry.get_platform(name).availability()
    assert not availability.ok and "finds no usable GPU: " in availability.reason
    assert "VISIBLE_DEVICES" in availability.remedy
    other = "rocm" if name == "cuda" else "cuda"
    assert f"this torch is a {'CUDA' if name == 'cuda' else 'ROCm'} build" in (
        registry.get_platform(other).availability().reason
    )


@pytest.mark.parametrize(("name", "build"), [("cuda", {"cuda": "13.0"}), ("rocm", {"hip": "7.0"})])
@pytest.mark.parametrize("error", [KeyError("libamd_smi.so"), RuntimeError("no driver"), AttributeError("x")])
def test_vendor_libraries_may_fail_in_any_way(
    monkeypatch: pytest.MonkeyPatch, name: str, build: dict[str, str], error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    on(monkeypatch, **build)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    monkeypatch.setitem(sys.modules, "pyrsmi", SimpleNamespace(rocml=SimpleNamespace(smi_initialize=fail)))
    monkeypatch.setattr("splash.platform.rocm.platform._DRIVER", SimpleNamespace(exists=lambda: True))
    assert "says" in registry.get_platform(name).availability().reason


@pytest.mark.parametrize(("name", "build"), [("cuda", {"cuda": "13.0"}), ("rocm", {"hip": "7.0"})])
def test_devices_are_shown(monkeypatch: pytest.MonkeyPatch, name: str, build: dict[str, str]) -> None:
    on(monkeypatch, **build, devices=2)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    platform = registry.get_platform(name)
    assert [(device.index, device.name, device.free_bytes >> 30) for device in platform.devices()] == [
        (0, "Pretend 9000", 60),
        (1, "Pretend 9000", 60),
    ]
    assert platform.default_ranks() == 2


def test_serving_on_amd_is_refused_honestly(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, hip="7.0", devices=2)
    platform = registry.get_platform("rocm")
    for refuse in (lambda: platform.create_group(2, 1, None), lambda: platform.join({}, 0, 1.0)):
        with pytest.raises(PlatformUnavailable, match=r"Pretend 9000 found.* does not serve on .*\+hardware=cpu"):
            refuse()
    assert registry.detect().name == "cpu"


def test_nvidia_gpus_serve_with_a_gpu_a_rank_or_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, cuda="13.0", devices=2)
    platform = registry.detect()
    assert platform.name == "cuda" and "2 x Pretend 9000, CUDA 13.0" in platform.availability().reason
    geometry = SimpleNamespace(arena_bytes=1000)
    for ranks, devices in ((1, [0]), (2, [0, 1]), (4, [0, 0, 1, 1])):
        handle = platform.create_group(ranks, 3, geometry)
        handle.close()
        assert handle.info["devices"] == devices
    with pytest.raises(ConfigError, match=r"attention.backend: 'aiter' is not usable here; choose auto or one of"):
        platform.create_group(2, 3, geometry, "aiter")


def test_arenas_get_what_other_things_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, cuda="13.0", devices=2)  # of 64 GiB, of which 60 are free
    monkeypatch.setitem(sys.modules, "pynvml", None)
    platform = registry.get_platform("cuda")
    assert platform.arena_budget(2, 10 << 30, 0.75) == (48 - 10 - 1) << 30
    assert platform.arena_budget(2, 10 << 30, 1.0) == (60 - 10 - 1) << 30, "no more than is free"
    assert platform.arena_budget(4, 10 << 30, 0.75) == (24 - 10 - 1) << 30, "two ranks share a GPU"
    with pytest.raises(CapacityError, match=r"gives each of 2 ranks a GPU 24.00 GiB. .* take 23.50 GiB"):
        platform.arena_budget(4, 47 << 29, 0.75)


def test_detect_prefers_an_accelerator_and_explains_when_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from splash.platform.rocm.platform import RocmPlatform

    with monkeypatch.context() as patch:
        patch.setattr(RocmPlatform, "availability", lambda self: Availability(True, "fine"))
        assert registry.detect().name == "rocm"
        assert registry.require("rocm").name == "rocm"
    on(monkeypatch)
    monkeypatch.setattr(CpuPlatform, "availability", lambda self: Availability(False, "no such luck", "buy a computer"))
    with pytest.raises(PlatformUnavailable, match=r"cuda: (?s:.*)rocm: (?s:.*)cpu: no such luck. buy a computer"):
        registry.detect()


def test_an_unrelated_aiter_is_not_taken_for_amds(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, expected in ((["__init__.py"], False), (["__init__.py", "mla.py"], True)):
        root = tmp_path_factory.mktemp("site")
        (root / "aiter").mkdir()
        for file in files:
            (root / "aiter" / file).write_text("raise RuntimeError('ROCm version file not found')\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            assert has_aiter() is expected
