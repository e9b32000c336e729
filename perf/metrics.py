"""What metrics cost: the time that they take of a decode step, against the step itself, in one run.

    python -m perf.metrics --batch 64

Serves a batch of requests to its end, then makes the calls that the engine makes for one step of it, many times over.
The target is under 1 % of a step. Prints both, and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from splash.core.request import SamplingParams
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.engine.metrics import EngineMetrics, RequestTimes
from splash.engine.outputs import GenerationRequest

TARGET = 0.01


def step_seconds(batch: int, ranks: int) -> list[float]:
    """Seconds from one decode step of `batch` requests to the next."""
    engine = Engine(EngineConfig("builtin:scribe", hardware="cpu", ranks=ranks, kv_cache_gib=0.5))
    try:
        params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
        for number in range(batch):
            engine.add_request(GenerationRequest(str(number), tuple(range(10, 42)), params))
        times = []
        while engine.has_work:
            started = time.perf_counter()
            if len(engine.step()) == batch:
                times.append(time.perf_counter() - started)
        return times[4:-4]
    finally:
        engine.close()


def metrics_seconds(batch: int, repeats: int = 2000) -> list[float]:
    """Seconds that the calls for one decode step of `batch` requests take."""
    metrics = EngineMetrics()
    requests = [RequestTimes(0.0) for _ in range(batch)]
    times = []
    for repeat in range(repeats):
        started = time.perf_counter()
        metrics.step("tp", 0.01, batch)
        now = repeat * 0.01
        for request in requests:
            metrics.token(request, now)
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="perf.metrics", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=64, help="requests that decode")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    step = statistics.median(step_seconds(args.batch, args.ranks))
    cost = statistics.median(metrics_seconds(args.batch))
    print(f"step {step * 1e3:.2f} ms, metrics {cost * 1e6:.0f} us: {cost / step:.2%} of it; the target is {TARGET:.0%}")
    print(json.dumps({"batch": args.batch, "ranks": args.ranks, "step_s": step, "metrics_s": cost}))


if __name__ == "__main__":
    main()
