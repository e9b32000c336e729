"""From the requests that a step serves to the queries that the ranks obey, and back from what those bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from splash.core.step import Query, StepOutput, StepPlan
from splash.scheduler.chunks import Batch
from splash.scheduler.page_keys import extend_keys
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress, Request

Filling = tuple[Request, int, int]  # fills pages first .. end - 1
_by_order = attrgetter("order")


class Turning(NamedTuple):
    """The requests whose next step is not one row in a page that they have, in order of service.

    Attributes:
        beginning: each has one token to compute, and begins a page with it.
        unfinished: they may have more tokens to compute.
    """

    beginning: list[Request]
    unfinished: list[Request]

    @classmethod
    def of(cls, running: Sequence[Request], page_size: int) -> Turning:
        """Those of some requests that hold pages."""
        made = cls([], [])
        for request in running:
            start, held = request.num_computed, request.held
            assert held is not None
            if len(request.tokens) - start > 1:
                made.unfinished.append(request)
            elif len(held) * page_size == start:
                made.beginning.append(request)
        return made


@dataclass(slots=True)
class PlannedStep:
    """A step in flight.

    Attributes:
        plan: what the ranks do.
        sampled: by owner, the requests that get a token, in the order of its queries.
        filling: the requests that fill a page with their only row.
        filling_chunks: which pages are filled by chunks.
        is_foreseen: whether all that it changes but the values of tokens has been taken in.
    """

    plan: StepPlan
    sampled: list[list[Request]]
    filling: list[Request]
    filling_chunks: list[Filling]
    is_foreseen: bool = False

    def take(self, output: StepOutput, eos_token_ids: frozenset[int]) -> tuple[list[Progress], list[Request]]:
        """Give the requests the tokens of an output, in the place of those foreseen if they were.

        Returns:
            what it brought for the requests that are live, and those of them that have ended by it, not live any more.
        """
        progress: list[Progress] = []
        ended: list[Request] = []
        failures = dict(output.failures)
        is_foreseen = self.is_foreseen
        for request, id, token, logprob in zip(
            chain.from_iterable(self.sampled), output.requests, output.tokens, output.logprobs, strict=True
        ):
            assert request.id == id, "not the requests that the step samples"
            if not request.live:
                continue
            tokens = request.tokens
            if is_foreseen:
                tokens[-1] = token
            else:
                tokens.append(token)
            num_tokens = len(tokens)
            finish_reason: str | None = None
            stop_reason: int | str | None = None
            if token in request.stops or num_tokens >= request.most_tokens or failures:
                failure = failures.get(id)
                finish_reason, stop_reason = request.finish(eos_token_ids) if failure is None else ("error", failure)
                if finish_reason is not None:
                    request.live = False
                    ended.append(request)
            num_output = num_tokens - request.num_prompt
            scores = tuple(request.scores) if num_output == 1 else ()
            progress.append(
                Progress(id, token, logprob, finish_reason, stop_reason, request.num_cached, num_output, scores)
            )
        return progress, ended


class Rows:
    """The queries of a step as they are put together, by owner.

    Attributes:
        queries: by owner.
        sampled, filling, filling_chunks: as in `PlannedStep`.
        turning: who will be in the next step.
    """

    def __init__(self, ranks: int) -> None:
        self.queries: list[list[Query]] = [[] for _ in range(ranks)]
        self.sampled: list[list[Request]] = [[] for _ in range(ranks)]
        self.filling: list[Request] = []
        self.filling_chunks: list[Filling] = []
        self.turning = Turning([], [])


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
        if chunks and request in chunks:
            continue
        held, start = request.held, request.num_computed
        assert held is not None
        owner, offset = held.owner, start % page_size
        new_pages = () if offset else (held.table.row(start // page_size),)
        if offset == last_offset:
            filling.append(request)
        queries[owner].append(Query(request.id, start, (request.tokens[start],), owner, True, new_pages))
        sampled[owner].append(request)
        request.num_computed = start + 1
    beginning, unfinished = made.turning = Turning(filling.copy(), [])
    for count, (_, left, request, _) in zip(batch.rows(), batch.chunks, strict=True):
        held, start = request.held, request.num_computed
        assert held is not None
        end = start + count
        if count < left:
            unfinished.append(request)
        elif end % page_size == 0:
            beginning.append(request)
        if count:
            # The ranks have not heard of the pages before its first chunk.
            pages = held.table.rows(0 if request in batch.new else -(-start // page_size), -(-end // page_size))
            # A prompt that is computed at once is not copied.
            whole = end <= request.num_prompt
            tokens = request.new.prompt[start:end] if whole else tuple(request.tokens[start:end])
            sample, score = count == left, request.is_unscored
            queries[held.owner].append(Query(request.id, start, tokens, held.owner, sample, pages, score))
            if sample:
                sampled[held.owner].append(request)
            request.num_computed = end
            made.filling_chunks.append((request, start // page_size, end // page_size))
    if len(beginning) > len(filling):  # else they are in order already
        beginning.sort(key=_by_order)
    return made


def fill_pages(cache: PrefixCache, filling: list[Request], page_size: int) -> None:
    """Let the cache know the pages that requests have filled by decoding, up to all that they have computed."""
    for request in filling:
        held, keys, page = request.held, request.keys, request.num_computed // page_size - 1
        if not request.live or held is None:
            continue
        if page < len(keys):
            cache.enter(held, page, page + 1, keys)
        else:
            cache.fill(held, page, request.tokens, page_size, keys)


def enter_pages(cache: PrefixCache, filling: list[Filling], page_size: int) -> None:
    """Let the cache know the pages that a step has filled."""
    for request, first, end in filling:
        held, keys = request.held, request.keys
        if not request.live or held is None:
            continue
        if end == first + 1 and end > len(keys):
            cache.fill(held, first, request.tokens, page_size, keys)
        else:
            extend_keys(keys, request.tokens, page_size, end)
            cache.enter(held, first, end, keys)
