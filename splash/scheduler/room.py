"""Room: how many pages and requests fit in the arenas in each layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from splash.core.capacity import page_slots
from splash.core.layout import KV, Layout
from splash.core.memory import ArenaGeometry
from splash.scheduler.footprint import received_weight_bytes
from splash.scheduler.prefix_cache import MOST_TAKEN_ALONG
from splash.scheduler.situation import Situation


class Fill(NamedTuple):
    """How far what is wanted fills the memory of a layout: the requests over those that fit at once.

    Attributes:
        begin, end: of a while, in which it goes evenly from the one to the other.
    """

    begin: float
    end: float

    @property
    def waves(self) -> Fill:
        """In how many waves it is served, since what does not fit waits: at least 1."""
        return Fill(max(1.0, self.begin), max(1.0, self.end))

    @property
    def full_share(self) -> float:
        """The share of the while in which memory is full, 0 to 1."""
        least, most = sorted(self)
        if most <= 1:
            return 0.0
        return 1.0 if least >= 1 else (most - 1) / (most - least)


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
        self._weights = {  # bytes of a layer's that a rank receives
            source: {target: received_weight_bytes(geometry, source, target) for target in layouts}
            for source in layouts
        }

    def capacity(self, layout: Layout) -> Callable[[float], float]:
        """A function of the pages of a request: how many such requests fit at once, balanced. At least 1."""
        fewest, ranks = self._fewest[layout], self._ranks
        if layout.kv is KV.REQUEST:  # few large requests leave on every rank what the next does not fit in
            return lambda pages: float(ranks * max(1, int(fewest / pages)))
        slots = fewest * (ranks if layout.kv is KV.POSITION else 1)
        return lambda pages: float(max(1, int(slots / pages)))

    def for_idle(self, situation: Situation, target: Layout) -> int:
        """About how many idle pages have room in `target` beside those of the running requests."""
        copies = self._ranks if target.kv is KV.REPLICATED else 1
        return max(0, self._total[target] // copies - situation.num_pages)

    def taken_along(self, situation: Situation, target: Layout) -> int:
        """About how many idle pages a switch to `target` can move with the running requests.

        Before and after the switch together, all that is there has to lie in slots that are for pages on both sides.
        """
        fewest = min(self._fewest[situation.layout], self._fewest[target])
        if target.kv is KV.REPLICATED:
            left = fewest - situation.num_pages * (1 + 1 / self._ranks)
        else:
            left = fewest * self._ranks - 2 * situation.num_pages
        return max(0, min(sum(situation.idle_T), MOST_TAKEN_ALONG, int(left)))

    def used_share(self, layout: Layout, pages: int) -> float:
        """The share of its slots that the fullest rank would use for so many pages, balanced as well as can be."""
        copies = self._ranks if layout.kv is KV.REPLICATED else 1
        return pages * copies / max(1, self._total[layout])

    def shortage(self, situation: Situation, target: Layout) -> str:
        """Why the pages of the running requests, with one each to grow by, could not go to `target`, or "".

        Bounds that need only totals come first: pages by rank are counted where those leave it open. Owners that are
        dealt out anew, the largest request first, end with at most total / T + largest (1 - 1/T) pages on a rank
        (Graham, 1969).
        """
        source, ranks, fewest = situation.layout, self._ranks, self._fewest[target]
        count, total = len(situation.running), situation.num_pages
        if target.kv is KV.REPLICATED:
            most = total
        elif target.kv is KV.POSITION:
            most = total // ranks + count  # each request has at most one page more on a rank than its share
            if most > fewest:
                most = int(situation.footprint.held(target).max())
        elif source.kv is KV.REQUEST:
            most = max(situation.used_T) + count  # as if one rank's requests were all that grow
            if most > fewest:
                most = int(situation.footprint.owned_T.max())
        else:
            largest = situation.largest_running
            most = max(largest, min(total, -(-total // ranks) + largest * (ranks - 1) // ranks))
        if most > fewest:
            return f"running requests need {most} pages on a rank, which has {fewest}"
        return self._staging_shortage(situation, target, most)

    def _staging_shortage(self, situation: Situation, target: Layout, most: int) -> str:
        """A switch copies into slots that are free on both sides, or else stages a layer at a time."""
        source, geometry = situation.layout, self.geometry
        weights = self._weights[source][target]
        if most * geometry.slot_bytes + weights <= self._staging_bytes:
            return ""
        footprint = situation.footprint
        received = int(footprint.received(source, target).max())
        staged = received * geometry.slot_bytes + weights
        # Slots for pages on both sides, in which nothing lies yet.
        spare = min(self._fewest[source], self._fewest[target]) - int(footprint.held(source).max())
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
