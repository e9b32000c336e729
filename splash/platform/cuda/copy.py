"""One-sided copies between mapped arenas, queued on the device: in the caller's stream, or behind it in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch

from splash.platform.base import Completion, CopyEngine, Transfer
from splash.platform.cuda.runtime import runtime

# A copy engine takes about 4 us to be told of an extent: over NVLink 4 it moves those of 7.5 MB on average at 306 GB/s,
# those of 15 MB at 336 and large ones at 366. The kernel reaches 328 with any, and with 32 programs already, which slow
# compute down by less than a tenth, the copy engine by a third of that.
_LONG_EXTENT_BYTES = 8 << 20
_FEW_EXTENTS = 8
_PROGRAMS = 32


class QueuedCompletion(Completion):
    """Work queued in another stream, which the current one waits for; the host goes on."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self._done)
        after.record(stream)
        self._waits.append((before, after))

    def waited_s(self) -> float:
        for _, after in self._waits:
            after.synchronize()
        return sum(before.elapsed_time(after) for before, after in self._waits) / 1e3


class ExtentTransfer(Transfer):
    """Few long ranges, each by a copy engine, which leaves the GPU's multiprocessors to compute."""

    def __init__(self, extents: np.ndarray, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._extents = extents
        self._regions = [(to.data_ptr(), start.data_ptr()) for to, start in zip(targets, sources, strict=True)]

    def run(self, first: int = 0, count: int | None = None) -> None:
        stream, end = torch.cuda.current_stream().cuda_stream, None if count is None else first + count
        for target, source in self._regions[first:end]:
            runtime().copy(target, source, self._extents, stream)


class ChunkTransfer(Transfer):
    """Many short ranges, those of all regions in one launch of a kernel."""

    def __init__(
        self,
        extents: np.ndarray,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        from splash.platform.triton.pages import chunk_table, region_table

        self._table = chunk_table(extents, targets[0].device)
        self._regions = region_table(targets, sources, targets[0].device)
        tensors = (self._regions, self._table.words, self._table.bytes)
        self._on_device = [tensor for tensor in tensors if tensor.is_cuda]
        self._uploaded = torch.cuda.current_stream().record_event()

    def run(self, first: int = 0, count: int | None = None) -> None:
        from splash.platform.triton.pages import copy_chunks

        stream = torch.cuda.current_stream()
        stream.wait_event(self._uploaded)
        for tensor in self._on_device:
            tensor.record_stream(stream)
        end = None if count is None else first + count
        copy_chunks(self._regions[first:end], self._table, _PROGRAMS)


class CudaCopyEngine(CopyEngine):
    """Long extents by the GPU's copy engines, which leave all of it to compute; many short ones by a kernel."""

    is_queued = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._has_kernel = find_spec("triton") is not None
        if self._has_kernel:
            self._compile(device)

    def _compile(self, device: torch.device) -> None:
        """Have the kernel ready before a switch needs it, which takes a third of a second."""
        memory = torch.zeros(64 * _FEW_EXTENTS, dtype=torch.uint8, device=device)
        for size in (16, 1):
            starts = 32 * np.arange(2 * _FEW_EXTENTS, dtype=np.int64)
            extents = np.stack((starts, starts + 16, np.full_like(starts, size)), axis=1)
            ChunkTransfer(extents, [memory], [memory]).run()

    def prepare(
        self, extents: np.ndarray, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Transfer:
        is_long = len(extents) <= _FEW_EXTENTS or extents[:, 2].sum() >= len(extents) * _LONG_EXTENT_BYTES
        if not targets or is_long or not self._has_kernel:
            return ExtentTransfer(extents, targets, sources)
        return ChunkTransfer(extents, targets, sources)

    def begin(self, work: Callable[[], None]) -> Completion:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return QueuedCompletion(self._stream.record_event())
