"""Owners: the rank that a request belongs to from its admission on.

The owner holds the pages where the layout keeps them by request, and computes the rows where it splits rows by
request. Other layouts have owners too, balanced the same way, so that a switch finds them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import gt

from splash.scheduler.idle_pages import CachedPage
from splash.scheduler.prefix_cache import Found, PrefixCache

# Tokens of context that weigh as much as one to compute. With eight layers of DeepSeek-V3 on two H200 in `dp` a rank
# computes one in 21 us (96,268 a second on both) and reads one of context in 2.4 ns a decode step (9,216 bytes at 3.85
# TB/s), so that eight of these come level after a thousand steps.
COMPUTE_WEIGHT = 8


def balance_owners(
    pages: Sequence[int], capacity: Sequence[int], chosen: Sequence[int | None] | None = None
) -> list[int]:
    """An owner for each of many requests at once: the largest first, each to the rank with the fewest pages so far.

    Args:
        pages: pages of each request.
        capacity: pages that each rank has room for; a rank that a request no longer fits on is passed over while
            another has room.
        chosen: owners chosen before, None where there is none. They stand as long as they have room.
    """
    load = [0] * len(capacity)
    owners = [0] * len(pages)
    left = []
    for index, owner in enumerate(chosen or [None] * len(pages)):
        if owner is not None and load[owner] + pages[index] <= capacity[owner]:
            owners[index] = owner
            load[owner] += pages[index]
        else:
            left.append(index)
    for index in sorted(left, key=lambda index: (-pages[index], index)):
        roomy = [rank for rank, room in enumerate(capacity) if load[rank] + pages[index] <= room]
        owner = min(roomy or range(len(capacity)), key=lambda rank: (load[rank], rank))
        owners[index] = owner
        load[owner] += pages[index]
    return owners


def owners_with_room(
    pool: PrefixCache,
    tokens: Sequence[int],
    num_pages: int,
    max_pages: int,
    found: Found | None = None,
    page_size: int = 1,
    reserved: Sequence[int] | None = None,
) -> Iterator[tuple[int, Sequence[CachedPage], list[int]]]:
    """The ranks that can take the request now, the one with the least to do first, each with what it has cached of it
    and the free pages that it takes on every rank.

    Args:
        pool: the pages.
        tokens: context tokens of the running requests of each rank.
        num_pages: pages that the request must be able to have at once.
        max_pages: pages that it has if it runs to its end, which its holders must have room for.
        found: what the cache has of its first pages: work that need not be done there.
        page_size: tokens a page.
        reserved: free pages on each rank that are not for it.

    Ties go to the rank with the most free pages, then to the lowest.
    """
    free = pool.num_free
    saved = COMPUTE_WEIGHT * page_size  # by each page that is there
    work = tokens if found is None else [own - num * saved for own, num in zip(tokens, found.counts, strict=True)]
    spare = free if reserved is None else [own - kept for own, kept in zip(free, reserved, strict=True)]
    for rank in _least_first(work, free):
        shared = found.pages(rank) if found is not None else ()
        takes = pool.takes(rank, shared, num_pages)
        if not any(map(gt, takes, spare)) and pool.fits_alone(rank, max_pages):
            yield rank, shared, takes


def _least_first(work: Sequence[int], free: Sequence[int]) -> Iterator[int]:
    """The ranks in order of work; among equals, the one with the most free pages first, then the lowest."""
    least = min(work)
    num_given = 0
    if work.count(least) == 1:  # mostly nobody asks for a second
        yield work.index(least)
        num_given = 1
    ranks = sorted(sorted(range(len(work)), key=free.__getitem__, reverse=True), key=work.__getitem__)
    yield from ranks[num_given:]
