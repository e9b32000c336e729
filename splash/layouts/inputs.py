"""Where what the host works out for a step lands on the device: anew each step, or where a graph looks for it.

The host's part of a step is the same code whether the step runs eagerly or as a graph: it uploads arrays, and names the
batches that will attend. Only this differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from splash.core.memory import ArenaGeometry
from splash.platform.base import AttentionBatch, AttentionBuffers, CapturableAttention, QueryShape
from splash.platform.host_copies import Staging, upload

MAX_ARRAYS = 16  # that a recorded step uploads, beside the plans of its batches
_ALIGNMENT = 16  # elements: kernels read what is aligned faster


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
        return upload(torch.from_numpy(array), self._device)

    def attends(self, batch: AttentionBatch, num_heads: int) -> None:
        """Backends plan when they first see a batch."""


class FixedInputs(StepInputs):
    """Tensors that the first step makes and later steps fill, in the order of the first, all of them with one copy.

    Args:
        device: the rank's.
        attention: makes the plans of batches.
        max_rows: most elements of an array.
        max_pages: most pages of a batch.
        geometry: of the arenas.
        dtype: of queries.
    """

    def __init__(
        self,
        device: torch.device,
        attention: CapturableAttention,
        max_rows: int,
        max_pages: int,
        geometry: ArenaGeometry,
        dtype: torch.dtype,
    ) -> None:
        self._attention = attention
        self._max_pages, self._geometry, self._dtype = max_pages, geometry, dtype
        self._pitch = -(-max_rows // _ALIGNMENT) * _ALIGNMENT
        self._all = torch.zeros(MAX_ARRAYS * self._pitch, dtype=torch.int64, device=device)
        self._staging = Staging(self._all)
        self._tensors: list[Tensor] = []
        self._batches: list[AttentionBuffers] = []
        self.begin()

    def begin(self) -> None:
        """Start over for the next step."""
        self._host = self._staging.next().numpy()
        self._next_tensor = self._next_batch = 0

    def upload(self, array: np.ndarray) -> Tensor:
        """Where the array, of int64, will be once it has been sent."""
        start = self._next_tensor * self._pitch
        if self._next_tensor == len(self._tensors):
            assert len(array) <= self._pitch and self._next_tensor < MAX_ARRAYS, "more than a step has"
            self._tensors.append(self._all[start : start + len(array)])
        device = self._tensors[self._next_tensor]
        assert array.dtype == np.int64 and array.shape == device.shape, "a step of another kind"
        self._host[start : start + len(array)] = array
        self._next_tensor += 1
        return device

    def send(self) -> None:
        """Queue the copy of what has been uploaded. Waits only for that of the step before the last."""
        self._staging.send(self._next_tensor * self._pitch)

    def attends(self, batch: AttentionBatch, num_heads: int) -> None:
        if self._next_batch == len(self._batches):
            rows = len(batch.row_positions)  # type: ignore[arg-type]
            spec, page_size = self._geometry.spec, self._geometry.page_size
            shape = QueryShape(num_heads, spec.latent_dim, spec.kv_lora_rank, page_size, self._dtype)
            self._batches.append(self._attention.buffers(rows, self._max_pages, shape))
        buffers = self._batches[self._next_batch]
        self._next_batch += 1
        self._attention.bind(batch, buffers)
        buffers.load(batch)
