"""Adaptive serving against each fixed layout: the same requests through real engines, side by side in one run.

    python -m perf.policy --out perf/results/cpu-policy.json
    python -m perf.policy --workloads rl_rollout,agentic --repeats 3 --policy threshold
    python -m perf.policy --load 8 --calibration described model=deepseek_v3 model.num_layers=8 model.num_experts=64 \
        load_format=dummy dtype=bfloat16 ranks=2 kv_cache_gib=16 max_batched_tokens=4096

Options without dashes are those of `python -m splash.serve`. The workloads are those of conf/workload in the size of
the model that ships with SPLASH; `--load` multiplies how many requests come, `--workload-option` sets more. A contender
is an engine in one layout, or with a policy that starts from the first layout. In a round all of them serve the whole
workload, in slices of `--slice` seconds, each by a clock of its own (`perf.slices`): a machine that others share as
well is slower now and faster then by more than layouts differ. `--slice 0` lets one after another serve all of it,
where memory does not suffice for all. They are compared by the tokens a second of the whole workload, prompts included.
Figures are medians over the rounds, and ratios medians of the rounds' ratios.

The ceiling beside them is a clairvoyant that never pays for a switch: every stretch of the work, by tokens served, in
the time of the fixed layout that was fastest over it. The requests do not say how long their answers will be: they may
be as long as the workload's longest, and are ended at their length as if by an end-of-sequence token.

The policy predicts from figures that are measured first, in about a minute, from those of `--calibration FILE`, or from
those of conf/hardware (`--calibration described`), which for a CPU are another machine's.

With `--simulate` the same contenders are simulated with those figures, so that every prediction of a step is exact:
what the policy loses there it loses by its decisions, which are printed. Nothing of that is a measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf.common import busy_cores, report
from perf.slices import Clock, Contender, Turn, take_turns
from splash.calibrate import calibrate, read_settings
from splash.core.errors import ConfigError, SplashError
from splash.core.hardware import load_calibration, with_figures
from splash.core.layout import LAYOUTS, check_layout, parse_layout
from splash.core.spec import ModelSpec
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.engine.simulated import SimulationConfig, simulate
from splash.machine import describe
from splash.model.config import ModelConfig, load_model_config, parse_model_config
from splash.platform.registry import detect, get_platform, require
from splash.scheduler.policy import KINDS, PolicyConfig
from splash.serve import read_options
from splash.sweep.served import clairvoyant_s
from splash.workload import Requests, load

BUSY = 0.2  # cores that other processes may use before the figures are worth nothing
STRETCHES = 20  # of the work, for the ceiling; of many short ones, the fastest would be fast by chance
ENGINE = ("kv_cache_gib=1", "max_batched_tokens=1024")  # unless the command line says otherwise
WARM_UP = ("workload.num_requests=8", "workload.input=256", "workload.output=24", "workload.concurrency=8")


@dataclass(frozen=True)
class Recipe:
    """A workload in the size of a small model.

    Attributes:
        counts: what `--load` multiplies: requests, and requests a second.
        rest: other overrides of its file.
    """

    counts: dict[str, int]
    rest: tuple[str, ...]

    def requests(self, name: str, factor: int, options: Sequence[str]) -> Requests:
        """The requests, `factor` times as many, with further overrides."""
        counts = [f"{key}={count * factor}" for key, count in self.counts.items()]
        return load(name, [f"workload.{option}" for option in (*counts, *self.rest, *options)]).requests()


# Many short generations, which leave a few that are ten times as long.
ROLLOUT = (
    "samples=4",
    "input={kind: lognormal, average: 80, sigma: 0.6, low: 32, high: 256}",
    "output={kind: lognormal, average: 80, sigma: 1.1, low: 8, high: 480}",
)
# Sessions that begin together, and go on turn by turn with all that came before.
AGENTS = (
    "turns={kind: lognormal, average: 3, sigma: 0.7, low: 1, high: 6}",
    "input={kind: lognormal, average: 150, sigma: 0.8, low: 16, high: 600}",
    "tool={kind: lognormal, average: 100, sigma: 1.0, low: 0, high: 400}",
    "output={kind: lognormal, average: 60, sigma: 0.9, low: 8, high: 300}",
    "think={kind: lognormal, average: 0.2, sigma: 0.8, low: 0.02, high: 1}",
    "system_prompt=300",
    "max_context=3000",
)
WORKLOADS = {
    "rl_rollout": Recipe({"num_prompts": 12}, ROLLOUT),
    "agentic": Recipe({"num_sessions": 8, "rate": 8}, AGENTS),
    "bursts": Recipe(
        {"num_requests": 60, "rate_on": 24, "rate_off": 1},
        (
            "on_s=2",
            "off_s=3",
            "input={kind: lognormal, average: 150, sigma: 0.8, low: 8, high: 1500}",
            "output={kind: lognormal, average: 60, sigma: 0.8, low: 4, high: 400}",
        ),
    ),
    "poisson": Recipe(
        {"num_requests": 60, "rate": 8},
        (
            "input={kind: lognormal, average: 150, sigma: 0.8, low: 8, high: 1500}",
            "output={kind: lognormal, average: 60, sigma: 0.8, low: 4, high: 400}",
        ),
    ),
    "fixed": Recipe({"num_requests": 32, "concurrency": 16}, ("input=256", "output=96")),
    # A rollout, a burst of agents, a few long prompts, and a few short requests, each once the one before has ended.
    "phases": Recipe(
        {
            "parts.rollout.num_prompts": 8,
            "parts.agents.num_sessions": 6,
            "parts.agents.rate": 6,
            "parts.documents.num_requests": 6,
            "parts.chat.num_requests": 8,
        },
        (
            *(f"parts.rollout.{option}" for option in ROLLOUT),
            *(f"parts.agents.{option}" for option in AGENTS),
            "parts.documents.concurrency=2",
            "parts.documents.input=3000",
            "parts.documents.output=32",
            "parts.chat.concurrency=2",
            "parts.chat.input=64",
            "parts.chat.output=64",
        ),
    ),
}
COMPARED = ("rl_rollout", "agentic", "phases")


def simulate_turn(config: EngineConfig, layout: str, policy: PolicyConfig, requests: Requests, spec: ModelSpec) -> Turn:
    """The same on a virtual clock; what is served counts when its request ends."""
    assert config.description is not None and config.ranks is not None
    same = {field.name for field in dataclasses.fields(EngineConfig)} & {
        field.name for field in dataclasses.fields(SimulationConfig)
    }
    given = {name: getattr(config, name) for name in same - {"hardware", "layout", "policy", "mem_fraction"}}
    longest = int(requests.output_len.max())
    settings = SimulationConfig(
        spec=spec, hardware=config.description, layout=layout, policy=policy, max_output_len=longest, **given
    )
    result = simulate(settings, requests)
    order = np.argsort(result.finish_s)
    tokens = np.cumsum((requests.input_len + requests.output_len)[order])
    rows = [row for before, row in itertools.pairwise(result.timeline) if row.layout != before.layout]
    for record in result.switches:
        reason = record.decision.reason if record.decision is not None else "by hand"
        print(f"  {record.source} -> {record.target} {record.status}: {reason}", file=sys.stderr)
    return Turn(
        seconds=result.seconds,
        served=list(zip(result.finish_s[order].tolist(), tokens.tolist(), strict=True)),
        latency_s=(result.finish_s - result.arrival_s).tolist(),
        switches=[(round(row.t_s, 2), row.layout) for row in rows],
        layout_s=dict(result.layout_seconds),
    )


def ceiling(fixed: list[Turn]) -> float:
    """Tokens a second with every stretch of the work in the time of the layout that was fastest over it."""
    total = fixed[0].served[-1][1]
    marks = np.arange(1, STRETCHES + 1) * (total / STRETCHES)
    reached = []
    for turn in fixed:
        seconds, tokens = np.array([(0.0, 0), *turn.served]).T
        reached.append(np.interp(marks, tokens, seconds).tolist())
    return float(total / clairvoyant_s(reached))


def contenders(ranks: int, num_heads: int, policy: str) -> dict[str, tuple[str, PolicyConfig]]:
    """(layout to start in, policy) by name: every layout that these ranks can serve in, and the policy."""
    chosen = {}
    for name in LAYOUTS:
        try:
            check_layout(parse_layout(name), num_heads, ranks)
        except ConfigError:
            continue
        chosen[name] = (name, PolicyConfig("static"))
    chosen["adaptive"] = (next(iter(chosen)), PolicyConfig(policy))
    return chosen


def take_round(args: argparse.Namespace, names: list[str], requests: Requests) -> list[Turn]:
    """Engines of those names, once they are warm, through one workload. No policy is asked while they warm up."""
    contenders: list[Contender] = []
    try:
        for name in names:
            layout, policy = args.contenders[name]
            clock = Clock()
            engine = Engine(dataclasses.replace(args.config, layout=layout, policy=policy), clock=clock)
            contenders.append(Contender(engine, clock))
            engine.loop.steering.pin()
            take_turns(contenders[-1:], load("fixed", WARM_UP).requests(), math.inf)
            engine.loop.steering.release()
        return take_turns(contenders, requests, args.slice or math.inf)
    finally:
        for contender in contenders:
            contender.engine.close()


def in_turn(names: list[str], number: int, rounds: int) -> list[str]:
    """The order of a round. Over all rounds everybody comes early and late, as the machine may become slower."""
    first = number * len(names) // rounds
    return names[first:] + names[:first]


def compare(args: argparse.Namespace, name: str, busy: list[float]) -> dict[str, Any]:
    """All contenders through one workload, `args.repeats` rounds."""
    requests = WORKLOADS[name].requests(name, args.load, args.workload_option)
    turns: dict[str, list[Turn]] = {}
    for number in range(args.repeats):
        names = in_turn(list(args.contenders), number, args.repeats)
        for together in [names] if args.slice else [[name] for name in names]:
            busy.append(busy_cores())
            if args.simulate:
                taken = [simulate_turn(args.config, *args.contenders[who], requests, args.spec) for who in together]
            else:
                taken = take_round(args, together, requests)
            for who, turn in zip(together, taken, strict=True):
                turns.setdefault(who, []).append(turn)
                print(
                    f"{name} round {number + 1}: {who:8} {turn.tokens_per_s:7.0f} tok/s in {turn.seconds:5.1f} s "
                    f"{' '.join(f'{layout}@{at:.1f}' for at, layout in turn.switches)}",
                    file=sys.stderr,
                    flush=True,
                )
    over = {
        who: statistics.median(
            [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(turns["adaptive"], of_one, strict=True)]
        )
        for who, of_one in turns.items()
        if who != "adaptive"
    }
    best = min(over, key=lambda who: over[who])
    tops = [
        ceiling([turns[who][number] for who in over]) / turns[best][number].tokens_per_s
        for number in range(args.repeats)
    ]
    return {
        "workload": name,
        "requests": len(requests),
        "tok_s": {
            who: round(statistics.median(turn.tokens_per_s for turn in of_one), 1) for who, of_one in turns.items()
        },
        "turns_tok_s": {who: [round(turn.tokens_per_s, 1) for turn in of_one] for who, of_one in turns.items()},
        "mean_latency_s": {
            who: round(statistics.median(statistics.fmean(turn.latency_s) for turn in of_one), 3)
            for who, of_one in turns.items()
        },
        "best_fixed": best,
        "adaptive_over": {who: round(value, 3) for who, value in over.items()},
        "adaptive_over_best": round(over[best], 3),
        "ceiling_over_best": round(statistics.median(tops), 3),
        "switches": [turn.switches for turn in turns["adaptive"]],
        "layout_s": [
            {layout: round(seconds, 1) for layout, seconds in turn.layout_s.items()} for turn in turns["adaptive"]
        ],
    }


def settings(args: argparse.Namespace) -> tuple[EngineConfig, ModelConfig]:
    """What every engine starts with, but for layout and policy: predictions are from this machine's figures.

    Raises:
        SplashError: an option cannot work, or the machine could not be measured.
    """
    given = {option.lstrip("+").partition("=")[0] for option in args.options}
    for option in ("layout", "policy"):
        if option in given:
            raise ConfigError(option, "is what is compared; --policy chooses the policy")
    _, config = read_options([*(each for each in ENGINE if each.partition("=")[0] not in given), *args.options])
    find = get_platform if args.simulate else require  # simulated, it need not be here
    platform = find(config.hardware) if config.hardware else detect()
    ranks = config.ranks or platform.default_ranks()
    hardware = config.description or describe(platform)
    if args.calibration != "described":
        if args.calibration == "measure":
            asked = dataclasses.replace(read_settings([f"ranks={ranks}", f"dtype={config.dtype}"]), hardware=hardware)
            found = calibrate(asked, lambda line: print(line, file=sys.stderr, flush=True))
        else:
            found = load_calibration(args.calibration)
        hardware = with_figures(hardware, found)
    config = dataclasses.replace(config, ranks=ranks, description=hardware)
    contents = config.model_config
    return config, load_model_config(config.model) if contents is None else parse_model_config(contents, config.model)


def main() -> int:
    """Measure, print and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="of the engines, as in dtype=bfloat16")
    parser.add_argument("--policy", default="cost", choices=[kind for kind in KINDS if kind != "static"])
    parser.add_argument("--calibration", default="measure", help="measure, described, or a file of splash.calibrate")
    parser.add_argument("--workloads", default=",".join(COMPARED), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--load", type=int, default=1, help="how many times as many requests")
    parser.add_argument(
        "--workload-option", action="append", default=[], help="of the workloads, as in output.average=640; repeatable"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds in which every contender has a turn")
    parser.add_argument("--slice", type=float, default=0.25, help="seconds; 0: the whole workload, one after another")
    parser.add_argument("--simulate", action="store_true", help="in the place of serving, once each")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    try:
        args.config, model = settings(args)
        args.spec = model.spec
        args.contenders = contenders(args.config.ranks, model.spec.num_heads, args.policy)
    except SplashError as error:
        print(f"perf.policy: {error}", file=sys.stderr)
        return 2

    if args.simulate:
        args.repeats = 1
    began = time.perf_counter()
    busy: list[float] = []
    rows = [compare(args, name, busy) for name in args.workloads.split(",")]
    print(f"{'workload':12}" + "".join(f"{who:>10}" for who in args.contenders) + "   over best   ceiling")
    for row in rows:
        print(
            f"{row['workload']:12}"
            + "".join(f"{row['tok_s'][who]:10.0f}" for who in args.contenders)
            + f"{row['adaptive_over_best']:12.3f}{row['ceiling_over_best']:10.3f}  (tokens/s; best {row['best_fixed']})"
        )
    # Ranks on accelerators leave the host's cores alone.
    is_cpu = args.config.description.platform == "cpu"
    if is_cpu and max(busy) > BUSY and not args.simulate:
        print(f"NOT TO BE RELIED ON: other processes used up to {max(busy):.1f} cores", file=sys.stderr)
    result = {
        **{
            option: getattr(args, option)
            for option in (
                "options",
                "policy",
                "calibration",
                "load",
                "workload_option",
                "repeats",
                "slice",
                "simulate",
            )
        },
        "model": args.config.model,
        "ranks": args.config.ranks,
        "hardware": args.config.description.name,
        "seconds": round(time.perf_counter() - began, 1),
        "others_busy_cores": max(busy),
        "rows": rows,
    }
    report("policy", result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
