"""What a workload amounts to, before anything has served it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash.workload.requests import Ints, Requests


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles and maximum of a length, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, values: Ints) -> Spread:
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(round(float(values.mean()), 2), p50, p90, p99, int(values.max()))


@dataclass(frozen=True)
class Summary:
    """Counts of requests and tokens; `dataclasses.asdict` makes it JSON.

    Args:
        num_dependent: requests that wait for another to finish.
        last_arrival_s: arrival of the last request, were serving to take no time.
        shared_prefix_fraction: share of the prompts' tokens that an unbounded prefix cache would save; requests that
            arrive together count as if one after the other.
        num_phases: phases, each of which waits for the one before.
        concurrency: most requests in flight, None for no limit in some phase.
    """

    num_requests: int
    num_sessions: int
    num_dependent: int
    last_arrival_s: float
    input_tokens: int
    output_tokens: int
    input_len: Spread
    output_len: Spread
    shared_prefix_fraction: float
    num_phases: int
    concurrency: int | None

    def table(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.num_requests:,} requests in {self.num_sessions:,} sessions, {self.num_dependent:,} after another"
            + (f", {self.num_phases} phases" if self.num_phases > 1 else ""),
            f"last arrival {self.last_arrival_s:,.1f} s"
            + ("" if self.concurrency is None else f", at most {self.concurrency} in flight"),
            f"tokens {self.input_tokens:,} in, {self.output_tokens:,} out",
            f"shared prefixes {self.shared_prefix_fraction:.1%} of the input",
            f"{'tokens':>8} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
        ]
        for name, row in (("input", self.input_len), ("output", self.output_len)):
            lines.append(
                f"{name:>8} {row.mean:>10,.1f} {row.p50:>10,.0f} {row.p90:>10,.0f} {row.p99:>10,.0f} {row.max:>10,}"
            )
        return "\n".join(lines)


def summarise(requests: Requests) -> Summary:
    """Count and measure `requests`, of which there is at least one."""
    input_tokens = int(requests.input_len.sum())
    limits = [phase.concurrency for phase in requests.phases]
    return Summary(
        num_requests=len(requests),
        num_sessions=len(np.unique(requests.session)),
        num_dependent=int((requests.after >= 0).sum()),
        last_arrival_s=round(float(requests.time_s[-1]), 3),
        input_tokens=input_tokens,
        output_tokens=int(requests.output_len.sum()),
        input_len=Spread.of(requests.input_len),
        output_len=Spread.of(requests.output_len),
        shared_prefix_fraction=round(int(requests.shared_len.sum()) / input_tokens, 4),
        num_phases=len(limits),
        concurrency=None if None in limits else max(limit for limit in limits if limit is not None),
    )
