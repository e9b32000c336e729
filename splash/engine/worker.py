"""A rank's process: `python -m splash.engine.worker FD`, started by `splash.engine.executor` and by nobody else.

It obeys plans from its socket until the socket closes, which is also how it learns that its launcher is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections import deque
from typing import TYPE_CHECKING

from splash.core.errors import SplashError, WorkerError
from splash.engine.messages import Channel, Failure, Launch, Ready, Result, Run, ToRank
from splash.switch.orders import CopyAhead

if TYPE_CHECKING:
    from splash.engine.progress import ProgressBoard
    from splash.engine.runner import Launched, ModelRunner

PR_SET_PDEATHSIG = 1
POLL_S = 50e-6  # how often the device is asked for a step's end while the next step may come


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends, and stop at once if it already has."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(channel: Channel) -> None:
    """Become the rank that the first message describes, then obey."""
    launch = channel.receive()
    assert isinstance(launch, Launch)
    try:
        _run(channel, launch)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the launcher is gone, or has no more use for this rank
    except BaseException as error:
        if not isinstance(error, SplashError):
            traceback.print_exc()
        blamed = error.rank if isinstance(error, WorkerError) else None
        channel.send(Failure(launch.rank, type(error).__name__, str(error), blamed))
        raise SystemExit(1) from None


def _run(channel: Channel, launch: Launch) -> None:
    import torch

    from splash.core.memory import ArenaGeometry
    from splash.core.spec import DTYPE_BYTES, kv_format
    from splash.engine.collector import keep_from_collector
    from splash.engine.progress import ProgressBoard
    from splash.engine.runner import ModelRunner
    from splash.model.config import parse_model_config
    from splash.platform.registry import get_platform

    torch.set_grad_enabled(False)
    config = parse_model_config(json.loads(launch.model_config), launch.model)
    geometry = ArenaGeometry(
        spec=config.spec,
        kv=kv_format(config.spec, launch.dtype),
        page_size=launch.page_size,
        weight_bytes=DTYPE_BYTES[launch.dtype],
        ranks=launch.ranks,
        num_slots=launch.num_slots,
    )
    group = get_platform(launch.platform).join(launch.group, launch.rank, launch.collective_timeout_s)
    try:
        runner = ModelRunner(
            launch.model,
            geometry,
            group,
            launch.layout,
            launch.dtype,
            launch.max_model_len,
            config.eos_token_ids,
            launch.load_format,
            launch.graph_rows,
        )
        keep_from_collector()
        memory = None if group.memory is None else group.memory()
        channel.send(
            Ready(
                launch.rank,
                runner.weight_bytes,
                runner.graph_bytes,
                runner.graph_seconds,
                0 if memory is None else memory.held_bytes,
                0 if memory is None else memory.device_used_bytes,
            )
        )
        board = ProgressBoard(launch.progress_fd, launch.ranks)
        _obey(channel, runner, board, launch.rank, 2 if launch.async_scheduling else 1)
    finally:
        group.close()


def _obey(channel: Channel, runner: ModelRunner, board: ProgressBoard, rank: int, most: int) -> None:
    """Launch steps as they come, on rank 0 at most so many before the first of them has been answered."""
    launched: deque[Launched] = deque()

    def answer() -> None:
        output, switch = launched.popleft().result()
        board.finish(rank)
        channel.send(Result(output, switch))
        runner.prepare()

    while True:
        if launched and (len(launched) == most or not _comes_before(channel, launched[0])):
            answer()
            continue
        message = channel.receive()
        if isinstance(message, CopyAhead):
            vote = runner.copy_ahead(message)
            if vote is not None:
                channel.send(vote)
            continue
        assert isinstance(message, Run)
        board.receive(rank)
        step = runner.launch(message.plan, message.switch, message.commit, message.copying)
        if rank == 0:
            launched.append(step)
        else:
            board.finish(rank)


def _comes_before(channel: Channel, step: Launched) -> bool:
    """Whether a message comes before a step is over."""
    while not step.is_done():
        if channel.has_message(POLL_S):
            return True
    return False


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Channel(socket.socket(fileno=int(sys.argv[1])), ToRank))


if __name__ == "__main__":
    main()
