"""From the requests that a step serves to the queries that the ranks obey, and back from what those bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from splash.core.step import Query, StepOutput, StepPlan
from splash.scheduler.chunks import Batch
from splash.scheduler.page_keys import extend_keys
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress, Request

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

    def take(self, output: StepOutput, eos_token_ids: frozenset[int]) -> tuple[list[Progress], list[Request]]:
        """Put the tokens of an output in the place of those foreseen.

        Returns:
            what it brought for the requests that are live, and those of them that have ended by it, not live any more.
        """
        progress: list[Progress] = []
        ended: list[Request] = []
        failures = dict(output.failures)
        for request, token, logprob in zip(self.sampled, output.tokens, output.logprobs, strict=True):
            if not request.live:
                continue
            tokens, id = request.tokens, request.id
            tokens[-1] = token
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
        sampled: by owner, the requests that get a token, in the same order.
        filling: who fills which pages.
        turning: in order of service, the requests whose next step is not one row in a page that they have: they have
            more tokens left, or begin a page.
    """

    def __init__(self, ranks: int) -> None:
        self.queries: list[list[Query]] = [[] for _ in range(ranks)]
        self.sampled: list[list[Request]] = [[] for _ in range(ranks)]
        self.filling: list[Filling] = []
        self.turning: list[Request] = []


def make_rows(running: Sequence[Request], batch: Batch, ranks: int, page_size: int) -> Rows:
    """The queries of a step by owner: rows of requests that decode, then chunks. Counts them as computed.

    Args:
        running: the requests that hold pages, in order of service.
        batch: which of them compute more than one token, or are new, and how many rows they get.
        ranks: T.
        page_size: token positions a page.
    """
    made = Rows(ranks)
    queries, sampled, filling, turning = made.queries, made.sampled, made.filling, made.turning
    chunks = {chunk.request for chunk in batch.chunks}
    last_offset = page_size - 1
    for request in running:
        if chunks and request in chunks:
            continue
        held, start = request.held, request.num_computed
        assert held is not None
        new_pages: tuple[tuple[int, ...], ...] = ()
        offset = start % page_size
        if not offset:
            page = start // page_size
            new_pages = (held.table.row(page),)
        if offset == last_offset:
            filling.append((request, start // page_size, start // page_size + 1))
            turning.append(request)
        owner = held.owner
        queries[owner].append(Query(request.id, start, (request.tokens[start],), owner, True, new_pages))
        sampled[owner].append(request)
        request.num_computed = start + 1
    for count, (_, left, request, _) in zip(batch.rows(), batch.chunks, strict=True):
        held, start = request.held, request.num_computed
        assert held is not None
        end = start + count
        if count < left or end % page_size == 0:
            turning.append(request)
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
            filling.append((request, start // page_size, end // page_size))
    if batch.chunks:  # else they are in order already
        turning.sort(key=attrgetter("order"))
    return made


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
