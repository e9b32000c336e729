"""How long a device works on something, by its own clock."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Span(ABC):
    """From the end of what is queued on a device now to the end of what is queued there when `end` is called."""

    @abstractmethod
    def end(self) -> None:
        """What is queued from here on does not count. Called once."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> float:
        """Wait until what was queued before the end is over. Returns the seconds."""


class HostSpan(Span):
    """Without queues: what is between the two calls is done when they are."""

    def __init__(self) -> None:
        self._begun = self._ended = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def is_over(self) -> bool:
        return True

    def wait(self) -> float:
        return self._ended - self._begun


class DeviceSpan(Span):
    """Between two events in the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._begun, self._ended = (torch.Event(device, enable_timing=True) for _ in range(2))
        self._begun.record()

    def end(self) -> None:
        self._ended.record()

    def is_over(self) -> bool:
        return self._ended.query()

    def wait(self) -> float:
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1e3
