"""Where what the host works out for a step lands on the device: anew each step, or where a graph looks for it.

The host's part of a step is the same code whether the step runs eagerly or as a graph: it uploads arrays, and names the
batches that will attend. Only this differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from splash.platform.base import AttentionBatch, AttentionBuffers, CapturableAttention


class StepInputs(ABC):
    """Takes what the host has for one step, in an order that is the same every step of a kind."""

    @abstractmethod
    def upload(self, array: np.ndarray) -> Tensor:
        """The array on the device."""

    @abstractmethod
    def attends(self, batch: AttentionBatch, num_heads: int) -> None:
        """`batch` will attend with so many heads."""


class EagerInputs(StepInputs):
    """New tensors for every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def attends(self, batch: AttentionBatch, num_heads: int) -> None:
        """Backends plan when they first see a batch."""


class FixedInputs(StepInputs):
    """Tensors that the first step makes and later steps fill, in the order of the first.

    A step may begin only once the uploads of the step before have ended.

    Args:
        device: the rank's.
        attention: makes the plans of batches.
        max_pages: most pages of a batch.
        page_size: token positions a page.
        dtype: of queries.
    """

    def __init__(
        self, device: torch.device, attention: CapturableAttention, max_pages: int, page_size: int, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._attention = attention
        self._max_pages, self._page_size, self._dtype = max_pages, page_size, dtype
        self._tensors: list[tuple[Tensor, Tensor]] = []  # pinned on the host, and on the device
        self._batches: list[AttentionBuffers] = []
        self._next_tensor = self._next_batch = 0

    def begin(self) -> None:
        """Start over for the next step."""
        self._next_tensor = self._next_batch = 0

    def upload(self, array: np.ndarray) -> Tensor:
        source = torch.from_numpy(array)
        if self._next_tensor == len(self._tensors):
            pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._device.type == "cuda")
            self._tensors.append((pinned, torch.empty_like(source, device=self._device)))
        host, device = self._tensors[self._next_tensor]
        assert host.shape == source.shape and host.dtype == source.dtype, "a step of another kind"
        self._next_tensor += 1
        host.copy_(source)
        return device.copy_(host, non_blocking=True)

    def attends(self, batch: AttentionBatch, num_heads: int) -> None:
        if self._next_batch == len(self._batches):
            rows = len(batch.row_positions)  # type: ignore[arg-type]
            made = self._attention.buffers(rows, self._max_pages, num_heads, self._page_size, self._dtype)
            self._batches.append(made)
        buffers = self._batches[self._next_batch]
        self._next_batch += 1
        self._attention.bind(batch, buffers)
        buffers.load(batch)
