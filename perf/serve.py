"""Drive any OpenAI-compatible endpoint and report throughput and latency.

    python -m perf.serve --url http://127.0.0.1:8000 --concurrency 16 --num-prompts 64 --input-len 128 --output-len 128

    python -m perf.serve --workload agentic --set num_sessions=20 --set rate=2

By default a closed loop: `concurrency` requests are in flight until all prompts are done. Prompts are random, each
different, so that no prefix cache helps; end-of-sequence is ignored, so that each generates as many tokens as asked.

With `--workload` the requests are those of a workload (docs/workloads.md): a name under conf/workload, a YAML file of
the same form, or a trace (.jsonl). They are sent when they fall due, whether or not earlier ones are done, except where
the workload says that one waits for another or bounds how many are in flight. `late` is from falling due to being sent,
waiting for a place included; everything else counts from being sent.

TTFT is from sending a request to its first streamed event; ITL is between one event and the next (an event may carry
more than one token); TPOT is (last - first) / (tokens - 1); E2E is from sending to the last event.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from perf.common import report, spread
from splash.core.errors import ConfigError
from splash.workload import Feed, Requests, Workload, from_mapping, load
from splash.workload import summarise as summarise_workload

WORDS = "page rank step row head group layout token batch cache owner shard gather reduce merge slot".split()
FIRST_TOKEN_ID = 16  # below are often special tokens

Prompt = str | list[int]


@dataclass(frozen=True)
class Load:
    """What to send: every prompt once, `concurrency` at a time."""

    url: str
    model: str
    prompts: Sequence[Prompt]
    output_len: int
    concurrency: int
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Replay:
    """A workload to send as it falls due, with token ids below `vocab_size`."""

    url: str
    model: str
    requests: Requests
    vocab_size: int
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Timing:
    """One request: seconds on the monotonic clock, tokens as the server counted them, and the text.

    `due` is when the request should have been sent: when it was, in a closed loop.
    """

    sent: float
    events: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    text: str
    due: float

    @property
    def late(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.events[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float:
        return (self.events[-1] - self.events[0]) / max(1, self.output_tokens - 1)


def make_prompts(kind: str, count: int, length: int, vocab_size: int, seed: int) -> list[Prompt]:
    """`count` different random prompts of `length` token ids ("tokens") or words ("text")."""
    draw = random.Random(seed)
    if kind == "text":
        return [" ".join(draw.choices(WORDS, k=length)) for _ in range(count)]
    return [[draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(length)] for _ in range(count)]


async def _request(
    client: httpx.AsyncClient, target: Load | Replay, prompt: Prompt, output_len: int, due: float | None = None
) -> Timing:
    """Stream one completion. Events are stamped as their bytes arrive and parsed once the stream has ended."""
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stamps: list[float] = []
    received: list[bytes] = []
    pending = b""
    sent = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode()[:500]
            raise SystemExit(f"{target.url} answered {response.status_code}: {said}")
        async for chunk in response.aiter_raw():
            now = time.perf_counter()
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    received.append(line[len(b"data: ") :])
                    stamps.append(now)
    times, text, usage = _read_events(target.url, stamps, [json.loads(line) for line in received])
    output_tokens = usage.get("completion_tokens", output_len)
    if output_tokens != output_len:
        raise SystemExit(f"{target.url} generated {output_tokens} tokens, {output_len} were asked for")
    prompt_tokens = usage.get("prompt_tokens", len(prompt))
    return Timing(sent, times, prompt_tokens, output_tokens, text, sent if due is None else due)


def _read_events(
    url: str, stamps: list[float], events: list[dict[str, Any]]
) -> tuple[tuple[float, ...], str, dict[str, int]]:
    """When events with choices came, their text, and the usage."""
    usage: dict[str, int] = {}
    times: list[float] = []
    text: list[str] = []
    for stamp, event in zip(stamps, events, strict=True):
        if "error" in event:
            raise SystemExit(f"{url} failed while streaming: {event['error']}")
        usage = event.get("usage") or usage
        if event.get("choices"):
            times.append(stamp)
            text.append(event["choices"][0].get("text") or "")
    if not times:
        raise SystemExit(f"{url} streamed no event with choices")
    return tuple(times), "".join(text), usage


async def drive(load: Load) -> list[Timing]:
    """Send every prompt of `load`; timings in the order of the prompts.

    Raises:
        SystemExit: the endpoint answered with an error or generated another number of tokens than asked.
    """
    results: dict[int, Timing] = {}
    waiting = iter(enumerate(load.prompts))
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=load.url, limits=limits, timeout=load.timeout_s, trust_env=False) as client:

        async def worker() -> None:
            for index, prompt in waiting:
                results[index] = await _request(client, load, prompt, load.output_len)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(load.prompts))):
                group.create_task(worker())
    return [results[index] for index in range(len(load.prompts))]


async def replay(target: Replay) -> list[Timing]:
    """Send the requests of a workload as they fall due; timings in their order.

    Raises:
        SystemExit: as `drive`.
    """
    results: dict[int, Timing] = {}
    feed = Feed(target.requests)
    finished = asyncio.Event()
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    start = time.perf_counter()
    async with httpx.AsyncClient(
        base_url=target.url, limits=unbounded, timeout=target.timeout_s, trust_env=False
    ) as client:

        async def send(index: int, due_s: float) -> None:
            prompt = target.requests.tokens(index, target.vocab_size).tolist()
            output_len = int(target.requests.output_len[index])
            results[index] = await _request(client, target, prompt, output_len, start + due_s)
            feed.finish(index, time.perf_counter() - start)
            finished.set()

        async with asyncio.TaskGroup() as group:
            while not feed.exhausted:
                finished.clear()
                for index, due_s in feed.take(time.perf_counter() - start):
                    group.create_task(send(index, due_s))
                pause = feed.next_time() - (time.perf_counter() - start)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(finished.wait(), None if math.isinf(pause) else max(0.0, pause))
    return [results[index] for index in range(len(target.requests))]


def run(target: Load | Replay) -> list[Timing]:
    """`drive` or `replay` to its end, with the first error of a request raised by itself rather than in a group."""
    try:
        return asyncio.run(drive(target) if isinstance(target, Load) else replay(target))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def named_workload(name: str, changes: Sequence[str]) -> Workload:
    """The workload called `name` or kept in the file `name`, with "key=value" changes.

    Raises:
        ConfigError: there is no such workload, or a change is not understood.
    """
    path = Path(name)
    if path.suffix == ".jsonl":
        return load("trace", [f"workload.path={json.dumps(name)}", *(f"workload.{change}" for change in changes)])
    if path.suffix not in (".yaml", ".yml"):
        return load(name, [f"workload.{change}" for change in changes])
    from omegaconf import OmegaConf

    if not path.is_file():
        raise ConfigError("workload", f"there is no file {name!r}")
    merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(changes)))
    mapping = OmegaConf.to_container(merged)
    if not isinstance(mapping, dict):
        raise ConfigError("workload", f"{name!r} must hold a mapping")
    return from_mapping({str(key): value for key, value in mapping.items()})


def served_model(url: str) -> str:
    """The first model that the endpoint lists."""
    response = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False)
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


def summarise(timings: Sequence[Timing]) -> dict[str, Any]:
    """Throughput over the whole run in tokens a second, latencies in milliseconds."""
    late = [t.late for t in timings]
    wall = max(t.events[-1] for t in timings) - min(t.sent for t in timings)
    output = sum(t.output_tokens for t in timings)
    return {
        "requests": len(timings),
        "wall_s": round(wall, 3),
        "output_tok_s": round(output / wall, 1),
        "total_tok_s": round((output + sum(t.prompt_tokens for t in timings)) / wall, 1),
        "ttft_ms": spread([t.ttft for t in timings]),
        "itl_ms": spread([gap for t in timings for gap in t.gaps]),
        "tpot_ms": spread([t.tpot for t in timings]),
        "e2e_ms": spread([t.e2e for t in timings]),
        **({"late_ms": spread(late)} if any(late) else {}),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Throughput, then one line of percentiles for each latency."""
    print(f"output {summary['output_tok_s']:.1f} tok/s   total {summary['total_tok_s']:.1f} tok/s")
    print(f"{'ms':>6} {'p50':>10} {'p95':>10} {'p99':>10} {'mean':>10}")
    for name in ("ttft", "itl", "tpot", "e2e", "late"):
        if row := summary.get(f"{name}_ms"):
            print(f"{name:>6} " + " ".join(f"{row[key]:>10.2f}" for key in ("p50", "p95", "p99", "mean")))


def main() -> None:
    """Parse the command line, warm up, drive, print a table and one JSON line."""
    parser = argparse.ArgumentParser(prog="perf.serve", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the endpoint listens, without /v1")
    parser.add_argument("--model", help="model name to ask for; the first that the endpoint lists by default")
    parser.add_argument("--workload", metavar="NAME|FILE", help="a workload, .yaml or trace, in place of equal prompts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a workload's option")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="token ids, or words with --prompts text")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prompts", choices=("tokens", "text"), default="tokens")
    parser.add_argument("--vocab-size", type=int, default=256, help="token ids are drawn below this")
    parser.add_argument("--warmup", type=int, default=2, help="requests sent first and not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the JSON record there as well")
    args = parser.parse_args()
    if args.set and args.workload is None:
        parser.error("--set changes a workload: name one with --workload")
    try:
        requests = named_workload(args.workload, args.set).requests() if args.workload else None
    except ConfigError as error:
        parser.error(str(error))

    url = args.url.rstrip("/").removesuffix("/v1")
    model = args.model or served_model(url)
    prompts = make_prompts(args.prompts, args.num_prompts + args.warmup, args.input_len, args.vocab_size, args.seed)
    warm, counted = prompts[: args.warmup], prompts[args.warmup :]
    if warm:
        run(Load(url, model, warm, args.output_len, args.concurrency))
    settings: dict[str, Any]
    if requests is None:
        summary = summarise(run(Load(url, model, counted, args.output_len, args.concurrency)))
        settings = {"concurrency": args.concurrency, "input_len": args.input_len, "output_len": args.output_len}
        print(f"{summary['requests']} requests of {args.input_len} + {args.output_len}, {args.concurrency} at a time")
    else:
        summary = summarise(run(Replay(url, model, requests, args.vocab_size)))
        described = summarise_workload(requests)
        settings = {"workload": {"name": args.workload, "set": args.set, **dataclasses.asdict(described)}}
        print(described.table())
    print_summary(summary)
    report("serve", {"url": url, "model": model, **settings, **summary}, args.out)


if __name__ == "__main__":
    main()
