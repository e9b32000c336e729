"""Arenas in shared memory: every rank maps every rank's, so that reading a peer is an ordinary load."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from splash.platform.base import Arenas
from splash.platform.cpu.shared import arena_file_bytes


class SharedArenas(Arenas):
    """The arenas of a group in one memory file a rank, layer after layer.

    Args:
        fds: a descriptor a rank, of `arena_file_bytes(num_layers, arena_bytes)` bytes. May be closed afterwards.
        rank: whose arenas are local.
        num_layers: layers.
        arena_bytes: bytes of one layer's arena.
    """

    def __init__(self, fds: Sequence[int], rank: int, num_layers: int, arena_bytes: int) -> None:
        self._rank = rank
        self._tensors: list[tuple[torch.Tensor, ...]] = []
        for fd in fds:
            memory = mmap.mmap(fd, arena_file_bytes(num_layers, arena_bytes))
            layers = torch.frombuffer(memory, dtype=torch.uint8).view(num_layers, -1)
            self._tensors.append(layers[:, :arena_bytes].unbind(0))

    def local(self, layer: int) -> torch.Tensor:
        return self._tensors[self._rank][layer]

    def peer(self, rank: int, layer: int) -> torch.Tensor:
        return self._tensors[rank][layer]

    def close(self) -> None:
        self._tensors.clear()
