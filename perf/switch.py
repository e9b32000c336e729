"""What a switch adds to the step that commits it: every direction, each way, in one run.

    python -m perf.switch --ranks 2 --batch 16 --context 512 --out perf/results/cpu-switch.json

The overhead of a switch is the time of the committing step less that of a matched step in the *destination* layout: for
decode the median of the steps just after the commit, for prefill the median of steps that compute the same chunk again.
A step's time is from sending it to the ranks until rank 0's answer is here. The time between one answer and the next,
which is what a client waits for a token and has planning in it, is kept as well.

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
import random
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perf.common import busy_cores, machine, spread, versions
from splash.core.diff import diff
from splash.core.layout import LAYOUTS
from splash.core.ownership import State
from splash.core.request import SamplingParams
from splash.engine.config import DTYPES, EngineConfig
from splash.engine.engine import Engine
from splash.engine.loop import Executor
from splash.engine.messages import Result, Run
from splash.engine.outputs import GenerationRequest
from splash.switch.orders import SwitchRecord

if TYPE_CHECKING:
    from rich.table import Table

WAYS = ("blocking", "layerwise", "precopy")
PREFILL_WAYS = WAYS[:2]
MARGIN = 64  # tokens that requests may grow on after they should have begun anew and are still compared
READY_STEPS = 4  # steps after a commit whose median is the time of a step in the destination
MATCHED_CHUNKS = 2  # the same for prefill
HOME = "dp"  # where requests are prefilled between walks: any layout would do, this one is quick at it
BUSY = 0.2  # cores that other processes may use before the figures are worth nothing
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PROBE_BYTES = 32 << 20
WORDS = {"none": "same", "discard": "drop", "all_gather": "gather", "all_to_all": "exchange"}
MIB = 1 << 20

Direction = tuple[str, str]
Cell = tuple[Direction, str]  # and the way


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds: from submission to answer, as `Loop.on_step` has it, and from the answer before. `rows`
    that it computed."""

    seconds: float
    gap: float
    rows: int
    commits: bool
    copies_ahead: bool


class TimedExecutor(Executor):
    """Another executor with a stopwatch."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._done = time.perf_counter()
        self._sent: deque[tuple[float, Run]] = deque()
        self.steps: list[StepTime] = []

    def submit(self, run: Run) -> None:
        self._sent.append((time.perf_counter(), run))
        self._inner.submit(run)

    def collect(self) -> Result:
        result = self._inner.collect()
        now = time.perf_counter()
        sent, run = self._sent.popleft()
        rows = sum(len(query.tokens) for query in run.plan.queries)
        self.steps.append(
            StepTime(now - max(sent, self._done), now - self._done, rows, run.switch is not None, run.ahead is not None)
        )
        self._done = now
        return result

    def check(self) -> None:
        self._inner.check()

    def restart(self, layout: str) -> None:
        self._inner.restart(layout)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Sample:
    """One switch. Seconds; `slowdown` is how much longer tokens took while copying ahead, as a share, None without."""

    added: float
    added_gap: float
    ready: float
    slowdown: float | None
    record: SwitchRecord


Samples = defaultdict[Cell, list[Sample]]


class Walk:
    """An engine under a constant load of decoding requests, taken from layout to layout.

    Requests start anew whenever they have grown by `growth` tokens, half below and half above the context asked for.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._growth = growth = max(128, args.context // 2)
        draw = random.Random(0)
        prompt_len = max(1, args.context - growth // 2)
        lengths = [prompt_len] * args.batch + [args.prefill_chunk]
        *self._prompts, self._chunk = (tuple(draw.choices(range(16, args.vocab_size), k=num)) for num in lengths)
        # Requests never end by themselves: one more switch may begin when they have grown, and copy ahead for long.
        self._params = SamplingParams(max_tokens=3 * growth, temperature=0.0, ignore_eos=True)
        longest = max(prompt_len + 3 * growth, args.prefill_chunk + 1)
        options = {"model": args.model, "ranks": args.ranks, "dtype": args.dtype, "layout": HOME, "hardware": "cpu"}
        options |= {"max_model_len": longest, "kv_cache_gib": args.kv_cache_gib, "prefix_cache": False}
        options |= dict(args.option)
        self.engine = Engine(EngineConfig(**options), lambda line: print(line, file=sys.stderr))
        self._clock = self.engine.loop.executor = TimedExecutor(self.engine.loop.executor)
        self._tokens: dict[str, list[int]] = defaultdict(list)
        self._load: list[str] = []
        self._num_requests = 0
        self._settled: list[StepTime] = []
        self.others_busy: list[float] = []
        self.num_tokens, self.num_wrong = 0, 0
        self._restart()
        while len(self._tokens[self._load[0]]) < growth + MARGIN:
            self._step()
        self._expected = [self._tokens[id] for id in self._load]
        self._expected_of_chunk = self._compute_chunk()
        self._restart()

    def _step(self) -> None:
        for output in self.engine.step():
            self._tokens[output.id].extend(output.tokens)

    def _add(self, prompt: tuple[int, ...], params: SamplingParams) -> str:
        self._num_requests += 1
        id = str(self._num_requests)
        self.engine.add_request(GenerationRequest(id, prompt, params))
        return id

    def _restart(self) -> None:
        """Drop the requests, see what else keeps the machine busy, and prefill the requests again."""
        for id in self._load:
            self.engine.abort(id)
        while self.engine.has_work:
            self._step()
        if self.engine.layout != HOME:
            self._commit(self.engine.switch(HOME, "blocking"))
        self.others_busy.append(busy_cores(0.3))
        self._tokens.clear()
        self._load = [self._add(prompt, self._params) for prompt in self._prompts]
        while not all(self._tokens[id] for id in self._load):
            self._step()
        self._settle()

    def check_tokens(self) -> None:
        """Count the tokens that differ from those of the run without switches."""
        for id, expected in zip(self._load, self._expected, strict=True):
            common = min(len(self._tokens[id]), len(expected))
            self.num_tokens += common
            self.num_wrong += sum(a != b for a, b in zip(self._tokens[id][:common], expected, strict=False))

    def _settle(self) -> None:
        first = len(self._clock.steps)
        while len(self._clock.steps) < first + READY_STEPS:
            self._step()
        self._settled = self._clock.steps[first:]

    def _commit(self, record: SwitchRecord) -> StepTime:
        """Run until the switch has ended; its committing step."""
        while self.engine.switcher.active is not None:
            self._step()
        if record.status != "committed":
            raise SystemExit(f"{record.source} -> {record.target}, {record.asked}: {record.status}: {record.reason}")
        return self._clock.steps[-1]

    def go(self, layout: str) -> None:
        """Be in `layout`, with requests that have not grown too much, and steady."""
        if len(self._tokens[self._load[0]]) >= self._growth:
            self.check_tokens()
            self._restart()
        if self.engine.layout != layout:
            self._commit(self.engine.switch(layout, "blocking"))
            self._settle()

    def decode(self, target: str, way: str) -> Sample:
        """Switch while every step decodes one token of each request."""
        ordinary = statistics.median(step.gap for step in self._settled)
        first = len(self._clock.steps)
        record = self.engine.switch(target, way)
        commit = self._commit(record)
        steps = self._clock.steps[first:]
        assert commit.commits and not any(step.commits for step in steps[:-1])
        # The ranks copy after they have answered, so it is the step behind that waits.
        copying = [step.gap for before, step in itertools.pairwise(steps[:-1]) if before.copies_ahead]
        self._settle()
        slowdown = statistics.fmean(copying) / ordinary - 1 if copying else None
        return _sample(commit, self._settled, slowdown, record)

    def prefill(self, target: str, way: str) -> Sample:
        """Switch with a step that computes a whole prompt beside the decodes, then compute that prompt again."""
        id = self._add(self._chunk, ONE_TOKEN)
        record = self.engine.switch(target, way)
        commit = self._commit(record)
        first = len(self._clock.steps)
        outputs = [self._tokens[id], *(self._compute_chunk() for _ in range(MATCHED_CHUNKS))]
        self.num_tokens += len(outputs)
        self.num_wrong += sum(tokens != self._expected_of_chunk for tokens in outputs)
        matched = [step for step in self._clock.steps[first:] if step.rows == commit.rows]
        if commit.rows != len(self._load) + len(self._chunk) or len(matched) != MATCHED_CHUNKS:
            raise SystemExit(f"prefill: the committing step has {commit.rows} rows; nothing may cut or cache the chunk")
        self._settle()
        return _sample(commit, matched, None, record)

    def _compute_chunk(self) -> list[int]:
        id = self._add(self._chunk, ONE_TOKEN)
        while not self._tokens[id]:
            self._step()
        return self._tokens[id]


def _sample(commit: StepTime, matched: Sequence[StepTime], slowdown: float | None, record: SwitchRecord) -> Sample:
    ready = statistics.median(step.seconds for step in matched)
    ready_gap = statistics.median(step.gap for step in matched)
    return Sample(commit.seconds - ready, commit.gap - ready_gap, ready, slowdown, record)


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
            into[direction, way].append(way_of(direction[1], way))

    try:
        take(0, WAYS[:1], defaultdict(list), walk.decode)  # memory that is written for the first time costs page faults
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
        "model": Path(args.model).name,
        **{key: getattr(args, key) for key in ("dtype", "ranks", "batch", "context", "prefill_chunk")},
        "options": dict(args.option),
        "rounds": rounds,
        "copy_gb_s_a_rank": round(rate / 1e9, 2),
        "others_busy_cores": {"p50": statistics.median(walk.others_busy), "max": max(walk.others_busy)},
        "tokens_compared": walk.num_tokens,
        "tokens_wrong": walk.num_wrong,
    }
    return run, [summarise(direction, decode, prefill, rate, args.ranks) for direction in args.directions]


def summarise(direction: Direction, decode: Samples, prefill: Samples, rate: float, ranks: int) -> dict[str, Any]:
    """A direction's row. Times in milliseconds."""
    pages = np.arange(ranks * ranks)  # of requests of which every rank owns one
    before, after = (State(LAYOUTS[name], ranks, pages // ranks, pages % ranks) for name in direction)
    moved = diff(before, after)
    records = [sample.record for sample in decode[direction, "blocking"]]
    kv_bytes, weight_bytes = (
        [round(statistics.median(values)) for values in zip(*received, strict=True)]
        for received in zip(*((r.kv_bytes_received, r.weight_bytes_received) for r in records), strict=True)
    )
    most = max(a + b for a, b in zip(kv_bytes, weight_bytes, strict=True))
    return {
        "direction": "->".join(direction),
        "kv": moved.pages.primitive.value,
        "weights": moved.weights.primitive.value,
        "kv_bytes_received": kv_bytes,
        "weight_bytes_received": weight_bytes,
        "ceiling_ms": _ms(most / rate),
        "decode": _compare({way: decode[direction, way] for way in WAYS}, most > 0),
        "prefill": _compare(
            {way: prefill[direction, way] for way in PREFILL_WAYS if prefill[direction, way]}, most > 0
        ),
    }


def _compare(samples: dict[str, list[Sample]], moves: bool) -> dict[str, Any]:
    """Each way beside blocking. Where nothing `moves` there is nothing to be better at."""
    if not samples:
        return {}
    ready = statistics.median(sample.ready for of_way in samples.values() for sample in of_way)
    blocking = statistics.median(sample.added for sample in samples["blocking"])
    result: dict[str, Any] = {"ready_ms": _ms(ready)}
    for way, of_way in samples.items():
        added = statistics.median(sample.added for sample in of_way)
        records = [sample.record for sample in of_way]
        received = [sum(record.kv_bytes_received) + sum(record.weight_bytes_received) for record in records]
        slowdowns = [sample.slowdown for sample in of_way if sample.slowdown is not None]
        result[way] = {
            "samples": len(of_way),
            "methods": dict(Counter(record.method for record in records)),
            "added_ms": spread([sample.added for sample in of_way], digits=3),
            "added_between_tokens_ms": spread([sample.added_gap for sample in of_way], digits=3),
            "below_blocking": round(1 - added / blocking, 3) if moves and blocking > 0 else None,
            "of_step": round(added / ready, 3),
            "record_added_ms": round(statistics.median(record.added_ms for record in records), 3),
            "planning_ms": round(statistics.median(record.planning_ms for record in records), 3),
            "bytes_received": round(statistics.median(received)),
            "background_steps": round(statistics.fmean(record.background_steps for record in records), 1),
            "copying_slowdown": round(statistics.fmean(slowdowns), 3) if slowdowns else None,
        }
    return result


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def print_tables(run: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Decode, then prefill where it was measured."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if run["others_busy_cores"]["p50"] > BUSY:
        console.print(f"NOT TO BE RELIED ON: other processes kept {run['others_busy_cores']['p50']:.1f} cores busy")
    if run["tokens_wrong"] and run["dtype"] == "float32":  # narrower types round otherwise in another layout
        console.print("WRONG OUTPUT: tokens differ from those without switches")
    console.print(
        f"{run['model']}, {run['dtype']}, {run['ranks']} ranks, {run['batch']} requests of about {run['context']} "
        f"tokens, {run['rounds']} rounds; {run['tokens_wrong']} of {run['tokens_compared']} tokens differ from an "
        f"unswitched run; a rank copies {run['copy_gb_s_a_rank']:.1f} GB/s out of another process while all do, and "
        "the ceiling is the time for what the busiest rank receives (MiB)"
    )
    work = {"decode": "decode", "prefill": f"prefill of {run['prefill_chunk']} tokens beside the decodes"}
    for part in (part for part in work if rows[0][part]):
        console.print(_table(f"{work[part]}: ms added to the committing step", part, rows))
        moving = [row[part] for row in rows if row["ceiling_ms"]]
        for way in (way for way in WAYS if moving and way in moving[0]):
            mean, blocking = (statistics.fmean(row[w]["added_ms"]["p50"] for row in moving) for w in (way, WAYS[0]))
            below = f", {1 - mean / blocking:.0%} below blocking" if way != WAYS[0] else ""
            console.print(f" {way} adds {mean:.2f} ms on average of {len(moving)} directions that move anything{below}")


def _table(title: str, part: str, rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1))
    headings = ["\ndirection", "\nKV", "\nweights", "\nceiling", "ready\nstep", "blocking\np50", "\np95"]
    headings += ["layer-wise\np50", "\np95", "below\nblocking"]
    if part == "decode":
        headings += ["pre-copy\np50", "\np95", "below\nblocking", "of\nstep", "steps\nahead", "slower\nby"]
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 3 else "right", no_wrap=True)
    for row in rows:
        line = [row["direction"]]
        for name, received in (("kv", row["kv_bytes_received"]), ("weights", row["weight_bytes_received"])):
            line.append(WORDS[row[name]] + (f" {max(received) / MIB:.1f}" if any(received) else ""))
        figures = row[part]
        line += [f"{row['ceiling_ms']:.2f}", f"{figures['ready_ms']:.2f}", *_added(figures["blocking"])]
        line += [*_added(figures["layerwise"]), _percent(figures["layerwise"]["below_blocking"])]
        if part == "decode":
            precopy = figures["precopy"]
            line += [*_added(precopy), _percent(precopy["below_blocking"]), _percent(precopy["of_step"])]
            ahead = f"{precopy['background_steps']:.1f}" if "precopy" in precopy["methods"] else "none"
            line += [ahead, _percent(precopy["copying_slowdown"])]
        table.add_row(*line)
    return table


def _added(way: dict[str, Any]) -> tuple[str, str]:
    return f"{way['added_ms']['p50']:.2f}", f"{way['added_ms']['p95']:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _directions(text: str) -> list[Direction]:
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
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--ranks", type=int, default=2, help="at least 2")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode")
    parser.add_argument("--context", type=int, default=512, help="tokens of each, on average")
    parser.add_argument("--repeats", type=int, default=15, help="most rounds, each with a switch a direction and way")
    parser.add_argument("--limit-s", type=float, default=280.0, help="begin no round that would end after this time")
    parser.add_argument("--directions", type=_directions, default=list(itertools.permutations(LAYOUTS, 2)))
    parser.add_argument("--prefill-chunk", type=int, default=512, help="tokens that a prefill step computes")
    parser.add_argument("--prefill-every", type=int, default=3, help="rounds between those with prefill; 0: none")
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
