"""Loop: serving without text. Schedule a step, have an executor carry it out, apply what it brought."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.engine.messages import Result, Run
from splash.engine.steering import Steering
from splash.engine.switching import Switcher
from splash.scheduler.policy import Policy, StaticPolicy
from splash.scheduler.prefix_cache import Keys
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler


class Executor(Protocol):
    """Carries out one plan at a time."""

    def submit(self, run: Run) -> None:
        """Begin a step. The step before must have been collected."""

    def collect(self) -> Result:
        """Wait for the step that was submitted.

        Raises:
            WorkerError: a rank died, failed or hung; the executor can only be closed after that.
        """

    def check(self) -> None:
        """Raise `WorkerError` if a rank has died while no step is in flight."""

    def close(self) -> None:
        """End everything that the executor started. Idempotent."""


class Loop:
    """Serves numbered requests, at most one step in flight. Not thread-safe: one thread calls everything.

    Args:
        scheduler: decides what a step computes; its pool says in which layout serving begins.
        executor: carries steps out. Closed with `close`.
        geometry: of the arenas.
        staging_bytes: most that a rank may stage for one layer of a switch.
        step_bytes: most that a rank copies ahead of a switch after one step.
        policy: chooses layouts while serving; None keeps the layout.
        clock: the time in seconds, from any origin.

    Attributes:
        switcher: takes switches of layout from request to record.
        steering: asks the policy, unless the layout is pinned.
        num_steps: steps that have run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        geometry: ArenaGeometry,
        staging_bytes: int,
        step_bytes: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.switcher = Switcher(scheduler, geometry, staging_bytes, step_bytes, clock)
        self.steering = Steering(policy or StaticPolicy(), scheduler, self.switcher, clock)
        self.num_steps = 0
        self._in_flight = False

    @property
    def layout(self) -> str:
        """Name of the layout that steps run in."""
        return self.switcher.layout.name

    def add(
        self, number: int, prompt: Sequence[int], params: SamplingParams, seed: int, priority: int = 0, keys: Keys = ()
    ) -> None:
        """Queue a request. `number` is never used again; `keys` is explained in `Scheduler.add`.

        Raises:
            RequestError: the request could never be served; nothing else is affected.
        """
        self.scheduler.add(number, prompt, params, seed, priority, keys)
        self.steering.arrived(len(prompt))

    def abort(self, number: int) -> None:
        """Drop a request; there is no progress of it any more. One that is not live is passed over."""
        self.scheduler.abort(number)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._in_flight or self.scheduler.has_work or self.switcher.active is not None

    def step(self) -> list[Progress]:
        """Finish the step in flight, begin the next one, and return what the finished one brought.

        Raises:
            WorkerError: the group died; the loop can only be closed.
        """
        progress = self.finish()
        self.begin()
        return progress

    def finish(self) -> list[Progress]:
        """The first half of `step`: afterwards no step is in flight."""
        if not self._in_flight:
            return []
        result = self.executor.collect()
        self._in_flight = False
        ran = result.switch is None or self.switcher.settle(result.switch)
        if not ran or result.output is None:
            return []
        self.num_steps += 1
        progress = self.scheduler.apply(result.output)
        for item in progress:
            if item.finish_reason is not None:
                self.steering.finished(item.num_output)
        return progress

    def begin(self) -> None:
        """The second half of `step`."""
        self.steering.act()
        run = self.switcher.next_run()
        if run is not None:
            self.executor.submit(run)
            self._in_flight = True
            self.steering.ask()

    def check(self) -> None:
        """Raise `WorkerError` if a rank has died while nothing runs."""
        if not self._in_flight:
            self.executor.check()

    def close(self) -> None:
        """End what the executor started. Idempotent."""
        self.executor.close()
