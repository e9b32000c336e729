"""Loads for tests of policies: situations made of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from splash.core.layout import KV, Layout
from splash.core.memory import ArenaGeometry
from splash.core.pages import HeldPages
from splash.core.request import SamplingParams
from splash.core.step import NewRequest
from splash.scheduler.policy import Limits
from splash.scheduler.request import Request
from splash.scheduler.situation import FIRST_WAITING, Situation


def request(
    id: int, owner: int | None, num_prompt: int, num_output: int, max_tokens: int = 1024, ranks: int = 8, left: int = 1
) -> Request:
    """A request that runs on `owner`, or waits where it is None; `left` of its tokens are to be computed."""
    length = num_prompt + num_output
    made = Request(
        id=id,
        priority=0,
        arrival=id,
        new=NewRequest(id, (), SamplingParams(), 0),
        num_prompt=num_prompt,
        max_tokens=max_tokens,
        tokens=range(length),  # only counted
    )
    if owner is not None:
        made.held = HeldPages(owner, ranks)
        made.num_computed = length - left
    return made


def situation(
    now: float,
    layout: Layout,
    running: Sequence[Request],
    waiting: Sequence[Request] = (),
    ranks: int = 8,
    page_size: int = 64,
    num_waiting: int | None = None,
    idle_pages: int = 0,
    num_queried: int = 0,
    num_hit: int = 0,
) -> Situation:
    """A situation in which no page is shared."""
    pages = sum(-(-len(each.tokens) // page_size) for each in running)
    used = [pages] * ranks if layout.kv is KV.REPLICATED else [pages, *[0] * (ranks - 1)]
    return Situation(
        now=now,
        layout=layout,
        ranks=ranks,
        page_size=page_size,
        running=running,
        waiting=waiting[:FIRST_WAITING],
        num_waiting=len(waiting) if num_waiting is None else num_waiting,
        used_T=used,
        idle_T=[idle_pages] * ranks,
        num_wanted=idle_pages * ranks,
        num_queried=num_queried,
        num_hit=num_hit,
        rows_begun=(),
        num_begun=0,
        live=lambda: [*running, *waiting],
    )


def decoding(
    count: int, tokens: int, ranks: int = 8, owners: Sequence[int] | None = None, output: int = 100, **options: int
) -> list[Request]:
    """`count` requests of `tokens` tokens each that decode, dealt out to the ranks in turn unless told otherwise."""
    owners = owners or [index % ranks for index in range(count)]
    return [
        request(index, owner, tokens - output, output, ranks=ranks, **options) for index, owner in enumerate(owners)
    ]


def limits(geometry: ArenaGeometry, max_num_seqs: int = 512, max_batched_tokens: int = 8192) -> Limits:
    """An engine's limits, with staging for anything."""
    return Limits(geometry, max_num_seqs, max_batched_tokens, staging_bytes=1 << 40, copy_bytes=1 << 30)
