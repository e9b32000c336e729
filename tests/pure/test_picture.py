"""The picture of what ranks hold: the ownership rule for every layout, and every slot accounted for once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from splash.core.layout import LAYOUTS, Layout, Projections
from splash.core.ownership import page_holders
from splash.core.request import SamplingParams
from splash.core.step import NO_SLOT
from splash.engine.picture import CACHED, FREE, MAX_RUNNING, MAX_WAITING, OTHER, WEIGHTS, Picture, picture
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from tests.arenas import tiny_geometry
from tests.fake_group import FakeGroup

RANKS, PAGE = 4, 4
GEOMETRY = tiny_geometry(RANKS, 8, PAGE, 16, 60)


def serving(layout: Layout, prompts: list[list[int]], max_num_seqs: int = 100) -> tuple[Scheduler, FakeGroup]:
    """A scheduler that has run two steps of some prompts."""
    config = SchedulerConfig(max_num_seqs, 200, 64, frozenset(), PAGE, True)
    pool = PrefixCache.of_geometry(GEOMETRY, layout)
    group = FakeGroup(config, layout, [GEOMETRY.num_slots] * RANKS, random.Random(0))
    scheduler = Scheduler(config, pool)
    for number, prompt in enumerate(prompts):
        scheduler.add(number, prompt, SamplingParams(max_tokens=20), seed=0)
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(group.run(plan))
    return scheduler, group


def cells(seen: Picture, rank: int) -> list[int]:
    return [code for code, count in seen.ranks[rank].cells for _ in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_it_is_what_page_tables_say(layout: Layout) -> None:
    scheduler, _ = serving(layout, [[request + 1] * (5 + 6 * request) for request in range(3)])
    scheduler.abort(0)  # its full page stays in the cache
    seen = picture(scheduler, GEOMETRY, {1: "one"})
    assert (seen.layout, seen.page_size, seen.slots_per_cell) == (layout.name, PAGE, 1)
    assert [request.output_tokens for request in seen.running] == [2, 2]
    for request in seen.running:
        pages = len(request.holders)
        assert request.computed_tokens == request.prompt_tokens + 1  # the last token is not computed on yet
        assert pages == -(-request.computed_tokens // PAGE)
        rule = page_holders(np.arange(pages), np.full(pages, request.owner), layout, RANKS)
        assert [[mask >> rank & 1 for rank in range(RANKS)] for mask in request.holders] == rule.astype(int).tolist()
        assert request.pages == tuple(rule.sum(axis=0).tolist())
    for rank, mine in enumerate(seen.ranks):
        assert mine.head_groups == ((rank,) if layout.projections is Projections.SHARDED else tuple(range(RANKS)))
        shown = cells(seen, rank)
        assert len(shown) == GEOMETRY.num_slots
        for index, request in enumerate(scheduler.running):
            assert request.held is not None
            slots = request.held.table.slots_on(rank)
            assert {slot for slot, code in enumerate(shown) if code == index} == set(slots.tolist())
        assert {s for s, code in enumerate(shown) if code != WEIGHTS} == set(GEOMETRY.page_slots(layout, rank).tolist())
        assert shown.count(CACHED) == mine.cached == scheduler.pool.num_idle[rank]
        assert (shown.count(FREE), shown.count(WEIGHTS)) == (mine.free, mine.weights)
        assert mine.cached + mine.free == scheduler.pool.num_free[rank]
        assert sum(mine.requests) == scheduler.pool.num_total[rank] - scheduler.pool.num_free[rank]
    assert sum(mine.cached for mine in seen.ranks) > 0


def test_shared_pages_are_in_one_place_and_nobody_is_named() -> None:
    prompt = [1] * 9
    scheduler, group = serving(LAYOUTS["tp"], [prompt])
    scheduler.add(7, prompt, SamplingParams(max_tokens=20), seed=0)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(group.run(plan))
    seen = picture(scheduler, GEOMETRY, {0: "cmpl-0", 7: "cmpl-7"})
    shared = scheduler.running[1].held
    assert shared is not None and seen.running[1].cached_tokens == 8
    assert seen.ranks[0].requests == (len(seen.running[0].holders) - 2, len(shared))
    ids = [request.id for request in seen.running]
    assert len(set(ids)) == 2 and not any("cmpl" in id for id in ids)


def test_many_requests_are_shown_together() -> None:
    scheduler, _ = serving(LAYOUTS["dp"], [[request % 40 + 1] * 3 for request in range(180)])
    seen = picture(scheduler, GEOMETRY, {})
    assert len(seen.running) == MAX_RUNNING and len(seen.waiting) == MAX_WAITING
    assert len(seen.running) + seen.more_running == scheduler.num_running == 100
    assert len(seen.waiting) + seen.more_waiting == scheduler.num_waiting == 80
    others = sum(cells(seen, rank).count(OTHER) for rank in range(RANKS))
    assert others == sum(rank.requests[MAX_RUNNING] for rank in seen.ranks if len(rank.requests) > MAX_RUNNING) > 0
    held = [request.held for request in scheduler.running]
    on_ranks = sum(slot != NO_SLOT for pages in held if pages is not None for slot in pages.table.slots_cT.flat)
    assert on_ranks == sum(sum(rank.requests) for rank in seen.ranks)
