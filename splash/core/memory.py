"""Arena geometry: one contiguous arena a layer, an array of page-sized slots that starts with the attention weights.

    slot      0        1        2        3        4        5       6 ...
              |--------|--------|--------|--------|--------|-------|---
    bytes     [ Q-B g0 | Q-B g1 ][ KV-B g0 | KV-B g1 ][ O g0 | O g1 ]  pages ...

Q-B, KV-B and O are stored whole, head-major, so head group h is one contiguous run of each. Rank r's own runs are
always resident. The other runs are weights in layouts with replicated projections and pages in layouts with sharded
ones: a layout is a choice of which slots are weights. A slot may hold a page iff it overlaps no run that the rank
must hold. Geometry is the same for every layer and every rank; only the choice differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splash.core.errors import CapacityError
from splash.core.layout import Layout, Projections
from splash.core.spec import KVFormat, ModelSpec

ALIGNMENT = 256  # bytes; every module starts on a multiple


def align(num_bytes: int) -> int:
    """`num_bytes` rounded up to the arena's alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ArenaGeometry:
    """Where everything lies in a layer's arena.

    Attributes:
        spec: the model's dimensions.
        kv: bytes a token a layer.
        page_size: token positions a page.
        weight_bytes: bytes of one weight element.
        ranks: T.
        num_slots: page-sized slots in the arena, those under the weights included.

    Raises:
        CapacityError: the weights alone do not fit in `num_slots`.
    """

    spec: ModelSpec
    kv: KVFormat
    page_size: int
    weight_bytes: int
    ranks: int
    num_slots: int

    def __post_init__(self) -> None:
        if self.num_slots < self.num_weight_slots:
            raise CapacityError(
                f"an arena of {self.num_slots} slots cannot hold the attention weights, which take "
                f"{self.num_weight_slots} slots of {self.slot_bytes} bytes a layer"
            )

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot: one page of one layer, without padding, so that the cache is one dense array."""
        return self.page_size * self.kv.token_bytes

    @cached_property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Module name -> (offset, bytes) of the whole module in the arena."""
        spans, offset = {}, 0
        for name, elements in self.spec.head_elements().items():
            size = elements * self.spec.num_heads * self.weight_bytes
            spans[name] = (offset, size)
            offset = align(offset + size)
        return spans

    @property
    def attention_bytes(self) -> int:
        """Bytes of Q-B, KV-B and O of one layer, all heads, without alignment."""
        return sum(size for _, size in self.modules.values())

    @cached_property
    def num_weight_slots(self) -> int:
        """Slots that the whole weights reach into, from slot 0 on."""
        end = max(offset + size for offset, size in self.modules.values())
        return -(-end // self.slot_bytes)

    @property
    def arena_bytes(self) -> int:
        """Bytes of one layer's arena."""
        return self.num_slots * self.slot_bytes

    def run(self, module: str, head_group: int) -> tuple[int, int]:
        """(offset, bytes) of one head group of a module. Needs T to divide the heads."""
        assert self.spec.num_heads % self.ranks == 0
        offset, size = self.modules[module]
        return offset + size // self.ranks * head_group, size // self.ranks

    def resident_runs(self, layout: Layout, rank: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the weight runs that `rank` must hold in `layout`."""
        if layout.projections is Projections.REPLICATED:
            return list(self.modules.values())
        return [self.run(module, rank) for module in self.modules]

    def page_slots(self, layout: Layout, rank: int) -> np.ndarray:
        """Slots of `rank` that may hold pages in `layout`, ascending, int64."""
        known = self._page_slots.get((layout.name, rank))
        if known is not None:
            return known
        free = np.ones(self.num_slots, dtype=bool)
        for offset, size in self.resident_runs(layout, rank):
            free[offset // self.slot_bytes : -(-(offset + size) // self.slot_bytes)] = False
        slots = self._page_slots[layout.name, rank] = np.flatnonzero(free)
        slots.setflags(write=False)
        return slots

    def page_flags(self, layout: Layout, rank: int) -> np.ndarray:
        """bool [slots]: the slot of `rank` may hold a page in `layout`. Read-only."""
        flags = self._page_flags.get((layout.name, rank))
        if flags is None:
            flags = self._page_flags[layout.name, rank] = np.zeros(self.num_slots, dtype=bool)
            flags[self.page_slots(layout, rank)] = True
            flags.setflags(write=False)
        return flags

    @cached_property
    def _page_slots(self) -> dict[tuple[str, int], np.ndarray]:
        """What `page_slots` has worked out: every plan asks for it."""
        return {}

    @cached_property
    def _page_flags(self) -> dict[tuple[str, int], np.ndarray]:
        """What `page_flags` has worked out."""
        return {}


def slots_for(spec: ModelSpec, kv: KVFormat, page_size: int, weight_bytes: int, arena_bytes: int) -> int:
    """Slots that fit in an arena of `arena_bytes` a layer."""
    geometry = ArenaGeometry(spec, kv, page_size, weight_bytes, 1, num_slots=1 << 40)
    return arena_bytes // geometry.slot_bytes
