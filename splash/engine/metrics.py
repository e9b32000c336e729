"""EngineMetrics: what an engine counts and times, for a scrape to read. Made to cost next to nothing in a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence

from splash.switch.orders import SwitchRecord

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Histogram:
    """Counts by bucket, as Prometheus has them. One thread observes; any may read, and finds each count at its time.

    Args:
        bounds: largest value of each bucket but the last, ascending.

    Attributes:
        total: sum of what was observed.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """For each bucket its bound, "+Inf" for the last, and how many values do not exceed it."""
        found, count = [], 0
        for bound, number in zip((*map(float, self.bounds), float("inf")), self._counts, strict=True):
            count += number
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(count)))
        return found


class RequestTimes:
    """When a request came, was first computed, brought its first token and its last. Seconds of the monotonic clock."""

    __slots__ = ("arrived", "first", "last", "started")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.started: float | None = None
        self.first: float | None = None
        self.last = 0.0


class EngineMetrics:
    """Times of requests and steps, and totals of tokens and switches. The engine's thread writes, any thread reads.

    Attributes:
        time_to_first_token, inter_token, end_to_end, queue, prefill, decode: seconds of requests.
        prompt_lengths, output_lengths: tokens of requests that have finished.
        step_rows: rows of steps.
        steps: seconds of steps by layout.
        forward_s: what the forwards of all steps took on rank 0's device.
        prompt_tokens, output_tokens: of all requests.
        finished: requests by the reason of their end.
        switches: by layout from and to, the method used and the status.
        switch_bytes: received by ranks in committed switches, by layout from and to, and "kv" or "weights".
        switch_exposed_s, switch_hidden_s: what committed switches made steps wait, and their time beside steps, by
            layout from and to.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.end_to_end = Histogram()
        self.queue = Histogram()
        self.prefill = Histogram()
        self.decode = Histogram()
        self.prompt_lengths = Histogram(TOKENS)
        self.output_lengths = Histogram(TOKENS)
        self.step_rows = Histogram(TOKENS)
        self.steps: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(STEP_SECONDS))
        self.forward_s = 0.0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished: Counter[str] = Counter()
        self.switches: Counter[tuple[str, str, str, str]] = Counter()
        self.switch_bytes: Counter[tuple[str, str, str]] = Counter()
        self.switch_exposed_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.switch_hidden_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    def step(self, layout: str, seconds: float, rows: int, forward_s: float) -> None:
        """A step has run."""
        self.forward_s += forward_s
        self.steps[layout].observe(seconds)
        self.step_rows.observe(rows)

    def token(self, times: RequestTimes, now: float) -> None:
        """A request has brought a token."""
        self.output_tokens += 1
        if times.first is None:
            times.first = now
            self.time_to_first_token.observe(now - times.arrived)
        else:
            self.inter_token.observe(now - times.last)
        times.last = now

    def finish(self, times: RequestTimes, reason: str, num_prompt: int, num_output: int, now: float) -> None:
        """A request has ended."""
        self.finished[reason] += 1
        self.end_to_end.observe(now - times.arrived)
        self.prompt_lengths.observe(num_prompt)
        self.output_lengths.observe(num_output)
        if times.started is not None and times.first is not None:
            self.prefill.observe(times.first - times.started)
            self.decode.observe(times.last - times.first)

    def start(self, times: RequestTimes, num_prompt: int, now: float) -> None:
        """A request is computed; told again where ranks were started anew."""
        if times.started is None:
            times.started = now
            self.queue.observe(now - times.arrived)
            self.prompt_tokens += num_prompt

    def switched(self, record: SwitchRecord, seconds: float) -> None:
        """A switch has ended, `seconds` after it began."""
        direction = record.source, record.target
        self.switches[*direction, record.method, record.status] += 1
        if record.status == "committed":
            exposed = record.added_ms / 1e3
            self.switch_exposed_s[direction] += exposed
            self.switch_hidden_s[direction] += max(0.0, seconds - exposed)
            self.switch_bytes[*direction, "kv"] += sum(record.kv_bytes_received)
            self.switch_bytes[*direction, "weights"] += sum(record.weight_bytes_received)
