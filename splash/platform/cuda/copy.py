"""One-sided copies between mapped arenas, queued on the device: in the caller's stream, or behind it in another."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch

from splash.platform.base import Completion, CopyEngine
from splash.platform.cuda.runtime import runtime

# A copy engine takes about 4 us to be told of an extent, in which it moves 1.5 MB from a peer over NVLink 4.
_LONG_EXTENT_BYTES = 1 << 20
_FEW_EXTENTS = 8


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


class CudaCopyEngine(CopyEngine):
    """Long extents by the GPU's copy engines, which leave its multiprocessors to compute; many short ones by a kernel.

    The kernel has few programs: 16 reach three quarters of the link, and slow compute down by less than a tenth.
    """

    is_queued = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._has_kernel = find_spec("triton") is not None

    def copy(self, target: torch.Tensor, source: torch.Tensor, extents: np.ndarray) -> None:
        is_long = len(extents) <= _FEW_EXTENTS or extents[:, 2].sum() >= len(extents) * _LONG_EXTENT_BYTES
        if is_long or not self._has_kernel:
            runtime().copy(target.data_ptr(), source.data_ptr(), extents, torch.cuda.current_stream().cuda_stream)
            return
        from splash.platform.triton.pages import copy_extents

        copy_extents(target, source, extents)

    def begin(self, work: Callable[[], None]) -> Completion:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return QueuedCompletion(self._stream.record_event())
