"""What crosses between the scheduler process and the ranks: frozen values, encoded as msgpack.

A step is one forward of the whole group. Every rank receives the same `StepPlan` and obeys it; rank 0 answers with a
`StepOutput`. Ranks keep two things a request between steps: its page table, and on rank 0 what its sampler needs.

A step may be sent before the one before it has been answered. Plans are carried out in order on every rank, so it may
take the pages that the step before was the last to use. The tokens that the step before samples are not known yet: the
ranks put them in the place of `PENDING_TOKEN`.
"""

from __future__ import annotations

import msgspec

from splash.core.request import SamplingParams, TokenLogprob

NO_SLOT = -1  # in a page's slots: this rank does not hold the page
PENDING_TOKEN = -1  # in a query's tokens: what the step before samples for this request
# Rows of a step with chunks, and keys they see in all, up to which it runs as a recorded step of single rows. Those
# read their history one by one, so many in 0.3 ms a layer at 3.8 TB/s; to start a layer otherwise takes a host 1.5 ms.
REPLAYED_ROWS, REPLAYED_KEYS = 256, 1 << 20


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the ranks hear of for the first time. `prompt` feeds the sampler's penalties.

    `output` is what it has generated already, on ranks that are no more; sampling goes on behind it.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    output: tuple[int, ...] = ()


class Query(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rows of one request in a step.

    `tokens` are the token ids at positions start, start + 1, ..., the last of them perhaps `PENDING_TOKEN`; `new_pages`
    are the pages that the rows are the first to need, in page order, each as T slots (slot on rank r, or NO_SLOT);
    `sample` asks for a token after the last row, `score` for the log-probability that each row gives to the next token
    of the prompt. As nothing in it can be part of a cycle, the garbage collector does not look at it.
    """

    request: int
    start: int
    tokens: tuple[int, ...]
    owner: int
    sample: bool
    new_pages: tuple[tuple[int, ...], ...] = ()
    score: bool = False


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step, the same for every rank.

    `released` requests lose their page table before the step (finished, aborted or preempted); `finished` ones are
    forgotten altogether. Queries are sorted by owner, and every rank takes part even with no rows of its own. With
    `greedy` each query that samples takes its most likely token, and nothing else is asked of the logits.
    """

    step: int
    epoch: int
    layout: str
    queries: tuple[Query, ...]
    new: tuple[NewRequest, ...] = ()
    released: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    greedy: bool = False


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens of a step: one entry for each query with `sample`, in query order.

    `scores` are for queries with `score`: the request, the position of the first token scored, and of each its
    log-probability.

    `failures` are requests whose grammar could not be followed, with the reason; their tokens mean nothing.

    `forward_s` are the seconds that rank 0's device spent in the forward, collectives included.
    """

    step: int
    epoch: int
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    failures: tuple[tuple[int, str], ...] = ()
    scores: tuple[tuple[int, int, tuple[TokenLogprob, ...]], ...] = ()
    forward_s: float = 0.0
