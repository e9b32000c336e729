"""AMD GPUs and Hygon DCUs as a platform: what is here and what is missing. This version does not serve on them yet."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from splash.core.errors import PlatformUnavailable
from splash.platform.base import Availability, DeviceInfo, GroupHandle, Platform, Rank

if TYPE_CHECKING:
    from splash.core.memory import ArenaGeometry

_INSTALL = "install a ROCm build of torch (https://pytorch.org/get-started/locally; for a DCU, the vendor's build)"
_ON_CPU = "serve on the CPU: +hardware=cpu"
_DRIVER = Path("/dev/kfd")


class RocmPlatform(Platform):
    """AMD GPUs and Hygon DCUs through a ROCm build of torch, which answers to `torch.cuda` as well."""

    name = "rocm"
    is_queued = True
    copy_mib = 768.0

    def availability(self) -> Availability:
        missing = self._missing()
        if missing is not None:
            return missing
        found = ", ".join(sorted({device.name for device in self.devices()}))
        kernels = "with aiter" if has_aiter() else "without aiter"
        return Availability(
            False, f"{found} found ({kernels}), but this version of SPLASH does not serve on AMD GPUs and DCUs", _ON_CPU
        )

    def devices(self) -> list[DeviceInfo]:
        """The GPUs that torch sees, whether or not this version can serve on them."""
        if self._missing() is not None:
            return []
        import torch

        devices = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append(DeviceInfo(index, torch.cuda.get_device_properties(index).name, total, free))
        return devices

    def default_ranks(self) -> int:
        return max(1, len(self.devices()))

    def rank_environment(self, ranks: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def arena_budget(self, ranks: int, beside_bytes: int, fraction: float) -> int:
        self._refuse()

    def attention_backends(self) -> tuple[str, ...]:
        return ()

    def create_group(
        self, ranks: int, num_layers: int, geometry: ArenaGeometry, attention: str = "auto"
    ) -> GroupHandle:
        self._refuse()

    def join(self, handle_info: Mapping[str, int | str | list[int]], rank: int, timeout_s: float) -> Rank:
        self._refuse()

    def _missing(self) -> Availability | None:
        """What stands between torch and a ROCm GPU, or None where one is there."""
        if find_spec("torch") is None:
            return Availability(False, "torch is not installed", f"{_INSTALL}; or {_ON_CPU}")
        import torch

        if torch.version.hip is None:
            build = "CUDA" if torch.version.cuda else "CPU"
            return Availability(
                False, f"this torch is a {build} build ({torch.__version__})", f"{_INSTALL}; or {_ON_CPU}"
            )
        if not torch.cuda.is_available():
            return Availability(
                False,
                f"torch is built for ROCm {torch.version.hip} but finds no usable GPU: {_driver_state()}",
                "check that rocm-smi lists a GPU, that this user may open /dev/kfd (group render) and that "
                f"HIP_VISIBLE_DEVICES does not hide it; or {_ON_CPU}",
            )
        return None

    def _refuse(self) -> NoReturn:
        availability = self.availability()
        raise PlatformUnavailable(f"rocm: {availability.reason}. {availability.remedy}")


def has_aiter() -> bool:
    """Whether AMD's aiter is installed. An unrelated package has the same import name but no `aiter.mla`.

    Looks without importing: AMD's runs ROCm's tools on import and fails where they are missing.
    """
    spec = find_spec("aiter")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "mla.py").exists() for folder in folders or ())


def _driver_state() -> str:
    """What the driver and ROCm's management library say."""
    if not _DRIVER.exists():
        return f"{_DRIVER} does not exist, so the amdgpu driver is not loaded"
    # Depending on which vendor libraries are present, failures are KeyError, RuntimeError, AttributeError and others.
    try:
        from pyrsmi import rocml

        rocml.smi_initialize()
        try:
            return f"the driver is loaded, with {rocml.smi_get_device_count()} GPUs"
        finally:
            rocml.smi_shutdown()
    except ImportError:
        return "the driver is loaded; its devices are unknown without pyrsmi"
    except Exception as error:
        return f"the driver is loaded, but pyrsmi says {error!r}"
