"""What the driver says of the GPUs, through NVML. Nothing here raises: telemetry that is missing is None."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment.

    Attributes:
        total_bytes, used_bytes, free_bytes: memory.
        utilization: percent of the last sampling period in which a kernel ran; None where it is not told.
        links_active: NVLink links that are up.
        link_errors: replay and recovery errors of all links since they were counted last.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    utilization: int | None
    links_active: int
    link_errors: int

    def words(self) -> str:
        """What is worth knowing besides memory."""
        busy = "" if self.utilization is None else f"{self.utilization} % busy, "
        return f"{busy}{self.links_active} NVLink links, {self.link_errors} link errors"


def state(uuid: str) -> GpuState | None:
    """The state of the GPU with that UUID (without "GPU-"), or None where NVML cannot say."""
    # A missing library, driver or permission each raises a class of its own, not all of them NVMLError.
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            utilization = None
            with suppress(Exception):
                utilization = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            active, errors = _links(nvml, handle)
            return GpuState(int(memory.total), int(memory.used), int(memory.free), utilization, active, errors)
    except Exception:
        return None


def driver() -> str:
    """What NVML says of the driver, in words."""
    try:
        with _nvml() as nvml:
            return f"driver {nvml.nvmlSystemGetDriverVersion()} with {nvml.nvmlDeviceGetCount()} GPUs"
    except ImportError:
        return "the driver's state is unknown without nvidia-ml-py"
    except Exception as error:
        return f"NVML says {error}"


def process_bytes(uuid: str, pids: set[int]) -> dict[int, int] | None:
    """Device memory of each of `pids` on a GPU, contexts included; None where the driver does not say."""
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return {process.pid: int(process.usedGpuMemory) for process in running if process.pid in pids}
    except Exception:
        return None


def _links(nvml: Any, handle: Any) -> tuple[int, int]:
    active = errors = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except Exception:  # no such link on this GPU
            break
        active += 1
        for counter in (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY):
            with suppress(Exception):
                errors += int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
    return active, errors


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
