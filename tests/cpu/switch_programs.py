"""Programs for `run_group` that switch: every rank schedules and switches alike, and rank 0 tells the others tokens."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from splash.core.errors import CapacityError, RequestError
from splash.core.layout import LAYOUTS, Projections
from splash.core.memory import ArenaGeometry
from splash.core.pages import PagePool
from splash.core.request import SamplingParams
from splash.core.step import StepOutput, StepPlan
from splash.engine import switching
from splash.engine.runner import ModelRunner
from splash.engine.switching import Switcher
from splash.layouts.tables import PageTables
from splash.platform.base import Arenas, Rank
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler
from splash.switch import transfer
from splash.switch.manifest import rank_copies
from splash.switch.orders import SwitchRecord
from splash.switch.transfer import LayerCopies

MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """One request: `count` greedy tokens after `prompt`."""

    prompt: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Limits:
    """How a replica batches and switches."""

    budget: int = 48
    max_num_seqs: int = 8
    max_model_len: int = 1024
    staging_bytes: int = 64 * MIB
    step_bytes: int = 64 << 10


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank.

    Attributes:
        kind: "read" (of `layer`, of a peer's arena or the own one), "manifest", "table", "memory" (no staging buffer),
            "validate" or "capacity" (while the commit is planned, on every rank alike).
        rank, layer: where.
    """

    kind: str
    rank: int = 0
    layer: int = 0


class FaultyArenas(Arenas):
    """Arenas of which one layer cannot be read while `broken_layer` is set."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self.broken_layer: int | None = None
        self.failed = 0

    def local(self, layer: int) -> torch.Tensor:
        return self._arenas.local(layer)

    def peer(self, rank: int, layer: int) -> torch.Tensor:
        if layer == self.broken_layer:
            self.failed += 1
            raise OSError("the mapping is gone")
        return self._arenas.peer(rank, layer)


class Replica:
    """A whole engine on one rank: what `Engine.step` does, with tokens from rank 0."""

    def __init__(self, rank: Rank, model: str, geometry: ArenaGeometry, layout: str, limits: Limits) -> None:
        torch.set_grad_enabled(False)
        self.arenas = FaultyArenas(rank.arenas)
        self.rank = dataclasses.replace(rank, arenas=self.arenas)
        self.geometry = geometry
        self.runner = ModelRunner(model, geometry, self.rank, layout, "float32", limits.max_model_len, ())
        config = SchedulerConfig(
            limits.max_num_seqs, limits.budget, limits.max_model_len, frozenset(), geometry.page_size
        )
        self.scheduler = Scheduler(config, PagePool.of_geometry(geometry, LAYOUTS[layout]))
        self.switcher = Switcher(self.scheduler, geometry, limits.staging_bytes, limits.step_bytes)
        self.fault: Fault | None = None
        self.tokens: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.aborted: set[int] = set()
        self.records: list[SwitchRecord] = []
        self.steps = 0
        self.staged = 0  # pages, and head groups, that commits staged
        self.lossy = 0  # commits that could not be abandoned
        self._answer: tuple[StepOutput | None, Any] | None = None

    def add(self, id: int, job: Job) -> None:
        self.scheduler.add(id, job.prompt, SamplingParams(max_tokens=job.count, temperature=0.0, ignore_eos=True), 0)
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
            self._break_a_table(order.manifest.requests)
        if order is not None and self._hits("memory"):
            transfer.LayerCopies = _no_memory
        self.arenas.broken_layer = self.fault.layer if self.fault and self._hits("read") else None
        output, outcome = self.runner.run(run.plan, order)
        if order is not None and self._hits("memory"):
            transfer.LayerCopies = LayerCopies
        if order is not None and self._hits("table"):
            self.runner._tables = self._tables_before
        if outcome is None or not outcome.error:
            output = self._agree(run.plan, output)
        self._answer = output, outcome
        if run.ahead is not None:
            self.runner.copy_ahead(run.ahead)
        self.arenas.broken_layer = None
        self.steps += 1

    def _planned(self) -> Any:
        kind = self.fault.kind if self.fault else ""
        validate, plan = switching.validate, self.switcher._plan
        if kind == "validate":
            switching.validate = _invalid
        if kind == "capacity" and self.switcher._active is not None and self.switcher._active.commit_next:
            self.switcher._plan = _no_room
            self.fault = None
        try:
            return self.switcher.next_run()
        finally:
            switching.validate, self.switcher._plan = validate, plan

    def _hits(self, kind: str) -> bool:
        return self.fault is not None and (self.fault.kind, self.fault.rank) == (kind, self.rank.rank)

    def _break_a_table(self, requests: Sequence[int]) -> None:
        tables = {request.id: self.runner._tables.slots(request.id).copy() for request in self.scheduler.running}
        self._tables_before = self.runner._tables
        tables[next(request for request in requests if len(tables[request]))][0] += 1
        self.runner._tables = PageTables(self.rank.size, tables)

    def _agree(self, plan: StepPlan, output: StepOutput | None) -> StepOutput:
        requests = tuple(query.request for query in plan.queries if query.sample)
        own = torch.tensor(output.tokens if output is not None else (), dtype=torch.int64)
        tokens = self.rank.comm.all_gather(own, [len(requests), *[0] * (self.rank.size - 1)]).tolist()
        return StepOutput(plan.step, plan.epoch, requests, tuple(tokens), (None,) * len(requests))

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
        }

    def digests(self, written: Mapping[int, int]) -> dict[str, Any]:
        """Hashes of what this rank holds: pages by (request, number), and head groups, over all layers.

        Args:
            written: request -> positions to look at.
        """
        pages = {}
        layers = [self.rank.arenas.local(layer).numpy() for layer in range(self.geometry.spec.num_layers)]
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


def serve(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    layout: str,
    jobs: Sequence[Job],
    limits: Limits,
    events: Sequence[tuple[int, tuple[Any, ...]]] = (),
) -> dict[str, Any]:
    """Serve `jobs` from the start, but for those that an event adds, and carry out events before their step.

    Events: ("add", job), ("abort", job), ("switch", layout, method, rebalance), ("cancel",), ("fault", Fault or None),
    ("settle",), which steps until the last switch has ended, ("drain",), ("status",), which notes the last switch's,
    and ("refuses", job), which notes it and adds a job that must be refused.
    """
    replica = Replica(rank, model, geometry, layout, limits)
    noted = []
    late = {event[1] for _, event in events if event[0] in ("add", "refuses")}
    for id, job in enumerate(jobs):
        if id not in late:
            replica.add(id, job)
    step = 0
    for when, event in events:
        while step < when:
            replica.step()
            step += 1
        match event:
            case ("add", id):
                replica.add(id, jobs[id])
            case ("abort", id):
                replica.abort(id)
            case ("switch", *arguments):
                replica.switch(*arguments)
            case ("cancel",):
                replica.switcher.abort()
            case ("fault", fault):
                replica.fault = fault
            case ("settle",):
                replica.settle(replica.records[-1])
            case ("drain",):
                replica.drain()
            case ("status",):
                noted.append((replica.records[-1].status, replica.records[-1].reason, replica.scheduler.num_waiting))
            case ("refuses", id):
                noted.append((replica.records[-1].status, "", 0))
                try:
                    replica.add(id, jobs[id])
                except RequestError:
                    continue
                raise AssertionError("the request was accepted")
            case _:
                raise AssertionError(event)
    replica.drain()
    return {**replica.summary(), "noted": noted}


def serve_each(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    cases: Sequence[Mapping[str, Any]],
    jobs: Sequence[Job],
    limits: Limits,
) -> list[dict[str, Any]]:
    """`serve` once for each of `cases`: its layout and events."""
    return [serve(rank, model, geometry, jobs=jobs, limits=limits, **case) for case in cases]


def inject(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    source: str,
    target: str,
    method: str,
    faults: Sequence[Fault],
    jobs: Sequence[Job],
    limits: Limits,
) -> list[dict[str, Any]]:
    """For each fault: serve, fail a switch with it, go on in the source, then switch for good. One summary a fault."""
    replica = Replica(rank, model, geometry, source, limits)
    results = []
    for fault in faults:
        replica.tokens, replica.records, replica.finished = {}, [], set()
        base = replica.scheduler._num_arrived
        if replica.switcher.layout.name != source:
            replica.switch(source, "blocking")
            replica.drain()
            replica.records.clear()
        for id, job in enumerate(jobs):
            replica.add(base + id, job)
        for _ in range(5):
            replica.step()
        replica.fault, replica.staged, replica.lossy, replica.arenas.failed = fault, 0, 0, 0
        record = replica.switch(target, method)
        replica.settle(record)
        seen = {
            "after": replica.switcher.layout.name,
            "staged": replica.staged,
            "lossy": replica.lossy,
            "failed_reads": replica.arenas.failed,
        }
        replica.fault = None
        for _ in range(3):
            replica.step()
        replica.settle(replica.switch(target, method))
        replica.drain()
        summary = replica.summary()
        summary.update(seen)
        summary["tokens"] = {id - base: tokens for id, tokens in summary["tokens"].items()}
        results.append(summary)
    return results


def walk(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    hops: Sequence[str],
    method: str,
    jobs: Sequence[Job],
    limits: Limits,
) -> dict[str, Any]:
    """Go from layout to layout with requests running: digests of what lies where after each hop, then the summary."""
    replica = Replica(rank, model, geometry, hops[0], limits)
    for id, job in enumerate(jobs):
        replica.add(id, job)
    for _ in range(6):
        replica.step()
    written = {request.id: request.num_computed for request in replica.scheduler.running}
    seen = [replica.digests(written)]
    for hop in hops[1:]:
        replica.settle(replica.switch(hop, method))
        rank.comm.barrier()
        seen.append(replica.digests(written))
    replica.drain()
    return {**replica.summary(), "seen": seen, "written": written}


@dataclass
class _Traffic:
    """One random schedule. Every rank draws the same numbers."""

    replica: Replica
    jobs: Sequence[Job]
    layouts: Sequence[str]
    rng: random.Random
    which: dict[int, int] = field(default_factory=dict)  # request -> job
    next_id: int = 0

    def act(self) -> None:
        rng, replica = self.rng, self.replica
        live = [request.id for request in replica.scheduler.requests]
        dice = rng.random()
        if dice < 0.25 and len(live) < 10:
            self.which[self.next_id] = rng.randrange(len(self.jobs))
            replica.add(self.next_id, self.jobs[self.which[self.next_id]])
            self.next_id += 1
        elif dice < 0.31 and live:
            replica.abort(rng.choice(live))
        elif dice < 0.45:
            method = rng.choice(["auto", "precopy", "layerwise", "blocking"])
            replica.switch(rng.choice(self.layouts), method, rng.random() < 0.3)
        elif dice < 0.47:
            replica.switcher.abort()
        elif dice < 0.49 and replica.fault is None:
            replica.fault = Fault("read", rng.randrange(replica.rank.size), rng.randrange(4))
        elif dice < 0.6:
            replica.fault = None


def traffic(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    layouts: Sequence[str],
    jobs: Sequence[Job],
    limits: Limits,
    seeds: Sequence[int],
    num_actions: int,
) -> list[dict[str, Any]]:
    """Random arrivals, aborts, switches, cancellations and faults. One summary a seed."""
    results = []
    for seed in seeds:
        rng = random.Random(seed)
        replica = Replica(rank, model, geometry, rng.choice(list(layouts)), limits)
        load = _Traffic(replica, jobs, layouts, rng)
        for _ in range(num_actions):
            load.act()
            if rng.random() < 0.7:
                replica.step()
        replica.drain()
        results.append({**replica.summary(), "which": load.which, "seed": seed})
    return results


def soak(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    layouts: Sequence[str],
    jobs: Sequence[Job],
    limits: Limits,
    num_switches: int,
) -> dict[str, Any]:
    """A random walk of switches under load. Anonymous memory of this rank is noted every 50 switches, in KiB."""
    rng = random.Random(0)
    replica = Replica(rank, model, geometry, layouts[0], limits)
    memory, which, next_id, wrong = [], {}, 0, 0
    counts: dict[str, int] = {}
    for number in range(num_switches):
        while len(replica.scheduler.requests) < 4:
            which[next_id] = rng.randrange(len(jobs))
            replica.add(next_id, jobs[which[next_id]])
            next_id += 1
        method = rng.choice(["precopy", "layerwise", "blocking"])
        record = replica.switch(rng.choice([name for name in layouts if name != replica.switcher.layout.name]), method)
        replica.settle(record)
        counts[record.status] = counts.get(record.status, 0) + 1
        replica.records.clear()
        for id in sorted(replica.finished):
            job = which.pop(id)
            wrong += len(replica.tokens.pop(id)) != jobs[job].count
        replica.finished.clear()
        if number % 50 == 49:
            gc.collect()
            memory.append(_private_kib())
    replica.drain()
    return {**replica.summary(), "memory": memory, "counts": counts, "wrong": wrong, "which": which}


def _private_kib() -> int:
    """Resident memory of this process, files and the shared arenas apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
