"""How long planning a step takes: `schedule` and `apply` with 512 running requests, without ranks.

    python -m perf.schedule [--requests 512] [--ranks 8] [--layout dop] [--out perf/results/schedule.json]

The aim is 1 ms: a step of a fast GPU lasts a few, and it waits while the next one is planned. Cases: steady decode with
requests spread over their pages (1 in 64 begins a page); one request in 256, and one in 32, has ended and as many are
admitted; a long prompt, or one of each owner, goes on in chunks while others as long wait, 32 in all; every request
fills a page in the same step, and begins the next one in the step after; and the same with one more admitted then.
Each without and with the prefix cache, which enters pages that have been filled over some steps. The ceiling builds the
queries of the same plan and the progress of the same output from values at hand, and does nothing else. Times are those
of the processor, as nothing in it waits.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from perf.common import busy_cores, percentile, report
from splash.core.layout import LAYOUTS
from splash.core.request import SamplingParams
from splash.core.step import Query, StepOutput, StepPlan
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler

AIM_MS = 1.0
BUSY = 0.2  # cores that other processes keep busy, above which figures are not to be relied on
PAGE = 64
STEPS = 200
SHARED = 512  # tokens that all prompts begin with
MAX_MODEL_LEN = 1 << 18


@dataclass(frozen=True)
class Step:
    """One step: seconds of schedule and apply, the same of the ceiling, and what the step had in it."""

    seconds: float
    ceiling: float
    new_pages: int
    new_requests: int


class Bench:
    """A scheduler with `count` requests, and a group that answers at once."""

    def __init__(self, count: int, ranks: int, layout: str, prefix_cache: bool, max_batched_tokens: int = 8192) -> None:
        self.count = count
        config = SchedulerConfig(count, max_batched_tokens, MAX_MODEL_LEN, frozenset(), PAGE, prefix_cache)
        slots = [np.arange(1 << 16) for _ in range(ranks)]
        self.scheduler = Scheduler(config, PrefixCache(LAYOUTS[layout], slots))
        self._rng = random.Random(0)
        self._shared = [self._rng.randrange(1000) for _ in range(SHARED)]
        self._next_id = 0
        if prefix_cache:  # what all prompts begin with is there, so that none waits for another to compute it
            self.add(SHARED + PAGE, max_tokens=1)
            while self.scheduler.has_work:
                self.step()

    def add(self, length: int, max_tokens: int = MAX_MODEL_LEN) -> None:
        """A request with a prompt of `length` tokens, of which the first are those of every prompt."""
        own = [self._rng.randrange(1000) for _ in range(max(0, length - SHARED))]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(self._next_id, self._shared[:length] + own, params, 0)
        self._next_id += 1

    def step(self) -> Step:
        """Plan a step and take its output in, both timed."""
        started = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        output = answer(plan)
        returned = time.thread_time()
        progress = self.scheduler.apply(output)
        seconds = time.thread_time() - returned + planned - started
        new_pages = sum(len(query.new_pages) for query in plan.queries if query.start)
        return Step(seconds, ceiling(plan, progress), new_pages, len(plan.new))


def answer(plan: StepPlan) -> StepOutput:
    """Some token for each query that asks for one."""
    requests = tuple(query.request for query in plan.queries if query.sample)
    return StepOutput(plan.step, plan.epoch, requests, (1,) * len(requests), (None,) * len(requests))


def ceiling(plan: StepPlan, progress: list[Progress]) -> float:
    """Seconds to build the queries of a plan and the progress of its output again."""
    queries = [(q.request, q.start, q.tokens, q.owner, q.sample, q.new_pages) for q in plan.queries]
    fields = [msgspec.structs.astuple(each) for each in progress]
    started = time.thread_time()
    rebuilt = tuple([Query(*query) for query in queries])
    again = [Progress(*field) for field in fields]
    seconds = time.thread_time() - started
    assert rebuilt == plan.queries and again == progress
    return seconds


def decoding(bench: Bench, spread: bool) -> Iterator[Step]:
    """Steps of requests that only decode, which begin their pages at different steps or all at the same."""
    for number in range(bench.count):
        bench.add(SHARED + (number % PAGE if spread else 0) + PAGE)
    while bench.scheduler.num_waiting or any(r.num_computed < r.num_prompt for r in bench.scheduler.running):
        bench.step()
    while True:
        yield bench.step()


def joining(bench: Bench) -> Iterator[Step]:
    """Steps of requests that fill their pages at the same step, after which one more comes, for one token."""
    for _ in range(bench.count - 1):
        bench.add(SHARED + PAGE)
    while True:
        yield bench.step()
        if bench.scheduler.running[0].num_computed % PAGE == 0:
            bench.add(SHARED + PAGE, max_tokens=1)


def admitting(bench: Bench, lifetime: int) -> Iterator[Step]:
    """Steps in which one request in `lifetime` ends, and the next admits as many, with prompts of 640 tokens."""
    for number in range(bench.count):
        bench.add(SHARED + 2 * PAGE, max_tokens=1 + number % lifetime)
    while True:
        waiting = bench.count - bench.scheduler.num_running - bench.scheduler.num_waiting
        for _ in range(waiting):
            bench.add(SHARED + 2 * PAGE, max_tokens=lifetime)
        yield bench.step()


def chunking(bench: Bench) -> Iterator[Step]:
    """Steps that go on with long prompts, one or one of each owner, while others as long wait; the rest decodes."""
    for _ in range(bench.count - 2):
        bench.add(SHARED + PAGE)
    while bench.scheduler.num_waiting or any(r.num_computed < r.num_prompt for r in bench.scheduler.running):
        bench.step()
    for _ in range(32):
        bench.add(MAX_MODEL_LEN - PAGE, max_tokens=1)
    bench.step()
    while True:
        yield bench.step()


def timed(steps: Iterator[Step], count: int) -> list[Step]:
    """The next `count` steps, with the garbage collector off as it may come at any of them."""
    gc.collect()
    gc.disable()
    try:
        return [next(steps) for _ in range(count)]
    finally:
        gc.enable()


def main() -> None:
    """Measure every case, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512, help="running requests")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layout", default="dop", choices=sorted(LAYOUTS))
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()

    busy = busy_cores()
    cases: dict[str, dict[str, float]] = {}
    for prefix_cache in (False, True):
        suffix = " with prefix cache" if prefix_cache else ""

        def bench(max_batched_tokens: int = 8192, prefix_cache: bool = prefix_cache) -> Bench:
            return Bench(args.requests, args.ranks, args.layout, prefix_cache, max_batched_tokens)

        aligned = timed(decoding(bench(1 << 20), spread=False), 16 * PAGE)
        joined = timed(joining(bench(1 << 20)), 16 * PAGE)[1:]
        steady = timed(decoding(bench(), spread=True), STEPS)
        few = timed(admitting(bench(1 << 20), 256), STEPS)[STEPS // 4 :]
        many = timed(admitting(bench(1 << 20), 32), STEPS)[STEPS // 4 :]
        chunks = timed(chunking(bench(1024)), STEPS)
        turns = [at for at, step in enumerate(aligned) if at and step.new_pages == args.requests]
        for name, steps in (
            ("steady decode", steady),
            ("1 in 256 admitted", [step for step in few if step.new_requests]),
            ("1 in 32 admitted", [step for step in many if step.new_requests]),
            ("a long prompt in chunks", chunks),
            ("every request fills a page", [aligned[at - 1] for at in turns]),
            ("every request begins a page", [aligned[at] for at in turns]),
            ("the same, and one is admitted", [step for step in joined if step.new_requests]),
        ):
            ms = [step.seconds * 1e3 for step in steps]
            floor = statistics.median(step.ceiling for step in steps) * 1e3
            cases[name + suffix] = {
                "median_ms": round(statistics.median(ms), 3),
                "p95_ms": round(percentile(ms, 95), 3),
                "ceiling_ms": round(floor, 3),
                "over_ceiling": round(statistics.median(ms) / floor, 1),
                "steps": len(ms),
            }
    if busy > BUSY:
        print(f"NOT TO BE RELIED ON: other processes kept {busy:.1f} cores busy")
    for name, case in cases.items():
        verdict = "" if case["median_ms"] < AIM_MS else "OVER"
        print(
            f"{name:>46}  {case['median_ms']:6.3f} ms  (95 % within {case['p95_ms']:.3f})  ceiling "
            f"{case['ceiling_ms']:.3f} ms, {case['over_ceiling']:.1f} times  {verdict}"
        )
    print(f"{'aim':>46}  {AIM_MS:6.3f} ms")
    result = {
        "requests": args.requests,
        "ranks": args.ranks,
        "layout": args.layout,
        "aim_ms": AIM_MS,
        "others_busy_cores": busy,
        "cases": cases,
    }
    report("schedule", result, args.out)


if __name__ == "__main__":
    main()
