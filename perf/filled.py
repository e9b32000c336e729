"""Contexts that nobody has computed: arenas full of random keys, and a scheduler that takes prompts for computed.

A benchmark of long contexts would spend its time on prompts. Here the ranks fill what their arenas hold beside weights
with random numbers, and long prompts begin with all of their tokens but the last computed. What they generate means
nothing, but steps and switches move, read and write what they always do.

As a program this is a rank's process whose arenas are filled: `python -m perf.filled FD`.
"""

from __future__ import annotations

from typing import Any

import torch

from splash.engine import executor, worker
from splash.engine.runner import ModelRunner
from splash.model.checkpoint import torch_dtype
from splash.scheduler import scheduler
from splash.scheduler.admission import Admission
from splash.scheduler.scheduler import Scheduler


def take_for_computed(served: Scheduler, tokens: int) -> None:
    """Have a scheduler take prompts of `tokens` or more for computed."""

    class Computed(Admission):
        """Has one token left of a long prompt."""

        def left(self, owner: int) -> int:
            return 1 if len(self._request.tokens) >= tokens else super().left(owner)

    begin = served._begin

    def begin_computed(request: Any, *rest: Any) -> None:
        begin(request, *rest)
        if len(request.tokens) >= tokens:
            request.num_computed = len(request.tokens) - 1

    scheduler.Admission = Computed  # type: ignore[misc]
    served._begin = begin_computed  # type: ignore[method-assign]


def fill_ranks() -> None:
    """Have the ranks of engines that start from now on fill their arenas."""
    executor.WORKER = "perf.filled"


class FilledRunner(ModelRunner):
    """Fills its arenas once the weights are in place."""

    def __init__(self, model: Any, geometry: Any, group: Any, layout: str, dtype: str, *rest: Any) -> None:
        super().__init__(model, geometry, group, layout, dtype, *rest)
        weights = geometry.num_weight_slots * geometry.slot_bytes
        for layer in range(geometry.spec.num_layers):
            group.arenas.local(layer)[weights:].view(torch_dtype(dtype)).normal_()


def main() -> None:
    """A rank's process."""
    from splash.engine import runner

    runner.ModelRunner = FilledRunner  # type: ignore[misc]
    torch.manual_seed(0)
    worker.main()


if __name__ == "__main__":
    main()
