"""Loop: serving without text. Schedule a step, have an executor carry it out, apply what it brought."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from splash.core.errors import WorkerError
from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.engine.messages import Result, Run
from splash.engine.restarts import Restarts
from splash.engine.steering import Steering
from splash.engine.switching import Switcher
from splash.scheduler.page_keys import Keys
from splash.scheduler.policy import Policy, StaticPolicy
from splash.scheduler.request import Progress
from splash.scheduler.scheduler import Scheduler
from splash.switch.orders import CopyAhead, Vote


class Executor(Protocol):
    """Carries out plans in order."""

    def submit(self, run: Run) -> None:
        """Begin a step, or line it up behind the one that runs. The step before that must have been collected."""

    def copy_ahead(self, order: CopyAhead) -> None:
        """Have the ranks copy ahead of a switch behind the step that was submitted last."""

    def votes(self) -> list[Vote]:
        """Wait for the votes of all ranks on the last order, which asked for them.

        Raises:
            WorkerError: as `collect`.
        """

    def collect(self) -> Result:
        """Wait for the first step that has not been collected.

        Raises:
            WorkerError: a rank died, failed or hung; the executor can only be restarted or closed after that.
        """

    def check(self) -> None:
        """Raise `WorkerError` if a rank has died while no step is in flight."""

    def restart(self, layout: str) -> None:
        """End the ranks, whatever they do, and start them anew in `layout`. They know of nothing.

        Raises:
            SplashError: as at the first start.
        """

    def close(self) -> None:
        """End everything that the executor started. Idempotent."""


class Loop:
    """Serves numbered requests. Not thread-safe: one thread calls everything.

    Between calls at most one step is in flight. With `async_scheduling` the next one is planned and sent before `step`
    waits for it, so that ranks go from step to step without waiting for the host. Where a switch is about to commit
    with a manifest, or a request with a grammar runs, each step is over before the next is planned.

    When a rank dies, fails or hangs, all are started anew in the layout that served last, and every live request is
    computed again from its tokens: nobody sees more of it than a pause. A switch under way has failed then.

    Args:
        scheduler: decides what a step computes; its pool says in which layout serving begins.
        executor: carries steps out. Closed with `close`.
        geometry: of the arenas.
        staging_bytes: most that a rank may stage for one layer of a switch.
        step_bytes: most that a rank copies ahead of a switch after one step.
        policy: chooses layouts while serving; None keeps the layout.
        clock: the time in seconds, from any origin.
        timer: see `Steering`.
        restarts: how often ranks that died are started anew; None never does.
        async_scheduling: plan and send each step while the one before it runs.
        streams: see `Switcher`.

    Attributes:
        restarts: counts the restarts.
        switcher: takes switches of layout from request to record.
        steering: asks the policy, unless the layout is pinned.
        num_steps: steps that have run.
        begun: requests that the step which `step` began is the first to compute.
        on_step: called with the layout, the seconds and the rows of each step that has run, and the seconds of the
            forward (`StepOutput.forward_s`). Its time is from its order to its output, or from the output before where
            that came later.
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
        timer: Callable[[], float] | None = None,
        restarts: Restarts | None = None,
        async_scheduling: bool = False,
        streams: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.switcher = Switcher(scheduler, geometry, staging_bytes, step_bytes, clock, streams)
        self.steering = Steering(policy or StaticPolicy(), scheduler, self.switcher, clock, timer)
        self.restarts = restarts or Restarts(most=0, window_s=1.0)
        self.num_steps = 0
        self.begun: list[int] = []
        self.on_step: Callable[[str, float, int, float], None] = lambda layout, seconds, rows, forward_s: None
        self._clock = clock
        self._async_scheduling = async_scheduling
        self._in_flight: deque[tuple[float, str, int]] = deque()  # when each step was sent, its layout and rows
        self._collected = -math.inf  # when the last step was

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
        return bool(self._in_flight) or self.scheduler.has_work or self.switcher.active is not None

    def step(self) -> list[Progress]:
        """Finish the step in flight, begin the next one before or after that, and return what the finished one brought.

        Raises:
            WorkerError: the group died once too often; the loop can only be closed.
        """
        progress: list[Progress] = []
        try:
            if self._may_run_ahead():
                self.scheduler.foresee()
                self.begin()
            progress = self.finish()
            if not self._in_flight:
                self.begin()
        except WorkerError as error:
            self._recover(error)
        return progress

    def _may_run_ahead(self) -> bool:
        """Whether a step is in flight whose outcome nobody has to know before the next: neither a switch that may fail
        in it or has to be planned behind it, nor a grammar, which says what may come after each token."""
        if not self._async_scheduling or len(self._in_flight) != 1 or not self.switcher.lets_run_ahead:
            return False
        return all([request.new.params.grammar is None for request in self.scheduler.running])

    def finish(self) -> list[Progress]:
        """Wait for the first step in flight, where there is one."""
        if not self._in_flight:
            return []
        result = self.executor.collect()
        before, self._collected = self._collected, self._clock()
        sent, layout, rows = self._in_flight.popleft()
        ran = result.switch is None or self.switcher.settle(result.switch)
        if not ran or result.output is None:
            return []
        self.num_steps += 1
        self.on_step(layout, self._collected - max(sent, before), rows, result.output.forward_s)
        progress = self.scheduler.apply(result.output)
        for item in progress:
            if item.finish_reason is not None:
                self.steering.finished(item.num_output, cut_off=item.finish_reason != "stop")
        return progress

    def begin(self) -> None:
        """Plan the next step and send it, where there is something to do."""
        self.steering.act()
        if self.switcher.awaits_votes:
            self.switcher.decide(self.executor.votes())
        run = self.switcher.next_run(at_boundary=not self._in_flight)
        self.begun = [] if run is None else [new.id for new in run.plan.new]
        if run is not None:
            rows = sum([len(query.tokens) for query in run.plan.queries])
            sent = self._clock()
            self.executor.submit(run)
            self._in_flight.append((sent, run.plan.layout, rows))
            order = self.switcher.look_ahead(run.plan)
            if order is not None:
                self.executor.copy_ahead(order)
            self.steering.ask()

    def check(self) -> None:
        """See that the ranks are alive while nothing runs, and start them anew if they are not.

        Raises:
            WorkerError: the group died once too often; the loop can only be closed.
        """
        if not self._in_flight:
            try:
                self.executor.check()
            except WorkerError as error:
                self._recover(error)

    def _recover(self, error: WorkerError) -> None:
        self._in_flight.clear()
        self.switcher.lose(f"{error}; the ranks are started anew")
        self.scheduler.start_over()
        self.restarts.run(error, lambda: self.executor.restart(self.layout))

    def close(self) -> None:
        """End what the executor started. Idempotent."""
        self.executor.close()
