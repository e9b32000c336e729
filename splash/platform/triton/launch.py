"""What every launch needs: which target the kernels run on, tile sizes for it, tensor descriptors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tiles:
    """A kernel's tile: rows x columns of the result, `depth` of the summed dim, and how to compile for it.

    Attributes:
        tma: tensor copy engine where the shapes allow it.
        swap: compute the transpose, where rows are few.
        precision: of products of float32; others are exact before they are summed.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    swap: bool = False
    precision: str = "ieee"


@dataclass(frozen=True)
class Target:
    """The device that kernels run on.

    Attributes:
        kind: "cuda", "hip", or "interpreter" where TRITON_INTERPRET runs kernels on the CPU.
        capability: major compute capability of a CUDA device, 0 elsewhere.
        processors: multiprocessors (compute units).
    """

    kind: str
    capability: int
    processors: int

    @property
    def has_tma(self) -> bool:
        """Whether the device has a tensor copy engine."""
        return self.capability >= 9


@functools.cache
def target_of(device: torch.device) -> Target:
    """What `device` is. Interpreted kernels take no notice of it."""
    if knobs.runtime.interpret or device.type == "cpu":
        return Target("interpreter", 0, 4)
    properties = torch.cuda.get_device_properties(device)
    kind = "hip" if torch.version.hip else "cuda"
    return Target(kind, properties.major if kind == "cuda" else 0, properties.multi_processor_count)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A tensor descriptor of a matrix whose blocks are rows x columns."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def describable(x: torch.Tensor) -> bool:
    """Whether TMA can address a matrix: its start and its rows on multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) == 1
