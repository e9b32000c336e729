"""Arenas in device memory that every rank of the host maps, each rank's in one allocation."""

from __future__ import annotations

import torch

from splash.core.memory import align
from splash.platform.base import Arenas, Communicator
from splash.platform.cuda.runtime import IPC_HANDLE_BYTES, runtime, tensor_at


class MappedArenas(Arenas):
    """The arenas of a group through CUDA IPC: the same for ranks that share a GPU and for ranks that have one each.

    Peers on other GPUs are reached over NVLink or PCIe by ordinary loads and copies. Memory starts as zeros.

    Args:
        host: exchanges the handles, over host memory.
        num_layers: layers.
        arena_bytes: bytes of one layer's arena.
        device: this rank's.

    Raises:
        CapacityError: the device has too little memory left.
    """

    def __init__(self, host: Communicator, num_layers: int, arena_bytes: int, device: torch.device) -> None:
        self._rank = host.rank
        self._host = host
        stride = align(arena_bytes)
        self._own = runtime().allocate(num_layers * stride)
        torch.cuda.synchronize(device)  # it is zero before a peer looks
        handle = torch.frombuffer(bytearray(runtime().export(self._own)), dtype=torch.uint8)
        handles = host.all_gather(handle.view(1, -1), [1] * host.size)
        assert handles.shape == (host.size, IPC_HANDLE_BYTES)
        self._bases = [
            self._own if rank == host.rank else runtime().map(handles[rank].numpy().tobytes())
            for rank in range(host.size)
        ]
        self._layers = [
            [tensor_at(base + layer * stride, arena_bytes, device) for layer in range(num_layers)]
            for base in self._bases
        ]

    def local(self, layer: int) -> torch.Tensor:
        return self._layers[self._rank][layer]

    def peer(self, rank: int, layer: int) -> torch.Tensor:
        return self._layers[rank][layer]

    def close(self) -> None:
        self._layers.clear()
        for rank, base in enumerate(self._bases):
            if rank != self._rank:
                runtime().unmap(base)
        runtime().free(self._own)
