"""What the HTTP layer costs: the same prompts through a server and through the offline engine, in turns, in one run.

    python -m perf.http_cost --out perf/results/cpu-http.json

Throughput is of all streams at once, each on a connection of its own; time to first token is of one request at a time,
with one token to generate. Both sides turn tokens into text, run in the same layout with as many ranks, and have no
prefix cache. The client runs on the same machine, so what it takes is part of what HTTP costs here; its share is
reported. Aims: throughput at most 5 % less, time to first token at most 3 ms more.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from perf.client import Call, Endpoint, make_prompts, run, served_model
from perf.common import busy_cores, report
from perf.generate import splash_server
from perf.serve_result import summarise
from splash import LLM, SamplingParams

MAX_LOSS = 0.05
MAX_ADDED_MS = 3.0
BUSY = 0.2  # cores that other processes may use before the figures are worth nothing


def offline_turn(args: argparse.Namespace, prompts: list[Any]) -> dict[str, float]:
    """Tokens a second of the offline engine, and its median time to first token in ms."""
    params = SamplingParams(max_tokens=args.output_len, temperature=0.0, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with LLM(
        args.model, layout=args.layout, ranks=args.ranks, dtype=args.dtype, prefix_cache=False, hardware=args.hardware
    ) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        began = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        waits = []
        for prompt in prompts[: args.firsts]:
            began = time.perf_counter()
            llm.generate(prompt, one)
            waits.append(time.perf_counter() - began)
    return {"tok_s": len(prompts) * args.output_len / seconds, "ttft_ms": statistics.median(waits) * 1e3}


def http_turn(args: argparse.Namespace, prompts: list[Any]) -> dict[str, float]:
    """The same over HTTP, with streaming, and the cores that the client took."""
    options = [f"model.path={args.model}", f"layout={args.layout}", f"dtype={args.dtype}", "prefix_cache=false"]
    if args.ranks is not None:
        options.append(f"ranks={args.ranks}")
    if args.hardware is not None:
        options.append(f"+hardware={args.hardware}")
    with splash_server(options, args.timeout) as server:
        endpoint = Endpoint(server.url, served_model(server.url))
        run(endpoint, [Call(prompt, 8) for prompt in prompts], len(prompts))
        before = resource.getrusage(resource.RUSAGE_SELF)
        timings = run(endpoint, [Call(prompt, args.output_len) for prompt in prompts], len(prompts))
        after = resource.getrusage(resource.RUSAGE_SELF)
        firsts = run(endpoint, [Call(prompt, 1) for prompt in prompts[: args.firsts]], 1)
    summary = summarise(timings)
    client_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "tok_s": summary["output_throughput"],
        "ttft_ms": statistics.median(timing.ttft for timing in firsts) * 1e3,
        "client_cores": client_s / summary["duration"],
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """`args.repeats` rounds of both, the first one of a round taking turns."""
    prompts = make_prompts("tokens", args.streams, args.input_len, args.vocab_size, seed=0)
    contest = {"offline": offline_turn, "http": http_turn}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contest}
    others_busy = []
    for number in range(args.repeats):
        names = list(contest) if number % 2 == 0 else list(reversed(contest))
        for name in names:
            others_busy.append(busy_cores())
            turns[name].append(contest[name](args, prompts))
    rounds = list(zip(turns["offline"], turns["http"], strict=True))
    loss = statistics.median(1 - http["tok_s"] / offline["tok_s"] for offline, http in rounds)
    added_ms = statistics.median(http["ttft_ms"] - offline["ttft_ms"] for offline, http in rounds)
    return {
        "streams": args.streams,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "layout": args.layout,
        "rounds": args.repeats,
        "offline_tok_s": round(statistics.median(turn["tok_s"] for turn in turns["offline"]), 1),
        "http_tok_s": round(statistics.median(turn["tok_s"] for turn in turns["http"]), 1),
        "throughput_loss": round(loss, 4),
        "offline_ttft_ms": round(statistics.median(turn["ttft_ms"] for turn in turns["offline"]), 3),
        "http_ttft_ms": round(statistics.median(turn["ttft_ms"] for turn in turns["http"]), 3),
        "added_ttft_ms": round(added_ms, 3),
        "client_cores": round(statistics.median(turn["client_cores"] for turn in turns["http"]), 3),
        "turns": {
            name: [{key: round(value, 3) for key, value in turn.items()} for turn in of] for name, of in turns.items()
        },
        "others_busy_cores": others_busy,
        "disturbed": max(others_busy) > BUSY,
    }


def print_result(result: dict[str, Any]) -> None:
    """A table of both, and how far the aims are met."""
    shape = f"{result['streams']} streams of {result['input_len']} + {result['output_len']} tokens"
    print(f"{shape}, layout {result['layout']}, medians of {result['rounds']} rounds; offline is the ceiling")
    print(f"{'':>24} {'offline':>10} {'HTTP':>10}")
    for name, key in (("output tok/s", "tok_s"), ("time to first token, ms", "ttft_ms")):
        print(f"{name:>24} {result[f'offline_{key}']:>10.2f} {result[f'http_{key}']:>10.2f}")
    loss, added_ms = result["throughput_loss"], result["added_ttft_ms"]
    print(f"throughput lost: {loss:.1%}, aim under {MAX_LOSS:.0%}: {'met' if loss < MAX_LOSS else 'missed'}")
    verdict = "met" if added_ms < MAX_ADDED_MS else "missed"
    print(f"time to first token added: {added_ms:.2f} ms, aim under {MAX_ADDED_MS:.0f} ms: {verdict}")
    print(f"the client took {result['client_cores']:.2f} cores")
    if result["disturbed"]:
        print(f"worth little: other processes took up to {max(result['others_busy_cores']):.2f} cores")


def main() -> None:
    """Parse the command line, compare, print a table and one JSON line."""
    parser = argparse.ArgumentParser(prog="perf.http_cost", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="builtin:scribe")
    add("--layout", default="dp")
    add("--ranks", type=int, help="the hardware's default if left out")
    add("--hardware", help="found by the machine if left out")
    add("--dtype", default="float32")
    add("--streams", type=int, default=64)
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=128)
    add("--firsts", type=int, default=16, help="requests whose time to first token is measured")
    add("--vocab-size", type=int, default=256, help="token ids are drawn below this")
    add("--repeats", type=int, default=3)
    add("--timeout", type=float, default=300.0, help="seconds that a server may take to start")
    add("--out", type=Path, help="write the JSON record there as well")
    args = parser.parse_args()
    result = compare(args)
    print_result(result)
    report("http_cost", result, args.out)


if __name__ == "__main__":
    main()
