"""Engines that take turns: their clocks stand still meanwhile, and no outcome of a step is lost."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from perf.slices import Clock, Settled
from splash.core.step import StepOutput, StepPlan
from splash.engine.messages import Result, Run
from splash.switch.orders import CopyAhead, Vote


class Numbered:
    """An executor whose results are those of the steps that were submitted, in order."""

    def __init__(self) -> None:
        self.steps: deque[int] = deque()

    def submit(self, run: Run) -> None:
        self.steps.append(run.plan.step)

    def collect(self) -> Result:
        return Result(StepOutput(self.steps.popleft(), 0, (), (), ()))

    def copy_ahead(self, order: CopyAhead) -> None:
        raise AssertionError("nothing is copied here")

    def votes(self) -> list[Vote]:
        return []

    def check(self) -> None:
        raise AssertionError("nobody asks")

    def restart(self, layout: str) -> None:
        raise AssertionError("nothing is restarted")

    def close(self) -> None:
        self.steps.clear()


@given(st.lists(st.sampled_from(["submit", "collect", "settle"]), max_size=60))
def test_steps_that_were_waited_for_are_collected_in_order(calls: list[str]) -> None:
    inner = Numbered()
    executor, submitted, collected = Settled(inner), 0, 0
    for call in calls:
        if call == "submit":
            executor.submit(Run(StepPlan(submitted, 0, "tp", ())))
            submitted += 1
        elif call == "settle":
            executor.settle()
            assert not inner.steps, "a step is still in flight"
        elif collected < submitted:
            output = executor.collect().output
            assert output is not None and output.step == collected
            collected += 1


def test_a_clock_passes_only_while_it_runs() -> None:
    clock = Clock()
    assert clock() == clock() == 0.0
    clock.start()
    running = [clock() for _ in range(1000)]
    clock.stop()
    stopped = clock()
    assert running == sorted(running) and 0.0 <= running[-1] <= stopped == clock()
    clock.skip(5.0)
    clock.skip(-1.0)
    assert clock() == stopped + 5.0
