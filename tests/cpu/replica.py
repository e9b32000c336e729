"""A whole engine on every rank: all schedule and switch alike, and rank 0 tells the others its tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from splash.core.errors import CapacityError
from splash.core.layout import LAYOUTS, Projections
from splash.core.memory import ArenaGeometry
from splash.core.pages import PageTable
from splash.core.request import SamplingParams
from splash.core.step import StepOutput, StepPlan
from splash.engine import runner, switching
from splash.engine.runner import ModelRunner
from splash.engine.switching import Switcher
from splash.layouts.tables import PageTables
from splash.platform.base import Completion, CopyEngine, Rank, Transfer
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler
from splash.switch import transfer
from splash.switch.manifest import rank_copies
from splash.switch.orders import CopyAhead, SwitchRecord, Vote
from splash.switch.transfer import LayerCopies

MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """One request: `count` greedy tokens after `prompt`."""

    prompt: tuple[int, ...]
    count: int
    priority: int = 0


@dataclass(frozen=True)
class Limits:
    """How a replica batches and switches."""

    budget: int = 48
    max_num_seqs: int = 8
    max_model_len: int = 1024
    staging_bytes: int = 64 * MIB
    step_bytes: int = 64 << 10
    prefix_cache: bool = True
    streams: bool = False


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank.

    Attributes:
        kind: "read" (of `layer`, of a peer's arena or the own one), "manifest", "table", "memory" (no staging buffer),
            "validate" or "capacity" (while the commit is planned, on every rank alike), "unsettled" (what was copied
            ahead is not all, so that a manifest has to commit).
        rank, layer: where.
    """

    kind: str
    rank: int = 0
    layer: int = 0


class FaultyTransfer(Transfer):
    """A transfer that fails where it reads the broken layer."""

    def __init__(self, engine: FaultyCopies, inner: Transfer, layers: list[int | None]) -> None:
        self._engine, self._inner, self._layers = engine, inner, layers

    def run(self, first: int = 0, count: int | None = None) -> None:
        end = None if count is None else first + count
        self._engine.read |= {layer for layer in self._layers[first:end] if layer is not None}
        if self._engine.broken_layer is not None and self._engine.broken_layer in self._layers[first:end]:
            self._engine.failed += 1
            raise OSError("the mapping is gone")
        self._inner.run(first, count)


class FaultyCopies(CopyEngine):
    """Copies, of which those from one layer of any arena fail while `broken_layer` is set.

    `read` are the layers that were read since it was last cleared.
    """

    def __init__(self, rank: Rank, num_layers: int) -> None:
        self._inner = rank.copies
        self.is_queued = rank.copies.is_queued
        self._layers = {
            rank.arenas.peer(r, layer).data_ptr(): layer for r in range(rank.size) for layer in range(num_layers)
        }
        self.broken_layer: int | None = None
        self.failed = 0
        self.read: set[int] = set()

    def prepare(
        self, extents: np.ndarray, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Transfer:
        layers = [self._layers.get(source.data_ptr()) for source in sources]
        return FaultyTransfer(self, self._inner.prepare(extents, targets, sources), layers)

    def begin(self, work: Callable[[], None]) -> Completion:
        return self._inner.begin(work)


class Replica:
    """A whole engine on one rank: what `Engine.step` does, with tokens from rank 0."""

    def __init__(self, rank: Rank, model: str, geometry: ArenaGeometry, layout: str, limits: Limits) -> None:
        torch.set_grad_enabled(False)
        self.copies = FaultyCopies(rank, geometry.spec.num_layers)
        self.rank = dataclasses.replace(rank, copies=self.copies)
        self.geometry = geometry
        self.runner = ModelRunner(model, geometry, self.rank, layout, "float32", limits.max_model_len, ())
        config = SchedulerConfig(
            limits.max_num_seqs,
            limits.budget,
            limits.max_model_len,
            frozenset(),
            geometry.page_size,
            limits.prefix_cache,
        )
        self.scheduler = Scheduler(config, PrefixCache.of_geometry(geometry, LAYOUTS[layout]))
        self.switcher = Switcher(
            self.scheduler, geometry, limits.staging_bytes, limits.step_bytes, streams=limits.streams
        )
        self.fault: Fault | None = None
        self.tokens: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.aborted: set[int] = set()
        self.records: list[SwitchRecord] = []
        self.steps = 0
        self.staged = 0  # pages, and head groups, that commits staged
        self.lossy = 0  # commits that could not be abandoned
        self.layers: list[tuple[set[int], set[int]]] = []  # by prepared commit, those read ahead and those in its step
        self._answer: tuple[StepOutput | None, Any] | None = None
        self._votes: list[Vote] = []

    def add(self, id: int, job: Job) -> None:
        params = SamplingParams(max_tokens=job.count, temperature=0.0, ignore_eos=True)
        self.scheduler.add(id, job.prompt, params, 0, job.priority)
        self.tokens[id] = []

    def abort(self, id: int) -> None:
        if id not in self.finished:
            self.aborted.add(id)
        self.scheduler.abort(id)

    def switch(self, layout: str, method: str = "auto", rebalance: bool = False) -> SwitchRecord:
        record = self.switcher.request(LAYOUTS[layout], method, rebalance, lambda record: None)
        self.records.append(record)
        return record

    @property
    def has_work(self) -> bool:
        return self._answer is not None or self.scheduler.has_work or self.switcher.active is not None

    @property
    def in_flight(self) -> bool:
        return self._answer is not None

    def step(self) -> None:
        """Take in the step in flight, then begin another; on a rank it is over when this returns."""
        if self._answer is not None:
            output, outcome = self._answer
            self._answer = None
            ran = outcome is None or self.switcher.settle(outcome)
            if ran:
                assert output is not None
                self._take(self.scheduler.apply(output))
        if self.switcher.awaits_votes:
            self.switcher.decide(self._votes)
        run = self._planned()
        if run is None:
            return
        order = run.switch
        if order is not None:
            copies = [rank_copies(order.manifest, self.geometry, rank) for rank in range(self.rank.size)]
            self.staged += sum(own.num_staged + own.weights_staged for own in copies)
            self.lossy += not order.manifest.abandonable
        if order is not None and self._hits("manifest"):
            order = msgspec.structs.replace(order, manifest=msgspec.structs.replace(order.manifest, epoch=-1))
        if order is not None and self._hits("table"):
            self._break_tables()
        if order is not None and self._hits("memory"):
            transfer.LayerCopies = _no_memory
        # Layers are only streamed where copies are queued, and such reads do not fail.
        breaks = self.fault is not None and self._hits("read") and run.commit is None
        self.copies.broken_layer = self.fault.layer if self.fault and breaks else None
        read_ahead = set(self.copies.read)
        if not run.copying:
            self.copies.read.clear()
        output, outcome = self.runner.run(run.plan, order, run.commit, run.copying)
        if run.commit is not None:
            self.layers.append((read_ahead, set(self.copies.read)))
        if order is not None and self._hits("memory"):
            transfer.LayerCopies = LayerCopies
        if order is not None and self._hits("table"):
            self.runner._tables = self._tables_before
        if outcome is None or not outcome.error:
            output = self._agree(run.plan, output)
        self._answer = output, outcome
        ahead = self._looked_ahead(run.plan)
        if ahead is not None:
            self._copy_ahead(ahead)
        self.copies.broken_layer = None
        self.steps += 1

    def _copy_ahead(self, order: CopyAhead) -> None:
        """Have the runner copy ahead, and let all ranks know its vote."""
        if order.rest is not None and self._hits("manifest"):
            order = msgspec.structs.replace(order, rest=order.rest[1:])
        if order.rest is not None and self._hits("table"):
            self._break_tables()
        if self._hits("memory"):
            runner.LayerCopies = _no_memory
        vote = self.runner.copy_ahead(order)
        runner.LayerCopies = LayerCopies
        if order.rest is not None and self._hits("table"):
            self.runner._tables = self._tables_before
        if vote is not None:
            known = self.rank.exchange([vote.digest, bool(vote.error)], settled=False)
            own = {self.rank.rank: vote.error}
            self._votes = [
                Vote(rank, vote.switch, digest, own.get(rank, "says no") if failed else "")
                for rank, (digest, failed) in enumerate(known)
            ]

    def _planned(self) -> Any:
        active = self.switcher._active
        commits = active is not None and active.commit_next
        with self._planning_fails(commits):
            run = self.switcher.next_run()
        if commits and self.fault is not None and self.fault.kind == "capacity":
            self.fault = None
        return run

    def _looked_ahead(self, plan: StepPlan) -> CopyAhead | None:
        active = self.switcher._active
        ahead = None if active is None else active.ahead
        if ahead is not None and self.fault is not None and self.fault.kind == "unsettled":
            ahead.is_settled = lambda manifest: False  # type: ignore[method-assign]
        with self._planning_fails(ahead is not None):
            return self.switcher.look_ahead(plan)

    @contextmanager
    def _planning_fails(self, commits: bool) -> Iterator[None]:
        """Have what is planned here for a commit be invalid, or lack room, where that is the fault."""
        kind = self.fault.kind if self.fault else ""
        validate, plan = switching.validate, self.switcher._plan
        if kind == "validate":
            switching.validate = _invalid
        if kind == "capacity" and commits:
            self.switcher._plan = _no_room
        try:
            yield
        finally:
            switching.validate, self.switcher._plan = validate, plan

    def _hits(self, kind: str) -> bool:
        return self.fault is not None and (self.fault.kind, self.fault.rank) == (kind, self.rank.rank)

    def _break_tables(self) -> None:
        slots = {request.id: self.runner._tables.slots(request.id).copy() for request in self.scheduler.running}
        self._tables_before = self.runner._tables
        for own in slots.values():
            own[-1:] += 1  # of what was prepared nobody asks at the commit
        tables = {request: PageTable(self.rank.size, own) for request, own in slots.items()}
        self.runner._tables = PageTables(self.rank.size, tables)

    def _agree(self, plan: StepPlan, output: StepOutput | None) -> StepOutput:
        requests = tuple(query.request for query in plan.queries if query.sample)
        tokens = output.tokens if output is not None else ()
        own = torch.tensor(tokens, dtype=torch.int64, device=self.rank.device)
        agreed = self.rank.comm.all_gather(own, [len(requests), *[0] * (self.rank.size - 1)]).tolist()
        return StepOutput(plan.step, plan.epoch, requests, tuple(agreed), (None,) * len(requests))

    def _take(self, progress: Sequence[Progress]) -> None:
        for item in progress:
            self.tokens[item.id].append(item.token)
            if item.finish_reason is not None:
                self.finished.add(item.id)

    def drain(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps; switch {self.switcher.active}")

    def settle(self, record: SwitchRecord, max_steps: int = 500) -> None:
        """Step until a switch has ended."""
        for _ in range(max_steps):
            if record in self.switcher.history:
                return
            self.step()
        raise AssertionError(f"a switch does not end: {record}")

    def summary(self) -> dict[str, Any]:
        """What tests look at, in the end."""
        return {
            "tokens": {id: tokens for id, tokens in self.tokens.items() if id not in self.aborted},
            "finished": self.finished,
            "records": [msgspec.to_builtins(record) for record in self.records],
            "pages_back": self.scheduler.pool.num_free == self.scheduler.pool.num_total,
            "layout": self.switcher.layout.name,
            "pool_layout": self.scheduler.pool.layout.name,
            "preemptions": self.scheduler.num_preemptions,
            "tables": len(self.runner._tables),
            "steps": self.steps,
            "staged": self.staged,
            "lossy": self.lossy,
            "layers": self.layers,
        }

    def digests(self, written: Mapping[int, int]) -> dict[str, Any]:
        """Hashes of what this rank holds: pages by (request, number), and head groups, over all layers.

        Args:
            written: request -> positions to look at.
        """
        pages = {}
        layers = [self.rank.arenas.local(layer).cpu().numpy() for layer in range(self.geometry.spec.num_layers)]
        slot_bytes, token = self.geometry.slot_bytes, self.geometry.kv.token_bytes
        for request in self.scheduler.running:
            assert request.held is not None
            for number in range(-(-written[request.id] // self.geometry.page_size)):
                slot = int(request.held.table.slots_cT[number, self.rank.rank])
                if slot >= 0:
                    filled = min(written[request.id] - number * self.geometry.page_size, self.geometry.page_size)
                    start = slot * slot_bytes
                    pages[request.id, number] = _hash([layer[start : start + filled * token] for layer in layers])
        every = self.switcher.layout.projections is Projections.REPLICATED
        groups = range(self.rank.size) if every else [self.rank.rank]
        weights = {}
        for group in groups if self.geometry.spec.num_heads % self.rank.size == 0 else []:
            runs = [self.geometry.run(module, group) for module in self.geometry.modules]
            weights[group] = _hash([layer[start : start + size] for layer in layers for start, size in runs])
        running = [request.id for request in self.scheduler.running]
        return {"layout": self.switcher.layout.name, "running": running, "pages": pages, "weights": weights}


def _hash(parts: Sequence[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.tobytes())
    return digest.hexdigest()


def _invalid(*_: object) -> None:
    raise ValueError("manifest: not so")


def _no_room(*_: object) -> Any:
    raise CapacityError("no room, says the test")


def _no_memory(*_: object, **__: object) -> Any:
    raise RuntimeError("out of memory")
