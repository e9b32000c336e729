"""Footprint: the pages of a load, where a layout keeps them, what a switch of them moves, and whether they fit.

Counts are closed forms of what `splash.core.ownership` and `splash.core.diff` say block by block, so that a policy can
ask for every layout in every step. Pages are counted whole: the last page of a request counts though it is part full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splash.core.capacity import attention_bytes, other_weight_bytes, page_slots
from splash.core.hardware import GIB, Hardware
from splash.core.layout import KV, Layout, Projections
from splash.core.memory import ArenaGeometry
from splash.core.spec import DTYPE_BYTES
from splash.scheduler.load import StepLoad

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Footprint:
    """Pages of the requests of a load, after its step.

    Attributes:
        ranks: T.
        total: pages of all requests.
        owned_T: int64 [T], pages of the requests that a rank owns.
        striped_T: int64 [T], pages whose number mod T is the rank.
        both_T: int64 [T], pages that are both.
    """

    ranks: int
    total: int
    owned_T: Ints
    striped_T: Ints
    both_T: Ints

    @classmethod
    def of(cls, load: StepLoad, page_size: int) -> Footprint:
        """The footprint of a load."""
        ranks = load.ranks
        pages_q = -(-load.context_q // page_size)
        striped_qT = (pages_q[:, None] + (ranks - 1 - np.arange(ranks))) // ranks
        owned = np.bincount(load.owner_q, pages_q, ranks).astype(np.int64)
        own_q = striped_qT[np.arange(len(pages_q)), load.owner_q]
        both = np.bincount(load.owner_q, own_q, ranks).astype(np.int64)
        return cls(ranks, int(pages_q.sum()), owned, striped_qT.sum(axis=0), both)

    @classmethod
    def even(cls, pages: int, ranks: int) -> Footprint:
        """The footprint of so many pages spread evenly over owners and numbers."""
        share, both = np.full(ranks, -(-pages // ranks)), np.full(ranks, -(-pages // ranks**2))
        return cls(ranks, pages, share, share, both)

    def held(self, layout: Layout) -> Ints:
        """int64 [T], pages that each rank holds in `layout`."""
        match layout.kv:
            case KV.REPLICATED:
                return np.full(self.ranks, self.total)
            case KV.REQUEST:
                return self.owned_T
            case KV.POSITION:
                return self.striped_T

    def kept(self, source: Layout, target: Layout) -> Ints:
        """int64 [T], pages that each rank holds in both layouts."""
        if source.kv is target.kv or target.kv is KV.REPLICATED:
            return self.held(source)
        return self.held(target) if source.kv is KV.REPLICATED else self.both_T

    def received(self, source: Layout, target: Layout) -> Ints:
        """int64 [T], pages that each rank receives in a switch between layouts, owners staying as they are."""
        return self.held(target) - self.kept(source, target)

    def sent(self, source: Layout, target: Layout) -> Ints:
        """int64 [T], pages that each rank is the source of, counted once for each receiver."""
        if source.kv is KV.REPLICATED or source.kv is target.kv:
            return np.zeros(self.ranks, dtype=np.int64)
        if target.kv is KV.REPLICATED:
            return self.held(source) * (self.ranks - 1)
        return self.held(source) - self.both_T


def received_weight_bytes(geometry: ArenaGeometry, source: Layout, target: Layout) -> int:
    """Bytes of attention weights of one layer that a rank receives in a switch."""
    if source.projections is Projections.SHARDED and target.projections is Projections.REPLICATED:
        return geometry.attention_bytes // geometry.ranks * (geometry.ranks - 1)
    return 0


@dataclass(frozen=True)
class Fit:
    """Whether a load fits in a layout, on the rank with the least room, with the numbers.

    Attributes:
        ok: all fits.
        needed: bytes of one rank by kind: weights that no layout moves, "projections", "kv", and "reserve", which
            covers graphs and workspace: the hardware's reserve, or the workspace of this load where that is more.
        available: bytes of a rank's memory that may be used.
        pages: pages of every layer that the rank needs.
        page_slots: pages that its arenas have room for.
    """

    ok: bool
    needed: dict[str, int]
    available: int
    pages: int
    page_slots: int

    @property
    def reason(self) -> str:
        """Why it does not fit; empty where it does."""
        if self.ok:
            return ""
        total, parts = sum(self.needed.values()), ", ".join(f"{k} {v / GIB:.2f}" for k, v in self.needed.items())
        return (
            f"a rank needs {self.pages} pages and has {self.page_slots}; {total / GIB:.2f} GiB of "
            f"{self.available / GIB:.2f} GiB ({parts})"
        )


def fits(
    layout: Layout,
    load: StepLoad,
    geometry: ArenaGeometry,
    hardware: Hardware,
    dtype: str,
    mem_fraction: float = 1.0,
) -> Fit:
    """Whether the requests of `load` and the step that computes it fit in `layout`.

    Args:
        layout: the layout.
        load: the requests, with the rows of the step.
        geometry: the arenas that are served from, which decide how many pages there are.
        hardware: of every rank, which decides how many bytes there are.
        dtype: of the weights.
        mem_fraction: share of the device's memory that may be used.
    """
    spec = geometry.spec
    footprint = Footprint.of(load, geometry.page_size)
    pages, slots = footprint.held(layout), page_slots(geometry, layout)
    worst = int((slots - pages).argmin())
    projections = int(attention_bytes(geometry, layout)[worst]) * spec.num_layers
    reserve = max(int(hardware.reserve_gib * GIB), workspace_bytes(layout, load, geometry, dtype))
    needed = other_weight_bytes(spec, dtype, geometry.ranks) | {
        "projections": projections,
        "kv": int(pages[worst]) * geometry.slot_bytes * spec.num_layers,
        "reserve": reserve,
    }
    available = int(hardware.memory_gib * mem_fraction * GIB)
    ok = bool((pages <= slots).all()) and sum(needed.values()) <= available
    return Fit(ok, needed, available, int(pages[worst]), int(slots[worst]))


def workspace_bytes(layout: Layout, load: StepLoad, geometry: ArenaGeometry, dtype: str) -> int:
    """Bytes that a step holds at once besides weights and cache, an estimate from above for one rank.

    Rows in and out of attention with the heads at hand (with all heads of its own rows where those are more), the
    gathered history of chunks where pages are striped, and float32 logits.
    """
    spec, ranks = geometry.spec, geometry.ranks
    size = max(2, DTYPE_BYTES[dtype])
    is_sharded = layout.projections is Projections.SHARDED
    most = max(load.rows_T, default=0)
    rows = load.num_rows if is_sharded else most
    heads = spec.num_heads // ranks if is_sharded else spec.num_heads
    row_heads = max(rows * heads, most * spec.num_heads if layout.kv is KV.REQUEST else 0)
    if layout.kv is KV.POSITION:
        row_heads = max(row_heads, load.num_singles * spec.num_heads)
    attention = row_heads * (spec.latent_dim + spec.kv_lora_rank) * size
    history = 0
    if layout.kv is KV.POSITION:
        history = sum(start + rows for _, rows, start in load.chunks) * geometry.kv.token_bytes
    logits = load.num_sampled * spec.vocab_size * 4
    return attention + history + logits + load.num_rows * spec.hidden_size * size * 4
