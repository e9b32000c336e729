"""NVIDIA GPUs as a platform: what is here and what is missing. This version does not serve on them yet."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from splash.core.errors import PlatformUnavailable
from splash.platform.base import Availability, DeviceInfo, GroupHandle, Platform, Rank

if TYPE_CHECKING:
    from splash.core.memory import ArenaGeometry

_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
_ON_CPU = "serve on the CPU: +hardware=cpu"


class CudaPlatform(Platform):
    """NVIDIA GPUs through a CUDA build of torch, and NVML where nvidia-ml-py is installed."""

    name = "cuda"

    def availability(self) -> Availability:
        missing = self._missing()
        if missing is not None:
            return missing
        found = ", ".join(sorted({device.name for device in self.devices()}))
        return Availability(False, f"{found} found, but this version of SPLASH does not serve on NVIDIA GPUs", _ON_CPU)

    def devices(self) -> list[DeviceInfo]:
        """The GPUs that torch sees, whether or not this version can serve on them."""
        if self._missing() is not None:
            return []
        import torch

        devices = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free = _free_bytes(str(properties.uuid))
            if free is None:  # asking torch makes a context on the device, which takes memory itself
                free = torch.cuda.mem_get_info(index)[0]
            devices.append(DeviceInfo(index, properties.name, properties.total_memory, free))
        return devices

    def default_ranks(self) -> int:
        return max(1, len(self.devices()))

    def rank_environment(self, ranks: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def create_group(self, ranks: int, num_layers: int, geometry: ArenaGeometry) -> GroupHandle:
        self._refuse()

    def join(self, handle_info: Mapping[str, int | str | list[int]], rank: int, timeout_s: float) -> Rank:
        self._refuse()

    def _missing(self) -> Availability | None:
        """What stands between torch and an NVIDIA GPU, or None where one is there."""
        if find_spec("torch") is None:
            return Availability(False, "torch is not installed", _INSTALL.replace("--force-reinstall ", ""))
        import torch

        if torch.version.cuda is None:
            build = "ROCm" if torch.version.hip else "CPU"
            return Availability(
                False,
                f"this torch is a {build} build ({torch.__version__})",
                f"install a CUDA build: {_INSTALL}; or {_ON_CPU}",
            )
        if not torch.cuda.is_available():
            return Availability(
                False,
                f"torch is built for CUDA {torch.version.cuda} but finds no usable GPU: {_driver_state()}",
                f"check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it; or {_ON_CPU}",
            )
        return None

    def _refuse(self) -> NoReturn:
        availability = self.availability()
        raise PlatformUnavailable(f"cuda: {availability.reason}. {availability.remedy}")


def _driver_state() -> str:
    """What NVML says of the driver."""
    # A missing library, driver or permission each raises a class of its own, not all of them NVMLError.
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return f"driver {pynvml.nvmlSystemGetDriverVersion()} with {pynvml.nvmlDeviceGetCount()} GPUs"
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        return "the driver's state is unknown without nvidia-ml-py"
    except Exception as error:
        return f"NVML says {error}"


def _free_bytes(uuid: str) -> int | None:
    """Free memory of a GPU according to NVML, or None where NVML cannot say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return None
