"""Programs for `run_group` that switch while they serve."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splash.core.errors import RequestError
from splash.core.memory import ArenaGeometry
from splash.platform.base import Rank
from tests.cpu.replica import Fault, Job, Limits, Replica


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
        replica.fault, replica.staged, replica.lossy, replica.copies.failed = fault, 0, 0, 0
        record = replica.switch(target, method)
        replica.settle(record)
        seen = {
            "after": replica.switcher.layout.name,
            "staged": replica.staged,
            "lossy": replica.lossy,
            "failed_reads": replica.copies.failed,
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
