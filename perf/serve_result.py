"""What a serving benchmark reports, under the names that `vllm bench serve` gives its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perf.client import Timing

METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Objectives such as "ttft:500", in milliseconds, by metric.

    Raises:
        ValueError: one has another form.
    """
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in OBJECTIVES:
            raise ValueError(f"{text!r} must be METRIC:MILLISECONDS, METRIC one of {', '.join(OBJECTIVES)}")
        try:
            objectives[name] = float(limit)
        except ValueError:
            raise ValueError(f"{text!r} must be METRIC:MILLISECONDS") from None
        if not objectives[name] > 0:
            raise ValueError(f"{text!r} must have a limit above 0")
    return objectives


def summarise(
    timings: Sequence[Timing], objectives: Mapping[str, float] | None = None, detailed: bool = False
) -> dict[str, Any]:
    """Throughput over the whole run, and each latency's mean, median, standard deviation and p99 in milliseconds.

    TTFT is from sending a request to its first streamed event; ITL is between one event and the next (an event may
    carry more than one token); TPOT is (last - first) / (tokens - 1), of requests with more than one token; E2EL is
    from sending to the last event; `late` from falling due to being sent. Goodput counts the requests that keep every
    objective.

    Args:
        timings: of all requests.
        objectives: by metric, the most milliseconds; None gives no goodput.
        detailed: add lengths, latencies in seconds, texts and errors of each request.
    """
    done = [timing for timing in timings if not timing.error]
    began = min(timing.sent for timing in timings)
    duration = max((timing.events[-1] for timing in done), default=began) - began
    input_tokens, output_tokens = sum(t.prompt_tokens for t in done), sum(t.output_tokens for t in done)
    goodput = None
    if objectives is not None:
        kept = [all(getattr(t, name) * 1e3 <= most for name, most in objectives.items()) for t in done]
        goodput = _rate(sum(kept), duration)
    summary: dict[str, Any] = {
        "duration": round(duration, 4),
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(done), duration),
        "request_goodput": goodput,
        "output_throughput": _rate(output_tokens, duration),
        "total_token_throughput": _rate(input_tokens + output_tokens, duration),
        "max_output_tokens_per_s": _busiest_second(done, began),
        "max_concurrent_requests": _most_at_once(done),
    }
    values = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in done if t.output_tokens > 1],
        "itl": [gap for t in done for gap in t.gaps],
        "e2el": [t.e2el for t in done],
    }
    if any(t.late for t in timings):
        values["late"] = [t.late for t in timings]
    for name, seconds in values.items():
        summary |= _spread(name, seconds)
    if detailed:
        summary |= {
            "input_lens": [t.prompt_tokens for t in timings],
            "output_lens": [t.output_tokens for t in timings],
            "ttfts": [0.0 if t.error else t.ttft for t in timings],
            "itls": [t.gaps for t in timings],
            "generated_texts": [t.text for t in timings],
            "errors": [t.error for t in timings],
        }
    return summary


def print_summary(summary: Mapping[str, Any]) -> None:
    """Throughput, then a line for each latency."""
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    print(f"{summary['completed']} requests in {summary['duration']:.1f} s{failed}")
    rates = f"output {summary['output_throughput']:.1f} tok/s   total {summary['total_token_throughput']:.1f} tok/s"
    print(f"{rates}   {summary['request_throughput']:.2f} requests/s")
    if summary["request_goodput"] is not None:
        print(f"goodput {summary['request_goodput']:.2f} requests/s")
    print(f"{'ms':>6} {'mean':>10} {'median':>10} {'p99':>10}")
    for name in (*METRICS, "late"):
        if f"mean_{name}_ms" in summary:
            print(
                f"{name:>6} " + " ".join(f"{summary[f'{what}_{name}_ms']:>10.2f}" for what in ("mean", "median", "p99"))
            )


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 3) if seconds else 0.0


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ms = np.asarray(seconds if len(seconds) else [0.0]) * 1e3
    found = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "p99": np.percentile(ms, 99)}
    return {f"{what}_{name}_ms": round(float(value), 3) for what, value in found.items()}


def _busiest_second(done: Sequence[Timing], began: float) -> float:
    """Most events in one second of the run."""
    stamps = np.array([stamp - began for timing in done for stamp in timing.events])
    return float(np.bincount(stamps.astype(np.int64)).max()) if len(stamps) else 0.0


def _most_at_once(done: Sequence[Timing]) -> int:
    """Most requests that were in flight at one moment; one that ends as another is sent does not count beside it."""
    moments = sorted([(t.sent, 1) for t in done] + [(t.events[-1], -1) for t in done])
    return int(np.cumsum([change for _, change in moments]).max(initial=0))
