"""Where a waiting request finds room: its owner, and what it shares. Decides, and moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splash.core.errors import RequestError
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.owners import choose_owner
from splash.scheduler.prefix_cache import CachedPage, PrefixCache, extend_keys
from splash.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Place:
    """Room for a request.

    Attributes:
        owner: the rank that the request would belong to.
        shared: the first of its pages, which the cache has there.
        num_pages: pages of the tokens that it has.
    """

    owner: int
    shared: Sequence[CachedPage]
    num_pages: int


def find_place(config: SchedulerConfig, pool: PrefixCache, request: Request, tokens: Sequence[int]) -> Place | None:
    """Room that is there now for a waiting request, or None. `tokens` of running requests are by rank."""
    page_size = config.page_size
    num_pages, max_pages = -(-len(request.tokens) // page_size), -(-request.max_positions // page_size)
    found: Sequence[Sequence[CachedPage]] = [()] * pool.ranks
    if config.prefix_cache:
        # At least the last token has to be computed on.
        most = (len(request.tokens) - 1) // page_size
        extend_keys(request.keys, request.tokens, page_size, most)
        found = pool.match(request.keys[:most])
    # One page more than the tokens take must be free: without room to grow it would soon be preempted.
    needed = min(num_pages + 1, max_pages)
    owner = choose_owner(pool, tokens, needed, max_pages, found, page_size)
    return None if owner is None else Place(owner, found[owner], num_pages)


def check_capacity(request: Request, pool: PrefixCache, page_size: int) -> None:
    """Refuse a request that would never fit, even alone.

    Raises:
        RequestError: naming the parameter that asks for too much.
    """

    def fits(num_positions: int) -> bool:
        num_pages = -(-num_positions // page_size)
        return any(pool.fits_alone(owner, num_pages) for owner in range(pool.ranks))

    if fits(request.max_positions):
        return
    room = f"the {pool.num_total} pages of {page_size} tokens that the ranks have in layout {pool.layout}"
    if not fits(request.num_prompt):
        raise RequestError("prompt", f"has {request.num_prompt} tokens, too many for {room}")
    raise RequestError(
        "max_tokens",
        f"is {request.max_tokens}, which with a prompt of {request.num_prompt} tokens is too many for {room}",
    )
