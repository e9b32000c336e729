"""One-sided copies between mapped arenas, in the calling thread or behind it in a thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from splash.platform.base import Completion, CopyEngine


class ThreadCompletion(Completion):
    """Completion of work in the copy thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class CpuCopyEngine(CopyEngine):
    """Copies with memcpy, which releases the interpreter, so that a thread of copies runs beside compute."""

    is_queued = False

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, extents: np.ndarray) -> None:
        for to, start, size in extents.tolist():
            target[to : to + size].copy_(source[start : start + size])

    def begin(self, work: Callable[[], None]) -> Completion:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "splash-copies")
        return ThreadCompletion(self._pool.submit(work))
