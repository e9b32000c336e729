"""One-sided copies between mapped arenas, in the calling thread or behind it in a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from splash.platform.base import Completion, CopyEngine, Transfer


class ThreadCompletion(Completion):
    """Completion of work in the copy thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class CpuTransfer(Transfer):
    """Copies with memcpy."""

    def __init__(self, extents: np.ndarray, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._extents = [tuple(extent) for extent in extents.tolist()]
        self._regions = list(zip(targets, sources, strict=True))

    def run(self, first: int = 0, count: int | None = None) -> None:
        end = None if count is None else first + count
        for target, source in self._regions[first:end]:
            for to, start, size in self._extents:
                target[to : to + size].copy_(source[start : start + size])


class CpuCopyEngine(CopyEngine):
    """Copies with memcpy, which releases the interpreter, so that a thread of copies runs beside compute."""

    is_queued = False

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def prepare(
        self, extents: np.ndarray, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Transfer:
        return CpuTransfer(extents, targets, sources)

    def begin(self, work: Callable[[], None]) -> Completion:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "splash-copies")
        return ThreadCompletion(self._pool.submit(work))
