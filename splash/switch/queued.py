"""Copies ahead of a switch that are queued on the device: which of them a step has to wait for."""

from __future__ import annotations

from collections import deque

from splash.platform.base import Completion


class QueuedCopies:
    """The copies that a rank has begun and no step has waited for, in the order of their start."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, Completion]] = deque()

    def add(self, switch: int, copies: Completion) -> None:
        """Take in what was begun last, ahead of a switch."""
        self._begun.append((switch, copies))

    def settle(self, copying: int) -> list[Completion]:
        """Before a step: let it see what is still being copied, unless the switch `copying` that it is for goes on.

        While it does, slots that are copied to are nobody else's, but it may let go of them from step to step: so all
        copies but the last ones are waited for. Without the switch the step may write to any.

        Returns:
            what is waited for.
        """
        waited = []
        while self._begun:
            switch, copies = self._begun[0]
            if len(self._begun) == 1 and switch == copying:
                break
            self._begun.popleft()
            copies.wait()
            waited.append(copies)
        return waited
