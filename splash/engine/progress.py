"""How far each rank has come, in memory that launcher and ranks share: who holds up a step that does not end."""

from __future__ import annotations

import mmap
import os

import numpy as np


class ProgressBoard:
    """Counts, for each rank, the steps that it has received and those that its host is through with.

    Where collectives are queued on a device, the host of a rank is through with a step before the step has run; only
    rank 0 waits for it. So a rank that has stopped is the one that is behind.

    Args:
        fd: a memory file of `create`, inherited by the ranks.
        ranks: T.
    """

    def __init__(self, fd: int, ranks: int) -> None:
        self._counts = np.frombuffer(mmap.mmap(fd, 16 * ranks), dtype=np.int64).reshape(ranks, 2)

    @staticmethod
    def create(ranks: int) -> int:
        """Descriptor of a new board."""
        fd = os.memfd_create("splash-progress")
        os.ftruncate(fd, 16 * ranks)
        return fd

    def receive(self, rank: int) -> None:
        """`rank` has received another step."""
        self._counts[rank, 0] += 1

    def finish(self, rank: int) -> None:
        """The host of `rank` is through with the step that it received last."""
        self._counts[rank, 1] += 1

    def behind(self, steps: int) -> list[int]:
        """The ranks that hold up the last of `steps` steps: those that have not received it; else those whose host
        is in it, and of these rank 0 only where there is no other, since it waits for all."""
        received, done = self._counts.T
        asleep = np.flatnonzero(received < steps).tolist()
        if asleep:
            return asleep
        busy: list[int] = np.flatnonzero(done < steps).tolist()
        return [rank for rank in busy if rank] or busy
