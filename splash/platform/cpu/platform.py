"""The CPU as a platform: one device, the host; ranks are processes that share anonymous memory."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from splash.core.errors import CapacityError, ConfigError, PlatformUnavailable
from splash.platform.base import Availability, DeviceInfo, GroupHandle, Platform, Rank
from splash.platform.cpu import collectives as host_collectives
from splash.platform.cpu.shared import arena_file_bytes

if TYPE_CHECKING:
    from splash.core.memory import ArenaGeometry

DEFAULT_ARENA_BYTES = 1 << 30

# What a step works in, the next one needs again. By itself glibc gives much of it back to the kernel, which zeroes it
# page by page as it is touched anew: thousands of faults a prefill. 32 MiB is the most that it takes as a threshold for
# mapping memory apart.
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class CpuPlatform(Platform):
    """The host's processors and memory.

    Arenas and mailboxes are memory files without a name, inherited by the ranks as descriptors: the kernel frees them
    with the last process that holds them, however it ends. Pages take memory only once they are written.

    Args:
        collectives: "shm" (shared memory, the default on x86) or "gloo" (torch.distributed, the default elsewhere).
    """

    name = "cpu"
    is_queued = False
    copy_mib = 2.0

    def __init__(self, collectives: host_collectives.Kind | None = None) -> None:
        self._collectives = collectives or host_collectives.default_kind()

    def availability(self) -> Availability:
        if not sys.platform.startswith("linux"):
            return Availability(
                False,
                f"the CPU platform needs Linux (memfd_create), not {sys.platform}",
                "run in a Linux container or virtual machine",
            )
        if find_spec("torch") is None:
            return Availability(
                False,
                "torch is not installed",
                "pip install torch --index-url https://download.pytorch.org/whl/cpu",
            )
        return Availability(True, f"{_num_cores()} cores, {self._collectives} collectives")

    def devices(self) -> list[DeviceInfo]:
        if not self.availability().ok:
            return []
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return [DeviceInfo(0, _processor_name(), min(total, memory_limit()[0]), available_bytes())]

    def default_ranks(self) -> int:
        return 2

    def rank_environment(self, ranks: int) -> dict[str, str]:
        threads = str(max(1, _num_cores() // ranks))
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        # Ranks share their cores with the server and with whatever else runs. A thread that spins keeps the one that
        # it waits for from a core: the default is 300,000 rounds, and 1,000 where threads outnumber processors.
        if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
            environment["GOMP_SPINCOUNT"] = "1000"
        if not os.environ.keys() & _KEPT_MEMORY.keys():
            environment |= _KEPT_MEMORY
        return environment

    def arena_budget(self, ranks: int, beside_bytes: int, fraction: float) -> int:
        return DEFAULT_ARENA_BYTES  # memory is the host's, and others use it too

    def attention_backends(self) -> tuple[str, ...]:
        return ("torch",)

    def create_group(
        self, ranks: int, num_layers: int, geometry: ArenaGeometry, attention: str = "auto"
    ) -> GroupHandle:
        availability = self.availability()
        if not availability.ok:
            raise PlatformUnavailable(f"cpu: {availability.reason}; {availability.remedy}")
        if attention not in ("auto", *self.attention_backends()):
            raise ConfigError("attention.backend", f"{attention!r} does not work on the CPU; choose auto or torch")
        assert ranks >= 1 and num_layers >= 1
        arenas = arena_file_bytes(num_layers, geometry.arena_bytes)
        shared = host_collectives.shared_bytes(self._collectives, ranks)
        available = available_bytes()
        if ranks * arenas + shared > available:
            raise CapacityError(
                f"{ranks} ranks x {num_layers} layers x arenas of {_mib(geometry.arena_bytes)} and {_mib(shared)} of "
                f"mailboxes take {_mib(ranks * arenas + shared)}, but {_mib(available)} of host memory is available; "
                f"use fewer slots an arena (now {geometry.num_slots}), fewer ranks or a smaller model"
            )
        fds: list[int] = []
        try:
            for rank in range(ranks):
                fds.append(os.memfd_create(f"splash-arenas-{rank}"))
                os.ftruncate(fds[-1], arenas)
            fds.append(host_collectives.create(self._collectives, ranks))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        info: dict[str, int | str | list[int]] = {
            "collectives": self._collectives,
            "ranks": ranks,
            "num_layers": num_layers,
            "arena_bytes": geometry.arena_bytes,
            "arena_fds": fds[:-1],
            "collectives_fd": fds[-1],
        }
        return GroupHandle(info, tuple(fds))

    def join(self, handle_info: Mapping[str, int | str | list[int]], rank: int, timeout_s: float) -> Rank:
        """Map the group's memory. Returns at once with shared memory; with gloo once every rank has connected."""
        import torch

        from splash.platform.cpu.arena import SharedArenas
        from splash.platform.cpu.attention import CpuAttention
        from splash.platform.cpu.copy import CpuCopyEngine
        from splash.platform.cpu.kernels import CpuKernels

        # Scores far below the largest turn into subnormal probabilities, which make products ten times slower.
        torch.set_flush_denormal(True)
        info = cast("Mapping[str, Any]", handle_info)
        size = info["ranks"]
        arenas = SharedArenas(info["arena_fds"], rank, info["num_layers"], info["arena_bytes"])
        comm = host_collectives.join(info["collectives"], info["collectives_fd"], rank, size, timeout_s)
        return Rank(rank, size, torch.device("cpu"), arenas, comm, CpuAttention(), CpuKernels(), CpuCopyEngine())


def available_bytes() -> int:
    """Bytes that can be taken without swapping: what the kernel reckons, within the control group's limit."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limit, used = memory_limit()
            return max(0, min(int(line.split()[1]) << 10, limit - used))
    raise PlatformUnavailable("cpu: /proc/meminfo has no MemAvailable; Linux 3.14 or later is needed")


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(limit, used) bytes of a control group (v2); no limit where there is none.

    Pages of files that nobody has read lately count as the group's until their memory is wanted: they are not used.
    """
    try:
        limit, current = (int((root / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit, current - int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # no control group, or "max"
        return 1 << 62, 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
