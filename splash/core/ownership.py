"""Who holds what: the one definition of a layout.

The attention state of a layer is a set of blocks. A *weight block* is one head group of Q-B, KV-B or O; a *page block*
is one page of one request with everything that is cached with it. A layout says, for every block, which ranks hold it:

    block                                      placement     holders
    -----------------------------------------  ------------  -------------------
    head group h of a module                   SHARDED       {h}
                                               REPLICATED    {0 .. T-1}
    page c of a request that rank w owns       REPLICATED    {0 .. T-1}
                                               REQUEST       {w}
                                               POSITION      {c mod T}
    page shared by several requests            any           union over them

For example T = 2 and a request of three pages that rank 1 owns (x: rank 0 holds it, y: rank 1, *: both):

            head groups 0 1    pages 0 1 2
    tp                  x y          * * *
    dp                  * *          y y y
    cp                  * *          x y x
    dop                 x y          y y y
    dcp                 x y          x y x

`weight_holders` and `page_holders` are that table. Everything else (memory a rank, the longest context, what a switch
of layout or of owners moves) is computed from the matrices they return, so a placement is defined nowhere else.

A page's holders depend on its number only through number mod T. State that is cut by head, such as grouped-query KV,
would add a head group to a page block and intersect the two tables; multi-head latent attention has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from splash.core.layout import KV, Layout, Projections

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class WeightBlock:
    """One head group of one module: "q_b", "kv_b" or "o"."""

    module: str
    head_group: int


@dataclass(frozen=True)
class PageBlock:
    """Page `number` of a request, with everything that is cached with it."""

    request: int
    number: int


Block = WeightBlock | PageBlock


def weight_holders(layout: Layout, ranks: int) -> Bools:
    """Which rank holds which head group of every module: bool [T head groups, T ranks]."""
    match layout.projections:
        case Projections.SHARDED:
            return np.eye(ranks, dtype=bool)
        case Projections.REPLICATED:
            return np.ones((ranks, ranks), dtype=bool)


def page_holders(numbers: Ints, owners: Ints, layout: Layout, ranks: int) -> Bools:
    """Which rank holds which page: bool [pages, T].

    Args:
        numbers: [pages], the page's number within its request.
        owners: [pages], the rank that owns the request.
        layout: the layout.
        ranks: T.
    """
    match layout.kv:
        case KV.REPLICATED:
            return np.ones((len(numbers), ranks), dtype=bool)
        case KV.REQUEST:
            holder = owners
        case KV.POSITION:
            holder = numbers % ranks
    held: Bools = holder[:, None] == np.arange(ranks)
    return held


def holders(block: Block, layout: Layout, owners: Mapping[int, int], ranks: int) -> frozenset[int]:
    """The ranks that hold one block. `owners` maps request -> rank."""
    if isinstance(block, WeightBlock):
        row = weight_holders(layout, ranks)[block.head_group]
    else:
        row = page_holders(np.array([block.number]), np.array([owners[block.request]]), layout, ranks)[0]
    return frozenset(np.flatnonzero(row).tolist())


@dataclass(frozen=True, eq=False)
class State:
    """Which pages there are and who owns them, in one layout.

    Each entry is a request's claim on a page. Without sharing there is one a page, in page order; with a prefix cache,
    `pages` names the page that each entry claims. Pages are numbered from 0 and each is claimed at least once: a cached
    page that no request uses is claimed for whichever rank should keep it.

    Attributes:
        layout: the layout.
        ranks: T.
        numbers: [claims], the page's number within the claiming request.
        owners: [claims], the rank that owns the claiming request.
        pages: [claims], the page claimed; None where claim i is the only one on page i.
    """

    layout: Layout
    ranks: int
    numbers: Ints
    owners: Ints
    pages: Ints | None = None

    def __post_init__(self) -> None:
        assert self.ranks >= 1
        assert len(self.numbers) == len(self.owners)
        if len(self.owners):
            assert self.numbers.min() >= 0
            assert self.owners.min() >= 0 and self.owners.max() < self.ranks
        if self.pages is not None:
            assert len(self.pages) == len(self.owners)
            assert np.bincount(self.pages).all(), "every page needs a claim"

    @property
    def num_pages(self) -> int:
        """Distinct pages."""
        if self.pages is None:
            return len(self.numbers)
        return int(self.pages.max()) + 1 if len(self.pages) else 0

    @cached_property
    def page_holders(self) -> Bools:
        """bool [pages, T]: which rank holds which page, the union over the page's claims."""
        claimed = page_holders(self.numbers, self.owners, self.layout, self.ranks)
        if self.pages is None:
            return claimed
        held = np.zeros((self.num_pages, self.ranks), dtype=bool)
        for rank in range(self.ranks):
            held[self.pages[claimed[:, rank]], rank] = True
        return held

    @cached_property
    def weight_holders(self) -> Bools:
        """bool [head groups, T]: which rank holds which head group of every module."""
        return weight_holders(self.layout, self.ranks)

    def held_pages(self, rank: int) -> npt.NDArray[np.intp]:
        """The pages that `rank` holds, ascending."""
        return np.flatnonzero(self.page_holders[:, rank])
