"""What the HTTP layer costs: the same prompts through a server and through the offline engine, in turns, in one run.

    python -m perf.http_cost --out perf/results/cpu-http.json
    python -m perf.http_cost --apart      # with cores to spare

Throughput is of all streams at once, each on a connection of its own; time to first token is of one request at a time,
with one token to generate. Both sides turn tokens into text, run in the same layout with as many ranks, and have no
prefix cache. The client runs on the same machine. Where it shares cores with the ranks, what it takes is part of what
HTTP seems to cost; so processor time a token is reported as well, the client's apart from the server's. With `--apart`
ranks, engine and client have cores of their own. Aims: throughput at most 5 % less, time to first token at most 3 ms
more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Cores:
    """Who may run where. Ranks and engine are the same for both sides."""

    ranks: frozenset[int]
    engine: frozenset[int]
    client: frozenset[int]


def share_cores(ranks: int, threads: int, apart: bool) -> Cores:
    """All cores for everybody; apart, `threads` for each rank, two for the engine, and the rest for the client."""
    every = sorted(os.sched_getaffinity(0))
    if not apart:
        return Cores(*[frozenset(every)] * 3)
    first = ranks * threads
    if len(every) < first + 3:
        raise SystemExit(
            f"--apart: {ranks} ranks of {threads} threads need {first + 3} cores, and there are {len(every)}"
        )
    return Cores(frozenset(every[:first]), frozenset(every[first : first + 2]), frozenset(every[first + 2 :]))


def move(pid: int, cores: frozenset[int]) -> None:
    """Let every thread of a process run on `cores` only. Processes that it has started stay where they are."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def processor_s(pid: int) -> tuple[float, float]:
    """Processor seconds of a process so far: of its first thread, and of all others."""
    times = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        times[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return times[pid], sum(times.values()) - times[pid]


def offline_turn(args: argparse.Namespace, prompts: list[Any], cores: Cores) -> dict[str, float]:
    """Tokens a second of the offline engine, its processor time a token, and its median time to first token in ms."""
    params = SamplingParams(max_tokens=args.output_len, temperature=0.0, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    move(os.getpid(), cores.ranks)  # which the ranks inherit
    with LLM(
        args.model, layout=args.layout, ranks=args.ranks, dtype=args.dtype, prefix_cache=False, hardware=args.hardware
    ) as llm:
        move(os.getpid(), cores.engine)
        llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        before = sum(processor_s(os.getpid()))
        began = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        engine_s = sum(processor_s(os.getpid())) - before
        waits = []
        for prompt in prompts[: args.firsts]:
            began = time.perf_counter()
            llm.generate(prompt, one)
            waits.append(time.perf_counter() - began)
    tokens = len(prompts) * args.output_len
    return {
        "tok_s": tokens / seconds,
        "ttft_ms": statistics.median(waits) * 1e3,
        "engine_us": engine_s / tokens * 1e6,
    }


def http_turn(args: argparse.Namespace, prompts: list[Any], cores: Cores) -> dict[str, float]:
    """The same over HTTP, with streaming. Processor time is that of the engine's thread, the event loop, the client."""
    options = [f"model.path={args.model}", f"layout={args.layout}", f"dtype={args.dtype}", "prefix_cache=false"]
    options.append(f"ranks={args.ranks}")
    if args.hardware is not None:
        options.append(f"+hardware={args.hardware}")
    move(os.getpid(), cores.ranks)  # which the server and its ranks inherit
    with splash_server(options, args.timeout) as server:
        move(server.pid, cores.engine)
        move(os.getpid(), cores.client)
        endpoint = Endpoint(server.url, served_model(server.url))
        run(endpoint, [Call(prompt, 8) for prompt in prompts], len(prompts))
        before = *processor_s(server.pid), sum(processor_s(os.getpid()))
        timings = run(endpoint, [Call(prompt, args.output_len) for prompt in prompts], len(prompts))
        after = *processor_s(server.pid), sum(processor_s(os.getpid()))
        firsts = run(endpoint, [Call(prompt, 1) for prompt in prompts[: args.firsts]], 1)
    tokens = len(prompts) * args.output_len
    http_us, engine_us, client_us = [(end - start) / tokens * 1e6 for start, end in zip(before, after, strict=True)]
    return {
        "tok_s": summarise(timings)["output_throughput"],
        "ttft_ms": statistics.median(timing.ttft for timing in firsts) * 1e3,
        "engine_us": engine_us,
        "http_us": http_us,
        "client_us": client_us,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """`args.repeats` rounds of both, the first one of a round taking turns."""
    prompts = make_prompts("tokens", args.streams, args.input_len, args.vocab_size, seed=0)
    cores = share_cores(args.ranks, args.threads, args.apart)
    contest = {"offline": offline_turn, "http": http_turn}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contest}
    others_busy = []
    for number in range(args.repeats):
        names = list(contest) if number % 2 == 0 else list(reversed(contest))
        for name in names:
            others_busy.append(busy_cores())
            turns[name].append(contest[name](args, prompts, cores))
    move(os.getpid(), cores.ranks | cores.engine | cores.client)

    def middle(name: str, key: str, digits: int = 1) -> float:
        return round(statistics.median(turn[key] for turn in turns[name]), digits)

    rounds = list(zip(turns["offline"], turns["http"], strict=True))
    loss = statistics.median(1 - http["tok_s"] / offline["tok_s"] for offline, http in rounds)
    added_ms = statistics.median(http["ttft_ms"] - offline["ttft_ms"] for offline, http in rounds)
    return {
        "streams": args.streams,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "layout": args.layout,
        "ranks": args.ranks,
        "apart": args.apart,
        "cores": {who: len(getattr(cores, who)) for who in ("ranks", "engine", "client")},
        "rounds": args.repeats,
        "offline_tok_s": middle("offline", "tok_s"),
        "http_tok_s": middle("http", "tok_s"),
        "throughput_loss": round(loss, 4),
        "offline_ttft_ms": middle("offline", "ttft_ms", 3),
        "http_ttft_ms": middle("http", "ttft_ms", 3),
        "added_ttft_ms": round(added_ms, 3),
        "processor_us_a_token": {
            "offline": {"engine": middle("offline", "engine_us")},
            "http": {who: middle("http", f"{who}_us") for who in ("engine", "http", "client")},
        },
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
    offline, http = result["processor_us_a_token"]["offline"], result["processor_us_a_token"]["http"]
    print(
        f"processor time a token, us: engine {offline['engine']:.1f} offline and {http['engine']:.1f} in the server, "
        f"HTTP {http['http']:.1f}, client {http['client']:.1f}"
    )
    added = http["engine"] - offline["engine"] + http["http"] + http["client"]
    where = "on cores of its own" if result["apart"] else "on the same cores"
    print(f"the client, {where}, took {http['client'] / added:.0%} of the processor time that HTTP added")
    if result["disturbed"]:
        print(f"worth little: other processes took up to {max(result['others_busy_cores']):.2f} cores")


def main() -> None:
    """Parse the command line, compare, print a table and one JSON line."""
    parser = argparse.ArgumentParser(prog="perf.http_cost", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="builtin:scribe")
    add("--layout", default="dp")
    add("--ranks", type=int, default=2)
    add("--apart", action="store_true", help="ranks, engine and client each on cores of their own")
    add("--threads", type=int, default=1, help="cores a rank with --apart; otherwise it takes its share of all")
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
