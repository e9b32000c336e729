"""Room: how many pages and requests fit in the arenas in each layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from splash.core.capacity import page_slots
from splash.core.layout import KV, Layout
from splash.core.memory import ArenaGeometry
from splash.scheduler.footprint import Footprint, received_weight_bytes

Ints = npt.NDArray[np.int64]


class Room:
    """The slots for pages that the ranks have in each layout.

    Args:
        geometry: of the arenas.
        layouts: those that the ranks can serve in.
        staging_bytes: most that a rank may stage for one layer of a switch.
    """

    def __init__(self, geometry: ArenaGeometry, layouts: Sequence[Layout], staging_bytes: int) -> None:
        self.geometry = geometry
        self.layouts = tuple(layouts)
        self._staging_bytes = staging_bytes
        self._ranks = geometry.ranks
        self.slots_T = {layout: page_slots(geometry, layout) for layout in layouts}
        self._fewest = {layout: int(slots.min()) for layout, slots in self.slots_T.items()}
        self._total = {layout: int(slots.sum()) for layout, slots in self.slots_T.items()}

    def capacity(self, layout: Layout) -> Callable[[float], float]:
        """A function of the pages of a request: how many such requests fit at once, balanced. At least 1."""
        fewest, ranks = self._fewest[layout], self._ranks
        if layout.kv is KV.REQUEST:  # few large requests leave on every rank what the next does not fit in
            return lambda pages: float(ranks * max(1, int(fewest / pages)))
        slots = fewest * (ranks if layout.kv is KV.POSITION else 1)
        return lambda pages: float(max(1, int(slots / pages)))

    def used_share(self, layout: Layout, pages: int) -> float:
        """The share of its slots that the fullest rank would use for so many pages, balanced as well as can be."""
        copies = self._ranks if layout.kv is KV.REPLICATED else 1
        return pages * copies / max(1, self._total[layout])

    def shortage(self, source: Layout, target: Layout, footprint: Footprint, largest: int) -> str:
        """Why the pages of the running requests could not be held in `target` when coming from `source`, or "".

        Args:
            footprint: their pages now.
            largest: pages of the largest of them. Owners that are dealt out anew, the largest request first, end with
                at most total / T + largest (1 - 1/T) pages on a rank (Graham, 1969).
        """
        geometry, slots = self.geometry, self.slots_T[target]
        if target.kv is KV.REQUEST and source.kv is not KV.REQUEST:
            even = -(-footprint.total // self._ranks) + largest * (self._ranks - 1) // self._ranks
            held = np.full(self._ranks, max(largest, min(even, footprint.total)))
        else:
            held = footprint.held(target)
        worst = int((held - slots).argmax())
        if held[worst] > slots[worst]:
            return f"running requests need {held[worst]} pages on a rank, which has {slots[worst]}"
        # A switch copies into slots that are free on both sides, or else stages a layer at a time.
        weights = received_weight_bytes(geometry, source, target)
        if int(held.max()) * geometry.slot_bytes + weights <= self._staging_bytes:
            return ""
        received = int(footprint.received(source, target).max())
        staged = received * geometry.slot_bytes + weights
        spare = int((np.minimum(self.slots_T[source], slots) - np.maximum(footprint.held(source), held)).min())
        if staged > self._staging_bytes and spare < received:
            return f"a switch would stage {staged} bytes a layer, and a rank has {self._staging_bytes}"
        return ""

    def fits_alone(self, layout: Layout, pages: int) -> bool:
        """Whether a request of so many pages fits in empty arenas."""
        slots = self.slots_T[layout]
        match layout.kv:
            case KV.REPLICATED:
                return pages <= self._fewest[layout]
            case KV.REQUEST:
                return pages <= int(slots.max())
            case KV.POSITION:
                rank = np.arange(self._ranks)
                return bool(((pages + self._ranks - 1 - rank) // self._ranks <= slots).all())
