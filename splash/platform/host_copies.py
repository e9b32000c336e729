"""Copies between a host and its device for which neither waits. On the CPU there is nothing to copy."""

from __future__ import annotations

import torch


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, for what is queued there next. The host may go on, and change the tensor."""
    # torch gives pinned memory out again only once the copies from it are over.
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, behind what is queued on their device.

    Args:
        tensors: all on one device, which nobody writes to any more.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        device = tensors[0].device
        self._hosts = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived = None if device.type == "cpu" else torch.Event(device)
        if self._arrived is not None:
            self._arrived.record()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._hosts


class Staging:
    """Host memory from which one place on the device is filled, step after step.

    Two buffers take turns, so that one can be written while the copy of the other waits behind the device's work.

    Args:
        target: contiguous, on the device.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        is_cpu = target.device.type == "cpu"
        self._hosts = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=not is_cpu) for _ in range(2)]
        self._copied = [None if is_cpu else torch.Event(target.device) for _ in range(2)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        """The host's buffer for the next copy. Waits only for the copy before the last one."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._hosts[self._turn]

    def send(self, count: int) -> None:
        """Queue the copy of the first `count` elements of the buffer that `next` gave."""
        self._target[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record()
