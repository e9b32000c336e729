"""Drive any OpenAI-compatible endpoint and report throughput and latency, in the fields of `vllm bench serve`.

    python -m perf.serve --num-prompts 64 --max-concurrency 16 --input-len 128 --output-len 128
    python -m perf.serve --workload sharegpt --num-prompts 500 --request-rate 4 --goodput ttft:500 tpot:50
    python -m perf.serve --workload prefix-repetition --prefix-len 512 --num-prefixes 8
    python -m perf.serve --workload agentic --set num_sessions=20 --set rate=2
    python -m perf.serve --workload my_trace.jsonl --set rate_scale=2

`--workload` takes one of those made here (random, sharegpt, prefix-repetition), a name under conf/workload, a YAML file
of the same form, or a trace (docs/workloads.md). Those made here arrive at `--request-rate` as a Poisson process, or
all at once; the others say themselves when what arrives. `--max-concurrency` bounds what is in flight: all at once with
a bound is a closed loop.

`sharegpt` has lengths of the shape of the conversations that people shared, with no text of theirs: lognormal, of about
the means that benchmarks report for them (220 tokens a prompt, 200 an answer), none above 1,024. Prompts are random
tokens, different ones except for what the workload shares, so that no prefix cache helps otherwise. End-of-sequence is
ignored, so that each request generates as many tokens as asked.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.client import WORDS, Call, Endpoint, Prompt, make_prompts, replay, run, served_model
from perf.common import report
from perf.serve_result import OBJECTIVES, parse_objectives, print_summary, summarise
from splash.core.errors import ConfigError
from splash.workload import Requests, Workload, from_mapping, load
from splash.workload import summarise as summarise_workload

MADE_HERE = ("random", "sharegpt", "prefix-repetition")


def made_here(args: argparse.Namespace) -> Workload:
    """The workload of that name, as the command line shapes it."""
    lengths: dict[str, Any] = {"input": args.input_len, "output": args.output_len}
    if args.workload == "sharegpt":
        lengths["input"] = {"kind": "lognormal", "average": 230, "sigma": 1.2, "low": 4, "high": 1024}
        lengths["output"] = {"kind": "lognormal", "average": 210, "sigma": 1.0, "low": 4, "high": 1024}
    elif args.workload == "prefix-repetition":
        lengths["input"] = args.prefix_len + args.input_len
        lengths |= {"shared_prefix": args.prefix_len, "prefix_groups": args.num_prefixes}
    arrival: dict[str, Any] = {"kind": "fixed"}
    if math.isfinite(args.request_rate):
        arrival = {"kind": "poisson", "rate": args.request_rate}
    return from_mapping({**arrival, **lengths, "num_requests": args.num_prompts, "seed": args.seed})


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


def call_of(requests: Requests, index: int, vocab_size: int, text: bool) -> Call:
    """Request `index` as it is sent: token ids, or with `text` a word for each."""
    tokens = requests.tokens(index, vocab_size).tolist()
    prompt: Prompt = " ".join(WORDS[token % len(WORDS)] for token in tokens) if text else tokens
    return Call(prompt, int(requests.output_len[index]), int(requests.priority[index]))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="perf.serve", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="where the endpoint listens, without /v1")
    add("--model", help="model name to ask for; the first that the endpoint lists by default")
    add("--backend", choices=("openai", "openai-chat"), default="openai", help="completions, or chat completions")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="bearer token; OPENAI_API_KEY by default")
    add("--workload", metavar="NAME|FILE", default="random", help=f"{', '.join(MADE_HERE)}, a name, .yaml or .jsonl")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change an option of a named workload")
    add("--request-rate", type=float, default=math.inf, help="requests a second; all at once by default")
    add("--max-concurrency", type=int, help="most requests in flight; no bound by default")
    add("--num-prompts", type=int, default=64)
    add("--input-len", type=int, default=128, help="tokens a prompt, after its prefix")
    add("--output-len", type=int, default=128)
    add("--prefix-len", type=int, default=256, help="tokens a shared prefix")
    add("--num-prefixes", type=int, default=10)
    add("--prompts", choices=("tokens", "text"), help="send token ids, or words; words to a chat, else ids by default")
    add("--vocab-size", type=int, default=256, help="token ids are drawn below this")
    add("--no-ignore-eos", action="store_true", help="let answers end early, and do not send ignore_eos")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"objectives, of {', '.join(OBJECTIVES)}")
    add("--warmup", type=int, default=2, help="requests sent first and not counted")
    add("--seed", type=int, default=0)
    add("--save-detailed", action="store_true", help="keep every request's figures in the record")
    add("--out", type=Path, help="write the JSON record there as well")
    return parser


def main() -> None:
    """Parse the command line, warm up, drive, print a table and one JSON line."""
    options = parser()
    args = options.parse_args()
    ours = args.workload in MADE_HERE
    if args.set and ours:
        options.error(f"--set changes a named workload, and {args.workload} is shaped by options of its own")
    if not ours and math.isfinite(args.request_rate):
        options.error(f"--request-rate: {args.workload} says itself when requests arrive; see --set")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        options.error("--max-concurrency must be at least 1")
    text = (args.prompts or ("text" if args.backend == "openai-chat" else "tokens")) == "text"
    if args.backend == "openai-chat" and not text:
        options.error("--prompts tokens: a chat is made of text")
    try:
        objectives = parse_objectives(args.goodput) if args.goodput else None
        requests = (made_here(args) if ours else named_workload(args.workload, args.set)).requests()
    except (ConfigError, ValueError) as error:
        options.error(str(error))
    if args.max_concurrency is not None:
        requests = requests.limited(args.max_concurrency)

    url = args.url.rstrip("/").removesuffix("/v1")
    model = args.model or served_model(url, args.api_key)
    endpoint = Endpoint(url, model, args.backend == "openai-chat", args.api_key, not args.no_ignore_eos)
    # The seed keeps what warms the endpoint up apart from what is counted.
    warm = make_prompts("text" if text else "tokens", args.warmup, args.input_len, args.vocab_size, args.seed + 1)
    run(endpoint, [Call(prompt, args.output_len) for prompt in warm], args.warmup or 1)
    timings = asyncio.run(replay(endpoint, requests, lambda index: call_of(requests, index, args.vocab_size, text)))
    summary = summarise(timings, objectives, args.save_detailed)
    described = summarise_workload(requests)
    print(described.table())
    print_summary(summary)
    for error in sorted({timing.error for timing in timings if timing.error})[:5]:
        print(f"failed: {error}", file=sys.stderr)
    record = {
        "backend": args.backend,
        "url": url,
        "model_id": model,
        "num_prompts": len(requests),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "max_concurrency": args.max_concurrency,
        "workload": {"name": args.workload, "set": args.set, **dataclasses.asdict(described)},
        "goodput_ms": objectives,
        **summary,
    }
    report("serve", record, args.out)
    if summary["failed"]:
        raise SystemExit(f"{summary['failed']} of {len(requests)} requests failed")


if __name__ == "__main__":
    main()
