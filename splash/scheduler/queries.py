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
from splash.scheduler.request import Progress, Request, held_pages

Filling = tuple[Request, int, int]  # fills pages first .. end - 1
MANY = 16  # where more than one of so many are meant, all are looked at to bring those in order
_by_order = attrgetter("order")
_id = attrgetter("id")


class Following(NamedTuple):
    """What requests that hold pages do in the step after one, each list in order of service.

    Attributes:
        decoding: by owner, those that have one token to compute.
        beginning: those of them that begin a page with it.
        unfinished: those whose prompt the step does not end. They may have one token left, or more.
    """

    decoding: list[list[Request]]
    beginning: list[Request]
    unfinished: list[Request]

    @classmethod
    def of(cls, running: Sequence[Request], ranks: int, page_size: int) -> Following:
        """What the running requests do, found by looking at each."""
        made = cls([[] for _ in range(ranks)], [], [])
        for request in running:
            start, held = request.num_computed, request.held
            assert held is not None
            if len(request.tokens) - start > 1:
                made.unfinished.append(request)
                continue
            made.decoding[held.owner].append(request)
            if len(held) * page_size == start:
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
        sampled = list(chain.from_iterable(self.sampled))
        assert output.requests == tuple(map(_id, sampled)), "not the requests that the step samples"
        for request, id, token, logprob in zip(sampled, output.requests, output.tokens, output.logprobs, strict=True):
            if not request.live:
                continue
            tokens = request.tokens
            if is_foreseen:
                tokens[-1] = token
            else:
                tokens.append(token)
            num_tokens = len(tokens)
            num_output = num_tokens - request.num_prompt
            may_end = token in request.stops or num_tokens >= request.most_tokens or failures
            if num_output > 1 and not may_end:
                progress.append(Progress(id, token, logprob, None, None, request.num_cached, num_output))
                continue
            failure = failures.get(id)
            finish_reason, stop_reason = request.finish(eos_token_ids) if failure is None else ("error", failure)
            if finish_reason is not None:
                request.live = False
                ended.append(request)
            scores = tuple(request.scores) if num_output == 1 else ()
            progress.append(
                Progress(id, token, logprob, finish_reason, stop_reason, request.num_cached, num_output, scores)
            )
        return progress, ended


class Rows:
    """The queries of a step as they are put together.

    Attributes:
        queries: by owner.
        sampled, filling, filling_chunks: as in `PlannedStep`.
        following: the step after it.
    """

    def __init__(self, decoding: Sequence[Sequence[Request]]) -> None:
        self.queries: list[list[Query]] = [[] for _ in decoding]
        self.sampled = [list(own) for own in decoding]
        self.filling: list[Request] = []
        self.filling_chunks: list[Filling] = []
        self.following = Following(self.sampled.copy(), [], [])


def make_rows(decoding: Sequence[Sequence[Request]], batch: Batch, running: Sequence[Request], page_size: int) -> Rows:
    """The queries of a step by owner: rows of requests that decode, then chunks. Counts them as computed.

    Args:
        decoding: by owner, the requests that have one token to compute, in order of service.
        batch: those that have more, or are new, and how many rows they get.
        running: all of them, in order of service.
        page_size: token positions a page.
    """
    made = Rows(decoding)
    queries, sampled, filling = made.queries, made.sampled, made.filling
    last_offset = page_size - 1
    for owner, own in enumerate(decoding):
        add_query = queries[owner].append
        for request in own:
            start = request.num_computed
            offset = start % page_size
            new_pages: tuple[tuple[int, ...], ...] = ()
            if not offset:
                held = request.held
                assert held is not None
                new_pages = (held.table.row(start // page_size),)
            if offset == last_offset:
                filling.append(request)
            add_query(Query(request.id, start, (request.tokens[start],), owner, True, new_pages))
            request.num_computed = start + 1
    if len(filling) > 1:
        made.filling = filling = _in_order(filling, running)
    decoding_next, beginning, unfinished = made.following
    beginning += filling
    for count, (_, left, request, _) in zip(batch.rows(), batch.chunks, strict=True):
        held, start = held_pages(request), request.num_computed
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
    if len(beginning) > len(filling):
        beginning.sort(key=_by_order)
    for owner, (own, then) in enumerate(zip(decoding, sampled, strict=True)):
        if own and len(then) > len(own) and then[len(own)].order < own[-1].order:
            decoding_next[owner] = sorted(then, key=_by_order)
    return made


def _in_order(requests: list[Request], running: Sequence[Request]) -> list[Request]:
    """Some of the running requests in order of service."""
    if MANY * len(requests) < len(running):
        return sorted(requests, key=_by_order)
    wanted = set(requests)
    return [request for request in running if request in wanted]


def fill_pages(cache: PrefixCache, filling: list[Request], page_size: int) -> None:
    """Let the cache know the pages that requests have filled by decoding, the last of all that they have computed.

    The step that fills them must be the last that has been planned: the next one counts more as computed.
    """
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
