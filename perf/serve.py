"""Drive any OpenAI-compatible endpoint and report throughput and latency.

    python -m perf.serve --url http://127.0.0.1:8000 --concurrency 16 --num-prompts 64 --input-len 128 --output-len 128

A closed loop: `concurrency` requests are in flight until all prompts are done. Prompts are random, each different, so
that no prefix cache helps; end-of-sequence is ignored, so that every request generates `output-len` tokens.

TTFT is from sending a request to its first streamed event; ITL is between one event and the next (an event may carry
more than one token); TPOT is (last - first) / (tokens - 1); E2E is from sending to the last event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from perf.common import report, spread

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
class Timing:
    """One request: seconds on the monotonic clock, tokens as the server counted them, and the text."""

    sent: float
    events: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    text: str

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


async def _request(client: httpx.AsyncClient, load: Load, prompt: Prompt) -> Timing:
    """Stream one completion. Events are stamped as their bytes arrive and parsed once the stream has ended."""
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_len,
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
            raise SystemExit(f"{load.url} answered {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for chunk in response.aiter_raw():
            now = time.perf_counter()
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    received.append(line[len(b"data: ") :])
                    stamps.append(now)
    return _timing(load, prompt, sent, stamps, [json.loads(line) for line in received])


def _timing(load: Load, prompt: Prompt, sent: float, stamps: list[float], events: list[dict[str, Any]]) -> Timing:
    usage: dict[str, int] = {}
    times: list[float] = []
    text: list[str] = []
    for stamp, event in zip(stamps, events, strict=True):
        if "error" in event:
            raise SystemExit(f"{load.url} failed while streaming: {event['error']}")
        usage = event.get("usage") or usage
        if event.get("choices"):
            times.append(stamp)
            text.append(event["choices"][0].get("text") or "")
    if not times:
        raise SystemExit(f"{load.url} streamed no event with choices")
    output_tokens = usage.get("completion_tokens", load.output_len)
    if output_tokens != load.output_len:
        raise SystemExit(f"{load.url} generated {output_tokens} tokens, {load.output_len} were asked for")
    return Timing(sent, tuple(times), usage.get("prompt_tokens", len(prompt)), output_tokens, "".join(text))


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
                results[index] = await _request(client, load, prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(load.prompts))):
                group.create_task(worker())
    return [results[index] for index in range(len(load.prompts))]


def run(load: Load) -> list[Timing]:
    """`drive` to its end, with the first error of a request raised by itself rather than in a group."""
    try:
        return asyncio.run(drive(load))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def served_model(url: str) -> str:
    """The first model that the endpoint lists."""
    response = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False)
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


def summarise(timings: Sequence[Timing]) -> dict[str, Any]:
    """Throughput over the whole run in tokens a second, latencies in milliseconds."""
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
    }


def main() -> None:
    """Parse the command line, warm up, drive, print a table and one JSON line."""
    parser = argparse.ArgumentParser(prog="perf.serve", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the endpoint listens, without /v1")
    parser.add_argument("--model", help="model name to ask for; the first that the endpoint lists by default")
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

    url = args.url.rstrip("/").removesuffix("/v1")
    model = args.model or served_model(url)
    prompts = make_prompts(args.prompts, args.num_prompts + args.warmup, args.input_len, args.vocab_size, args.seed)
    warm, counted = prompts[: args.warmup], prompts[args.warmup :]
    if warm:
        run(Load(url, model, warm, args.output_len, args.concurrency))
    summary = summarise(run(Load(url, model, counted, args.output_len, args.concurrency)))

    print(f"{summary['requests']} requests of {args.input_len} + {args.output_len}, {args.concurrency} at a time")
    print(f"output {summary['output_tok_s']:.1f} tok/s   total {summary['total_tok_s']:.1f} tok/s")
    print(f"{'ms':>6} {'p50':>10} {'p95':>10} {'p99':>10} {'mean':>10}")
    for name in ("ttft", "itl", "tpot", "e2e"):
        row = summary[f"{name}_ms"]
        print(f"{name:>6} " + " ".join(f"{row.get(key, float('nan')):>10.2f}" for key in ("p50", "p95", "p99", "mean")))
    settings = {"concurrency": args.concurrency, "input_len": args.input_len, "output_len": args.output_len}
    report("serve", {"url": url, "model": model, **settings, **summary}, args.out)


if __name__ == "__main__":
    main()
