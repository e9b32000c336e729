"""Every fixed layout through one engine: tokens a second of prefill and in all, and the time between tokens.

    python -m perf.layouts --cases 16x256x32,4x2048x16
    python -m perf.layouts --cases 256x1024x64,16x32768x16 +hardware=h200 ranks=2 model=deepseek_v3 \\
        model.num_layers=8 model.num_experts=64 load_format=dummy dtype=bfloat16 max_batched_tokens=8192

A case is REQUESTSxINPUTxOUTPUT: so many requests that arrive together. What is not an option here is an option of
`python -m splash.serve`. The engine starts once and is switched from layout to layout, and every layout serves every
case, in an order that turns from round to round. Planning, sending, sampling and making text are all in the figures, as
clients of the offline engine see them; HTTP is not.

Prefill is the tokens of all prompts over the time until every request has its first token. A decode step is the median
time between two answers of the ranks that each bring every request a token; where prefill takes more steps than there
are tokens out, so that all never decode together, there is none. The host's share of the time of such steps is what
rank 0's device did not spend in the forward: sampling and copies of a step's inputs and tokens count as the host's.

Prompts are random, and so is routing. With `load_format=dummy_same_experts` all rows choose the same experts, as they
do with weights of one scale throughout, where the router's bias outweighs its scores: vLLM's dummy weights are of that
kind.

The ceiling beside a decode step is the bytes that it must read over the rate of a copy, which `--copy-gb-s` takes from
`perf.step`; beside prefill it is the model's own operations over the rate of a large product (`--product-tflops`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perf.common import busy_cores, report
from perf.step import decode_bytes, prefill_flops
from splash.core.layout import LAYOUTS
from splash.core.request import SamplingParams
from splash.core.spec import DTYPE_BYTES
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.engine.outputs import GenerationRequest
from splash.serve import read_options

WARM_UP_TOKENS = 1 << 16


class Case(NamedTuple):
    """So many requests of so many tokens in and out."""

    requests: int
    input: int
    output: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True)
class Turn:
    """One layout through one case, in seconds: of prefill, in all, and of each step in which all requests decoded.

    `forwards` is what of each such step rank 0's device spent in the forward.
    """

    prefill: float
    total: float
    steps: tuple[float, ...]
    forwards: tuple[float, ...]


def serve(engine: Engine, case: Case, seed: int) -> Turn:
    """All requests of a case at once, to the end."""
    vocab = engine.model_config.spec.vocab_size
    draw = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=case.output, ignore_eos=True)
    waiting = set()
    prompts = draw.integers(16, vocab, (case.requests, case.input)).tolist()
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(GenerationRequest(f"{seed}-{number}", tuple(prompt), params))
        waiting.add(f"{seed}-{number}")
    prefill = last = 0.0
    before, steps, forwards = 0, [], []
    while engine.has_work:
        computed = engine.metrics.forward_s
        outputs = engine.step()
        now = time.perf_counter() - started
        if not outputs:
            continue
        tokens = sum(len(output.tokens) > 0 for output in outputs)
        if waiting:
            waiting -= {output.id for output in outputs}
            prefill = now
        elif tokens == before == case.requests:
            steps.append(now - last)
            forwards.append(engine.metrics.forward_s - computed)
        last, before = now, tokens
    return Turn(prefill, last, tuple(steps), tuple(forwards))


def measure(
    engine: Engine, layouts: Sequence[str], cases: Sequence[Case], rounds: int
) -> dict[tuple[str, Case], list[Turn]]:
    """Turns by layout and case, after shorter ones that do not count, in which kernels are compiled."""
    turns: dict[tuple[str, Case], list[Turn]] = {}
    for number in range(rounds):
        for place in range(len(layouts)):
            layout = layouts[(place + number) % len(layouts)]
            engine.switch(layout, "blocking")
            for case in [_warm_up(case) for case in cases] if number == 0 else [Case(2, 64, 4)]:
                serve(engine, case, 999)
            assert engine.layout == layout
            for index, case in enumerate(cases):
                turn = serve(engine, case, number * 1000 + index)
                turns.setdefault((layout, case), []).append(turn)
                figures = summarise(case, [turn])
                line = (
                    f"round {number + 1} {layout:>4} {case!s:>14}: prefill {figures['prefill_tok_s']:,.0f} tok/s, in "
                    f"all {figures['total_tok_s']:,.0f} tok/s, between tokens {_cell(figures['step_ms'], 2)} ms, the "
                    f"host's share {_cell(figures['host_share'], 3)}"
                )
                print(line, file=sys.stderr, flush=True)
    return turns


def _warm_up(case: Case) -> Case:
    """Steps of the same kinds, but fewer."""
    return Case(min(case.requests, -(-WARM_UP_TOKENS // case.input)), case.input, min(case.output, 4))


def summarise(case: Case, turns: Sequence[Turn]) -> dict[str, float | None]:
    """Medians over the rounds."""
    steps = [seconds for turn in turns for seconds in turn.steps]
    forwards = [seconds for turn in turns for seconds in turn.forwards]
    prefill, total = (statistics.median(getattr(turn, name) for turn in turns) for name in ("prefill", "total"))
    return {
        "prefill_tok_s": round(case.requests * case.input / prefill, 1),
        "total_tok_s": round(case.requests * (case.input + case.output) / total, 1),
        "step_ms": round(statistics.median(steps) * 1e3, 3) if steps else None,
        "host_share": round(max(1 - sum(forwards) / sum(steps), 0.0), 4) if steps else None,
    }


def ceilings(engine: Engine, case: Case, config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    """What bounds prefill (tokens a second) and a decode step (milliseconds) on all ranks; empty if unknown."""
    spec, ranks = engine.model_config.spec, engine.ranks
    bounds = {}
    if args.product_tflops:
        seconds = prefill_flops(spec, case.requests, case.input, 0) / (args.product_tflops * 1e12 * ranks)
        bounds["prefill_tok_s"] = round(case.requests * case.input / seconds, 1)
    if args.copy_gb_s:
        context, alike = case.input + case.output // 2, config.load_format == "dummy_same_experts"
        num_bytes = decode_bytes(spec, DTYPE_BYTES[config.dtype], case.requests, context, same_experts=alike)
        bounds["step_ms"] = round(num_bytes / (args.copy_gb_s * 1e6 * ranks), 3)
    return bounds


def print_table(rows: Sequence[dict[str, Any]], layouts: Sequence[str]) -> None:
    """A table a figure: cases down, layouts across, the ceiling last."""
    for figure, unit, digits in (
        ("total_tok_s", "tok/s in all", 0),
        ("prefill_tok_s", "tok/s of prefill", 0),
        ("step_ms", "ms a step", 2),
        ("host_share", "host's share", 3),
    ):
        print(f"\n{unit:>18}" + "".join(f"{name:>10}" for name in (*layouts, "ceiling")))
        for row in rows:
            values = [row["layouts"][name][figure] for name in layouts] + [row["ceiling"].get(figure)]
            print(f"{row['case']:>18}" + "".join(f"{_cell(value, digits):>10}" for value in values))


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def case_of(text: str) -> Case:
    """A case as the command line has it."""
    try:
        case = Case(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTSxINPUTxOUTPUT, as in 16x1024x64") from None
    if min(case) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return case


def main() -> None:
    """Measure, print the tables, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: [case_of(part) for part in text.split(",")], required=True)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--copy-gb-s", type=float, help="of a copy on one device, reads and writes")
    parser.add_argument("--product-tflops", type=float, help="of a large product on one device")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("options", nargs="*", help="of splash.serve")
    args = parser.parse_intermixed_args()
    _, config = read_options([*args.options, f"layout={args.layouts[0]}", "prefix_cache=false"])
    busy = busy_cores()
    engine = Engine(config, lambda line: print(line, file=sys.stderr, flush=True))
    try:
        turns = measure(engine, args.layouts, args.cases, args.rounds)
        rows = [
            {
                "case": str(case),
                "ceiling": ceilings(engine, case, config, args),
                "layouts": {name: summarise(case, turns[name, case]) for name in args.layouts},
            }
            for case in args.cases
        ]
        print_table(rows, args.layouts)
        settings = {"options": args.options, "ranks": engine.ranks, "rounds": args.rounds, "others_busy_cores": busy}
    finally:
        engine.close()
    report("layouts", {**settings, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
