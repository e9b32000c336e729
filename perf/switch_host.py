"""What the engine's own thread does for a switch of long contexts, without ranks: all of it is planning.

    python -m perf.switch_host --out perf/results/switch-host.json

An executor that answers at once stands in for the ranks of a DeepSeek-V3 of 8 layers, with contexts that nobody has
computed (`perf.filled`). While a step runs the engine plans what is copied behind it; where that takes no longer than a
step, it costs nothing. At the boundary it plans the step that commits, which waits for that. While that step runs it
counts what the switch does, and settles it when the step is over. Processor time of the thread, in milliseconds; there
is no ceiling but zero. With each step planned while the one before runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from perf.common import busy_cores, report
from perf.filled import take_for_computed
from perf.switch import directions_of
from perf.switch_walk import shapes
from splash.core.layout import LAYOUTS
from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.core.spec import kv_format
from splash.core.step import StepOutput
from splash.engine.collector import keep_from_collector
from splash.engine.loop import Executor, Loop
from splash.engine.messages import Channel, Result, Run
from splash.model.config import parse_model_config
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.queries import enter_pages
from splash.scheduler.scheduler import Scheduler
from splash.switch.orders import CopyAhead, SwitchOutcome, Vote
from splash.switch.prepared import chain

PAGE_SIZE, DTYPE_BYTES, MIB = 64, 2, 1 << 20
GROWTH = 1024  # tokens that each request has room to grow by
METHODS = ("precopy", "layerwise")


class AgreeingRanks(Executor):
    """Ranks that carry out everything at once and agree to it."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._runs, self._told = ranks, deque[Run](), (0, 0)
        self.order_bytes = 0

    def submit(self, run: Run) -> None:
        self._runs.append(run)

    def copy_ahead(self, order: CopyAhead) -> None:
        self.order_bytes = max(self.order_bytes, len(Channel.encode(order)))
        told = self._told[1] if self._told[0] == order.switch else 0
        self._told = order.switch, chain(chain(told, order.prepared), order.rest or ())

    def votes(self) -> list[Vote]:
        return [Vote(rank, *self._told) for rank in range(self._ranks)]

    def collect(self) -> Result:
        run = self._runs.popleft()
        requests = tuple(query.request for query in run.plan.queries if query.sample)
        nothing = (None,) * len(requests)
        output = StepOutput(run.plan.step, run.plan.epoch, requests, (1,) * len(requests), nothing)
        return Result(output, None if run.commit is None else SwitchOutcome())

    def check(self) -> None:
        """Nothing can die."""

    def restart(self, layout: str) -> None:
        """Nothing is to be started anew."""

    def close(self) -> None:
        """Nothing was started."""


def measure(args: argparse.Namespace, source: str, target: str, method: str) -> dict[str, Any]:
    """One switch: milliseconds of each thing that the engine does for it."""
    spec = parse_model_config(shapes(args.shapes, args.context + GROWTH), args.shapes).spec
    kv = kv_format(spec, "bfloat16")
    pages = -(-args.batch * (args.context + GROWTH) // PAGE_SIZE)
    room = ArenaGeometry(spec, kv, PAGE_SIZE, DTYPE_BYTES, 2, 1 << 30).num_weight_slots + pages + pages // 8
    geometry = ArenaGeometry(spec, kv, PAGE_SIZE, DTYPE_BYTES, 2, room)
    limits = SchedulerConfig(args.batch, args.batch, args.context + GROWTH, frozenset(), PAGE_SIZE, args.prefix_cache)
    scheduler = Scheduler(limits, PrefixCache.of_geometry(geometry, LAYOUTS[source]))
    take_for_computed(scheduler, args.context)
    ranks = AgreeingRanks(geometry.ranks)
    loop = Loop(scheduler, ranks, geometry, 2048 * MIB, int(args.copy_mib * MIB), async_scheduling=True, streams=True)
    params = SamplingParams(max_tokens=GROWTH, temperature=0.0, ignore_eos=True)
    for number in range(args.batch):
        loop.add(number, [(number * 7 + at) % 1000 + 16 for at in range(args.context)], params, 0)
    for _ in range(2 * PAGE_SIZE):
        loop.step()
    if args.prefix_cache:
        enter_pages(scheduler.pool, [(own, 0, args.context // PAGE_SIZE) for own in scheduler.running], PAGE_SIZE)
    keep_from_collector()
    times: dict[str, list[float]] = defaultdict(list)
    switcher = loop.switcher
    look_ahead, next_run, settle = switcher.look_ahead, switcher.next_run, switcher.settle

    def timed_look_ahead(plan: Any) -> CopyAhead | None:
        began = time.thread_time()
        order = look_ahead(plan)
        ended = time.thread_time()
        if order is not None:
            times["order" if order.rest is None else "last order"].append(ended - began)
        elif not times["order"]:
            times["begin"].append(ended - began)
        elif times["last order"] and not times["counts"]:
            times["counts"].append(ended - began)
        return order

    def timed_next_run(at_boundary: bool = True) -> Run | None:
        began = time.thread_time()
        run = next_run(at_boundary)
        if run is not None:
            times["plan" if run.commit is None else "plan of the commit"].append(time.thread_time() - began)
        return run

    def timed_settle(outcome: SwitchOutcome) -> bool:
        began = time.thread_time()
        ran = settle(outcome)
        times["settle"].append(time.thread_time() - began)
        return ran

    switcher.look_ahead, switcher.next_run = timed_look_ahead, timed_next_run  # type: ignore[method-assign]
    switcher.settle = timed_settle  # type: ignore[method-assign]
    record = switcher.request(LAYOUTS[target], method, False, lambda record: None)
    while switcher.active is not None:
        loop.step()
    if (record.status, record.method) != ("committed", method):
        raise SystemExit(f"{source} -> {target}: {record.status} by {record.method}: {record.reason}")
    row: dict[str, Any] = {"direction": f"{source}->{target}", "method": method, "orders": record.background_steps}
    for what, seconds in times.items():
        row[what] = {"p50": round(statistics.median(seconds) * 1e3, 2), "max": round(max(seconds) * 1e3, 2)}
    return {**row, "order_bytes": ranks.order_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="deepseek_v3,8,64", help="NAME,LAYERS,EXPERTS of conf/model")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode")
    parser.add_argument("--context", type=int, default=262144, help="tokens of each")
    parser.add_argument("--copy-mib", type=float, default=256.0, help="copied ahead behind a step, by each rank")
    parser.add_argument("--prefix-cache", action="store_true", help="with the pages of the requests in the cache")
    parser.add_argument("--directions", type=directions_of, default=directions_of("dp:tp,tp:dop,dop:dp,dp:dop"))
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    busy, rows = busy_cores(), []
    for source, target in args.directions:
        for method in METHODS:
            rows.append(row := measure(args, source, target, method))
            timings = ", ".join(
                f"{what} {t['p50']:.2f} (max {t['max']:.2f})" for what, t in row.items() if isinstance(t, dict)
            )
            print(f"{row['direction']}, {method}, {row['orders']} orders: {timings} ms", flush=True)
    settings = {name: getattr(args, name) for name in ("shapes", "batch", "context", "copy_mib", "prefix_cache")}
    report("switch_host", {**settings, "others_busy_cores": busy, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
