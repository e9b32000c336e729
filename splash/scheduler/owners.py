"""Owners: the rank that a request belongs to from its admission on.

The owner holds the pages where the layout keeps them by request, and computes the rows where it splits rows by
request. Other layouts have owners too, balanced the same way, so that a switch finds them in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from splash.core.pages import PagePool


def choose_owner(pool: PagePool, tokens: Sequence[int], num_pages: int, max_pages: int) -> int | None:
    """The rank with the least to attend to among those that can take the request, or None where none can now.

    Args:
        pool: the pages.
        tokens: context tokens of the running requests of each rank.
        num_pages: pages that must be free at once.
        max_pages: pages that the request has if it runs to its end, which its holders must have room for.

    Ties go to the rank with the most free pages, then to the lowest.
    """
    free = pool.num_free
    usable = [
        rank for rank in range(pool.ranks) if not pool.lacking(rank, 0, num_pages) and pool.fits_alone(rank, max_pages)
    ]
    return min(usable, key=lambda rank: (tokens[rank], -free[rank], rank), default=None)
