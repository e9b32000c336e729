"""What a decision of the cost policy costs the engine: a realistic decode of many requests, decided on again and again.

    python -m perf.policy_cost [--requests 512] [--decisions 400] [--out perf/results/policy-cost.json]

Every decision is made when it is due. Requests grow by a token each 25 ms, end after lognormal lengths and are
replaced. Compared in the same run:
reading the requests into arrays, which no decision can do without (the ceiling); the cost model's exact prediction of
one step in five layouts, which is a part of what an outlook asks for; and the decision. Times are the thread's own
processor time, which other processes lengthen less.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

from perf.common import busy_cores, report, spread
from splash.core.decision import Decision
from splash.core.hardware import Hardware
from splash.core.layout import DP, KV, LAYOUTS, Layout
from splash.core.pages import HeldPages
from splash.core.request import SamplingParams
from splash.core.step import NewRequest
from splash.plan import ModelChoice
from splash.scheduler.cost_model import CostModel
from splash.scheduler.cost_policy import CostPolicy
from splash.scheduler.policy import Limits, PolicyConfig
from splash.scheduler.request import Request
from splash.scheduler.situation import Situation
from splash.settings import build, compose

LIMIT_MS = 0.3
RANKS = 8
STEP_S = 0.025


def main() -> None:
    """Measure, print and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512, help="running requests")
    parser.add_argument("--decisions", type=int, default=400, help="decisions timed")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()

    busy = busy_cores()
    mapping = compose("plan", ["model=deepseek_v3", "+hardware=h200"])
    spec, hardware = build(ModelChoice, mapping["model"]).spec(), build(Hardware, mapping["hardware"])
    model = CostModel(spec, hardware, RANKS, "fp8")
    limits = Limits(model.planned_geometry(0.85), args.requests, 8192, 1 << 30, 1 << 26)
    policy = CostPolicy(PolicyConfig("cost", interval_ms=0), model, limits)
    draw = random.Random(0)
    running = [_request(number, draw, fresh=False) for number in range(args.requests)]
    decisions: list[Decision | None] = []
    timed: dict[str, list[float]] = {"read requests": [], "one step exactly": [], "decide": []}
    now, layout = 0.0, DP
    for turn in range(args.decisions + 20):  # the first ones fill what is remembered
        before, now = now, max(now + 0.05, policy.due_s)
        grown = round((now - before) / STEP_S)
        for index, request in enumerate(running):
            request.tokens = range(len(request.tokens) + grown)  # type: ignore[assignment]  # only counted
            request.num_computed += grown
            if len(request.tokens) >= request.num_prompt + draw.lognormvariate(7.5, 0.7):
                policy.finished(len(request.tokens) - request.num_prompt)
                running[index] = _request(args.requests * (turn + 1) + index, draw, fresh=True)
                policy.arrived(now, running[index].num_prompt)
        if turn < 20:
            layout = _carry_out(policy, policy.decide(_situation(running, now, layout)), now)
            continue
        timed["read requests"].append(_timed(lambda s: (s.length_n, s.owner_n), _situation(running, now, layout)))
        timed["one step exactly"].append(_timed(lambda s: model.steps(s.load), _situation(running, now, layout)))
        decide = lambda situation: decisions.append(policy.decide(situation))  # noqa: E731
        timed["decide"].append(_timed(decide, _situation(running, now, layout)))
        assert decisions, "a decision was made"
        layout = _carry_out(policy, decisions.pop(), now)

    for name, seconds in timed.items():
        figures = spread(seconds, digits=3)
        print(f"{name:>17}  p50 {figures['p50']:.3f} ms  p95 {figures['p95']:.3f}  p99 {figures['p99']:.3f}")
    medians = {name: spread(seconds, digits=4)["p50"] for name, seconds in timed.items()}
    verdict = "within" if medians["decide"] <= LIMIT_MS else "above"
    over = {name: medians["decide"] / medians[name] for name in ("read requests", "one step exactly")}
    print(f"a decision on {args.requests} requests is {verdict} the limit of {LIMIT_MS} ms")
    print(f"it takes {over['read requests']:.1f} times as long as reading the requests,", end=" ")
    print(f"{over['one step exactly']:.2f} times as long as predicting one step exactly")
    result = {
        "others_busy_cores": busy,
        "requests": args.requests,
        "decisions": args.decisions,
        "limit_ms": LIMIT_MS,
        "ms": {name: spread(seconds, digits=4) for name, seconds in timed.items()},
    }
    report("policy_cost", result, args.out)


def _request(number: int, draw: random.Random, fresh: bool) -> Request:
    num_prompt = 1 + int(draw.lognormvariate(6.5, 0.8))
    length = num_prompt + (1 if fresh else draw.randrange(1, 3000))
    request = Request(
        id=number,
        priority=0,
        arrival=number,
        new=NewRequest(number, (), SamplingParams(), 0),
        num_prompt=num_prompt,
        max_tokens=16384,
        tokens=range(length),  # type: ignore[arg-type]  # only counted
        num_computed=length - 1,
    )
    request.held = HeldPages(number % RANKS, RANKS)
    return request


def _carry_out(policy: CostPolicy, decision: Decision | None, now: float) -> Layout:
    """The layout after a decision. A switch that it wants is made at once."""
    assert decision is not None
    if decision.switches:
        policy.switched(LAYOUTS[decision.target], "committed", now)
    return LAYOUTS[decision.target]


def _situation(running: list[Request], now: float, layout: Layout) -> Situation:
    pages = sum(-(-len(request.tokens) // 64) for request in running)
    return Situation(
        now=now,
        layout=layout,
        ranks=RANKS,
        page_size=64,
        running=tuple(running),
        waiting=(),
        num_waiting=0,
        used_T=[pages if layout.kv is KV.REPLICATED else pages // RANKS] * RANKS,
        idle_T=[0] * RANKS,
        num_wanted=0,
        num_queried=0,
        num_hit=0,
        rows_begun=(),
        num_begun=0,
        live=lambda: running,
    )


def _timed(function: Callable[[Situation], object], situation: Situation) -> float:
    started = time.thread_time()
    function(situation)
    return time.thread_time() - started


if __name__ == "__main__":
    main()
