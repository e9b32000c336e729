"""The border between SPLASH and hardware.

The launching process asks a `Platform` whether it is usable and has it create a group; each rank's process joins the
group and receives a `Rank`: its device, its arenas and its peers' (mapped, so that a peer can be read one-sided), a
communicator, an attention backend and fused kernels. A platform never sees a layout: it sees heads, rows and pages.

Shape suffixes: n rows, H heads, C kv-lora rank, R rotary dim, D hidden size, P page size, S slots, T ranks.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from splash.platform.span import HostSpan, Span

if TYPE_CHECKING:
    import numpy as np
    import torch

    from splash.core.memory import ArenaGeometry
    from splash.platform.kernels import Kernels

_T = TypeVar("_T")


@dataclass(frozen=True)
class Availability:
    """Whether a platform is usable here. `reason` says why (not); `remedy` what to do, empty when usable."""

    ok: bool
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class DeviceInfo:
    """One device: what it is called, its memory in bytes (total and free now), and what else its driver says of it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    state: str = ""


@dataclass(frozen=True)
class GroupHandle:
    """What the launching process hands to every rank so that the ranks find each other and each other's memory.

    `info` is serialisable; `fds` are file descriptors that the ranks must inherit. Closing releases what the
    launcher holds; memory goes with the last process that maps it.
    """

    info: Mapping[str, int | str | list[int]]
    fds: tuple[int, ...] = ()
    _open: list[int] = field(init=False, default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._open.extend(self.fds)

    def close(self) -> None:
        """Close the launcher's descriptors. Idempotent: whoever gets their numbers next keeps what is theirs."""
        while self._open:
            os.close(self._open.pop())


class Arenas(ABC):
    """The arenas of a group: one a layer a rank, addresses fixed for the life of the group."""

    @abstractmethod
    def local(self, layer: int) -> torch.Tensor:
        """This rank's arena of `layer`: uint8 [arena_bytes]."""

    @abstractmethod
    def peer(self, rank: int, layer: int) -> torch.Tensor:
        """A peer's arena of `layer` mapped for one-sided reads: uint8 [arena_bytes]. `peer(own rank)` is `local`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory. Nobody may look at any of the tensors after that."""


class Communicator(ABC):
    """Collectives over the group. Every rank calls the same sequence; rows of any count, zero included.

    Tensors are contiguous and on the rank's device; any dtype torch has. Splits are along dim 0. Every rank gets the
    same bits. On a device with queues a collective is queued like any other operation: what the caller does next on the
    device sees its result, and happens after what every rank that has rows did before. A peer that does not arrive
    within the timeout raises `WorkerError` naming the collective, and the ranks missing where they can be known.
    """

    rank: int
    size: int

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. Returns x's shape; x may be overwritten."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Concatenate over ranks. x [counts[rank], ...] -> [sum(counts), ...]."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Sum over ranks, keep own rows. x [sum(counts), ...] -> [counts[rank], ...]."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Row exchange. x [sum(send), ...], the rows for rank 0 first -> [sum(receive), ...], from rank 0 first."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


@dataclass(frozen=True)
class AttentionBatch:
    """Which rows attend to which pages, built once a step and used by every layer.

    Sequence b has rows `row_starts[b] : row_starts[b + 1]` and pages `page_starts[b] : page_starts[b + 1]`. A page is
    a slot of the KV tensor, and holds the positions number * P to number * P + P - 1. A row at position p attends to
    the positions <= p that the listed pages hold; these need not be all there are (position-sharded KV) and may be
    none.
    Rows need not be consecutive positions.

    Attributes (numpy arrays of int64 on the host; a platform uploads what it needs and keeps it in `device_state`):
        row_positions: [n]
        row_starts: [B + 1]
        slots: [pages]
        numbers: [pages], ascending within a sequence
        page_starts: [B + 1]
    """

    row_positions: object
    row_starts: object
    slots: object
    numbers: object
    page_starts: object
    device_state: dict[str, object] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class QueryShape:
    """What the batches of a layer have in common: queries [n, H, K] of `dtype`, whose values are the first of a key.

    Attributes:
        num_heads: H.
        key_dim: K = C + R.
        value_dim: C.
        page_size: P.
        dtype: of queries and cache.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    dtype: torch.dtype


BLIND_LSE = -3e4  # weighs nothing beside any sum of scores


class AttentionBackend(ABC):
    """Multi-query attention over a paged latent cache, the one attention that absorbed MLA needs."""

    @abstractmethod
    def attend(
        self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """softmax(scale q k^T) v for each row and head, in float32 inside.

        Args:
            q_nHK: [n, H, C + R], the absorbed queries.
            pages_SPK: [S, P, C + R], the cache; values are the first `value_dim` elements of a key.
            batch: which rows see which pages.
            scale: softmax scale.
            value_dim: C.

        Returns:
            out [n, H, value_dim] in q's dtype, and the natural log-sum-exp of the scaled scores [n, H] float32.
            A row that sees nothing gives out = 0 and an lse below `BLIND_LSE`, -inf as a rule.
        """

    @abstractmethod
    def attend_expanded(
        self,
        q_nHd: torch.Tensor,
        pages_SPK: torch.Tensor,
        batch: AttentionBatch,
        kv_b_HEC: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """The same attention with each head's keys and values computed from the latents; cheaper for many rows.

        Args:
            q_nHd: [n, H, N + R], queries before absorption.
            pages_SPK: [S, P, C + R], the cache.
            batch: which rows see which pages; every row sees something.
            kv_b_HEC: [H, N + V, C], which makes a head's N key dims and V value dims from a latent.
            scale: softmax scale.

        Returns:
            [n, H, V] in q's dtype.
        """


class AttentionBuffers(Protocol):
    """The plan of a batch on the device, at addresses that never change, so that a graph can hold them."""

    def load(self, batch: AttentionBatch) -> None:
        """Plan `batch` and upload it in the current stream. An upload before must have ended."""


class CapturableAttention(Protocol):
    """A backend whose `attend` can be part of a graph. `attend_expanded` need not be: it is for prompts."""

    def attend(
        self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `AttentionBackend.attend`."""

    def attend_expanded(
        self,
        q_nHd: torch.Tensor,
        pages_SPK: torch.Tensor,
        batch: AttentionBatch,
        kv_b_HEC: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend_expanded`."""

    def buffers(self, max_rows: int, max_pages: int, shape: QueryShape) -> AttentionBuffers:
        """Buffers for batches of so many rows, and at most so many pages."""

    def bind(self, batch: AttentionBatch, buffers: Any) -> None:
        """Have `attend` of `batch` use what `buffers` hold when its kernels run."""


class Graph(ABC):
    """Work that has been recorded, to be done again as a whole."""

    @abstractmethod
    def replay(self) -> None:
        """Queue the work again: the same operations at the same addresses."""


class Graphs(ABC):
    """Records what the host queues, so that it can be queued again at once.

    Attributes:
        attention: the rank's attention backend.
    """

    attention: CapturableAttention

    @abstractmethod
    def capture(self, work: Callable[[], _T]) -> tuple[Graph, _T]:
        """Record `work`, which has run before. What it returns is filled by `replay`, and overwritten by the next.

        Work must not wait for the device, nor depend on data there. Results of earlier captures may share memory with
        those of later ones: only the graph that was replayed last has valid ones.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop every graph, before the communicator closes."""


class Completion(ABC):
    """Work that runs behind compute."""

    @abstractmethod
    def wait(self) -> None:
        """Let what follows in the caller's order see the work done. Raises what the work raised."""

    def waited_s(self) -> float:
        """Seconds for which `wait` has held up the device, once it has; 0 where waiting holds up the host instead."""
        return 0.0


class Transfer(ABC):
    """The same byte ranges between some pairs of regions, such as a layer's arenas: made once, run when it is time."""

    @abstractmethod
    def run(self, first: int = 0, count: int | None = None) -> None:
        """Copy the ranges in `count` pairs of regions from `first` on; in all from there where it is left out."""


class CopyEngine(ABC):
    """One-sided copies between the arenas of a group, in order of their start.

    Attributes:
        is_queued: copies are queued on the device. Then one that could be queued does not fail by itself, and waiting
            for it holds up the device, not the host.
    """

    is_queued: bool

    @abstractmethod
    def prepare(
        self, extents: np.ndarray, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Transfer:
        """A transfer of byte ranges from each source to its target.

        Args:
            extents: int64 [n, 3] of (to, from, bytes). No range that is written overlaps one that is read.
            targets: uint8 [bytes] each. The caller keeps them, and the sources, for as long as the transfer is run.
            sources: one for each target.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor, extents: np.ndarray) -> None:
        """Copy the ranges, int64 [n, 3] of (to, from, bytes), from one region to another, now."""
        self.prepare(extents, [target], [source]).run()

    @abstractmethod
    def begin(self, work: Callable[[], None]) -> Completion:
        """Run `work`, which runs transfers, behind the caller's compute and after all work begun before.

        What `work` raises is raised here where copies are queued, else when the work is waited for.
        """


@dataclass(frozen=True)
class MemoryUse:
    """Device memory at one moment, in bytes.

    Attributes:
        held_bytes: what this process holds for tensors, arenas apart: weights, workspace and graphs.
        device_used_bytes: what is taken on the device, by whomever.
        device_total_bytes: what the device has.
    """

    held_bytes: int
    device_used_bytes: int
    device_total_bytes: int


@dataclass(frozen=True)
class Rank:
    """What a rank's process works with once it has joined its group."""

    rank: int
    size: int
    device: torch.device
    arenas: Arenas
    comm: Communicator
    attention: AttentionBackend
    kernels: Kernels
    copies: CopyEngine
    graphs: Graphs | None = None  # None where steps cannot be recorded
    memory: Callable[[], MemoryUse] | None = None  # None where memory is the host's; gives back what is held for reuse
    host: Communicator | None = None  # over the host's memory, where `comm` works in the device's
    span: Callable[[], Span] = HostSpan  # begins one

    def exchange(self, notes: Sequence[int], settled: bool) -> list[list[int]]:
        """Every rank's notes, by rank, all of one length and of 64 bits.

        They do not pass through the device. With `settled` a rank gives its own once what it has queued is done, so
        that ranks know as much of each other afterwards.
        """
        import torch

        if settled and self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()
        comm = self.host or self.comm
        gathered: list[list[int]] = comm.all_gather(torch.tensor([list(notes)]), [1] * self.size).tolist()
        return gathered

    def close(self) -> None:
        """Leave the group and let go of its memory. Whatever uses either must be gone."""
        if self.graphs is not None:
            self.graphs.clear()
        self.comm.close()
        self.arenas.close()


class Platform(ABC):
    """One kind of hardware. Constructing it is free of side effects and of heavy imports.

    Attributes:
        name: what it is called in configurations.
        is_queued: work is queued on a device: a rank's host goes on while it runs, and what it queues next is in order.
        copy_mib: that a rank copies ahead of a switch behind one step, in MiB: little beside what a step takes.
    """

    name: str
    is_queued: bool
    copy_mib: float

    @abstractmethod
    def availability(self) -> Availability:
        """Whether this platform can serve here, and if not, what is missing and what to do instead."""

    @abstractmethod
    def devices(self) -> list[DeviceInfo]:
        """The devices found; empty when unavailable."""

    @abstractmethod
    def default_ranks(self) -> int:
        """The number of ranks to serve with where nobody says."""

    @abstractmethod
    def rank_environment(self, ranks: int) -> dict[str, str]:
        """Environment variables that a rank's process must start with."""

    @abstractmethod
    def arena_budget(self, ranks: int, beside_bytes: int, fraction: float) -> int:
        """Bytes a rank that its arenas may take in all.

        Args:
            ranks: T.
            beside_bytes: what a rank will take besides: weights that are not in the arenas, and workspace.
            fraction: share of each device's memory to use.

        Raises:
            CapacityError: nothing is left for arenas; the message has the numbers.
        """

    @abstractmethod
    def attention_backends(self) -> tuple[str, ...]:
        """Names of the attention backends that work here; "auto" takes the first that suits a model."""

    @abstractmethod
    def create_group(
        self, ranks: int, num_layers: int, geometry: ArenaGeometry, attention: str = "auto"
    ) -> GroupHandle:
        """In the launching process: make what the ranks share.

        Args:
            ranks: T.
            num_layers: arenas a rank.
            geometry: of an arena.
            attention: one of `attention_backends()`, or "auto".

        Raises:
            CapacityError: the arenas do not fit in memory, where the launcher can know.
            PlatformUnavailable: this platform is not usable here.
        """

    @abstractmethod
    def join(self, handle_info: Mapping[str, int | str | list[int]], rank: int, timeout_s: float) -> Rank:
        """In a rank's process: join the group that `create_group` made.

        Raises:
            CapacityError: the arenas do not fit in the device's memory.
            WorkerError: a peer does not come.
        """
