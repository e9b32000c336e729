"""Compare SPLASH with transformers' `generate`: same machine, same weights, same prompts, greedy, in one run.

    python -m perf.generate --ranks 2 --layouts tp,dop --out perf/results/cpu-generate.json

Every repeat gives each contender a turn, so that a slow minute of the machine strikes all of them; figures are the
medians. SPLASH is measured through its HTTP server, streaming included, in a subprocess that lives for its turn only.
transformers gets the fastest of its attention and experts implementations, on every core or on one. A figure of wrong
output is worth nothing: the share of requests whose text equals transformers' is printed beside it. So is a figure from
a busy machine: what other processes use is looked at before every turn.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import splash
from perf.client import Call, Endpoint, Prompt, make_prompts, run, served_model
from perf.common import busy_cores, percentile, process_tree, pss_mib, report, spread
from perf.serve_result import summarise
from perf.transformers_peer import PeerTask, run_peer

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
BUSY = 0.2  # cores that other processes may use before the figures are worth nothing
CONTENDER_COLUMNS = ("single_tok_s", "batch_tok_s", "ttft_ms", "startup_s", "pss_mib")


@dataclass(frozen=True)
class Server:
    """A SPLASH server that answers. `startup_s` is from starting its process to being ready."""

    url: str
    pid: int
    startup_s: float


@contextlib.contextmanager
def splash_server(options: list[str], timeout_s: float) -> Iterator[Server]:
    """`python -m splash.serve` on a free port with `options`, stopped at the end together with its ranks.

    Raises:
        RuntimeError: it ended or was not ready in time; the message ends with what it printed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "splash.serve", "host=127.0.0.1", "port=0", *options]
    with tempfile.TemporaryFile("w+") as log:
        launched = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            url = _wait_ready(process, log.fileno(), launched + timeout_s)
            yield Server(url, process.pid, time.perf_counter() - launched)
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], log: int, deadline: float) -> str:
    """The address that the server printed, once it says there that it is ready."""
    import httpx

    pause = threading.Event()
    while time.perf_counter() < deadline:
        printed = os.pread(log, 1 << 20, 0).decode(errors="replace")
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{printed[-3000:]}")
        found = ADDRESS.search(printed)
        if found:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{found[0]}/ready", timeout=5, trust_env=False).status_code == 200:
                    return found[0]
        pause.wait(0.02)
    raise RuntimeError(f"the server was not ready in time:\n{printed[-3000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; kill its whole session when it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure_endpoint(url: str, prompts: list[Prompt], output_len: int) -> dict[str, Any]:
    """One prompt at a time, then all at once, after a warm-up. Times in seconds."""
    endpoint = Endpoint(url, served_model(url))
    run(endpoint, [Call(prompt, 8) for prompt in prompts], len(prompts))
    alone = run(endpoint, [Call(prompt, output_len) for prompt in prompts[:2]], 1)
    first = run(endpoint, [Call(prompt, 1) for prompt in prompts[:4]], 1)
    together = run(endpoint, [Call(prompt, output_len) for prompt in prompts], len(prompts))
    return {
        "single_tok_s": summarise(alone)["output_throughput"],
        "batch_tok_s": summarise(together)["output_throughput"],
        "ttft_s": [timing.ttft for timing in first],
        "itl_ms": spread([gap for timing in together for gap in timing.gaps]),
        "texts": [timing.text for timing in together],
    }


def measure_splash(args: argparse.Namespace, layout: str, prompts: list[Prompt]) -> dict[str, Any]:
    """One turn of SPLASH in `layout`: a fresh server, its figures, its memory by process."""
    options = [f"model.path={args.model}", f"ranks={args.ranks}", f"layout={layout}", f"dtype={args.dtype}"]
    options.append("prefix_cache=false")  # every round sends the same prompts, and transformers computes them anew
    with splash_server(options + args.option, args.timeout) as server:
        turn = measure_endpoint(server.url, prompts, args.output_len)
        memory = [pss_mib(pid) for pid in process_tree(server.pid)]
        return turn | {"startup_s": server.startup_s, "pss_mib": sum(memory), "pss_mib_by_process": memory}


def ceiling(size: dict[str, float], batch: int) -> dict[str, float]:
    """Tokens a second that no implementation can pass at `batch`: by arithmetic, by reading weights, and the lesser.

    Attention over the cache, norms and sampling count as free, so the true ceiling is lower. A step reads the dense
    weights once, and each expert that at least one of the rows chooses: 1 - (1 - share)^batch of them.
    """
    active = size["dense_parameters"] + size["routed_parameters"] * size["expert_share"]
    touched = size["dense_parameters"] + size["routed_parameters"] * (1 - (1 - size["expert_share"]) ** batch)
    arithmetic = size["gemm_gflop_s"] * 1e9 / (2 * active)
    reading = batch * size["read_gb_s"] * 1e9 / (touched * size["bytes_per_parameter"])
    return {
        "arithmetic_tok_s": round(arithmetic, 1),
        "reading_tok_s": round(reading, 1),
        "tok_s": round(min(arithmetic, reading), 1),
    }


def medians(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the turns of one contender, and every turn's throughput."""
    return {
        "single_tok_s": round(statistics.median(turn["single_tok_s"] for turn in turns), 1),
        "batch_tok_s": round(statistics.median(turn["batch_tok_s"] for turn in turns), 1),
        "ttft_ms": round(statistics.median(percentile(turn["ttft_s"], 50) for turn in turns) * 1e3, 2),
        **{
            key: round(statistics.median(turn[key] for turn in turns), 2)
            for key in ("startup_s", "pss_mib")
            if key in turns[0]
        },
        "turns": {key: [round(turn[key], 1) for turn in turns] for key in ("single_tok_s", "batch_tok_s")},
    }


def checkpoint(model: str) -> Path:
    """The directory of `model`, which is a path or "builtin:NAME" for a model that ships with SPLASH."""
    if model.startswith("builtin:"):
        return Path(splash.__file__).parent / "data" / model.removeprefix("builtin:")
    return Path(model).resolve()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate transformers, then `args.repeats` rounds of one turn each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    plain = tokenizer.encode("a", add_special_tokens=False)[-1]
    # A prompt that ended inside a character would make the output's first character a matter of taste.
    drawn = make_prompts("tokens", args.batch, args.input_len - 1, args.vocab_size, seed=0)
    token_ids = [[*prompt, plain] for prompt in drawn]
    prompts: list[Prompt] = [*token_ids]
    layouts = args.layouts.split(",")
    calibration = run_peer(PeerTask(args.model, args.dtype, token_ids, args.output_len), args.timeout)
    task = PeerTask(args.model, args.dtype, token_ids, args.output_len, calibration["choice"])

    others_busy: list[float] = []
    contest: dict[str, Callable[[], dict[str, Any]]] = {"transformers": lambda: run_peer(task, args.timeout)}
    for layout in layouts:
        contest[f"splash {layout}"] = functools.partial(measure_splash, args, layout, prompts)
    if args.peer_url:
        contest["peer"] = lambda: measure_endpoint(args.peer_url, prompts, args.output_len)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in contest}
    for number in range(args.repeats):
        print(f"round {number + 1} of {args.repeats}", file=sys.stderr, flush=True)
        for name, take_turn in contest.items():
            others_busy.append(busy_cores())
            turns[name].append(take_turn())

    reference = tokenizer.batch_decode(turns["transformers"][0]["tokens"], skip_special_tokens=True)
    contenders = {}
    for name, of_one in turns.items():
        contenders[name] = medians(of_one)
        if "texts" in of_one[0]:
            same = [
                text == expected for turn in of_one for text, expected in zip(turn["texts"], reference, strict=True)
            ]
            contenders[name]["same_text"] = round(sum(same) / len(same), 3)
        for key in ("itl_ms", "pss_mib_by_process"):
            if key in of_one[-1]:
                contenders[name][key] = of_one[-1][key]
    return {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "ranks": args.ranks,
        "batch": args.batch,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "repeats": args.repeats,
        "others_busy_cores": others_busy,
        "transformers": {"choice": calibration["choice"], "tried_tok_s": calibration["tried"]},
        "size": calibration["model"],
        "ceiling": {str(batch): ceiling(calibration["model"], batch) for batch in (1, args.batch)},
        "contenders": contenders,
    }


def print_table(result: dict[str, Any]) -> None:
    """Ceilings first, then one line a contender."""
    batch, size = result["batch"], result["size"]
    if max(result["others_busy_cores"]) > BUSY:
        print(f"NOT TO BE RELIED ON: other processes kept {max(result['others_busy_cores']):.1f} cores busy")
    print(
        f"{result['model']}, {result['dtype']}, {result['ranks']} ranks, "
        f"{batch} x ({result['input_len']} + {result['output_len']}) tokens, medians of {result['repeats']}"
    )
    print(f"this machine: GEMM {size['gemm_gflop_s']:.0f} GFLOP/s, reads weights at {size['read_gb_s']:.1f} GB/s")
    print(f"{'':<16}{'tok/s at 1':>12}{f'at {batch}':>10}{'TTFT ms':>10}{'ready s':>9}{'PSS MiB':>9}{'same text':>11}")
    one, many = (result["ceiling"][str(b)]["tok_s"] for b in (1, batch))
    print(f"{'ceiling':<16}{one:>12.1f}{many:>10.1f}")
    for name, row in result["contenders"].items():
        cells = [row.get(column) for column in CONTENDER_COLUMNS]
        texts = [f"{cell:.1f}" if cell is not None else "-" for cell in cells]
        same = f"{row['same_text']:.0%}" if "same_text" in row else "-"
        print(f"{name:<16}{texts[0]:>12}{texts[1]:>10}{texts[2]:>10}{texts[3]:>9}{texts[4]:>9}{same:>11}")


def main() -> None:
    """Parse the command line, compare, print a table and one JSON line."""
    parser = argparse.ArgumentParser(prog="perf.generate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="builtin:scribe", help="directory of a checkpoint that both can load")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", default="tp", help="comma-separated, one contender each")
    parser.add_argument("--option", action="append", default=[], help="a further server option, as key=value")
    parser.add_argument("--batch", type=int, default=16, help="prompts, and the higher concurrency")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=256, help="token ids are drawn below this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-url", help="another OpenAI endpoint with the same model, measured in every round")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one turn or one start")
    parser.add_argument("--out", type=Path, help="write the JSON record there as well")
    args = parser.parse_args()
    args.model = str(checkpoint(args.model))
    os.environ.pop("OMP_NUM_THREADS", None)  # every contender decides for itself how many cores it takes
    result = compare(args)
    print_table(result)
    report("generate", result, args.out)


if __name__ == "__main__":
    main()
