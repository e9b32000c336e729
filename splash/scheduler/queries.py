"""From the requests that a step serves to the queries that the ranks obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splash.core.step import Query, StepPlan
from splash.scheduler.chunks import Batch
from splash.scheduler.prefix_cache import PrefixCache, extend_keys
from splash.scheduler.request import Request

Filling = tuple[Request, int, int]  # fills pages first .. end - 1


@dataclass(slots=True)
class PlannedStep:
    """A step in flight.

    Attributes:
        plan: what the ranks do.
        sampled: the requests that get a token, in the order of its queries.
        filling: who fills which pages.
        is_foreseen: whether all that it changes but the values of tokens has been taken in.
    """

    plan: StepPlan
    sampled: list[Request]
    filling: list[Filling]
    is_foreseen: bool = False


class Rows:
    """The queries of a step as they are put together, by owner.

    Attributes:
        queries: by owner.
        sampled: by owner, the requests that get a token, in the same order.
        filling: who fills which pages.
    """

    def __init__(self, ranks: int) -> None:
        self.queries: list[list[Query]] = [[] for _ in range(ranks)]
        self.sampled: list[list[Request]] = [[] for _ in range(ranks)]
        self.filling: list[Filling] = []


def make_rows(running: Sequence[Request], batch: Batch, ranks: int, page_size: int) -> Rows:
    """The queries of a step by owner: rows of requests that decode, then chunks. Counts them as computed.

    Args:
        running: the requests that hold pages, in order of service.
        batch: which of them compute more than one token, or are new, and how many rows they get.
        ranks: T.
        page_size: token positions a page.
    """
    made = Rows(ranks)
    queries, sampled, filling = made.queries, made.sampled, made.filling
    chunks = {chunk.request for chunk in batch.chunks}
    last_offset = page_size - 1
    for request in running:
        if request in chunks:
            continue
        held, start = request.held, request.num_computed
        assert held is not None
        new_pages: tuple[tuple[int, ...], ...] = ()
        offset = start % page_size
        if not offset:
            page = start // page_size
            new_pages = held.table.rows(page, page + 1)
        elif offset == last_offset:
            filling.append((request, start // page_size, start // page_size + 1))
        owner = held.owner
        queries[owner].append(Query(request.id, start, (request.tokens[start],), owner, True, new_pages))
        sampled[owner].append(request)
        request.num_computed = start + 1
    for count, (_, left, request, _) in zip(batch.rows(), batch.chunks, strict=True):
        held, start = request.held, request.num_computed
        assert held is not None
        if count:
            end = start + count
            # The ranks have not heard of the pages before its first chunk.
            pages = held.table.rows(0 if request in batch.new else -(-start // page_size), -(-end // page_size))
            tokens = tuple(request.tokens[start:end])
            sample, score = count == left, request.is_unscored
            queries[held.owner].append(Query(request.id, start, tokens, held.owner, sample, pages, score))
            if sample:
                sampled[held.owner].append(request)
            request.num_computed = end
            filling.append((request, start // page_size, end // page_size))
    return made


def enter_pages(cache: PrefixCache, filling: list[Filling], page_size: int) -> None:
    """Let the cache know the pages that a step has filled."""
    for request, first, end in filling:
        if request.live and request.held is not None:
            extend_keys(request.keys, request.tokens, page_size, end)
            for page in range(first, end):
                cache.enter(request.held, page, request.keys)
