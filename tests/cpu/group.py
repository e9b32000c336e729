"""Run a function on every rank of a real group of processes, on the CPU or on GPUs.

    results = run_group("tests.cpu.programs_of_mine:exchange", ranks=4, arguments={"rows": 3})

calls `exchange(rank: Rank, rows=3)` in four processes that share a group and returns what they returned, by rank.
A rank that fails, dies or hangs fails the call with `GroupError`, which says which rank it was and shows its traceback.
Arguments and results travel as pickles between processes of one test run.

All groups of a test session are forked from one process that has imported torch but computed nothing, so that a group
costs milliseconds, not an import of torch a rank. It starts on first use and ends with the session.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing.connection
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[2]


class GroupError(AssertionError):
    """A rank failed, died or hung."""


def run_group(
    target: str,
    ranks: int,
    arguments: Mapping[str, object] | None = None,
    *,
    num_layers: int = 1,
    geometry: object | None = None,
    platform: str = "cpu",
    collectives: str | None = None,
    attention: str = "auto",
    collective_timeout_s: float = 100.0,
    timeout_s: float = 200.0,
) -> list[Any]:
    """Call `target` ("module:function") as `function(rank, **arguments)` on every rank.

    Args:
        target: a function that other processes can import.
        ranks: T.
        arguments: keyword arguments, the same on every rank.
        num_layers: layers of the group's arenas.
        geometry: `ArenaGeometry` of the arenas; a tiny one by default.
        platform: "cpu" or "cuda".
        collectives: "shm" or "gloo", on the CPU.
        attention: the attention backend.
        collective_timeout_s: how long a collective waits for a peer.
        timeout_s: how long all of it may take.

    Returns:
        what the ranks returned, by rank.

    Raises:
        GroupError: a rank raised, died or did not finish in time.
    """
    kind = (platform, collectives, attention)
    job = (target, ranks, dict(arguments or {}), num_layers, geometry, kind, collective_timeout_s, timeout_s)
    connection = _nursery()
    connection.send_bytes(pickle.dumps(job))
    # The nursery enforces the timeout; what is added here covers its import of torch, on a machine that is busy.
    if not connection.poll(timeout_s + 60.0):
        raise GroupError(f"{target}: the process that forks the ranks does not answer")
    results, problems = pickle.loads(connection.recv_bytes())
    if problems:
        raise GroupError(f"{target} on {ranks} ranks:\n" + "\n".join(problems))
    return results


_connection: multiprocessing.connection.Connection | None = None


def _nursery() -> multiprocessing.connection.Connection:
    """The connection to the process that forks the ranks, started on first use."""
    global _connection
    if _connection is None:
        ours, theirs = multiprocessing.Pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cpu.group", str(theirs.fileno())],
            cwd=ROOT,
            # torch must look for GPUs without starting CUDA, which does not survive a fork.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

        def stop() -> None:
            ours.close()
            process.wait(timeout=60.0)

        atexit.register(stop)
        _connection = ours
    return _connection


def _serve(connection: multiprocessing.connection.Connection) -> None:
    """In the nursery: run jobs until the test session closes the connection."""
    import torch  # noqa: F401  so that every fork has it

    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # nothing is left to be done, and taking torch apart takes time
        connection.send_bytes(pickle.dumps(_run(*job)))


def _run(
    target: str,
    ranks: int,
    arguments: dict[str, object],
    num_layers: int,
    geometry: Any,
    kind: tuple[str, Any, str],
    collective_timeout_s: float,
    timeout_s: float,
) -> tuple[list[Any], list[str]]:
    """Fork the ranks and wait for them. Returns (results by rank, what went wrong)."""
    from splash.platform.cpu.platform import CpuPlatform
    from splash.platform.registry import get_platform

    name, collectives, attention = kind
    try:
        importlib.import_module(target.partition(":")[0])  # once, for all the forks to come
    except Exception:
        return [], [traceback.format_exc()]
    platform = CpuPlatform(collectives) if name == "cpu" else get_platform(name)
    try:
        handle = platform.create_group(ranks, num_layers, geometry or _tiny_geometry(ranks), attention)
    except Exception:
        return [], [traceback.format_exc()]
    pids: list[int] = []
    pipes: list[int] = []
    logs: list[BinaryIO] = []
    for rank in range(ranks):
        reader, writer = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  closed below
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _become_rank(platform, handle.info, rank, target, arguments, collective_timeout_s, writer, log)
        os.close(writer)
        pids.append(pid)
        pipes.append(reader)
        logs.append(log)
    handle.close()
    answers = _collect(pipes, pids, time.monotonic() + timeout_s)
    results: list[Any] = [None] * ranks
    problems = []
    for rank, (pid, answer) in enumerate(zip(pids, answers, strict=True)):
        _, status = os.waitpid(pid, 0)
        logs[rank].seek(0)
        output = logs[rank].read().decode(errors="replace").strip()
        logs[rank].close()
        if answer is None:
            problems.append(f"rank {rank} hung: no result within {timeout_s:g} s\n{output}")
        elif not answer:
            problems.append(f"rank {rank} died: {_ending(status)}\n{output}")
        else:
            ok, value = pickle.loads(answer)
            if ok:
                results[rank] = value
            else:
                problems.append(f"rank {rank} failed:\n{value}{output}")
    return results, problems


def _end(pid: int) -> None:
    """End a rank that hangs, and have it write to its log where, if it still can."""
    os.kill(pid, signal.SIGABRT)  # faulthandler says where, and lets it die
    deadline = time.monotonic() + 5.0
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


def _collect(pipes: list[int], pids: list[int], deadline: float) -> list[bytes | None]:
    """All that each rank wrote until it closed its pipe; None for a rank that hung, which is killed."""
    received: list[list[bytes]] = [[] for _ in pipes]
    open_ranks = {fd: rank for rank, fd in enumerate(pipes)}
    poller = select.poll()
    for fd in pipes:
        poller.register(fd, select.POLLIN)
    while open_ranks:
        events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            break
        for fd, _ in events:
            data = os.read(fd, 1 << 20)
            if data:
                received[open_ranks[fd]].append(data)
            else:
                poller.unregister(fd)
                del open_ranks[fd]
    for rank in open_ranks.values():
        _end(pids[rank])
    for fd in pipes:
        os.close(fd)
    hung = set(open_ranks.values())
    return [None if rank in hung else b"".join(parts) for rank, parts in enumerate(received)]


def _become_rank(
    platform: Any,
    info: Mapping[str, Any],
    rank: int,
    target: str,
    arguments: dict[str, object],
    collective_timeout_s: float,
    writer: int,
    log: BinaryIO,
) -> None:
    """In a forked rank: join, call the target, answer, exit."""
    try:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            module, _, function = target.partition(":")
            os.environ.update(platform.rank_environment(info["ranks"]))
            member = platform.join(info, rank, collective_timeout_s)
            answer = pickle.dumps((True, getattr(importlib.import_module(module), function)(member, **arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code} without a result"


def _tiny_geometry(ranks: int) -> Any:
    from splash.core.memory import ArenaGeometry
    from splash.core.spec import ModelSpec, RopeSpec, kv_format

    spec = ModelSpec("test", 1, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())
    return ArenaGeometry(spec, kv_format(spec, "float32"), 16, 4, ranks, num_slots=64)


if __name__ == "__main__":
    _serve(multiprocessing.connection.Connection(int(sys.argv[1])))
