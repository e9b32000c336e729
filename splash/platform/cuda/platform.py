"""NVIDIA GPUs as a platform: one GPU a rank with NCCL, or several ranks a GPU, for checking, through the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from splash.core.errors import CapacityError, ConfigError, PlatformUnavailable
from splash.platform.base import (
    AttentionBackend,
    Availability,
    CapturableAttention,
    Communicator,
    DeviceInfo,
    GroupHandle,
    MemoryUse,
    Platform,
    Rank,
)
from splash.platform.cpu import collectives as host_collectives
from splash.platform.cuda import nvml
from splash.platform.kernels import Kernels
from splash.platform.span import DeviceSpan

if TYPE_CHECKING:
    import torch

    from splash.core.memory import ArenaGeometry
    from splash.platform.cuda.flashinfer_prefill import FlashInferPrefill

_INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
_ON_CPU = "serve on the CPU: +hardware=cpu"
CONTEXT_BYTES = 1 << 30  # of a process: CUDA's own, kernels and libraries
# Sums that a kernel of our own makes: the longest, and what a program takes of it. A rank reads all its peers' inputs.
SUM_PARTS = {256 << 10: 4096, 2 << 20: 16384}
SUM_READ_BYTES = 2 << 20
# How many times as long as it has to work queued on a device waits for a peer. None of it can say who is missing, but
# ends the process; before that the launcher, which knows who is behind, has given up and said so.
PATIENCE = 2


class CudaPlatform(Platform):
    """NVIDIA GPUs through a CUDA build of torch, and NVML where nvidia-ml-py is installed.

    Rank r uses GPU r of those visible. With more ranks than GPUs, ranks share them in equal runs, and collectives go
    through the host: every layout and switch can be checked on one GPU, but not at speed. The launching process never
    makes a context on a GPU.
    """

    name = "cuda"
    is_queued = True
    copy_mib = 768.0  # 2.2 ms at 360 GB/s: few large orders slow decode down less than many small ones

    def availability(self) -> Availability:
        missing = self._missing()
        if missing is not None:
            return missing
        import torch

        count = torch.cuda.device_count()
        names = ", ".join(sorted({device.name for device in self.devices()}))
        backends = " and ".join(self.attention_backends())
        return Availability(True, f"{count} x {names}, CUDA {torch.version.cuda}, attention by {backends}")

    def devices(self) -> list[DeviceInfo]:
        if self._missing() is not None:
            return []
        import torch

        devices = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            state = nvml.state(str(properties.uuid))
            # Asking torch makes a context on the device, which takes memory itself.
            free = torch.cuda.mem_get_info(index)[0] if state is None else state.free_bytes
            words = "" if state is None else state.words()
            devices.append(DeviceInfo(index, properties.name, properties.total_memory, free, words))
        return devices

    def default_ranks(self) -> int:
        if self._missing() is not None:
            return 1
        import torch

        return max(1, torch.cuda.device_count())

    def rank_environment(self, ranks: int) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            # NVLink multicast is not used: it has not been tried here, and a process that is killed may leave it taken.
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }

    def arena_budget(self, ranks: int, beside_bytes: int, fraction: float) -> int:
        devices = self.devices()
        sharing = -(-ranks // len(devices))
        total = min(device.total_bytes for device in devices[:ranks])
        free = min(device.free_bytes for device in devices[:ranks])
        usable = min(int(total * fraction), free) // sharing
        budget = usable - beside_bytes - CONTEXT_BYTES
        if budget <= 0:
            raise CapacityError(
                f"mem_fraction={fraction} of {_gib(total)}, of which {_gib(free)} are free, gives each of {sharing} "
                f"ranks a GPU {_gib(usable)}. Weights beside the arenas and workspace take {_gib(beside_bytes)}, and "
                f"the CUDA context {_gib(CONTEXT_BYTES)}: nothing is left for attention weights and KV cache. Use more "
                "GPUs or a smaller model"
            )
        return budget

    def attention_backends(self) -> tuple[str, ...]:
        found = [name for name in ("flashinfer", "triton") if find_spec(name) is not None]
        return (*found, "torch")

    def create_group(
        self, ranks: int, num_layers: int, geometry: ArenaGeometry, attention: str = "auto"
    ) -> GroupHandle:
        missing = self._missing()
        if missing is not None:
            raise PlatformUnavailable(f"cuda: {missing.reason}. {missing.remedy}")
        if attention != "auto" and attention not in self.attention_backends():
            known = ", ".join(self.attention_backends())
            raise ConfigError("attention.backend", f"{attention!r} is not usable here; choose auto or one of {known}")
        import torch

        assert ranks >= 1 and num_layers >= 1
        visible = torch.cuda.device_count()
        kind = host_collectives.default_kind()
        fds = (host_collectives.create(kind, ranks), os.memfd_create("splash-nccl"))
        info: dict[str, int | str | list[int]] = {
            "ranks": ranks,
            "num_layers": num_layers,
            "arena_bytes": geometry.arena_bytes,
            "devices": [rank if ranks <= visible else rank * visible // ranks for rank in range(ranks)],
            "collectives": kind,
            "collectives_fd": fds[0],
            "nccl_fd": fds[1],
            "attention": attention,
        }
        return GroupHandle(info, fds)

    def join(self, handle_info: Mapping[str, int | str | list[int]], rank: int, timeout_s: float) -> Rank:
        """Join, in a stream that is not the default one. Returns once every rank has mapped every arena."""
        import torch

        from splash.platform.cuda.arena import MappedArenas
        from splash.platform.cuda.comm import NcclCommunicator, StagedCommunicator
        from splash.platform.cuda.copy import CudaCopyEngine
        from splash.platform.cuda.graphs import CudaGraphs
        from splash.platform.cuda.runtime import check_peers

        info = cast("Mapping[str, Any]", handle_info)
        ranks, devices = info["ranks"], info["devices"]
        device = torch.device("cuda", devices[rank])
        torch.cuda.set_device(device)
        # The default stream waits for others and they for it, and it can neither be captured nor copy in batches.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.set_float32_matmul_precision("highest")
        host = host_collectives.join(info["collectives"], info["collectives_fd"], rank, ranks, timeout_s)
        check_peers(sorted(set(devices)))
        try:
            arenas = MappedArenas(host, info["num_layers"], info["arena_bytes"], device)
        except CapacityError as error:
            raise CapacityError(_arenas_do_not_fit(info, rank, error)) from None
        is_apart = len(set(devices)) == ranks > 1
        comm: Communicator
        if is_apart:
            nccl = NcclCommunicator(host, info["nccl_fd"], device, timeout_s * PATIENCE)
            comm = _with_short_sums(nccl, host, devices, timeout_s * PATIENCE)
        else:
            comm = StagedCommunicator(host, device)
        backends = _backends(info["attention"], device)
        is_queued = is_apart or ranks == 1
        graphs = None if backends.capturable is None or not is_queued else CudaGraphs(backends.capturable)
        return Rank(
            rank,
            ranks,
            device,
            arenas,
            comm,
            backends.attention,
            backends.kernels,
            CudaCopyEngine(device),
            graphs,
            _memory_use,
            host,
            partial(DeviceSpan, device),
        )

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
                f"torch is built for CUDA {torch.version.cuda} but finds no usable GPU: {nvml.driver()}",
                f"check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it; or {_ON_CPU}",
            )
        return None


@dataclass(frozen=True)
class _Backends:
    """What computes. `capturable` is the attention whose work can be part of a graph, where there is one."""

    attention: AttentionBackend
    kernels: Kernels
    capturable: CapturableAttention | None


def _backends(attention: str, device: torch.device) -> _Backends:
    """The attention backend of that name and the kernels that go with it."""
    if attention == "torch" or find_spec("triton") is None:
        from splash.platform.cpu.attention import CpuAttention
        from splash.platform.cpu.kernels import CpuKernels

        return _Backends(CpuAttention(), CpuKernels(), None)
    from splash.platform.triton.attention import TritonAttention
    from splash.platform.triton.kernels import TritonKernels

    kernels, triton = TritonKernels(device), TritonAttention(device)
    if attention == "triton" or find_spec("flashinfer") is None:
        return _Backends(triton, kernels, triton)
    from splash.platform.cuda.flashinfer_mla import FlashInferAttention

    flashinfer = FlashInferAttention(device, triton, _prefill(device))
    return _Backends(flashinfer, kernels, flashinfer)


def _prefill(device: torch.device) -> FlashInferPrefill | None:
    """FlashInfer's attention of prompts, where it has kernels for this GPU that are faster than those here."""
    import torch

    from splash.platform.cuda.flashinfer_prefill import FlashInferKernels, FlashInferPrefill

    properties = torch.cuda.get_device_properties(device)
    return (
        FlashInferPrefill(FlashInferKernels(device), properties.multi_processor_count)
        if properties.major == 9
        else None
    )


def _with_short_sums(rest: Communicator, host: Communicator, devices: list[int], timeout_s: float) -> Communicator:
    """`rest` with short sums by a kernel of our own, where Triton is and every rank's memory takes atomics from all."""
    import torch

    from splash.platform.cuda.arena import MappedArenas
    from splash.platform.cuda.comm import ShortSumsCommunicator
    from splash.platform.cuda.runtime import runtime

    own = devices[host.rank]
    can = find_spec("triton") is not None and all(runtime().has_atomics(own, peer) for peer in devices if peer != own)
    if not bool(host.all_gather(torch.tensor([can]), [1] * host.size).all()):
        return rest
    from splash.platform.triton.sums import PeerSums, region_bytes

    device = torch.device("cuda", own)
    sums, regions = [], []
    for longest, part in SUM_PARTS.items():
        most = min(longest, SUM_READ_BYTES // max(1, host.size - 1) // part * part)
        regions.append(MappedArenas(host, 1, region_bytes(most, part), device))
        sums.append(PeerSums(regions[-1], host.rank, host.size, timeout_s, most, part))
        for dtype in (torch.bfloat16, torch.float32):
            sums[-1].all_reduce(torch.zeros(64, dtype=dtype, device=device))  # compiled now, while nobody waits
    return ShortSumsCommunicator(rest, sums, regions)


def _memory_use() -> MemoryUse:
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return MemoryUse(torch.cuda.memory_reserved(), total - free, total)


def _arenas_do_not_fit(info: Mapping[str, Any], rank: int, error: CapacityError) -> str:
    import torch

    free, total = torch.cuda.mem_get_info()
    sharing = info["devices"].count(info["devices"][rank])
    return (
        f"rank {rank} of {sharing} on GPU {info['devices'][rank]} needs {info['num_layers']} arenas of "
        f"{_gib(info['arena_bytes'])}, {_gib(info['num_layers'] * info['arena_bytes'])} in all; {_gib(free)} of "
        f"{_gib(total)} are free ({error}). Lower kv_cache_gib or mem_fraction"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
