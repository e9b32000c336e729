"""What a switch moves: the difference between who holds each block now and who must hold it next.

For every rank a block is kept (held and needed), fetched (needed, not held) or dropped (held, not needed); a fetched
block has one source, which holds it. The same difference between two sets of owners in one layout is a rebalance of
requests. Nothing here knows a layout: a direction's primitive is read off the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from splash.core.ownership import Bools, State

NO_SOURCE = -1  # in fetch_source: this rank does not fetch the block


class Primitive(Enum):
    """The collective that carries out a difference.

    ALL_GATHER: every block that moves ends up on every rank. ALL_TO_ALL: blocks move to the particular ranks that
    need them. DISCARD: nothing moves, something is dropped. NONE: nothing changes.
    """

    NONE = "none"
    DISCARD = "discard"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, eq=False)
class BlockDiff:
    """The difference for one kind of block.

    Attributes:
        keep: bool [blocks, T], the rank holds the block and goes on holding it.
        fetch_source: int16 [blocks, T], the rank to fetch the block from, or NO_SOURCE.
        drop: bool [blocks, T], the rank holds the block and lets go of it.
    """

    keep: Bools
    fetch_source: npt.NDArray[np.int16]
    drop: Bools

    @cached_property
    def fetch(self) -> Bools:
        """bool [blocks, T], the rank fetches the block."""
        fetched: Bools = self.fetch_source != NO_SOURCE
        return fetched

    @property
    def received(self) -> npt.NDArray[np.intp]:
        """[T], blocks that each rank fetches."""
        blocks: npt.NDArray[np.intp] = self.fetch.sum(axis=0, dtype=np.intp)
        return blocks

    @property
    def sent(self) -> npt.NDArray[np.intp]:
        """[T], fetches that each rank is the source of."""
        return np.bincount(self.fetch_source[self.fetch], minlength=self.fetch_source.shape[1])

    @property
    def primitive(self) -> Primitive:
        """What it takes to carry this difference out."""
        moving = self.fetch.any(axis=1)
        if not moving.any():
            return Primitive.DISCARD if self.drop.any() else Primitive.NONE
        reaches_every_rank = (self.keep | self.fetch)[moving].all()
        return Primitive.ALL_GATHER if reaches_every_rank else Primitive.ALL_TO_ALL


@dataclass(frozen=True, eq=False)
class Diff:
    """What changes between two states: `weights` by head group, `pages` by page."""

    weights: BlockDiff
    pages: BlockDiff


def diff(src: State, dst: State, idle: Bools | None = None) -> Diff:
    """What turns `src` into `dst`: two layouts, two sets of owners, or both, over the same pages and ranks.

    Args:
        src: the state now.
        dst: the state wanted.
        idle: bool [pages], cached pages that no request uses and nobody takes along: one stays where what is resident
            already satisfies `dst`, and is dropped everywhere otherwise.
    """
    assert src.ranks == dst.ranks and src.num_pages == dst.num_pages
    held, need = src.page_holders, dst.page_holders
    if idle is not None:
        evicted = idle & (need & ~held).any(axis=1)
        need = need & ~evicted[:, None]
    return Diff(diff_blocks(src.weight_holders, dst.weight_holders), diff_blocks(held, need))


def diff_blocks(held: Bools, need: Bools) -> BlockDiff:
    """The difference between two holder matrices, bool [blocks, T]. Every block that is needed is held somewhere.

    Sources are balanced: ranks that hold the same blocks are the source of equally many fetches, to within one.
    """
    missing = need & ~held
    if not missing.any():
        return BlockDiff(held & need, np.full(held.shape, NO_SOURCE, dtype=np.int16), held & ~need)
    copies = np.count_nonzero(held, axis=1)
    assert not missing[copies == 0].any(), "a needed block is held by no rank"
    source = np.where(missing, held.argmax(axis=1).astype(np.int16)[:, None], np.int16(NO_SOURCE))
    several = np.flatnonzero(copies > 1)
    several = several[missing[several].any(axis=1)]
    if several.size:
        _balance(held[several], missing, source, several)
    return BlockDiff(held & need, source, held & ~need)


def _balance(holders: Bools, missing: Bools, source: npt.NDArray[np.int16], rows: npt.NDArray[np.intp]) -> None:
    """Choose the sources of the blocks `rows`, which have several holders: `holders` [len(rows), T].

    The other blocks have no choice and their load is given. A set of holders at a time, smallest sets first, the load
    of its members is levelled as far as it goes. Two ranks that hold the same blocks are in the same sets, so this
    keeps them within one of each other.
    """
    source[rows] = NO_SOURCE
    load = np.bincount(source[source != NO_SOURCE], minlength=holders.shape[1])
    _, first, which = np.unique(_set_numbers(holders), return_index=True, return_inverse=True)
    sets = holders[first]
    by_set = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    for index in np.argsort(np.count_nonzero(sets, axis=1), kind="stable"):
        members = rows[by_set[index]]
        block, rank = np.nonzero(missing[members])
        chosen = _level(load, np.flatnonzero(sets[index]), block.size)
        source[members[block], rank] = chosen
        load += np.bincount(chosen, minlength=load.size)


def _set_numbers(holders: Bools) -> npt.NDArray[np.void]:
    """A value a row, equal where the rows are: the row's bits. Sorting these is many times faster than sorting rows."""
    bits = np.packbits(holders, axis=1)
    return bits.view(np.dtype((np.void, bits.shape[1]))).ravel()


def _level(load: npt.NDArray[np.intp], ranks: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.intp]:
    """`count` choices among `ranks`, each the least loaded at its turn."""
    order = np.argsort(load[ranks], kind="stable")
    level = load[ranks][order]
    # reach[k]: choices it takes to raise the k + 1 least loaded to one level.
    reach = np.concatenate(([0], np.cumsum(np.diff(level) * np.arange(1, level.size))))
    raised = int(np.searchsorted(reach, count, side="right"))
    rest, extra = divmod(count - int(reach[raised - 1]), raised)
    share = np.zeros(level.size, dtype=np.intp)
    share[:raised] = level[raised - 1] - level[:raised] + rest
    share[:extra] += 1
    # A rank's k-th choice comes when its load is load + k: in that order the sources alternate.
    turn = np.concatenate([start + np.arange(num) for start, num in zip(level, share, strict=True)])
    return np.repeat(ranks[order], share)[np.argsort(turn, kind="stable")]
