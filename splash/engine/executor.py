"""LocalGroup: carries out steps with one process a rank on this host."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from splash.core import errors
from splash.core.errors import SplashError, WorkerError
from splash.core.memory import ArenaGeometry
from splash.engine.config import EngineConfig
from splash.engine.messages import Channel, Failure, FromRank, Launch, Ready, Result, Run
from splash.engine.progress import ProgressBoard
from splash.platform.base import Platform
from splash.switch.orders import CopyAhead, Vote

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 5.0
WORKER = "splash.engine.worker"  # the program of a rank's process
COLLECTIVE_SHARE = 0.8  # of the step timeout, so that the rank that waits can say for whom


class LocalGroup:
    """An executor that is a group of rank processes on this host. With `async_scheduling` it takes two steps at a time.

    Each rank has one end of a socket pair, so a rank learns of the launcher's death, and the launcher of a rank's, as
    end of file. Ranks run in a session of their own: a terminal's Ctrl-C reaches only the launcher.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        model_config: Mapping[str, Any],
        platform: Platform,
        ranks: int,
        geometry: ArenaGeometry,
        async_scheduling: bool = False,
    ) -> None:
        self._timeout_s = config.step_timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._config = config
        self._model_path = model_path
        self._model_config = json.dumps(dict(model_config))
        self._platform = platform
        self._ranks = ranks
        self._geometry = geometry
        self._max_model_len = 0
        self._async_scheduling = async_scheduling
        self._open()

    def _open(self) -> None:
        layers = self._geometry.spec.num_layers
        self._board_fd = ProgressBoard.create(self._ranks)
        self._board = ProgressBoard(self._board_fd, self._ranks)
        self._num_collected = 0
        self._results: deque[Result] = deque()
        self._votes: list[Vote] = []
        self._handle = self._platform.create_group(self._ranks, layers, self._geometry, self._config.attention.backend)

    def start(self, max_model_len: int) -> list[Ready]:
        """Start the ranks in the configuration's layout and wait until all are ready.

        Returns:
            what each rank says of itself, by rank.

        Raises:
            SplashError: what a rank failed with, of the same class.
        """
        self._max_model_len = max_model_len
        return self._start(self._config.layout)

    def restart(self, layout: str) -> None:
        for process in self._processes:
            process.kill()
        self.close()
        self._open()
        self._start(layout)

    def _start(self, layout: str) -> list[Ready]:
        self._poller = select.poll()
        self._rank_of: dict[int, int] = {}
        try:
            for rank in range(self._ranks):
                self._spawn(rank, layout)
            ready: dict[int, Ready] = {}
            deadline = time.monotonic() + START_TIMEOUT_S
            while len(ready) < self._ranks:
                message = self._next_message(deadline, lambda: _late(set(range(self._ranks)) - set(ready)))
                assert isinstance(message, Ready)
                ready[message.rank] = message
        except BaseException:
            self.close()
            raise
        return [ready[rank] for rank in range(self._ranks)]

    def _spawn(self, rank: int, layout: str) -> None:
        ours, theirs = socket.socketpair()
        seconds, fraction = divmod(self._timeout_s, 1)  # a rank that hangs with a full socket must not hold up this one
        timeout = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        environment = {**os.environ, **self._platform.rank_environment(self._ranks)}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), self._board_fd, *self._handle.fds),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes.append(process)
        channel = Channel(ours, FromRank)
        self._channels.append(channel)
        self._rank_of[channel.fileno()] = rank
        self._poller.register(channel.fileno(), select.POLLIN)
        config = self._config
        channel.send(
            Launch(
                rank=rank,
                ranks=self._ranks,
                platform=self._platform.name,
                group=dict(self._handle.info),
                model=self._model_path,
                model_config=self._model_config,
                load_format=config.load_format,
                dtype=config.dtype,
                layout=layout,
                page_size=config.page_size,
                num_slots=self._geometry.num_slots,
                max_model_len=self._max_model_len,
                graph_rows=config.graph_rows,
                progress_fd=self._board_fd,
                collective_timeout_s=self._timeout_s * COLLECTIVE_SHARE,
                async_scheduling=self._async_scheduling,
            )
        )

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def submit(self, run: Run) -> None:
        self._send(run)

    def copy_ahead(self, order: CopyAhead) -> None:
        self._send(order)

    def _send(self, message: Run | CopyAhead) -> None:
        frame = Channel.encode(message)
        for rank, channel in enumerate(self._channels):
            try:
                channel.send_encoded(frame)
            except BlockingIOError:
                raise WorkerError(
                    f"no progress within {self._timeout_s:g} s: rank {rank} reads nothing", rank
                ) from None
            except OSError:
                raise self._died(rank) from None

    def collect(self) -> Result:
        deadline = time.monotonic() + self._timeout_s
        while not self._results:
            self._take(deadline, self._held_up)
        self._num_collected += 1
        return self._results.popleft()

    def votes(self) -> list[Vote]:
        deadline = time.monotonic() + self._timeout_s
        while len(self._votes) < self._ranks:
            self._take(deadline, self._not_voted)
        votes, self._votes = self._votes, []
        return votes

    def _take(self, deadline: float, late: Callable[[], WorkerError]) -> None:
        """Wait for a message and keep it for whoever asks for its kind."""
        message = self._next_message(deadline, late)
        if isinstance(message, Vote):
            self._votes.append(message)
        else:
            assert isinstance(message, Result)
            self._results.append(message)

    def check(self) -> None:
        if self._poller.poll(0):
            self._next_message(time.monotonic(), self._held_up)
            raise AssertionError("a rank spoke without being asked")

    def _next_message(self, deadline: float, late: Callable[[], WorkerError]) -> Ready | Result | Vote:
        events = self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            raise late()
        for fd, _ in events:
            rank = self._rank_of[fd]
            try:
                message = self._channels[rank].receive()
            except EOFError:
                raise self._died(rank) from None
            if isinstance(message, Failure):
                raise _revive(message)
            assert isinstance(message, Ready | Result | Vote)
            return message
        raise AssertionError("unreachable")

    def _held_up(self) -> WorkerError:
        step = self._num_collected + 1
        behind = self._board.behind(step)
        who = ", ".join(f"rank {rank}" for rank in behind)
        return WorkerError(
            f"no progress within {self._timeout_s:g} s: step {step} is held up by {who}",
            behind[0] if len(behind) == 1 else None,
        )

    def _not_voted(self) -> WorkerError:
        missing = sorted(set(range(self._ranks)) - {vote.rank for vote in self._votes})
        who = ", ".join(f"rank {rank}" for rank in missing)
        return WorkerError(
            f"no progress within {self._timeout_s:g} s: a switch is held up by {who}",
            missing[0] if len(missing) == 1 else None,
        )

    def _died(self, rank: int) -> WorkerError:
        try:
            code = self._processes[rank].wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return WorkerError(f"rank {rank} closed its socket but did not exit", rank)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return WorkerError(f"rank {rank} {how}", rank)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._channels.clear()
        self._processes.clear()
        self._handle.close()
        if self._board_fd >= 0:
            os.close(self._board_fd)
            self._board_fd = -1


def _late(ranks: Collection[int]) -> WorkerError:
    return WorkerError(f"no progress within the timeout; ranks that are not ready: {set(ranks)}")


def _revive(failure: Failure) -> SplashError:
    """The exception that a rank failed with: of its own class where that is one of ours and takes just a message."""
    text = f"rank {failure.rank}: {failure.message}"
    if failure.kind in ("CheckpointError", "CapacityError", "PlatformUnavailable"):
        kind: type[SplashError] = getattr(errors, failure.kind)
        return kind(failure.message)
    if failure.kind == "WorkerError":
        return WorkerError(text, failure.blamed)
    return WorkerError(f"rank {failure.rank} failed with {failure.kind}: {failure.message}", failure.rank)
