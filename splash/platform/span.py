"""How long a device works on something, by its own clock."""

from __future__ import annotations

import time

import torch


class Span:
    """From the end of what is queued on a device now to the end of what is queued there when `end` is called.

    Without queues, on the CPU, the time between the two calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._now()
        self._ended = self._begun

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def end(self) -> None:
        """What is queued from here on does not count."""
        self._ended = self._now()

    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended.query() if isinstance(self._ended, torch.Event) else True

    def wait(self) -> float:
        """Wait until what was queued before the end is over. Returns the seconds."""
        begun, ended = self._begun, self._ended
        if isinstance(begun, torch.Event) and isinstance(ended, torch.Event):
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1e3
        assert isinstance(begun, float) and isinstance(ended, float)
        return ended - begun
