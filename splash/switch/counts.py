"""What a manifest does, in numbers."""

from __future__ import annotations

import msgspec
import numpy as np

from splash.core.diff import NO_SOURCE
from splash.core.layout import parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.step import NO_SLOT
from splash.switch.manifest import Manifest, living
from splash.switch.placement import Slots


class SwitchCounts(msgspec.Struct, frozen=True, array_like=True):
    """What a manifest does, by rank. Bytes are over all layers; pages are those of one layer."""

    kept: tuple[int, ...]
    fetched: tuple[int, ...]
    moved: tuple[int, ...]
    dropped: tuple[int, ...]
    staged: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]


def count(manifest: Manifest, geometry: ArenaGeometry, pages: tuple[Slots, Slots] | None = None) -> SwitchCounts:
    """What the manifest does, by rank, counting pages and weights that were copied ahead as well.

    Args:
        manifest: the switch.
        geometry: of the arenas.
        pages: int32 [pages, T] each, slots before and after of all pages, where not all are in the manifest.
    """
    before, after = pages or (manifest.source_pT(), manifest.target_pT())
    kept, fetched, moved, dropped = count_pages(before, after)
    groups = np.array(manifest.weight_sources) != NO_SOURCE
    group_bytes = geometry.attention_bytes // geometry.ranks * geometry.spec.num_layers
    staged = []
    for rank, (own_before, own_after) in enumerate(zip(manifest.source_pT().T, manifest.target_pT().T, strict=True)):
        _, alive = living(own_before, geometry.page_flags(parse_layout(manifest.source), rank))
        copied = (own_after != NO_SLOT) & (own_before != own_after)
        staged.append(int(np.count_nonzero(alive[own_after] & copied)))
    return SwitchCounts(
        kept=kept,
        fetched=fetched,
        moved=moved,
        dropped=dropped,
        staged=tuple(staged),
        kv_bytes=tuple(num * geometry.slot_bytes * geometry.spec.num_layers for num in fetched),
        weight_bytes=tuple(group_bytes * num for num in np.count_nonzero(groups, axis=0).tolist()),
    )


def count_pages(before_pT: Slots, after_pT: Slots) -> tuple[tuple[int, ...], ...]:
    """(kept, fetched, moved, dropped) by rank, of pages that lie in these slots before and after."""
    counts = []
    for before, after in zip(before_pT.T, after_pT.T, strict=True):  # numpy is far slower along rows of a few ranks
        held, wanted = before != NO_SLOT, after != NO_SLOT
        flags = (held, wanted, held & wanted, held & (before == after))
        num_held, num_wanted, num_both, num_kept = (int(np.count_nonzero(own)) for own in flags)
        counts.append((num_kept, num_wanted - num_both, num_both - num_kept, num_held - num_both))
    return tuple(zip(*counts, strict=True))
