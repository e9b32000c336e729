"""Sums over ranks in one kernel: for messages whose bytes take less time than a collective's meetings do.

Every rank has a region that all ranks map. Program p of a rank's kernel
    copies its part of the rank's input into the region, to a place that only program p ever uses,
    adds one to a counter of program p in every peer's region, and waits until all peers have done so to its own,
    and adds up that part of all inputs, read from the peers, in the order of ranks and in float32.
So programs meet only those of their own number, and every rank gets the same bits.

Places are double, and calls take turns. The first rank that has waited in a call has met all peers: none can have added
for a later call yet. So whoever has waited knows that all peers have written their input of this call and read what
they wanted in the call before, and it may write over its own of that call in the next. What a call waits for is counted
on the device, so that a graph can hold calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton import knobs

from splash.platform.base import Arenas
from splash.platform.triton.launch import next_power_of_2

PART_BYTES = 4096  # of the input, a program's
MAX_BYTES = 1 << 20
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COUNTER_BYTES = 32  # apart, so that programs do not wait at the same place of the cache
_POLLS_A_SECOND = 8_000_000  # at most: each is a round trip to the cache of the GPU, of about 0.25 us on an H200


@triton.jit(debug=True, do_not_specialize=["rank", "max_polls"])
def sum_kernel(
    x_ptr, out_ptr, regions_ptr, calls_ptr, size, first, last, rank, max_polls,
    RANKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    COUNTER_BYTES: tl.constexpr, PART_BYTES: tl.constexpr,
):  # fmt: skip
    """Elements first .. last - 1 of the sum over ranks of x [size]. `out` may be x where that is all of them.

    `regions_ptr` has every rank's address as int64, `calls_ptr` how many calls each program has had, int64 [PARTS].
    """
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program)
    half = (call % 2).to(tl.int32)
    x_X = tl.arange(0, BLOCK)
    i_X = program * BLOCK + x_X
    region = tl.load(regions_ptr + rank)
    place = PARTS * COUNTER_BYTES + (program * 2 + half) * PART_BYTES
    data_ptr = tl.multiple_of((region + place).to(x_ptr.dtype), 16)
    tl.store(data_ptr + x_X, tl.load(x_ptr + i_X, mask=i_X < size), mask=i_X < size)
    tl.debug_barrier()  # all of the part is written before any peer is told

    t_T = tl.arange(0, BLOCK_T)
    counter_bytes = program * COUNTER_BYTES
    is_peer_T = (t_T < RANKS) & (t_T != rank)
    regions_T = tl.load(regions_ptr + t_T, mask=is_peer_T, other=0)
    tl.atomic_add((regions_T + counter_bytes).to(tl.pointer_type(tl.int32)), 1, is_peer_T, sem="release", scope="sys")
    counter_ptr = (region + counter_bytes).to(tl.pointer_type(tl.int32))
    wanted = ((call + 1) * (RANKS - 1)).to(tl.int32)  # counters wrap around, and so does this
    ahead = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="sys") - wanted
    polls = 0
    while (ahead < 0) & (polls < max_polls):
        ahead = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="sys") - wanted
        polls += 1
    tl.device_assert(ahead >= 0, "a sum over ranks: a peer did not come in time")
    tl.store(calls_ptr + program, call + 1)
    tl.debug_barrier()

    is_own_X = (i_X >= first) & (i_X < last)
    sum_X = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        part_ptr = tl.multiple_of((tl.load(regions_ptr + peer) + place).to(x_ptr.dtype), 16)
        sum_X += tl.load(part_ptr + x_X, mask=is_own_X, other=0.0, volatile=True).to(tl.float32)
    tl.store(out_ptr + (i_X - first), sum_X, mask=is_own_X)


class PeerSums:
    """Sums of up to `max_bytes` over the ranks of one host, by one kernel each.

    Every rank calls the same operations with the same shapes in the same order, all in one stream, and no kernel starts
    before the one ahead of it in the stream has ended. A peer that does not come in time ends the kernel by an
    assertion, after which the device is of no more use to the process.

    Args:
        arenas: one layer, `region_bytes(max_bytes, part_bytes)` long, zeros at first. The caller closes it.
        rank: whose sums these are.
        ranks: T.
        timeout_s: how long to wait for a peer, roughly: at least that, or 268 s if that is less, and up to a few times
            as long.
        max_bytes: of an input.
        part_bytes: of the input, a program's: a multiple of 128.
    """

    def __init__(
        self,
        arenas: Arenas,
        rank: int,
        ranks: int,
        timeout_s: float,
        max_bytes: int = MAX_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        regions = [arenas.peer(peer, 0) for peer in range(ranks)]
        assert all(len(region) >= region_bytes(max_bytes, part_bytes) for region in regions) and part_bytes % 128 == 0
        device = regions[rank].device
        self._rank, self._ranks, self._max_bytes, self._part_bytes = rank, ranks, max_bytes, part_bytes
        self._parts = _parts(max_bytes, part_bytes)
        self._max_polls = min(int(timeout_s * _POLLS_A_SECOND), 2**31 - 1)
        self._regions = torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64, device=device)
        self._calls = torch.zeros(self._parts, dtype=torch.int64, device=device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether sums of `x` can be made here."""
        return 0 < x.nbytes <= self._max_bytes and x.dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`Communicator.all_reduce`, into x itself."""
        self._run(x, x, 0, x.numel())
        return x

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`Communicator.reduce_scatter`."""
        assert len(counts) == self._ranks and sum(counts) == x.shape[0], (tuple(x.shape), counts)
        width = math.prod(x.shape[1:])
        first = sum(counts[: self._rank]) * width
        out = x.new_empty((counts[self._rank], *x.shape[1:]))
        self._run(x, out, first, first + out.numel())
        return out

    def _run(self, x: torch.Tensor, out: torch.Tensor, first: int, last: int) -> None:
        assert self.fits(x) and x.is_contiguous(), (x.shape, x.stride(), x.dtype)
        # Sums of addresses do not overflow, and to look costs more than the rest of the kernel does.
        options = {} if knobs.runtime.interpret else {"sanitize_overflow": False}
        sum_kernel[(_parts(x.nbytes, self._part_bytes),)](
            x, out, self._regions, self._calls, x.numel(), first, last, self._rank, self._max_polls,
            RANKS=self._ranks, BLOCK_T=next_power_of_2(self._ranks), BLOCK=self._part_bytes // x.itemsize,
            PARTS=self._parts, COUNTER_BYTES=_COUNTER_BYTES, PART_BYTES=self._part_bytes, **options,
        )  # fmt: skip


def region_bytes(max_bytes: int = MAX_BYTES, part_bytes: int = PART_BYTES) -> int:
    """Bytes of a rank's region: a counter for every program, then two places for each."""
    return _parts(max_bytes, part_bytes) * (_COUNTER_BYTES + 2 * part_bytes)


def _parts(num_bytes: int, part_bytes: int) -> int:
    return -(-num_bytes // part_bytes)
