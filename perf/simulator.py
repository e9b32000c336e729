"""How fast the simulator is, and how right: `python -m perf.simulator [--against-engine] [--out FILE]`.

    python -m perf.simulator                            request-steps a second at several batches and on a trace
    python -m perf.simulator --requests 1000000         one long open workload, with progress
    python -m perf.simulator --against-engine           simulated against measured time on this machine

A request-step is one request in one step. Speed is processor time of one core, so that a busy machine shows less. The
ceiling is the scheduler alone: every step planned and applied, with an executor that answers at once. The simulator can
be above it, since it takes most steps without a plan; `every step` is the simulator without that.

Against the engine the same workload is served by real ranks and simulated with figures that were calibrated on the
machine in the same run, or come from `--calibration`. The ceiling is the machine itself: the engine serves each
workload `--repeats` times, and its own times differ by as much as is printed. Admissions and preemptions have to be
equal; the script ends with 1 where they are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common import busy_cores, report
from splash.calibrate import calibrate, choose, read_settings
from splash.core.hardware import Hardware, load_calibration, with_figures
from splash.core.request import SamplingParams
from splash.core.step import StepOutput, StepPlan
from splash.engine.loop import Executor
from splash.engine.messages import Result, Run
from splash.engine.outputs import GenerationRequest
from splash.engine.simulated import Simulation, SimulationConfig, simulate
from splash.engine.virtual import VirtualClock
from splash.llm import LLM
from splash.plan import ModelChoice
from splash.settings import build, compose
from splash.workload import Requests, load

BATCHES = (1, 8, 64, 256)
PROGRESS_S = 10.0  # between lines that say how far a long run is
AIM = 50_000  # request-steps a second
CEILING_STEP_S = 0.02  # of the executor that answers at once: how requests arrive meanwhile hardly matters
MODEL = "builtin:scribe"
PRESSURE_GIB = 0.03  # arenas that hold about a dozen requests of the mixed case
LIMITS: dict[str, Any] = {"page_size": 64, "max_num_seqs": 32, "max_batched_tokens": 512}


class InstantExecutor:
    """Answers every step at once; the virtual clock moves on by the same every time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._result = Result(None)

    def submit(self, run: Run) -> None:
        plan = run.plan
        ids = tuple([query.request for query in plan.queries if query.sample])
        self._result = Result(StepOutput(plan.step, plan.epoch, ids, (0,) * len(ids), (None,) * len(ids)))

    def collect(self) -> Result:
        self._clock.now += CEILING_STEP_S
        return self._result

    def check(self) -> None:
        """Nothing can die."""

    def restart(self, layout: str) -> None:
        """Nothing is to be started anew."""

    def close(self) -> None:
        """Nothing was started."""


class Counting:
    """An executor that notes admissions, preemptions, and how many queries it was given."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.collect, self.check = executor.collect, executor.check
        self.restart, self.close = executor.restart, executor.close
        self.admissions: list[int] = []
        self.preemptions: list[tuple[int, int]] = []
        self.request_steps = 0
        self.first_step: int | None = None

    def submit(self, run: Run) -> None:
        self._note(run.plan)
        self._executor.submit(run)

    def _note(self, plan: StepPlan) -> None:
        self.first_step = plan.step if self.first_step is None else self.first_step
        self.admissions += [new.id for new in plan.new]
        lost = set(plan.released) - set(plan.finished)
        self.preemptions += [(plan.step - self.first_step, id) for id in plan.released if id in lost]
        self.request_steps += len(plan.queries)


# --- speed ---


def virtual_config(layout: str) -> SimulationConfig:
    """Eight B200 that serve DeepSeek-V3."""
    spec = build(ModelChoice, compose("plan", ["model=deepseek_v3"])["model"]).spec()
    hardware = build(Hardware, compose("plan", ["+hardware=b200"])["hardware"])
    return SimulationConfig(spec, hardware, 8, "fp8", layout=layout)


def speed(requests: Requests, layout: str, repeats: int) -> dict[str, Any]:
    """Request-steps a second of the simulator, of the simulator with every step, and of the scheduler alone."""
    config = virtual_config(layout)
    turns: dict[str, list[float]] = {"simulator": [], "every_step": [], "scheduler_alone": []}
    result = simulate(config, requests)
    for _ in range(repeats):
        for name, times in turns.items():
            simulation = Simulation(config, requests, every_step=name != "simulator")
            if name == "scheduler_alone":
                simulation.loop.executor = Counting(InstantExecutor(simulation.clock))
            began = time.process_time()
            while simulation.step():
                pass
            seconds = time.process_time() - began
            executor = simulation.loop.executor
            count = executor.request_steps if isinstance(executor, Counting) else simulation.recorder.request_steps
            times.append(count / seconds)
    rates = {name: round(statistics.median(times)) for name, times in turns.items()}
    return {
        "layout": layout,
        "requests": len(requests),
        "request_steps": result.request_steps,
        "steps": result.steps,
        "mean_batch": round(result.request_steps / result.steps, 1),
        "virtual_s": round(result.seconds, 1),
        "request_steps_per_s": rates,
        "requests_per_s": round(len(requests) * rates["simulator"] / result.request_steps),
        "over_scheduler_alone": round(rates["simulator"] / rates["scheduler_alone"], 2),
    }


def measure_long(count: int) -> dict[str, Any]:
    """Request-steps a second over `count` requests that arrive as independent users', once, with progress."""
    requests = load("poisson", [f"workload.num_requests={count}", "workload.rate=20"]).requests()
    began, told = time.process_time(), time.perf_counter()

    def progress(finished: int, now_s: float) -> None:
        nonlocal told
        if time.perf_counter() - told >= PROGRESS_S:
            told = time.perf_counter()
            seconds = time.process_time() - began
            print(f"{finished:>9} of {count} in {seconds:.0f} s, {now_s:.0f} s simulated", file=sys.stderr, flush=True)

    result = simulate(virtual_config("dp"), requests, progress=progress)
    seconds = time.process_time() - began
    rate = result.request_steps / seconds
    print(
        f"{count} requests, {result.request_steps} request-steps of {result.seconds:.0f} s in {seconds:.0f} s: "
        f"{rate:.0f} a second, {rate / AIM:.2f} of the aim"
    )
    return {
        "model": "deepseek_v3",
        "hardware": "b200 x 8",
        "aim_request_steps_per_s": AIM,
        "requests": count,
        "request_steps": result.request_steps,
        "steps": result.steps,
        "virtual_s": round(result.seconds, 1),
        "seconds": round(seconds, 1),
        "request_steps_per_s": round(rate),
    }


def measure_speed(repeats: int) -> dict[str, Any]:
    """All of the speed part."""
    cases: dict[str, tuple[Requests, str]] = {}
    for batch in BATCHES:
        options = [f"num_requests={max(4 * batch, 16)}", f"concurrency={batch}"]
        cases[f"batch {batch}"] = load("fixed", [f"workload.{option}" for option in options]).requests(), "dp"
    cases["trace"] = load("trace").requests(), "tp"
    cases["agentic"] = load("agentic").requests(), "dp"
    rows = {}
    for name, (requests, layout) in cases.items():
        row = rows[name] = speed(requests, layout, repeats)
        rates = row["request_steps_per_s"]
        print(
            f"{name:>16} {layout}: {row['request_steps']:>9} request-steps, {row['mean_batch']:>5} a step; "
            f"{rates['simulator']:>8} a second, {row['requests_per_s']:>4} requests, "
            f"every step {rates['every_step']:>7}, "
            f"scheduler alone {rates['scheduler_alone']:>7}; {row['over_scheduler_alone']:.2f} of that ceiling",
            flush=True,
        )
    return {"model": "deepseek_v3", "hardware": "b200 x 8", "aim_request_steps_per_s": AIM, "rows": rows}


# --- against the engine ---


@dataclass(frozen=True)
class Case:
    """A workload that is there from the start, and where it is served."""

    name: str
    layout: str
    overrides: tuple[str, ...]
    kv_cache_gib: float = 0.5

    def requests(self) -> Requests:
        options = ["concurrency=null", *self.overrides]
        return load("fixed", [f"workload.{option}" for option in options]).requests()


def cases() -> list[Case]:
    """Few and many, long and short, and a mixture that has to preempt, on the shipped model."""
    decode = ("num_requests=24", "input=40", "output=160")
    prefill = ("num_requests=16", "input=900", "output=4")
    mixed = (
        "num_requests=40",
        "input={kind: uniform, low: 30, high: 700}",
        "output={kind: uniform, low: 8, high: 160}",
        "shared_prefix=130",
        "prefix_groups=4",
    )
    found = [Case("single", "tp", ("num_requests=1", "input=200", "output=200"))]
    for layout in ("tp", "dp", "dop"):
        found += [Case("decode", layout, decode), Case("prefill", layout, prefill), Case("mixed", layout, mixed)]
    return [*found, Case("pressure", "tp", mixed, PRESSURE_GIB)]


def serve(llm: LLM, requests: Requests) -> tuple[float, Counting]:
    """Seconds from the first request to the last finish, and what happened. All are there before the first step."""
    engine = llm.engine
    inner = engine.loop.executor
    engine.loop.executor = counting = Counting(inner)
    prompts = [
        tuple(requests.tokens(index, engine.model_config.spec.vocab_size).tolist()) for index in range(len(requests))
    ]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=int(requests.output_len[index]), temperature=0.0, ignore_eos=True)
        engine.add_request(GenerationRequest(str(index), prompt, params))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - began
    engine.loop.executor = inner
    return seconds, counting


def compare(case: Case, hardware: Hardware, ranks: int, dtype: str, repeats: int) -> dict[str, Any]:
    """One case, measured and simulated. A group of its own for every repeat, so that no cache is left from before."""
    requests, times = case.requests(), []
    happened: list[tuple[list[int], list[tuple[int, int]]]] = []
    options = {**LIMITS, "kv_cache_gib": case.kv_cache_gib}
    for _ in range(repeats):
        with LLM(MODEL, ranks=ranks, dtype=dtype, layout=case.layout, **options) as llm:
            serve(llm, load("fixed", ["workload.num_requests=2", "workload.input=70", "workload.output=8"]).requests())
            llm.engine.scheduler.pool.evict()
            seconds, counting = serve(llm, requests)
            spec, longest = llm.engine.model_config.spec, llm.engine.max_model_len
        times.append(seconds)
        offset = min(counting.admissions)
        preemptions = [(step, id - offset) for step, id in counting.preemptions]
        happened.append(([id - offset for id in counting.admissions], preemptions))
    config = SimulationConfig(
        spec,
        hardware,
        ranks,
        dtype,
        layout=case.layout,
        max_model_len=longest,
        **options,
    )
    result = simulate(config, requests)
    measured = statistics.median(times)
    return {
        "case": case.name,
        "layout": case.layout,
        "measured_s": round(measured, 3),
        "simulated_s": round(result.seconds, 3),
        "ratio": round(result.seconds / measured, 3),
        "spread": round(max(times) / min(times), 3),
        "steps": result.steps,
        "preemptions": len(result.preemptions),
        "same_schedule": all(each == (result.admissions, result.preemptions) for each in happened),
    }


def measure_against_engine(calibration: str | None, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All of the comparison."""
    platform, description = choose(None)
    ranks = platform.default_ranks()
    if calibration is not None:
        found = load_calibration(calibration)
    else:
        found = calibrate(dataclasses.replace(read_settings([]), ranks=ranks), say)
    hardware = with_figures(description, found)
    rows = []
    for case in cases():
        row = compare(case, hardware, ranks, found.dtype, repeats)
        rows.append(row)
        print(
            f"{case.name:>9} {case.layout:>4}: {row['simulated_s']:7.2f} s simulated, {row['measured_s']:7.2f} s "
            f"measured (repeats differ by {row['spread'] - 1:.0%}); ratio {row['ratio']:.2f}; "
            f"{row['preemptions']} preemptions, "
            f"schedule {'equal' if row['same_schedule'] else 'DIFFERENT'}",
            flush=True,
        )
    errors = [abs(row["ratio"] - 1) for row in rows]
    total = sum(row["simulated_s"] for row in rows) / sum(row["measured_s"] for row in rows)
    print(f"all together {total:.2f}; median error {statistics.median(errors):.0%}, worst {max(errors):.0%}")
    return {
        "model": MODEL,
        "platform": platform.name,
        "device": found.device,
        "dtype": found.dtype,
        "ranks": ranks,
        "ratio_of_all": round(total, 3),
        "median_error": round(statistics.median(errors), 3),
        "worst_error": round(max(errors), 3),
        "within_25_percent": sum(error <= 0.25 for error in errors),
        "cases": len(rows),
        "same_schedule": all(row["same_schedule"] for row in rows),
        "rows": rows,
    }


def main() -> int:
    """Measure one of the two, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against-engine", action="store_true", help="simulated against measured time")
    parser.add_argument("--calibration", help="file of python -m splash.calibrate; left out, calibrates first")
    parser.add_argument(
        "--requests", type=int, help="requests of one long open workload, in the place of the usual cases"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contender")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    busy = busy_cores()
    if args.against_engine:
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        result = measure_against_engine(args.calibration, args.repeats, say)
        report("simulator_against_engine", {"others_busy_cores": busy, **result}, args.out)
        return 0 if result["same_schedule"] else 1
    result = measure_speed(args.repeats) if args.requests is None else measure_long(args.requests)
    report("simulator", {"others_busy_cores": busy, **result}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
