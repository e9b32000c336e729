"""What a switch adds to the step that commits it: every direction, each way, in one run.

    python -m perf.switch --ranks 2 --batch 16 --context 512 --out perf/results/cpu-switch.json

The overhead of a switch is the time of the committing step, the two before it and the one after it, less that of as
many matched steps in the *destination* layout: for decode of steps just after the commit, for prefill of steps around
one that computes the same chunk again. A step's time is that between one answer and the next, which is what a client
waits for a token, with all planning in it. What is added to the committing step alone is kept as well.

With --shapes and --filled weights and cache are random, and contexts may be as long as memory allows:

    python -m perf.switch --shapes deepseek_v3,8,64 --filled --dtype bfloat16 --batch 16 --context 262144 \
        --prefill-chunk 8192 --kv-cache-gib 48 --option hardware='"cuda"' --option switch_copy_mib=256

Every round walks all directions, A to B and back in each way, so that a slow minute of the machine strikes all of them;
rounds begin at another direction and way each time. The ceiling is the time in which every rank copies what it has to
receive out of another process's memory, all at once, at the rate measured here: nothing that moves everything between
two steps is faster. What is copied ahead of the commit, or behind compute, can be. Figures of wrong output are worth
nothing: every token is compared with those of a run that never switches.

Prints a table, then a JSON line for the run and one for each direction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perf.common import machine, versions
from perf.switch_rows import PREFILL_WAYS, WAYS, print_tables, summarise
from perf.switch_walk import Cell, Direction, Sample, Samples, Walk
from splash.core.layout import LAYOUTS
from splash.engine.config import DTYPES

PROBE_BYTES = 32 << 20


def copy_rate(ranks: int) -> float:
    """Bytes a second that each rank copies out of another process's memory while all of them do: the best of many."""
    context = multiprocessing.get_context("fork")
    # Shared without a file, like arenas. Each copies the first half of another's to the second half of its own.
    memory = np.frombuffer(mmap.mmap(-1, ranks * 2 * PROBE_BYTES), np.uint8).reshape(ranks, 2, PROBE_BYTES)
    barrier, seconds = context.Barrier(ranks, timeout=60.0), context.Array("d", ranks, lock=False)

    def copy_often(rank: int) -> None:
        memory[rank] = 1
        best = float("inf")
        for _ in range(100):  # about a second: a ceiling needs the best of many
            barrier.wait()
            start = time.perf_counter()
            np.copyto(memory[rank, 1], memory[rank - 1, 0])
            best = min(best, time.perf_counter() - start)
        seconds[rank] = best

    processes = [context.Process(target=copy_often, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process that measures the copy rate failed")
    return PROBE_BYTES / max(seconds)


def cells(directions: Sequence[Direction], ways: Sequence[str], turn: int) -> Iterable[Cell]:
    """Every direction in every way, each with its way back behind it. `turn` says where to begin."""
    pairs = list(dict.fromkeys(tuple(sorted(direction)) for direction in directions))
    for near, far in _rotated(pairs, turn):
        for way in _rotated(ways, turn):
            for direction in ((near, far), (far, near)):
                if direction in directions:
                    yield direction, way


def _rotated(items: Sequence[Any], turn: int) -> list[Any]:
    return [*items[turn % len(items) :], *items[: turn % len(items)]]


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole run: what is true of all of it, and a row for each direction."""
    rate = copy_rate(args.ranks) if args.peer_gb_s is None else args.peer_gb_s * 1e9
    walk = Walk(args)
    decode: Samples = defaultdict(list)
    prefill: Samples = defaultdict(list)

    def take(turn: int, ways: Sequence[str], into: Samples, way_of: Callable[[str, str], Sample]) -> None:
        for direction, way in cells(args.directions, ways, turn):
            walk.go(direction[0])
            sample = way_of(direction[1], way)
            into[direction, way].append(sample)
            print(f"{'->'.join(direction)}, {way}: {sample}", file=sys.stderr, flush=True)

    try:
        if args.warm_up:  # memory that is written for the first time costs page faults
            take(0, WAYS[:1], defaultdict(list), walk.decode)
        rounds, started = 0, time.monotonic()
        # A further round begins only if there is time for it to end.
        while rounds < args.repeats and (time.monotonic() - started) * (rounds + 1) <= args.limit_s * max(rounds, 1):
            take(rounds, WAYS, decode, walk.decode)
            if args.prefill_every and rounds % args.prefill_every == 0:
                take(rounds, PREFILL_WAYS, prefill, walk.prefill)
            rounds += 1
            print(f"round {rounds}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        walk.check_tokens()
    finally:
        walk.engine.close()
    run = {
        "benchmark": "switch",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "model": args.shapes or Path(args.model).name,
        "filled": args.filled,
        **{key: getattr(args, key) for key in ("dtype", "ranks", "batch", "context", "prefill_chunk")},
        "options": dict(args.option),
        "rounds": rounds,
        "copy_gb_s_a_rank": round(rate / 1e9, 2),
        "others_busy_cores": {"p50": statistics.median(walk.others_busy), "max": max(walk.others_busy)},
        "tokens_compared": walk.num_tokens,
        "tokens_wrong": walk.num_wrong,
    }
    return run, [summarise(direction, decode, prefill, rate, args.ranks) for direction in args.directions]


def directions_of(text: str) -> list[Direction]:
    """The directions of A:B,C:D and so on."""
    directions = [tuple(name.split(":")) for name in text.split(",")]
    for direction in directions:
        if len(direction) != 2 or direction[0] == direction[1] or not set(direction) <= set(LAYOUTS):
            raise argparse.ArgumentTypeError(f"{':'.join(direction)} is not two of {', '.join(LAYOUTS)}, as in tp:dp")
    return directions  # type: ignore[return-value]


def _option(text: str) -> tuple[str, Any]:
    return text.partition("=")[0], json.loads(text.partition("=")[2])


def main() -> None:
    """Parse the command line, measure, print the tables and the JSON lines."""
    parser = argparse.ArgumentParser(prog="perf.switch", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="builtin:scribe", help="a checkpoint's directory, or builtin:NAME")
    parser.add_argument("--shapes", help="NAME,LAYERS,EXPERTS of conf/model, with random weights, in place of --model")
    parser.add_argument(
        "--filled", action="store_true", help="fill the cache with random keys; contexts are not computed, nor compared"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--ranks", type=int, default=2, help="at least 2")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode")
    parser.add_argument("--context", type=int, default=512, help="tokens of each, on average")
    parser.add_argument("--repeats", type=int, default=15, help="most rounds, each with a switch a direction and way")
    parser.add_argument("--limit-s", type=float, default=280.0, help="begin no round that would end after this time")
    parser.add_argument("--directions", type=directions_of, default=list(itertools.permutations(LAYOUTS, 2)))
    parser.add_argument("--prefill-chunk", type=int, default=512, help="tokens that a prefill step computes")
    parser.add_argument("--prefill-every", type=int, default=3, help="rounds between those with prefill; 0: none")
    parser.add_argument(
        "--no-warm-up", dest="warm_up", action="store_false", help="leave out the walk before the first"
    )
    parser.add_argument("--kv-cache-gib", type=float, default=0.5, help="of arenas a rank; little room means staging")
    parser.add_argument("--vocab-size", type=int, default=256, help="token ids are drawn below this")
    parser.add_argument("--peer-gb-s", type=float, help="of reading a peer's GPU, as perf.primitives measures it")
    parser.add_argument("--option", type=_option, action="append", default=[], help="of the engine, as key=JSON")
    parser.add_argument("--out", type=Path, help="write run and directions there as one JSON record")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks: must be at least 2, not {args.ranks}: one rank has nobody to switch with")
    run, rows = measure(args)
    print_tables(run, rows)
    print(*map(json.dumps, (run, *rows)), sep="\n")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**run, "directions": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
