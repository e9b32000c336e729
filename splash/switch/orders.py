"""What the engine tells the ranks to do about a switch, what they answer, and what a caller is told in the end."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from splash.core.decision import Decision
from splash.switch.counts import SwitchCounts
from splash.switch.manifest import Manifest, RankCopies

Method = Literal["auto", "precopy", "layerwise", "blocking"]
METHODS: tuple[Method, ...] = ("auto", "precopy", "layerwise", "blocking")


class SwitchOrder(msgspec.Struct, frozen=True, array_like=True):
    """Commit a manifest with the step that it comes with, which runs in the target layout.

    `layerwise` reads each layer behind the compute of those before it; otherwise all are read before the step.
    `switch` is the number of the switch.
    """

    switch: int
    manifest: Manifest
    layerwise: bool


class PreparedPages(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one request, from number `first` on, that will be where the target state wants them.

    Negative requests are none: their pages are cached, and move with those of the requests.
    `source` and `target` are int32 [pages, T] as bytes: the request's page table before the switch and after it. What a
    rank knew of pages from `first` on holds no more.
    """

    request: int
    first: int
    source: bytes
    target: bytes


class CopyAhead(msgspec.Struct, frozen=True, tag=True):
    """What to do behind the step that was sent before this, for a switch that will commit later.

    Attributes:
        switch: number of that switch.
        layers: how many of the first layers pages are copied in.
        pages: by rank, int32 [n, 5] as bytes: peer, source slot, target slot, first position, position after the last.
        weights: by rank, (head group, peer, layer) to fetch.
        prepared: pages that need nothing more once these copies are made.
        rest: all pages of the running requests that were not prepared, and where later layers are streamed, cached
            pages that move with the switch. With them the target state is whole, and every rank gives its `Vote` on it:
            the next step may commit. None where the switch goes on copying.
        streamed: by rank, (head group, peer) to fetch in the later layers, which are read behind the compute of those
            before them in the step that commits. Only with `rest`.
    """

    switch: int
    layers: int
    pages: tuple[bytes, ...]
    weights: tuple[tuple[tuple[int, int, int], ...], ...]
    prepared: tuple[PreparedPages, ...] = ()
    rest: tuple[PreparedPages, ...] | None = None
    streamed: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def copies_anything(self) -> bool:
        """Whether a rank copies a page or weights."""
        return any(self.pages) or any(self.weights)

    def rank_copies(self, rank: int) -> RankCopies:
        """The page copies of one rank, made in every layer."""
        rows = np.frombuffer(self.pages[rank], dtype=np.int32).reshape(-1, 5)
        return RankCopies(
            peer=rows[:, 0].astype(np.int16),
            source=rows[:, 1],
            target=rows[:, 2],
            first=rows[:, 3].astype(np.int64),
            last=rows[:, 4].astype(np.int64),
            staged=np.zeros(len(rows), dtype=bool),
            weights=(),
            weights_staged=False,
        )


class Vote(msgspec.Struct, frozen=True, tag=True):
    """A rank's word on a `CopyAhead` with which the target state is whole: whether the switch may commit without it.

    `digest` is that of all that the rank was told. `error` says why it cannot go along, and is empty where it can.
    """

    rank: int
    switch: int
    digest: int
    error: str = ""


class PreparedCommit(msgspec.Struct, frozen=True, array_like=True):
    """Run the step that this comes with in the target state of a switch that every rank has voted for."""

    switch: int
    digest: int


class SwitchOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of a commit. Bytes are those that each rank received in it, over all layers; left out where none did.

    `error` is empty when the switch is committed. `recoverable` False means that the cache is lost. `exposed_s` is the
    longest time that a rank's step waited for the switch.
    """

    error: str = ""
    rank: int | None = None
    recoverable: bool = True
    kv_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    exposed_s: float = 0.0


class SwitchRecord(msgspec.Struct, kw_only=True, rename={"source": "from", "target": "to"}):
    """One switch as the engine's history keeps it. Pages and bytes are by rank; bytes are over all layers.

    Attributes:
        id: number of the switch, from 1.
        source, target: layouts; the same when owners were rebalanced.
        asked: the method asked for.
        method: the method used, empty before one is chosen.
        status: "waiting", "copying", "committing", "committed", "refused", "failed", "aborted" or "superseded".
        reason: why it waits, was refused or failed; why another method than the one asked for was used.
        kv_bytes_received, weight_bytes_received: what each rank read from its peers, ahead of the commit included.
        kv_bytes_planned, weight_bytes_planned: what the ownership difference asks for.
        pages_kept, pages_fetched, pages_moved, pages_dropped: pages of one layer.
        planning_ms: time to plan the manifest that was committed.
        added_ms: time that the committing step waited for the switch, on the slowest rank.
        background_steps: ordinary steps that copied ahead.
        waited_steps: steps that passed while the switch waited for room.
        decision: what made a policy ask for it; None where somebody else did.
    """

    id: int
    source: str
    target: str
    asked: str
    method: str = ""
    status: str = "waiting"
    reason: str = ""
    kv_bytes_received: list[int] = []
    weight_bytes_received: list[int] = []
    kv_bytes_planned: list[int] = []
    weight_bytes_planned: list[int] = []
    pages_kept: list[int] = []
    pages_fetched: list[int] = []
    pages_moved: list[int] = []
    pages_dropped: list[int] = []
    planning_ms: float = 0.0
    added_ms: float = 0.0
    background_steps: int = 0
    waited_steps: int = 0
    decision: Decision | None = None

    def describe(self, counts: SwitchCounts) -> None:
        """Say what the commit does."""
        self.kv_bytes_planned, self.weight_bytes_planned = list(counts.kv_bytes), list(counts.weight_bytes)
        self.pages_kept, self.pages_fetched = list(counts.kept), list(counts.fetched)
        self.pages_moved, self.pages_dropped = list(counts.moved), list(counts.dropped)
