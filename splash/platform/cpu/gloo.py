"""Collectives over torch.distributed's gloo: what shared memory is checked against, and used where it cannot be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from splash.core.errors import WorkerError
from splash.platform.base import Communicator

_T = TypeVar("_T")
_ARRIVALS_S = 1.0  # after a failure, how long to wait for the peers to say that they had arrived


class GlooCommunicator(Communicator):
    """Every collective is gloo's all-to-all of bytes, so that any dtype works; sums are local and in rank order.

    The process group is the communicator's own; torch.distributed's default group is neither needed nor made.
    Unlike shared memory, gloo does not notice peers that call another collective with the same sizes.

    Args:
        fd: a memory file shared by the ranks, empty at first, in which they find each other.
        rank: this rank.
        size: T.
        timeout_s: how long a collective waits for a peer.
    """

    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._count = 0
        c10d: Any = distributed
        self._store = c10d.FileStore(f"/proc/self/fd/{fd}", size)
        self._store.set_timeout(timedelta(seconds=timeout_s))
        gloo = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = self._named("join", lambda: gloo(self._store, rank, size, options))

    def barrier(self) -> None:
        self._named("barrier", lambda: self._group.barrier().wait())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        parts = self._gather("all_reduce", flat, [flat.numel()] * self.size)
        return x.copy_(_sum(parts.view(self.size, *x.shape)))

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(counts) == self.size and counts[self.rank] == x.shape[0], (tuple(x.shape), counts)
        return self._gather("all_gather", x, counts)

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(counts) == self.size and sum(counts) == x.shape[0], (tuple(x.shape), counts)
        own = counts[self.rank]
        parts = self._exchange("reduce_scatter", x, counts, [own] * self.size)
        return _sum(parts.view(self.size, own, *x.shape[1:]))

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        assert len(send) == len(receive) == self.size and sum(send) == x.shape[0], (tuple(x.shape), send, receive)
        return self._exchange("all_to_all", x, send, receive)

    def close(self) -> None:
        del self._group, self._store

    def _gather(self, name: str, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._exchange(name, torch.cat([x] * self.size), [x.shape[0]] * self.size, counts)

    def _exchange(self, name: str, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        row_bytes = math.prod(x.shape[1:]) * x.itemsize
        source, target = x.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        send_bytes, receive_bytes = [n * row_bytes for n in send], [n * row_bytes for n in receive]
        self._named(name, lambda: self._group.alltoall_base(target, source, receive_bytes, send_bytes).wait())
        return out

    def _named(self, name: str, operation: Callable[[], _T]) -> _T:
        """Run an operation of gloo's; if it fails, say which ranks never came to it."""
        self._count += 1
        try:
            return operation()
        except RuntimeError as error:
            missing = self._missing()
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "a peer"
            raise WorkerError(
                f"{name}: {who} did not arrive or failed in it (rank {self.rank} waits {self._timeout_s:g} s): {error}",
                missing[0] if missing else None,
            ) from error

    def _missing(self) -> list[int]:
        """Ranks that do not report, within a moment of this rank's failure, to have failed in the same collective."""
        self._store.set(f"failed {self._count} {self.rank}", "")
        missing = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + _ARRIVALS_S
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._store.check([f"failed {self._count} {rank}"])]
            time.sleep(0.01)
        return missing


def _sum(parts_T: torch.Tensor) -> torch.Tensor:
    """((part 0 + part 1) + part 2) + ..., in float32 for narrower floating types, rounded once."""
    narrow = parts_T.dtype.is_floating_point and parts_T.itemsize < 4
    total, *others = parts_T.float() if narrow else parts_T
    for part in others:
        total = total + part
    return total.to(parts_T.dtype)
