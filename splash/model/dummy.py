"""Random weights in the place of a checkpoint, so that a model's shapes can be run without one."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

ROUTER_BIAS = "e_score_correction_bias"


class DummyCheckpoint:
    """Reads as `Checkpoint` does. The same tensor has the same values in every rank and process on the same device.

    Matrices keep the variance of their input, norms are 1 and biases 0, so that activations stay in range however
    many layers there are and routers choose every expert alike.

    Args:
        device: where tensors are made, which for large ones matters.
        dtype: of the tensors.
        same_experts: routers' correction biases outweigh their scores, so that all rows of a layer choose the same
            experts, as they do with weights that are all drawn from one narrow range.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, same_experts: bool = False) -> None:
        self._device = device
        self._dtype = dtype
        self._same_experts = same_experts

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        """A tensor of the whole `shape`, or a slice of its first and second dims."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        if self._same_experts and name.endswith(ROUTER_BIAS):
            order = torch.randperm(*shape, generator=generator, device=self._device)  # scores are less than 1
            return order.to(self._dtype)[rows or slice(None)]
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, value, dtype=self._dtype, device=self._device)[rows or slice(None)]
        whole = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        return whole[rows or slice(None), columns or slice(None)].mul_(1 / math.sqrt(shape[-1]))
