"""A rank's part in a switch: reading its peers' arenas layer by layer, and agreeing with them before every layer.

    read(l)     direct copies go to their place, staged ones to the staging buffer; nothing alive is overwritten
    agree       every rank learns whether every rank has read layer l; this is also the barrier between reads and writes
    settle(l)   staged copies are written back; from here on layer l is in the target state

Where copies are queued on the device and overwrite nothing alive, one agreement serves for all layers.

Reads need no other synchronisation: a switch begins at a step boundary, when no rank writes to what the source state
holds, and after the agreement on a layer nobody reads it any more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from splash.core.errors import SwitchError
from splash.core.memory import ArenaGeometry
from splash.platform.base import Completion, Rank, Transfer
from splash.switch.manifest import Manifest, RankCopies, rank_copies

READ_OK, READ_FAILED = 1, 0


class LayerCopies:
    """One rank's copies as byte extents, the same for every layer.

    Attributes:
        kv_bytes, weight_bytes: received from peers a layer; what is copied within the rank is not counted.
        staging_bytes: size of the staging buffer.
    """

    def __init__(self, copies: RankCopies, geometry: ArenaGeometry, group: Rank) -> None:
        self._group = group
        pages = np.concatenate([_page_extents(copies, plane, geometry) for plane in planes(geometry)])
        weights = np.array(
            [
                (peer, offset, offset, length)
                for head_group, peer in copies.weights
                for offset, length in (geometry.run(module, head_group) for module in geometry.modules)
            ],
            dtype=np.int64,
        ).reshape(-1, 4)
        peers, to, start, size = np.concatenate((pages, weights)).T
        num_planes = len(pages) // max(len(copies.peer), 1)
        staged = np.r_[np.tile(copies.staged, num_planes), [copies.weights_staged] * len(weights)].astype(bool)
        place = np.zeros_like(to)
        place[staged] = np.cumsum(size[staged]) - size[staged]
        self.staging_bytes = int(size[staged].sum())
        staging = torch.empty(self.staging_bytes, dtype=torch.uint8, device=group.device)
        layers = range(geometry.spec.num_layers)
        own, buffer = [group.arenas.local(layer) for layer in layers], [staging] * len(layers)
        self._reads: list[Transfer] = []
        for targets, extents in (
            (own, _by_peer(peers, to, start, size, ~staged)),
            (buffer, _by_peer(peers, place, start, size, staged)),
        ):
            for peer, of_peer in extents.items():
                sources = [group.arenas.peer(peer, layer) for layer in layers]
                self._reads.append(group.copies.prepare(of_peer, targets, sources))
        write_back = merge_extents(np.stack((to, place, size), axis=1)[staged])
        self._write_back = group.copies.prepare(write_back, own, buffer) if self.staging_bytes else None
        foreign = peers != group.rank
        is_weight = np.arange(len(peers)) >= len(pages)
        self.kv_bytes = int(size[foreign & ~is_weight].sum())
        self.weight_bytes = int(size[foreign & is_weight].sum())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not self._reads

    def read(self, layer: int) -> None:
        """Read this layer from the peers."""
        for transfer in self._reads:
            transfer.run(layer, 1)

    def read_first(self, layers: int) -> None:
        """Read so many of the first layers. Only where nothing is staged."""
        assert not self.staging_bytes
        for transfer in self._reads:
            transfer.run(0, layers)

    def write_back(self, layer: int) -> None:
        """Write what was staged to its place."""
        if self._write_back is not None:
            self._write_back.run(layer, 1)


def planes(geometry: ArenaGeometry) -> list[tuple[int, int]]:
    """(offset in a page's slot, bytes a token) of each thing that is cached with a page, in order."""
    latent, indexer = geometry.kv.latent_bytes, geometry.kv.indexer_bytes
    return [(0, latent), *([(geometry.page_size * latent, indexer)] if indexer else [])]


def _page_extents(copies: RankCopies, plane: tuple[int, int], geometry: ArenaGeometry) -> np.ndarray:
    """(peer, to, from, bytes) of one plane of each page, int64 [n, 4]. Planes of whole pages join into one extent."""
    offset, token_bytes = plane
    begin = offset + copies.first * token_bytes
    return np.stack(
        (
            copies.peer.astype(np.int64),
            copies.target.astype(np.int64) * geometry.slot_bytes + begin,
            copies.source.astype(np.int64) * geometry.slot_bytes + begin,
            (copies.last - copies.first) * token_bytes,
        ),
        axis=1,
    )


def _by_peer(
    peers: np.ndarray, to: np.ndarray, start: np.ndarray, size: np.ndarray, chosen: np.ndarray
) -> dict[int, np.ndarray]:
    extents = np.stack((to, start, size), axis=1)
    return {int(peer): merge_extents(extents[chosen & (peers == peer)]) for peer in np.unique(peers[chosen])}


def merge_extents(extents: np.ndarray) -> np.ndarray:
    """Join extents (to, from, bytes) that continue each other on both sides. int64 [n, 3] -> [m, 3], sorted by `to`."""
    if len(extents) < 2:
        return extents
    ordered = extents[np.argsort(extents[:, 0], kind="stable")]
    ends = ordered[:-1, :2] + ordered[:-1, 2:]
    begins = np.r_[True, (ordered[1:, :2] != ends).any(axis=1)]
    merged = ordered[begins]
    merged[:, 2] = np.add.reduceat(ordered[:, 2], np.flatnonzero(begins))
    return merged


def copy_head_group(head_group: int, peer: int, layer: int, geometry: ArenaGeometry, group: Rank) -> None:
    """Read one head group of one layer's weights from a peer to its place here."""
    runs = [geometry.run(module, head_group) for module in geometry.modules]
    extents = np.array([(offset, offset, size) for offset, size in runs], dtype=np.int64)
    group.copies.copy(group.arenas.local(layer), group.arenas.peer(peer, layer), extents)


class Stream:
    """The layers of a prepared switch that were not copied ahead, read in order behind the compute of those before.

    Args:
        copies: of each of these layers.
        layers: all of them, ascending and up to the last.
        group: the rank.

    Attributes:
        layerwise: always.
        reading: by layer, once `begin` was called.
    """

    layerwise = True

    def __init__(self, copies: LayerCopies, layers: range, group: Rank) -> None:
        self._copies, self._layers, self._group = copies, layers, group
        self.reading: list[Completion] = []

    def begin(self) -> None:
        """Queue the reads behind what the rank has begun."""
        for layer in self._layers:
            self.reading.append(self._group.copies.begin(lambda layer=layer: self._copies.read(layer)))  # type: ignore[misc]

    def arrive(self, layer: int) -> None:
        """Let what follows see `layer` in the target state."""
        if layer in self._layers:
            self.reading[layer - self._layers.start].wait()

    def complete(self) -> None:
        """Let what follows see every layer in the target state."""
        self.reading[-1].wait()  # which were begun in order


class Handoff:
    """Carries out one manifest on one rank, in one step.

    Use: `agree` once; then for each layer in order, before computing it, `arrive`; or `complete`, which does all layers
    at once. Every rank of the group does the same.

    Attributes:
        layerwise: whether layers are to arrive one by one, behind the compute of those before.
        copies: what this rank copies in every layer, from `agree` on.
        exposed_s: seconds that the step waited for the switch.
    """

    copies: LayerCopies

    def __init__(self, manifest: Manifest, geometry: ArenaGeometry, group: Rank, layerwise: bool) -> None:
        self._manifest = manifest
        self._group = group
        self._geometry = geometry
        self._num_layers = geometry.spec.num_layers
        self._in_background = self.layerwise = layerwise
        self._reading: list[Completion] = []
        self._any_copies = True
        self._source_lost = False
        self.exposed_s = 0.0

    def agree(self, own_tables: Mapping[int, np.ndarray], copied_ahead: bool, is_prepared: bool) -> None:
        """Compare notes with every rank before anything is touched.

        Args:
            own_tables: this rank's page tables of the manifest's requests.
            copied_ahead: whether all copies ahead of the commit that this rank was told to make were made.
            is_prepared: whether this rank was told what the manifest takes for prepared, and found it to be so.

        Raises:
            SwitchError: on every rank alike, naming a rank that has another manifest or another page table, that failed
                to copy ahead, or that cannot make its copies, for want of staging memory for instance.
        """
        started = time.perf_counter()
        manifest = self._manifest
        rest = [own_tables[id][first:] for id, first in zip(manifest.requests, manifest.first, strict=True) if id >= 0]
        tables = np.concatenate([np.empty((0, self._group.size), dtype=np.int32), *rest])
        matches = is_prepared and np.array_equal(tables, manifest.source_tables())
        is_empty, error = True, ""
        try:
            copies = rank_copies(self._manifest, self._geometry, self._group.rank)
            self.copies = LayerCopies(copies, self._geometry, self._group)
            is_empty = self.copies.is_empty
        except Exception as failure:
            error = f": {failure}"
        flags = [int(matches), int(copied_ahead), int(not error), int(is_empty)]
        # Peers must not read what this rank still writes. Where nobody reads there is nothing to wait for.
        notes = self._group.exchange([self._manifest.digest(), *flags], settled=self._manifest.reads_peers)
        digests = [digest for digest, *_ in notes]
        usual = max(digests, key=digests.count)  # the lowest rank's where there is no majority
        for rank, (digest, same, ahead, ready, _) in enumerate(notes):
            if digest != usual:
                raise SwitchError(f"rank {rank} has another manifest than its peers", rank)
            if not same:
                raise SwitchError(f"rank {rank} has other page tables than the manifest starts from", rank)
            if not ahead:
                raise SwitchError(f"rank {rank} failed to copy ahead of the switch", rank)
            if not ready:
                cause = error if rank == self._group.rank else ""
                raise SwitchError(f"rank {rank} could not make ready for the switch{cause}", rank)
        self._any_copies = not all(empty for *_, empty in notes)
        self._is_free = self._group.copies.is_queued and self._manifest.abandonable
        if self._any_copies and self._is_free:
            self._queue()
        elif self._any_copies and self._in_background:
            # One staging buffer: a layer is read ahead only once the layer before has been written back.
            ahead = 1 if self.copies.staging_bytes else self._num_layers
            for layer in range(ahead):
                self._begin(layer)
        self.exposed_s += time.perf_counter() - started

    def _begin(self, layer: int) -> None:
        self._reading.append(self._group.copies.begin(lambda: self.copies.read(layer)))

    def _queue(self) -> None:
        """Queue the reads of all layers, and agree that every rank could.

        Such reads overwrite nothing that is alive, and nothing else can go wrong with them. So ranks need not agree
        on each layer, nor wait for each other's reads before they compute; the host does not wait at all.
        """
        status, error = READ_OK, ""
        try:
            if self.layerwise:
                for layer in range(self._num_layers):
                    self._begin(layer)
            else:
                self._reading.append(self._group.copies.begin(lambda: self.copies.read_first(self._num_layers)))
        except Exception as failure:
            status, error = READ_FAILED, f": {failure}"
        for rank, (read,) in enumerate(self._group.exchange([status], settled=False)):
            if read == READ_FAILED:
                self._abandon()
                raise SwitchError(f"rank {rank} could not read{error if rank == self._group.rank else ''}", rank)

    def arrive(self, layer: int) -> None:
        """Return once `layer` is in the target state on this rank and, where it matters, read by all.

        Raises:
            SwitchError: on every rank alike, naming a rank that could not read. `recoverable` says whether the source
                state is whole.
        """
        if not self._any_copies:
            return
        if self._is_free:
            if layer < len(self._reading):
                self._reading[layer].wait()
            return
        started = time.perf_counter()
        status, error = READ_OK, ""
        try:
            if self._in_background:
                self._reading[layer].wait()
            else:
                self.copies.read(layer)
        except Exception as failure:
            status, error = READ_FAILED, f": {failure}"
        statuses = self._group.exchange([status, self.copies.staging_bytes], settled=True)
        for rank, (read, _) in enumerate(statuses):
            if read == READ_FAILED:
                self._abandon()
                text = f"rank {rank} could not read layer {layer}" + (error if rank == self._group.rank else "")
                raise SwitchError(text, rank, recoverable=not self._source_lost)
        self.copies.write_back(layer)
        # A step that computes between layers may itself write to slots in which the source state has something alive.
        self._source_lost |= any(staging for _, staging in statuses)
        self._source_lost |= self._in_background and not self._manifest.abandonable
        if self._in_background and len(self._reading) == layer + 1 < self._num_layers:
            self._begin(layer + 1)
        self.exposed_s += time.perf_counter() - started

    def complete(self) -> None:
        """Bring every layer to the target state. Raises as `arrive`."""
        for layer in range(self._num_layers):
            self.arrive(layer)

    def _abandon(self) -> None:
        """Wait for reads that are under way, so that nothing is written after this."""
        for reading in self._reading:
            try:
                reading.wait()
            except Exception:
                continue

    def received(self) -> tuple[list[int], list[int], float]:
        """(KV bytes by rank, weight bytes by rank, longest exposed seconds), over all layers, on every rank alike.

        Where nobody copies anything ranks do not ask each other, and the seconds are this rank's.
        """
        if not self._any_copies:
            return [0] * self._group.size, [0] * self._group.size, self.exposed_s
        micros = int((self.exposed_s + sum(reading.waited_s() for reading in self._reading)) * 1e6)
        kv, weights = self.copies.kv_bytes * self._num_layers, self.copies.weight_bytes * self._num_layers
        # Settled: in a later step a rank may write to what its peers have read in this one.
        notes = self._group.exchange([kv, weights, micros], settled=True)
        return [kv for kv, _, _ in notes], [weights for _, weights, _ in notes], max(m for _, _, m in notes) / 1e6
