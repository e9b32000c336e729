"""Ranks that are made up, for tests of schedulers: they answer plans, and check what they are told."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from splash.core.layout import CP, DP, KV, TP, Layout
from splash.core.ownership import page_holders
from splash.core.request import SamplingParams, TokenLogprob
from splash.core.step import NO_SLOT, StepOutput, StepPlan
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler

EOS = 0
VOCABULARY = 50


@dataclass
class FakeGroup:
    """Obeys plans as the ranks do and checks what they rely on."""

    config: SchedulerConfig
    layout: Layout
    slots: list[int]  # pages on each rank
    rng: random.Random
    history: dict[int, list[int]] = field(default_factory=dict)  # request -> prompt and output
    computed: dict[int, int] = field(default_factory=dict)  # request -> rows since its table was last dropped
    tables: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)  # (rank, slot, offset) -> history
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    choosy: set[int] = field(default_factory=set)  # requests for which the most likely token will not do
    next_step: int = 0

    def run(self, plan: StepPlan) -> StepOutput:
        config, ranks = self.config, len(self.slots)
        assert (plan.step, plan.layout) == (self.next_step, self.layout.name)
        self.next_step += 1
        for id in plan.released:
            del self.tables[id], self.computed[id], self.owners[id]
        for id in plan.finished:
            assert id not in self.tables
            del self.history[id]
        for new in plan.new:
            assert new.id not in self.history
            self.history[new.id] = [*new.prompt, *new.output]
            self.prompts[new.id] = new.prompt
            if not new.params.is_greedy:
                self.choosy.add(new.id)
        queries = plan.queries
        assert queries
        assert not (plan.greedy and any(query.request in self.choosy for query in queries))
        assert plan.greedy or self.choosy
        assert [query.owner for query in queries] == sorted(query.owner for query in queries)
        assert len({query.request for query in queries}) == len(queries)
        assert sum(len(query.tokens) for query in queries) <= config.max_batched_tokens
        sampled: dict[int, int] = {}
        scores: list[tuple[int, int, tuple[TokenLogprob, ...]]] = []
        for query in queries:
            id, end = query.request, query.start + len(query.tokens)
            is_new = id not in self.tables
            if is_new and config.prefix_cache:
                assert query.start % config.page_size == 0
                self.computed[id] = query.start
            assert query.start == self.computed.get(id, 0), "rows are contiguous"
            assert query.tokens == tuple(self.history[id][query.start : end])
            assert query.tokens
            assert query.sample == (end == len(self.history[id]))
            self.computed[id] = end
            table = self.tables.setdefault(id, [])
            table.extend(query.new_pages)
            assert len(table) == -(-end // config.page_size), "pages cover the rows exactly"
            assert self.owners.setdefault(id, query.owner) == query.owner
            rule = page_holders(np.arange(len(table)), np.full(len(table), query.owner), self.layout, ranks)
            assert ((np.array(table) != NO_SLOT) == rule).all()
            self._compute(id, query.start, end)
            if query.score:
                tokens = self.prompts[id][query.start + 1 : end + 1]
                found = tuple(TokenLogprob(token, -float(query.start + 1 + i)) for i, token in enumerate(tokens))
                scores.append((id, query.start + 1, found))
            if query.sample:
                sampled[id] = self.token(id)
                self.history[id].append(sampled[id])
        assert len(self.tables) <= config.max_num_seqs
        for rank, total in enumerate(self.slots):
            used = [page[rank] for table in self.tables.values() for page in table if page[rank] != NO_SLOT]
            assert len(used) == len(set(used)) or config.prefix_cache
            assert all(0 <= slot < total for slot in used)
        logprobs = (None,) * len(sampled)
        return StepOutput(
            plan.step, plan.epoch, tuple(sampled), tuple(sampled.values()), logprobs, scores=tuple(scores)
        )

    def token(self, id: int) -> int:
        """The next token of a request."""
        return self.rng.randrange(VOCABULARY)

    def _compute(self, id: int, start: int, end: int) -> None:
        """Store what each row makes of all before it, and see that what it reads is that and nothing else."""
        history, size = self.history[id], self.config.page_size
        for position in range(end):
            for rank, slot in enumerate(self.tables[id][position // size]):
                at, made = (rank, slot, position % size), tuple(history[: position + 1])
                if position >= start:
                    self.memory[at] = made
                elif slot != NO_SLOT:
                    assert self.memory[at] == made, f"request {id} sees what is not its own at {position}"


def make(
    layout: Layout = TP,
    slots: tuple[int, ...] = (64, 64),
    max_num_seqs: int = 8,
    max_batched_tokens: int = 16,
    max_model_len: int = 64,
    page_size: int = 4,
    seed: int = 0,
    prefix_cache: bool = False,
) -> tuple[Scheduler, FakeGroup]:
    config = SchedulerConfig(max_num_seqs, max_batched_tokens, max_model_len, frozenset({EOS}), page_size, prefix_cache)
    pool = PrefixCache(layout, [np.arange(count) for count in slots])
    return Scheduler(config, pool), FakeGroup(config, layout, list(slots), random.Random(seed))


def check_counts(scheduler: Scheduler) -> None:
    """What is counted of the running requests is what they come to."""
    owners = [request.held.owner for request in scheduler.running]
    tokens = [0] * scheduler.pool.ranks
    for owner, request in zip(owners, scheduler.running, strict=True):
        tokens[owner] += len(request.tokens)
    assert scheduler._tokens == tokens
    assert scheduler._owned == [owners.count(rank) for rank in range(len(tokens))]
    assert scheduler._num_not_greedy == sum(not request.params.is_greedy for request in scheduler.running)


def check_cache(scheduler: Scheduler) -> None:
    """References are those of the running requests, and every slot is free, held or idle, once."""
    check_counts(scheduler)
    pool = scheduler.pool
    refs: Counter[tuple[int, int]] = Counter()
    held_slots: set[tuple[int, int]] = set()
    for request in scheduler.running:
        held = request.held
        assert held is not None and len(held.ids) == len(held) == len(held.table)
        place = held.owner if pool.layout.kv is KV.REQUEST else 0
        for page, slots in zip(held.ids, held.table.rows(0, len(held)), strict=True):
            if (page, place) in pool._by_id:
                assert pool._by_id[page, place].slots == slots
                refs[page, place] += 1
            held_slots |= {(rank, slot) for rank, slot in enumerate(slots) if slot != NO_SLOT}
    assert sum(map(len, pool._by_key.values())) == len(pool._by_id)
    assert {at: page.refs for at, page in pool._by_id.items() if page.refs} == dict(refs)
    idle = {id(page) for page in pool._idle}
    assert idle == {id(page) for page in pool._by_id.values() if not page.refs}
    if scheduler._following is not None:
        decoding, beginning, unfinished = scheduler._following
        assert all(own == sorted(own, key=lambda request: request.order) for own in decoding)
        for request in scheduler.running:
            start, pages = request.num_computed, len(request.held) * scheduler.config.page_size
            assert (request in unfinished) + decoding[request.held.owner].count(request) == 1
            assert len(request.tokens) - start <= 1 or request in unfinished
            assert start < pages or request in beginning or request in unfinished
    # What a switch would take along, and what lies where it wants it, is remembered as long as it stays true.
    room = pool.num_total
    for target in (CP, DP):
        remembered = [(chain.pages, chain.owner) for chain in pool.chains(target, room, 12)]
        lying = [own.tolist() for own in pool.idle_slots(target)]
        pool._idle.forget()
        assert remembered == [(chain.pages, chain.owner) for chain in pool.chains(target, room, 12)]
        assert lying == [own.tolist() for own in pool.idle_slots(target)]
    slots = pool.idle_slots()
    for rank, allocator in enumerate(pool._allocators):
        on_rank = {slot for at, slot in held_slots if at == rank}
        assert not on_rank & set(slots[rank].tolist()) and len(set(slots[rank].tolist())) == len(slots[rank])
        assert allocator.num_free + len(slots[rank]) == pool.num_free[rank]


def drain(scheduler: Scheduler, group: FakeGroup, max_steps: int = 10_000) -> list[list[Progress]]:
    """Step until nothing is left. Progress by step."""
    steps = []
    while (plan := scheduler.schedule()) is not None:
        steps.append(scheduler.apply(group.run(plan)))
        assert len(steps) <= max_steps, "livelock"
    assert not scheduler.has_work
    return steps


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"ignore_eos": True, **fields})
