"""Messages between the launcher and its ranks: msgpack over socket pairs."""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import msgspec

from splash.core.step import StepOutput, StepPlan
from splash.switch.orders import CopyAhead, PreparedCommit, SwitchOrder, SwitchOutcome, Vote


class Launch(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank: what to become. `model_config` is the contents of config.json, as JSON.

    `progress_fd` is the group's `ProgressBoard`. With `async_scheduling` a step may come before the one before it has
    been answered.
    """

    rank: int
    ranks: int
    platform: str
    group: dict[str, int | str | list[int]]
    model: str
    model_config: str
    load_format: str
    dtype: str
    layout: str
    page_size: int
    num_slots: int
    max_model_len: int
    graph_rows: int
    progress_fd: int
    collective_timeout_s: float
    async_scheduling: bool = False


class Run(msgspec.Struct, frozen=True, tag=True):
    """Carry out a step, and commit a switch with it: by a manifest, or as it was prepared and voted for.

    `copying` is the number of the switch that goes on copying ahead behind this step, 0 where none does.
    """

    plan: StepPlan
    switch: SwitchOrder | None = None
    commit: PreparedCommit | None = None
    copying: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank has joined its group, loaded its weights and recorded its graphs.

    Bytes of weights outside the arenas and of graphs; all that the rank holds, arenas apart; and what is used on its
    device, by whomever. Zero where there is nothing to say.
    """

    rank: int
    weight_bytes: int
    graph_bytes: int = 0
    graph_seconds: float = 0.0
    held_bytes: int = 0
    device_used_bytes: int = 0


class Result(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's answer to a step. A step whose switch failed has no output: it has not been run."""

    output: StepOutput | None
    switch: SwitchOutcome | None = None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on. `kind` is the exception's class name; `blamed` is the rank at fault, if known."""

    rank: int
    kind: str
    message: str
    blamed: int | None = None


ToRank = Launch | Run | CopyAhead
FromRank = Ready | Result | Vote | Failure

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()


class Channel:
    """One end of a rank's socket: length-prefixed msgpack."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """Speak over `sock`, expecting messages of the union `receives`."""
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises OSError when the peer is gone."""
        self.send_encoded(self.encode(message))

    @staticmethod
    def encode(message: msgspec.Struct) -> bytes:
        """A message framed for `send_encoded`, for sending the same one to several peers."""
        body = _ENCODER.encode(message)
        return _LENGTH.pack(len(body)) + body

    def send_encoded(self, frame: bytes) -> None:
        """Send a frame made by `encode`."""
        self._socket.sendall(frame)

    def has_message(self, timeout_s: float) -> bool:
        """Whether a message, or the end of the peer, comes within so long."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def receive(self) -> Any:
        """Block until a message arrives. Raises EOFError when the peer has closed or died."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(length))

    def _read(self, count: int) -> bytes:
        chunks = []
        while count:
            try:
                chunk = self._socket.recv(count)
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise EOFError
            chunks.append(chunk)
            count -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        self._socket.close()
