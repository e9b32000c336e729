"""Where a waiting request finds room: its owner, what it shares, who has to make way. Decides, and moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from splash.core.errors import RequestError
from splash.scheduler.chunks import Batch
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.idle_pages import CachedPage
from splash.scheduler.owners import COMPUTE_WEIGHT, owners_with_room
from splash.scheduler.page_keys import extend_keys
from splash.scheduler.prefix_cache import Found, PrefixCache
from splash.scheduler.request import Request


class Place(NamedTuple):
    """Room for a request.

    Attributes:
        owner: the rank that the request would belong to.
        shared: the first of its pages, which the cache has there.
        takes: free pages on each rank that it would leave less, with the one that it needs to grow.
    """

    owner: int
    shared: Sequence[CachedPage]
    takes: list[int]


class Admission:
    """Looks for room for one request among the pages of a pool.

    Args:
        config: limits.
        pool: the pages.
        request: it waits.

    Attributes:
        found: what the cache has of its first pages.
        num_pages: pages of the tokens that it has.
    """

    def __init__(self, config: SchedulerConfig, pool: PrefixCache, request: Request) -> None:
        self._pool = pool
        self._page_size = config.page_size
        self.num_pages = -(-len(request.tokens) // config.page_size)
        self._max_pages = -(-request.max_positions // config.page_size)
        # One page more than the tokens take must be free: without room to grow it would soon be preempted.
        self._needed = min(self.num_pages + 1, self._max_pages)
        self._request = request
        self.found = Found([0] * pool.ranks, (), False)
        if config.prefix_cache and not request.is_unscored:
            # At least the last token has to be computed on.
            most = (len(request.tokens) - 1) // config.page_size
            extend_keys(request.keys, request.tokens, config.page_size, most)
            self.found = pool.match(request.keys[:most])

    def left(self, owner: int) -> int:
        """Tokens to compute with that owner: those that it does not have in its cache."""
        return len(self._request.tokens) - self.found.counts[owner] * self._page_size

    def place(self, tokens: Sequence[int], reserved: Sequence[int] | None = None) -> Place | None:
        """The first of `places`, or None."""
        return next(self.places(tokens, reserved), None)

    def places(self, tokens: Sequence[int], reserved: Sequence[int] | None = None) -> Iterator[Place]:
        """Room that is there now: with the rank that has the least to do, then with others that find as much.

        Args:
            tokens: context tokens of the running requests of each rank.
            reserved: pages on each rank that must be left.
        """
        least = None
        for owner, shared, takes in owners_with_room(
            self._pool, tokens, self._needed, self._max_pages, self.found, self._page_size, reserved
        ):
            least = len(shared) if least is None else least
            if len(shared) >= least:
                yield Place(owner, shared, takes)

    def place_with_rows(
        self, tokens: Sequence[int], batch: Batch, reserved: Sequence[int] | None = None
    ) -> tuple[Place | None, bool]:
        """The first of `places` where the request has rows in the batch as well, or else the first; whether it has."""
        first = None
        for place in self.places(tokens, reserved):
            if batch.admits(self._request, self.left(place.owner), place.owner):
                return place, True
            first = first or place
            if batch.busy_T is None:
                break  # it would have as few rows with any other owner
        return first, False

    def place_of_others(self, tokens: Sequence[int], running: Sequence[Request]) -> tuple[Place, list[Request]] | None:
        """Room that is there once less important requests give up theirs, and which ones: as few and as late as can be.

        Args:
            tokens: context tokens of the running requests of each rank.
            running: in order of service; only those of a higher `priority` number make way, the last first.

        Returns:
            None where there would be none even so.
        """
        best: tuple[Place, list[Request]] | None = None
        tried: list[tuple[list[int], Sequence[CachedPage]]] = []
        for owner in sorted(range(self._pool.ranks), key=lambda rank: tokens[rank] + COMPUTE_WEIGHT * self.left(rank)):
            if not self._pool.fits_alone(owner, self._max_pages):
                continue
            shared = self.found.pages(owner)
            place = Place(owner, shared, self._pool.takes(owner, shared, self._needed))
            if (place.takes, place.shared) in tried:
                continue  # its pages would lie where those of another owner would
            tried.append((place.takes, place.shared))
            victims = self._victims(place, running)
            if victims and (best is None or victims[-1].order > best[1][-1].order):
                best = place, victims
        return best

    def _victims(self, place: Place, running: Sequence[Request]) -> list[Request]:
        """Who makes way for a place, the least important and youngest first. Empty where that would not do."""
        importance = self._request.priority
        missing = [takes - free for takes, free in zip(place.takes, self._pool.num_free, strict=True)]
        later = list(takewhile(lambda request: request.priority > importance, reversed(running)))
        held = [request.held for request in later if request.held is not None]
        counts = [self._pool.counts(own) for own in held]
        if any([count > 0 and count > sum([pages[rank] for pages in counts]) for rank, count in enumerate(missing)]):
            return []
        victims: list[Request] = []
        # What the request shares stays in use, whoever gives it up.
        given_up = Counter(dict.fromkeys(place.shared, -1))
        for request, own, pages in zip(later, held, counts, strict=True):
            lacking = [rank for rank, count in enumerate(missing) if count > 0]
            if not lacking:
                break
            if any([pages[rank] for rank in lacking]):
                victims.append(request)
                freed = self._pool.freed(own, given_up)
                missing = [count - more for count, more in zip(missing, freed, strict=True)]
        if max(missing) > 0:
            return []
        return victims or later[:1]  # where there are pages, there are too many requests


def is_stuck(
    request: Request, config: SchedulerConfig, pool: PrefixCache, running: Sequence[Request], tokens: Sequence[int]
) -> bool:
    """Whether the first request in the queue can neither join the running ones nor take the place of any."""
    if running and running[-1].priority > request.priority:
        return False  # it may, though perhaps not now
    if len(running) >= min(config.max_num_seqs, config.max_batched_tokens):
        return True
    return Admission(config, pool, request).place(tokens) is None


def check_request(prompt: Sequence[int], priority: int, max_model_len: int) -> None:
    """Refuse a request that no server of this model could take.

    Raises:
        RequestError: naming the parameter that is out of range.
    """
    if not prompt:
        raise RequestError("prompt", "must have at least 1 token")
    if len(prompt) + 1 > max_model_len:
        raise RequestError(
            "prompt", f"has {len(prompt)} tokens; the model's length of {max_model_len} accepts {max_model_len - 1}"
        )
    if not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise RequestError("priority", f"must be a 64-bit integer, not {priority!r}")


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
