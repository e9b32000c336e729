"""A picture of what each rank holds at a step boundary, by request and by slot. It knows no prompt's text."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from itertools import groupby

import msgspec
import numpy as np

from splash.core.layout import Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import weight_holders
from splash.core.pages import PagePool
from splash.core.step import NO_SLOT
from splash.scheduler.request import Request
from splash.scheduler.scheduler import Scheduler

MAX_RUNNING = 64  # requests that a picture shows one by one
MAX_WAITING = 32
MAX_PAGES = 48  # of a request, whose holders are shown one by one
MAX_CELLS = 1024  # in which a rank's arena is drawn

FREE, WEIGHTS, CACHED, OTHER = -1, -2, -3, -4  # what a cell shows where it is not of a request that is shown


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that holds pages.

    Attributes:
        id: a short hash of its id.
        owner: its owner rank.
        priority: the lower, the earlier it is served.
        prompt_tokens, output_tokens: so far.
        max_tokens: most that it may generate.
        computed_tokens: positions whose keys and values are in the cache.
        cached_tokens: tokens of the prompt that were found in the prefix cache.
        pages: by rank, pages that it holds; one that it shares counts for each request that does.
        holders: for each of its first pages, the ranks that hold it: the sum of 2^rank.
    """

    id: str
    owner: int
    priority: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    computed_tokens: int
    cached_tokens: int
    pages: tuple[int, ...]
    holders: tuple[int, ...]


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that holds no pages, with the tokens that it will have computed before its next one."""

    id: str
    priority: int
    tokens: int


class RankPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a layer, which is the same in every layer.

    Attributes:
        head_groups: of the projections, those that are here.
        requests: pages here by request, in the order of `Picture.running` and then of all others together; one that
            several share counts for the last of them.
        cached: pages that only the prefix cache holds.
        free: pages' worth of slots that hold nothing, or are claimed for a switch under way.
        weights: slots that the projections take, in whole or in part.
        cells: the arena from its start, as (what, how many cells): a request's place in `running`, or `FREE`,
            `WEIGHTS`, `CACHED`, `OTHER`.
    """

    head_groups: tuple[int, ...]
    requests: tuple[int, ...]
    cached: int
    free: int
    weights: int
    cells: tuple[tuple[int, int], ...]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank holds at a step boundary.

    Attributes:
        layout: the one that the pages lie in: while a switch commits, already the target.
        page_size: token positions a page.
        slot_bytes: of a page in one layer.
        slots: of a rank's arena, pages or weights.
        slots_per_cell: how many slots one cell stands for; it shows the first of them.
        running: the first in the order of service.
        waiting: the same.
        more_running, more_waiting: how many there are beside.
        ranks: each one's part.
    """

    layout: str
    page_size: int
    slot_bytes: int
    slots: int
    slots_per_cell: int
    running: tuple[RunningRequest, ...]
    waiting: tuple[WaitingRequest, ...]
    more_running: int
    more_waiting: int
    ranks: tuple[RankPicture, ...]


def picture(scheduler: Scheduler, geometry: ArenaGeometry, names: Mapping[int, str]) -> Picture:
    """What every rank holds. Call between steps.

    Args:
        scheduler: whose requests and pages are shown.
        geometry: of the arenas.
        names: ids of live requests by their number.
    """
    layout = scheduler.pool.layout
    running = [request for request in scheduler.running if request.live and request.held is not None]
    waiting = [request for request in scheduler.requests if request.held is None]
    shown, queue = running[:MAX_RUNNING], heapq.nsmallest(MAX_WAITING, waiting, key=lambda request: request.order)
    slots_per_cell = -(-geometry.num_slots // MAX_CELLS)
    idle = scheduler.pool.idle_slots()
    return Picture(
        layout=layout.name,
        page_size=geometry.page_size,
        slot_bytes=geometry.slot_bytes,
        slots=geometry.num_slots,
        slots_per_cell=slots_per_cell,
        running=tuple(_running(request, scheduler.pool, names) for request in shown),
        waiting=tuple(
            WaitingRequest(id=_name(request, names), priority=request.priority, tokens=len(request.tokens))
            for request in queue
        ),
        more_running=len(running) - len(shown),
        more_waiting=len(waiting) - len(queue),
        ranks=tuple(
            _rank(rank, running, idle[rank], layout, geometry, slots_per_cell) for rank in range(geometry.ranks)
        ),
    )


def _running(request: Request, pool: PagePool, names: Mapping[int, str]) -> RunningRequest:
    assert request.held is not None
    first = request.held.table.rows(0, MAX_PAGES)
    return RunningRequest(
        id=_name(request, names),
        owner=request.held.owner,
        priority=request.priority,
        prompt_tokens=request.num_prompt,
        output_tokens=len(request.tokens) - request.num_prompt,
        max_tokens=request.max_tokens,
        computed_tokens=request.num_computed,
        cached_tokens=request.num_cached,
        pages=tuple(pool.counts(request.held)),
        holders=tuple(sum(1 << rank for rank, slot in enumerate(page) if slot != NO_SLOT) for page in first),
    )


def _name(request: Request, names: Mapping[int, str]) -> str:
    return hashlib.blake2b(names.get(request.id, str(request.id)).encode(), digest_size=4).hexdigest()


def _rank(
    rank: int, running: list[Request], idle: np.ndarray, layout: Layout, geometry: ArenaGeometry, slots_per_cell: int
) -> RankPicture:
    what = np.full(geometry.num_slots, WEIGHTS, dtype=np.int32)
    what[geometry.page_slots(layout, rank)] = FREE
    what[idle] = CACHED
    for index, request in enumerate(running):
        assert request.held is not None
        what[request.held.table.slots_on(rank)] = min(index, MAX_RUNNING)
    num_shown = min(len(running), MAX_RUNNING)
    per_request = np.bincount(what[what >= 0], minlength=num_shown)
    cells = np.where(what == MAX_RUNNING, OTHER, what)[::slots_per_cell].tolist()
    return RankPicture(
        head_groups=tuple(np.flatnonzero(weight_holders(layout, geometry.ranks)[:, rank]).tolist()),
        requests=tuple(per_request.tolist()),
        cached=int((what == CACHED).sum()),
        free=int((what == FREE).sum()),
        weights=int((what == WEIGHTS).sum()),
        cells=tuple((code, len(list(group))) for code, group in groupby(cells)),
    )
