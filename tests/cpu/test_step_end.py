"""A rank answers for a step once the device is through with it, whether or not anything was sampled."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from splash.core.layout import LAYOUTS
from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.core.step import StepOutput, StepPlan
from splash.engine.messages import Channel, FromRank, Result, Run, ToRank
from splash.engine.progress import ProgressBoard
from splash.engine.runner import ModelRunner
from splash.engine.worker import _obey
from splash.platform.base import Rank
from splash.platform.span import Span
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler
from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for

CHUNK = 16
PROMPT = range(5, 45)  # takes three steps, the first two of which sample nothing


class Queue:
    """A device that is through with what is queued on it no sooner than somebody waits for it, and then at once."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_queued = 0

    def span(self) -> Span:
        return QueuedSpan(self)


class QueuedSpan(Span):
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._number, queue.num_queued = queue.num_queued, queue.num_queued + 1
        self._is_over = False

    def end(self) -> None:
        self._queue.events.append(f"queue {self._number}")

    def is_over(self) -> bool:
        return self._is_over

    def wait(self) -> float:
        self._is_over = True
        self._queue.events.append(f"end {self._number}")
        return self._number + 0.5


class WatchedChannel(Channel):
    """Notes when a step is answered."""

    def __init__(self, sock: socket.socket, queue: Queue) -> None:
        super().__init__(sock, ToRank)
        self._queue = queue

    def send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, Result) and message.output is not None
        self._queue.events.append(f"answer {message.output.step}")
        super().send(message)


def obey(
    rank: Rank, model: str, geometry: ArenaGeometry, plans: list[StepPlan], most: int
) -> tuple[list[str], list[StepOutput]]:
    """Carry out `plans`, all of which wait in the socket. Returns what happened in which order, and the answers."""
    torch.set_grad_enabled(False)
    queue = Queue()
    runner = ModelRunner(model, geometry, dataclasses.replace(rank, span=queue.span), "tp", "float32", 64, ())
    ours, theirs = socket.socketpair()
    launcher = Channel(ours, FromRank)
    for plan in plans:
        launcher.send(Run(plan))
    ours.shutdown(socket.SHUT_WR)
    board = ProgressBoard(ProgressBoard.create(rank.size), rank.size)
    with pytest.raises(EOFError):  # all plans have been taken; what runs then is never answered
        _obey(WatchedChannel(theirs, queue), runner, board, rank.rank, most)
    num_answers = sum(event.startswith("answer") for event in queue.events)
    return queue.events, [launcher.receive().output for _ in range(num_answers)]


def plans_of(geometry: ArenaGeometry, count: int) -> list[StepPlan]:
    """The first steps of one request, each planned while the one before it runs."""
    scheduler = Scheduler(
        SchedulerConfig(1, CHUNK, 64, frozenset(), geometry.page_size), PrefixCache.of_geometry(geometry, LAYOUTS["tp"])
    )
    scheduler.add(0, PROMPT, SamplingParams(max_tokens=8, temperature=0.0), 0)
    plans: list[StepPlan] = []
    for _ in range(count):
        if plans:
            scheduler.foresee()
        plan = scheduler.schedule()
        assert plan is not None
        if plans:
            requests = tuple(query.request for query in plans[-1].queries if query.sample)
            tokens = (7,) * len(requests)  # which nobody looks at: the plans say that they are pending
            scheduler.apply(StepOutput(plan.step - 1, plan.epoch, requests, tokens, (None,) * len(requests)))
        plans.append(plan)
    return plans


@pytest.mark.parametrize("most", [1, 2])
def test_every_answer_waits_for_its_step(tiny_checkpoint: Callable[[str], Path], most: int) -> None:
    """On the rank that answers, `most` steps are queued before the first of them is waited for. Others never wait."""
    model = str(tiny_checkpoint("base"))
    geometry = geometry_for(model, 2, 16, 20)
    plans = plans_of(geometry, 6)
    assert [any(query.sample for query in plan.queries) for plan in plans] == [False, False, True, True, True, True]
    kind = {"num_layers": geometry.spec.num_layers, "geometry": geometry}
    arguments = {"model": model, "geometry": geometry, "plans": plans, "most": most}
    (events, outputs), (quiet, nothing) = run_group(f"{__name__}:obey", 2, arguments, **kind)
    assert (quiet, nothing) == ([f"queue {step}" for step in range(6)], [])
    if most == 1:
        expected = [f"{what} {step}" for step in range(6) for what in ("queue", "end", "answer")]
    else:
        expected = ["queue 0"]
        for step in range(5):
            expected += [f"queue {step + 1}", f"end {step}", f"answer {step}"]
    assert events == expected
    assert [(output.step, len(output.tokens), output.forward_s) for output in outputs] == [
        (step, int(step > 1), step + 0.5) for step in range(len(outputs))
    ]
