"""History: the last minutes of an engine, as samples of about half a second and the switches between them.

It is fed by every step and bounded: that is all that watching an engine costs while nobody watches.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from splash.engine.switching import Switcher
from splash.scheduler.scheduler import Scheduler
from splash.switch.orders import SwitchRecord

SAMPLE_S = 0.5
MAX_SAMPLES = 1200  # ten minutes of work
MAX_EVENTS = 200
RECENT_STEPS = 64  # of which the median is a layout's step time


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """About half a second in which steps ran, all in one layout.

    Attributes:
        time_s: its end, in seconds on the engine's clock.
        seconds: its length, from the end of the step before its first one.
        layout: in which the steps ran.
        steps: how many ended.
        step_ms, step_max_ms: median and longest time from one step's end to the next one's, the engine's own work
            between them included.
        output_tokens: generated.
        prompt_tokens: in the prompts whose first output token came, those found in the prefix cache included.
        ttft_ms, ttft_max_ms: mean and longest time from a request's arrival to its first token; None without one.
        itl_ms, itl_max_ms: mean and longest time between two tokens of a request; None without any.
        running, waiting: requests at its end.
        used_pages: by rank, pages that requests hold at its end.
    """

    time_s: float
    seconds: float
    layout: str
    steps: int
    step_ms: float
    step_max_ms: float
    output_tokens: int
    prompt_tokens: int
    ttft_ms: float | None
    ttft_max_ms: float | None
    itl_ms: float | None
    itl_max_ms: float | None
    running: int
    waiting: int
    used_pages: tuple[int, ...]


class SwitchEvent(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}):
    """A switch that has ended, at `time_s` on the engine's clock; else as in `SwitchRecord`, bytes over all ranks."""

    time_s: float
    id: int
    source: str
    target: str
    method: str
    status: str
    reason: str
    by_policy: bool
    bytes_received: int
    added_ms: float


class StepTime(msgspec.Struct, frozen=True):
    """Steps of one layout: the median of its last ones in ms, when the last of them ended, and how many ever."""

    step_ms: float
    time_s: float
    steps: int


class _Mean:
    """Mean and maximum of what was added."""

    __slots__ = ("count", "longest", "total")

    def __init__(self) -> None:
        self.count, self.total, self.longest = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value > self.longest:
            self.longest = value

    def ms(self) -> tuple[float | None, float | None]:
        """(mean, maximum) of seconds, in milliseconds."""
        if not self.count:
            return None, None
        return round(self.total / self.count * 1e3, 3), round(self.longest * 1e3, 3)


class _Steps:
    """The steps of one layout."""

    __slots__ = ("count", "end_s", "last")

    def __init__(self) -> None:
        self.count, self.end_s = 0, 0.0
        self.last: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float, end_s: float) -> None:
        self.count += 1
        self.end_s = end_s
        self.last.append(seconds)

    def time(self) -> StepTime:
        return StepTime(round(median(self.last) * 1e3, 3), round(self.end_s, 3), self.count)


class History:
    """The last minutes of an engine.

    Args:
        scheduler: whose load is sampled.
        switcher: whose switches are noted.
        now_s: the time on a clock of any origin, which all later times are from.
    """

    def __init__(self, scheduler: Scheduler, switcher: Switcher, now_s: float) -> None:
        self._scheduler = scheduler
        self._switcher = switcher
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._events: deque[SwitchEvent] = deque(maxlen=MAX_EVENTS)
        self._recent: dict[str, _Steps] = {}  # by layout
        self._last_switch: SwitchRecord | None = None
        self._step_began_s = now_s
        self._begin(now_s, switcher.layout.name)

    def _begin(self, now_s: float, layout: str) -> None:
        self._began_s, self._layout = now_s, layout
        self._steps: list[float] = []  # seconds of each
        self._output, self._prompt = 0, 0
        self._ttft, self._itl = _Mean(), _Mean()

    def first_token(self, waited_s: float, num_prompt_tokens: int) -> None:
        """A request has its first output token, so long after it came."""
        self._output += 1
        self._prompt += num_prompt_tokens
        self._ttft.add(waited_s)

    def next_token(self, waited_s: float) -> None:
        """A request has another output token, so long after the one before."""
        self._output += 1
        self._itl.add(waited_s)

    def stepped(self, now_s: float, ran: bool, layout: str) -> None:
        """The loop has finished a step, if any was in flight, and begun the next. Call before noting its tokens.

        Args:
            now_s: the time.
            ran: whether a step has ended.
            layout: the one in which it ran.
        """
        history = self._switcher.history
        if history and history[-1] is not self._last_switch:
            self._note_switches(now_s)
        began_s, self._step_began_s = self._step_began_s, now_s
        if not ran:
            return
        if self._steps and (layout != self._layout or now_s - self._began_s >= SAMPLE_S):
            self._close(began_s)
        if not self._steps:
            self._begin(began_s, layout)
        self._steps.append(now_s - began_s)
        recent = self._recent.get(layout)
        if recent is None:
            recent = self._recent[layout] = _Steps()
        recent.add(now_s - began_s, now_s)

    def idle(self, now_s: float) -> None:
        """Nothing is in flight: what was not yet in a sample is one now."""
        if self._steps:
            self._close(now_s)

    def _close(self, now_s: float) -> None:
        scheduler, steps = self._scheduler, self._steps
        ttft, itl = self._ttft.ms(), self._itl.ms()
        pool = scheduler.pool
        self._samples.append(
            Sample(
                time_s=round(now_s, 3),
                seconds=round(now_s - self._began_s, 4),
                layout=self._layout,
                steps=len(steps),
                step_ms=round(median(steps) * 1e3, 3),
                step_max_ms=round(max(steps) * 1e3, 3),
                output_tokens=self._output,
                prompt_tokens=self._prompt,
                ttft_ms=ttft[0],
                ttft_max_ms=ttft[1],
                itl_ms=itl[0],
                itl_max_ms=itl[1],
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                used_pages=tuple(total - free for total, free in zip(pool.num_total, pool.num_free, strict=True)),
            )
        )
        self._begin(now_s, self._layout)

    def _note_switches(self, now_s: float) -> None:
        new = []
        for record in reversed(self._switcher.history):
            if record is self._last_switch:
                break
            new.append(record)
        self._last_switch = new[0]
        for record in reversed(new):
            self._events.append(
                SwitchEvent(
                    time_s=round(now_s, 3),
                    id=record.id,
                    source=record.source,
                    target=record.target,
                    method=record.method,
                    status=record.status,
                    reason=record.reason,
                    by_policy=record.decision is not None,
                    bytes_received=sum(record.kv_bytes_received) + sum(record.weight_bytes_received),
                    added_ms=round(record.added_ms, 3),
                )
            )

    @property
    def samples(self) -> list[Sample]:
        """The last samples, oldest first."""
        return list(self._samples)

    @property
    def events(self) -> list[SwitchEvent]:
        """The last switches, oldest first."""
        return list(self._events)

    def step_times(self) -> dict[str, StepTime]:
        """By layout that steps have run in."""
        return {layout: steps.time() for layout, steps in self._recent.items()}
