"""Collectives of processes on one host over shared memory.

Every rank has two mailboxes, used in turn, and a control line with the number of the last round it published. A round
is: fill own mailbox, publish, wait until every peer has published, read the peers' mailboxes. Two mailboxes make one
wait a round enough: a rank fills a mailbox again two rounds later, after it has seen every peer publish the round
between, and a peer publishes that only after it has done reading.

Ordering: a rank's stores to its mailbox must become visible before its store to the control line, and a peer's loads
must not be reordered the other way. x86 promises both for ordinary memory (total store order), so plain stores suffice;
other architectures do not, and there the platform uses `GlooCommunicator`.

Waiting yields the core (more ranks than cores is the common case), and after `_SPIN_S` it sleeps between looks so that
the peer waited for gets the core.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Sequence

import torch

from splash.core.errors import WorkerError
from splash.platform.base import Communicator
from splash.platform.cpu.shared import LINE_WORDS, MAILBOX_BYTES, header_bytes, mailbox_memory_bytes, table_words

_SPIN_S = 0.002
_SLEEP_S = 50e-6
_TWO_PHASE_RANKS, _TWO_PHASE_BYTES = 4, 256 << 10  # from here on all_reduce is faster as reduce_scatter, all_gather
_MAX_VIEWS = 4096

# Words of a rank's control line.
_SEQUENCE, _LEFT, _DESCRIPTORS = 0, 1, 2  # from _DESCRIPTORS on: (signature, elements), one pair a mailbox

_OPERATIONS = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_BARRIER, _ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = range(5)
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ACCUMULATE_IN_FLOAT32 = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point and dtype.itemsize < 4)


class ShmCommunicator(Communicator):
    """Collectives over one shared mapping of `mailbox_memory_bytes(size)` bytes.

    A rank joins a mapping once. Peers that call another collective, or with other counts, raise `WorkerError` on every
    rank instead of exchanging the wrong bytes. After any `WorkerError` the group is unusable.

    Sums are ((rank 0 + rank 1) + rank 2) + ...; floating types of less than 32 bits are summed in float32 and rounded
    once. With one rank every collective returns its argument.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        assert len(memory) >= mailbox_memory_bytes(size) and 0 <= rank < size
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._next = 1  # the coming round; memory starts as zeros, so no rank has published it
        self._control = memoryview(memory)[: header_bytes(size)].cast("q")
        self._line = rank * LINE_WORDS
        self._peers = tuple((peer, peer * LINE_WORDS) for peer in range(size) if peer != rank)
        self._tables = size * LINE_WORDS
        boxes = torch.frombuffer(memory, dtype=torch.uint8, offset=header_bytes(size), count=2 * size * MAILBOX_BYTES)
        self._boxes = boxes.view(2, size, MAILBOX_BYTES)
        self._views: dict[tuple[int, torch.dtype, int], tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def barrier(self) -> None:
        if self.size > 1:
            self._round(_BARRIER << 56, 0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        flat = x.view(-1)
        num = flat.numel()
        if self.size >= _TWO_PHASE_RANKS and num * x.itemsize >= _TWO_PHASE_BYTES:
            counts = [num * (rank + 1) // self.size - num * rank // self.size for rank in range(self.size)]
            own = self._reduce_scatter(_ALL_REDUCE, flat, counts)
            self._all_gather(_ALL_REDUCE, own, counts, flat)
            return x
        chunk = MAILBOX_BYTES // x.itemsize
        if num <= chunk:
            self._reduce_chunk(_signature(_ALL_REDUCE, x.dtype, num), flat)
        else:
            for part in flat.split(chunk):
                self._reduce_chunk(_signature(_ALL_REDUCE, x.dtype, num), part)
        return x

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(counts) == self.size and counts[self.rank] == x.shape[0], (tuple(x.shape), counts)
        if self.size == 1:
            return x
        out = x.new_empty((sum(counts), *x.shape[1:]))
        width = math.prod(x.shape[1:])
        self._all_gather(_ALL_GATHER, x.view(-1), [count * width for count in counts], out.view(-1))
        return out

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(counts) == self.size and sum(counts) == x.shape[0], (tuple(x.shape), counts)
        if self.size == 1:
            return x
        width = math.prod(x.shape[1:])
        out = self._reduce_scatter(_REDUCE_SCATTER, x.view(-1), [count * width for count in counts])
        return out.view(counts[self.rank], *x.shape[1:])

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        assert len(send) == len(receive) == self.size and sum(send) == x.shape[0], (tuple(x.shape), send, receive)
        if self.size == 1:
            return x
        flat = x.view(-1)
        num = flat.numel()
        width = math.prod(x.shape[1:])
        out = x.new_empty((sum(receive), *x.shape[1:]))
        chunk = MAILBOX_BYTES // x.itemsize
        signature = _signature(_ALL_TO_ALL, x.dtype, width)

        table = self._table(self.rank)
        start = 0
        for peer, count in enumerate(send):
            self._control[table + peer] = start
            start += count * width
        self._control[table + self.size] = start
        offset = self._descriptor()
        self._fill(flat, 0, min(num, chunk))
        parity = self._round(signature, num)

        segments = []  # (peer, where its rows go, their start and stop in all that the peer sends)
        longest = num
        targets = out.view(-1).split([count * width for count in receive])
        for peer, (count, target) in enumerate(zip(receive, targets, strict=True)):
            table = self._table(peer, parity)
            start, stop = self._control[table + self.rank], self._control[table + self.rank + 1]
            if stop - start != count * width:
                raise self._disagreement(_ALL_TO_ALL, peer, f"sends {stop - start}", f"expects {count * width}")
            segments.append((peer, target, start, stop))
            if peer != self.rank:
                longest = max(longest, self._control[peer * LINE_WORDS + offset + 1])

        for window in range(0, max(longest, 1), chunk):
            if window:
                self._fill(flat, window, min(num, window + chunk))
                parity = self._round(signature, num)
            boxes = self._boxes_of(parity, x.dtype, chunk)[1]
            for peer, target, start, stop in segments:
                low, high = max(start, window), min(stop, window + chunk)
                if low < high:
                    part = target if high - low == stop - start else target[low - start : high - start]
                    part.copy_(boxes[peer][low - window : high - window])
        return out

    def close(self) -> None:
        """Tell the peers, so that one that still waits for this rank fails at once. Idempotent."""
        if self._line >= 0:
            self._control[self._line + _LEFT] = 1
            self._line = -1
            self._views.clear()
            self._control.release()

    def _reduce_chunk(self, signature: int, flat: torch.Tensor) -> None:
        """Sum `flat`, which fits in a mailbox, over ranks, in place."""
        num = flat.numel()
        _, boxes = self._boxes_of(self._next & 1, flat.dtype, num)
        boxes[self.rank].copy_(flat)
        self._round(signature, num)
        _sum(boxes, flat)

    def _all_gather(self, operation: int, flat: torch.Tensor, nums: Sequence[int], out: torch.Tensor) -> None:
        """Concatenate the ranks' `nums` elements in `out`."""
        chunk = MAILBOX_BYTES // flat.itemsize
        longest, own = max(nums), nums[self.rank]
        uniform = min(nums) == longest
        signature = _signature(operation, flat.dtype, out.numel())
        offset = self._descriptor()
        for window in range(0, max(longest, 1), chunk):
            self._fill(flat, window, min(own, window + chunk))
            parity = self._round(signature, own)
            if not window:
                for peer, line in self._peers:
                    if self._control[line + offset + 1] != nums[peer]:
                        theirs = f"gives {self._control[line + offset + 1]}"
                        raise self._disagreement(operation, peer, theirs, f"expects {nums[peer]}")
            if uniform:
                size = min(longest - window, chunk)
                if size > 0:
                    rows = out.view(self.size, longest)
                    part = rows if size == longest else rows[:, window : window + size]
                    part.copy_(self._boxes_of(parity, flat.dtype, size)[0])
                continue
            position = 0
            for rank, num in enumerate(nums):
                size = min(num - window, chunk)
                if size > 0:
                    box = self._boxes_of(parity, flat.dtype, size)[1][rank]
                    out[position + window : position + window + size].copy_(box)
                position += num

    def _reduce_scatter(self, operation: int, flat: torch.Tensor, nums: Sequence[int]) -> torch.Tensor:
        """Sum over ranks of this rank's share of `flat`, whose shares have `nums` elements."""
        chunk = MAILBOX_BYTES // flat.itemsize
        num, own = flat.numel(), nums[self.rank]
        begin = sum(nums[: self.rank])
        out = flat.new_empty(own)
        signature = _signature(operation, flat.dtype, num)
        offset = self._descriptor()
        for window in range(0, max(num, 1), chunk):
            self._fill(flat, window, min(num, window + chunk))
            parity = self._round(signature, own)
            if not window:
                for peer, line in self._peers:
                    if self._control[line + offset + 1] != nums[peer]:
                        theirs = f"keeps {self._control[line + offset + 1]}"
                        raise self._disagreement(operation, peer, theirs, f"expects it to keep {nums[peer]}")
            low, high = max(begin, window), min(begin + own, window + chunk)
            if low < high:
                boxes, _ = self._boxes_of(parity, flat.dtype, min(num - window, chunk))
                part = out if high - low == own else out[low - begin : high - begin]
                _sum(boxes[:, low - window : high - window].unbind(0), part)
        return out

    def _boxes_of(self, parity: int, dtype: torch.dtype, num: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The first `num` elements of every rank's mailbox, [T, num] and rank by rank.

        Kept, since making a view costs as much as a small copy.
        """
        key = (parity, dtype, num)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # a view made in that mode could not be written to outside of it
                boxes = self._boxes[parity][:, : num * dtype.itemsize].view(dtype)
                views = self._views[key] = (boxes, boxes.unbind(0))
        return views

    def _fill(self, flat: torch.Tensor, start: int, stop: int) -> None:
        """Copy elements `start` to `stop` into this rank's mailbox of the coming round."""
        if start < stop:
            part = flat if stop - start == flat.numel() else flat[start:stop]
            self._boxes_of(self._next & 1, flat.dtype, stop - start)[1][self.rank].copy_(part)

    def _descriptor(self) -> int:
        """Offset in a control line of the coming round's descriptor."""
        return _DESCRIPTORS + 2 * (self._next & 1)

    def _table(self, rank: int, parity: int | None = None) -> int:
        """First word of a rank's all_to_all table of a round; of the coming round by default."""
        parity = self._next & 1 if parity is None else parity
        return self._tables + (2 * rank + parity) * table_words(self.size)

    def _round(self, signature: int, elements: int) -> int:
        """Publish the coming round, wait for every peer to publish it, and check that it is the same collective.

        Returns:
            The round's parity: which mailboxes hold it.
        """
        control, number, line = self._control, self._next, self._line
        offset = _DESCRIPTORS + 2 * (number & 1)
        control[line + offset] = signature
        control[line + offset + 1] = elements
        control[line] = number
        for peer, peer_line in self._peers:
            if control[peer_line] < number:
                self._await(peer_line, number, signature)
            if control[peer_line + offset] != signature:
                ours, theirs = _describe(signature), _describe(control[peer_line + offset])
                raise WorkerError(f"ranks disagree: rank {self.rank} is in {ours}, rank {peer} in {theirs}", peer)
        self._next = number + 1
        return number & 1

    def _await(self, peer_line: int, number: int, signature: int) -> None:
        """Wait until a peer has published round `number`."""
        control, pause = self._control, os.sched_yield
        start = time.monotonic()
        spinning = True
        looks = 0
        while control[peer_line] < number:
            if spinning:
                pause()
                looks += 1
                if looks & 63:
                    continue
            else:
                time.sleep(_SLEEP_S)
            waited = time.monotonic() - start
            spinning = waited < _SPIN_S
            if not spinning:
                self._check_arrivals(number, signature, waited)

    def _check_arrivals(self, number: int, signature: int, waited: float) -> None:
        """Give up on the peers that have left the group, or on all that are missing once the timeout has passed."""
        # First who has left: a peer may arrive and then leave between the two looks.
        left = {peer for peer, line in self._peers if self._control[line + _LEFT]}
        missing = [peer for peer, line in self._peers if self._control[line] < number]
        gone = [peer for peer in missing if peer in left]
        if gone:
            raise WorkerError(f"{_describe(signature)}: {_name(gone)} left the group before it", gone[0])
        if missing and waited > self._timeout_s:
            raise WorkerError(
                f"{_describe(signature)}: {_name(missing)} did not arrive within {self._timeout_s:g} s "
                f"(rank {self.rank} waited)",
                missing[0],
            )

    def _disagreement(self, operation: int, peer: int, theirs: str, ours: str) -> WorkerError:
        return WorkerError(
            f"ranks disagree on the counts of {_OPERATIONS[operation]}: "
            f"rank {peer} {theirs} elements, rank {self.rank} {ours}",
            peer,
        )


def _signature(operation: int, dtype: torch.dtype, elements: int) -> int:
    """What all ranks must agree on in a round, in one word."""
    return operation << 56 | _DTYPE_CODES[dtype] << 48 | elements


def _describe(signature: int) -> str:
    operation = signature >> 56
    if operation == _BARRIER:
        return _OPERATIONS[operation]
    dtype = str(_DTYPES[signature >> 48 & 0xFF]).removeprefix("torch.")
    elements = signature & (1 << 48) - 1
    return f"{_OPERATIONS[operation]} of {elements} {dtype} elements{' a row' * (operation == _ALL_TO_ALL)}"


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + ..., in float32 for narrower floating types."""
    if out.dtype in _ACCUMULATE_IN_FLOAT32:
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
