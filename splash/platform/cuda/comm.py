"""Collectives on GPUs: NCCL where every rank has a GPU of its own, the host's memory where ranks share one.

Where peers' memory takes atomic operations, short sums are made by a kernel of our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from splash.core.errors import WorkerError
from splash.platform.base import Arenas, Communicator

if TYPE_CHECKING:
    from splash.platform.triton.sums import PeerSums

_T = TypeVar("_T")


class StagedCommunicator(Communicator):
    """Collectives of device tensors through the host, one at a time and each waited for; none with one rank.

    NCCL refuses ranks that share a GPU. This is for checking layouts with more ranks than GPUs, not for speed. It has
    what the communicator on the host has: sums in rank order, and peers that are missing or astray named.
    """

    def __init__(self, host: Communicator, device: torch.device) -> None:
        self.rank, self.size = host.rank, host.size
        self._host = host
        self._device = device

    def barrier(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._host.barrier()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._through_host(x, self._host.all_reduce)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._through_host(x, lambda host: self._host.all_gather(host, counts))

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._through_host(x, lambda host: self._host.reduce_scatter(host, counts))

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return self._through_host(x, lambda host: self._host.all_to_all(host, send, receive))

    def _through_host(self, x: torch.Tensor, collective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return x if self.size == 1 else collective(x.cpu()).to(self._device)

    def close(self) -> None:
        self._host.close()


class NcclCommunicator(Communicator):
    """Collectives by NCCL, queued in the current stream: the host goes on, and what it queues next sees the result.

    The process group is the communicator's own; torch.distributed's default group is neither needed nor made. Uneven
    counts are padded to the longest, so that a collective completes on no rank before all have come to it; a rank
    without rows takes part in full.

    Args:
        host: collectives over host memory, for meeting and for naming who is missing.
        store_fd: a memory file shared by the ranks, empty at first, in which NCCL's ranks find each other.
        device: this rank's.
        timeout_s: how long a collective may take before NCCL's watchdog ends the process.
    """

    def __init__(self, host: Communicator, store_fd: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = host.rank, host.size
        self._host = host
        c10d: Any = distributed
        self._store = c10d.FileStore(f"/proc/self/fd/{store_fd}", self.size)
        self._store.set_timeout(timedelta(seconds=timeout_s))
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group = c10d.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        self._device = device
        self._failed = False
        # Connect now, while the host's communicator can still say who is missing.
        host.barrier()
        self.all_reduce(torch.zeros(1, device=device))
        self.barrier()

    def barrier(self) -> None:
        # On the host, which waits as a barrier must and knows who is missing.
        torch.cuda.current_stream(self._device).synchronize()
        self._host.barrier()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            self._named("all_reduce", lambda: self._group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(counts) == self.size and counts[self.rank] == x.shape[0], (tuple(x.shape), counts)
        most = max(counts)
        out = x.new_empty((self.size * most, *x.shape[1:]))
        if out.numel():
            source, target = _bytes(_padded(x, most)), _bytes(out)
            self._named("all_gather", lambda: self._group._allgather_base(target, source))
        if min(counts) == most:
            return out
        blocks = out.view(self.size, most, *x.shape[1:])
        return torch.cat([block[:count] for block, count in zip(blocks.unbind(0), counts, strict=True)])

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(counts) == self.size and sum(counts) == x.shape[0], (tuple(x.shape), counts)
        most = max(counts)
        if min(counts) != most:
            x = torch.cat([_padded(part, most) for part in x.split(list(counts))])
        out = x.new_empty((most, *x.shape[1:]))
        if out.numel():
            self._named("reduce_scatter", lambda: self._group._reduce_scatter_base(out, x))
        return out[: counts[self.rank]]

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        assert len(send) == len(receive) == self.size and sum(send) == x.shape[0], (tuple(x.shape), send, receive)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        width = math.prod(x.shape[1:]) * x.itemsize
        source, target = _bytes(x), _bytes(out)
        split_in, split_out = [count * width for count in send], [count * width for count in receive]
        self._named("all_to_all", lambda: self._group.alltoall_base(target, source, split_out, split_in))
        return out

    def close(self) -> None:
        # A shutdown waits for what is queued, which after a failure may never end.
        self._group.abort() if self._failed else self._group.shutdown()
        self._host.close()

    def _named(self, name: str, operation: Callable[[], Any]) -> None:
        """Queue a collective; if it cannot be, say which."""
        try:
            operation().wait()
        except RuntimeError as error:
            self._failed = True
            raise WorkerError(f"{name} on rank {self.rank}: {error}") from error


class ShortSumsCommunicator(Communicator):
    """Short sums by one kernel over memory that all ranks map, everything else by another communicator.

    Args:
        rest: does everything else, and is closed with this.
        sums: each makes sums as long as it can that those before it cannot; all of them are queued in one stream.
        regions: their memory, closed with this.

    Attributes:
        rest: as given.
    """

    def __init__(self, rest: Communicator, sums: Sequence[PeerSums], regions: Sequence[Arenas]) -> None:
        self.rank, self.size = rest.rank, rest.size
        self.rest = rest
        self._sums, self._regions = sums, regions

    def barrier(self) -> None:
        self.rest.barrier()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._by(x).all_reduce(x)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self.rest.all_gather(x, counts)

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._by(x).reduce_scatter(x, counts)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return self.rest.all_to_all(x, send, receive)

    def close(self) -> None:
        self.rest.close()
        for regions in self._regions:
            regions.close()

    def _by(self, x: torch.Tensor) -> PeerSums | Communicator:
        return next((sums for sums in self._sums if sums.fits(x)), self.rest)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    """x with rows added up to `count`; what is in them does not matter, but it is finite."""
    if x.shape[0] == count:
        return x
    return torch.cat((x, x.new_zeros((count - x.shape[0], *x.shape[1:]))))
