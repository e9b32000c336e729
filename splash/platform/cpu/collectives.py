"""Collectives over the memory of one host: made once by the launcher, joined by every rank.

Ranks on GPUs use them too, to meet and wherever tensors are on the host.
"""

from __future__ import annotations

import mmap
import os
import platform
from typing import Literal

from splash.platform.base import Communicator
from splash.platform.cpu.shared import mailbox_memory_bytes

Kind = Literal["shm", "gloo"]
KINDS: tuple[Kind, ...] = ("shm", "gloo")


def default_kind() -> Kind:
    """Shared memory where stores become visible in their order (x86), gloo elsewhere."""
    return "shm" if platform.machine() in ("x86_64", "AMD64") else "gloo"


def shared_bytes(kind: Kind, ranks: int) -> int:
    """Bytes of memory that the collectives of `ranks` ranks share."""
    return mailbox_memory_bytes(ranks) if kind == "shm" else 0


def create(kind: Kind, ranks: int) -> int:
    """Descriptor of a new memory file, to be inherited by the ranks, who `join` with it."""
    fd = os.memfd_create(f"splash-{kind}")
    os.ftruncate(fd, shared_bytes(kind, ranks))
    return fd


def join(kind: Kind, fd: int, rank: int, ranks: int, timeout_s: float) -> Communicator:
    """Join. Returns at once with shared memory; with gloo once every rank has connected."""
    from splash.platform.cpu.gloo import GlooCommunicator
    from splash.platform.cpu.shm import ShmCommunicator

    if kind == "shm":
        return ShmCommunicator(mmap.mmap(fd, 0), rank, ranks, timeout_s)
    return GlooCommunicator(fd, rank, ranks, timeout_s)
