"""Layouts: where attention's projections live, times where the KV cache lives.

Five of the six combinations are useful and have names. Replicated projections with replicated KV are dominated by
every other layout and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from splash.core.errors import ConfigError


class Projections(Enum):
    """Placement of the attention projections Q-B, KV-B and O."""

    SHARDED = "sharded"  # rank h holds head group h
    REPLICATED = "replicated"  # every rank holds all head groups


class KV(Enum):
    """Placement of the KV pages."""

    REPLICATED = "replicated"  # every rank holds every page
    REQUEST = "request"  # a request's pages live on its owner rank
    POSITION = "position"  # page number c lives on rank c mod T


class Rows(Enum):
    """Placement of the query rows at a layer boundary."""

    REPLICATED = "replicated"  # every rank holds every row
    SPLIT = "split"  # each row is held by one rank, its home


@dataclass(frozen=True)
class Layout:
    """A parallel layout of attention: the product of two placements.

    Raises:
        ConfigError: both placements are replicated.
    """

    projections: Projections
    kv: KV

    def __post_init__(self) -> None:
        if self.projections is Projections.REPLICATED and self.kv is KV.REPLICATED:
            raise ConfigError("layout", "replicated projections with replicated KV are dominated by every other layout")

    @cached_property
    def _hash(self) -> int:
        return hash((self.projections, self.kv))

    def __hash__(self) -> int:  # of enums it takes long, and layouts are keys in what is decided at every step
        return self._hash

    @property
    def name(self) -> str:
        """The short name: tp, dp, cp, dop or dcp."""
        return _NAMES[self]

    @property
    def rows(self) -> Rows:
        """Rows follow the projections: a rank with every head can own whole rows, a rank with few needs them all."""
        return Rows.REPLICATED if self.projections is Projections.SHARDED else Rows.SPLIT

    def __str__(self) -> str:
        return self.name


TP = Layout(Projections.SHARDED, KV.REPLICATED)
DP = Layout(Projections.REPLICATED, KV.REQUEST)
CP = Layout(Projections.REPLICATED, KV.POSITION)
DOP = Layout(Projections.SHARDED, KV.REQUEST)
DCP = Layout(Projections.SHARDED, KV.POSITION)

LAYOUTS: dict[str, Layout] = {"tp": TP, "dp": DP, "cp": CP, "dop": DOP, "dcp": DCP}
_NAMES: dict[Layout, str] = {layout: name for name, layout in LAYOUTS.items()}


def parse_layout(name: str) -> Layout:
    """The layout of that name.

    Raises:
        ConfigError: no layout has that name; the message lists those that exist.
    """
    try:
        return LAYOUTS[name]
    except (KeyError, TypeError):
        raise ConfigError("layout", f"unknown layout {name!r}; choose one of {', '.join(LAYOUTS)}") from None


def check_layout(layout: Layout, num_heads: int, ranks: int) -> None:
    """Refuse a layout whose sharded projections would need unequal head groups.

    Raises:
        ConfigError: projections are sharded and `ranks` does not divide `num_heads`.
    """
    if layout.projections is Projections.SHARDED and num_heads % ranks:
        usable = ", ".join(name for name, other in LAYOUTS.items() if other.projections is Projections.REPLICATED)
        raise ConfigError(
            "layout",
            f"{layout} shards attention heads, and {ranks} ranks do not divide {num_heads} heads; "
            f"use {usable}, or a number of ranks that divides {num_heads}",
        )
