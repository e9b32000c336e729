"""Where pages come to lie: a rank's slots after a switch, chosen so that little is overwritten and runs are long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from splash.core.step import NO_SLOT

Slots = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


def page_numbers(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, .. length - 1 for each length in turn: the page numbers of requests of these lengths."""
    numbers: npt.NDArray[np.int64] = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return numbers


def slot_flags(slots: npt.NDArray[np.integer[Any]], num_slots: int) -> Flags:
    """bool [num_slots]: which slots are in `slots`. NO_SLOT is -1, and names one flag too many, which is cut off."""
    flags = np.zeros(num_slots + 1, dtype=bool)
    flags[slots.astype(np.int64, copy=False)] = True  # numpy takes other integers half as fast
    return flags[:-1]


def place(
    before: npt.NDArray[np.int64],
    after: npt.NDArray[np.int64],
    wanted: Flags,
    source: npt.NDArray[np.int16],
    usable: Flags,
    alive: Flags,
    idle: Flags,
    border: int,
) -> tuple[npt.NDArray[np.intp], bool]:
    """Choose one rank's slots after the switch.

    Args:
        before: [p] slots before.
        after: [p] slots after, so far only those chosen ahead; the others are filled in.
        wanted: [p] pages that the rank holds after the switch.
        source: [p] ranks that pages are fetched from, NO_SOURCE for those that are not, T for those only reserved.
        usable: [slots] may hold pages after the switch.
        alive: [slots] holds a written page or weights before it.
        idle: [slots] holds a cached page that no request uses.
        border: slots below it may turn into weights one day; those above are taken first.

    Returns:
        The slots to withhold until the commit, and whether a page took a slot in which something is alive.
    """
    in_use = alive | slot_flags(before, len(usable))
    ahead = after[after != NO_SLOT]
    assert usable[ahead].all() and not in_use[ahead].any(), "a slot that was chosen ahead is not free"
    # NO_SLOT, -1, reads the last flag here: a page that is not held does not stay, whatever that is.
    stays = wanted & (before != NO_SLOT) & (after == NO_SLOT) & usable[before]
    np.copyto(after, before, where=stays)
    free = usable & ~slot_flags(after, len(usable))
    homeless = np.flatnonzero(wanted & (after == NO_SLOT))
    homeless = homeless[np.argsort(source[homeless], kind="stable")]
    overwrites = False
    above = np.zeros_like(free)
    above[border:] = True
    # A slot that is reserved but not written may be overwritten, yet an abandoned switch must find it reserved.
    tiers: tuple[Callable[[], Flags], ...] = (
        lambda: free & ~in_use & ~idle & above,
        lambda: free & ~in_use & ~idle & ~above,
        lambda: free & ~in_use & idle,
        lambda: free & in_use & ~alive,
        lambda: free & alive,
    )
    for candidates in tiers:
        if not len(homeless):
            break
        slots = _longest_runs_first(candidates(), len(homeless))
        after[homeless[: len(slots)]] = slots
        free[slots] = False
        homeless = homeless[len(slots) :]
        overwrites = candidates is tiers[-1]
    assert not len(homeless)
    return np.flatnonzero(free & in_use), overwrites


def _longest_runs_first(flags: Flags, most: int) -> npt.NDArray[np.intp]:
    """The first `most` indices where `flags` is set: run by run, the longest first, each in ascending order."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    order = np.argsort(-lengths, kind="stable")
    enough = order[: int(np.searchsorted(np.cumsum(lengths[order]), most)) + 1]
    starts, lengths = starts[enough], lengths[enough]
    indices: npt.NDArray[np.intp] = np.repeat(starts, lengths) + page_numbers(lengths)
    return indices[:most]
