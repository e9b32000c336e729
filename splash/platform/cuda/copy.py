"""One-sided copies between mapped arenas, queued on the device: in the caller's stream, or behind it in another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from splash.platform.base import Completion, CopyEngine
from splash.platform.cuda.runtime import runtime


class QueuedCompletion(Completion):
    """Work queued in another stream, which the current one waits for; the host goes on."""

    def __init__(self, done: torch.cuda.Event, error: Exception | None) -> None:
        self._done = done
        self._error = error

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        if self._error is not None:
            raise self._error


class CudaCopyEngine(CopyEngine):
    """Copies by the GPU's copy engines, which leave its multiprocessors to compute."""

    def __init__(self, device: torch.device) -> None:
        # Copies hide behind compute, so compute goes first where both could.
        self._stream = torch.cuda.Stream(device, priority=0)

    def copy(self, target: torch.Tensor, source: torch.Tensor, extents: np.ndarray) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        runtime().copy(target.data_ptr(), source.data_ptr(), extents, stream)

    def begin(self, work: Callable[[], None]) -> Completion:
        self._stream.wait_stream(torch.cuda.current_stream())
        error = None
        with torch.cuda.stream(self._stream):
            try:
                work()
            except Exception as failure:  # told by wait, as for work in a thread
                error = failure
            done = self._stream.record_event()
        return QueuedCompletion(done, error)
