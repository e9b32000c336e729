"""Run the points of a sweep: measured ones one at a time and alone, simulated ones beside each other.

Rows are kept as they come and stand in the order of the points at the end, whatever the number of processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, Protocol

from splash.core.errors import CapacityError, ConfigError, RequestError, WorkerError
from splash.sweep.measure import Basis, Bench, basis_of, engine_config
from splash.sweep.outcome import figures, fitting, identity
from splash.sweep.points import Point, RunSettings
from splash.sweep.simulate import run_simulated
from splash.sweep.store import Row, RowStore
from splash.workload import Requests

# What says that a point cannot be served as it is, which a row reports; anything else ends the sweep.
REFUSALS = (CapacityError, ConfigError, RequestError)


class Watcher(Protocol):
    """Is told how a sweep goes."""

    def began(self, total: int, known: int) -> None:
        """`total` points, `known` of which have rows already."""

    def advanced(self, label: str, share: float) -> None:
        """The point that is measured has come so far, 0 to 1."""

    def finished(self, row: Row) -> None:
        """A row has been added."""


def run_sweep(run: RunSettings, points: Sequence[Point], watcher: Watcher) -> list[Row]:
    """Run every point that has no row yet, and return the rows of all in order.

    Raises:
        ConfigError: a point is to be measured and cannot be, or the folder cannot be used.
        WorkerError: a rank, or a process that simulated, died. Rows before are kept.
    """
    bases = [basis_of(point) for point in points]
    keys = [key_of(point, basis) for point, basis in zip(points, bases, strict=True)]
    store = RowStore(run.folder, run.fresh)
    finished: Sequence[str] = ()
    try:
        missing = {key: number for number, key in enumerate(keys) if store.get(key) is None}
        watcher.began(len(set(keys)), len(set(keys)) - len(missing))
        work = [(points[number], bases[number], key) for key, number in missing.items()]
        with contextlib.closing(_rows(work, run.workers, watcher)) as rows_to_come:
            for row in rows_to_come:
                store.add(row)
                watcher.finished(row)
        finished = keys
    finally:
        store.close(finished)
    rows = [store.get(key) for key in dict.fromkeys(keys)]
    return [row for row in rows if row is not None]


def key_of(point: Point, basis: Basis) -> str:
    """Names a row: what decides its figures, and for measured ones the device as well."""
    device = f"-{basis.why}" if basis.name == "measured" else ""
    return f"{point.grid}-{basis.name}{device}-{point.digest[:16]}"


def _rows(work: Sequence[tuple[Point, Basis, str]], workers: int, watcher: Watcher) -> Generator[Row, None, None]:
    """Simulated points first, as they finish, then measured ones: nothing runs beside a measurement."""
    simulated = [item for item in work if item[1].name == "simulated"]
    measured = [item for item in work if item[1].name == "measured"]
    if workers == 1 or len(simulated) < 2:
        yield from map(_simulated_row, simulated)
    else:
        yield from _side_by_side(simulated, workers)
    # Points of one engine follow each other, in the order in which engines are first asked for.
    engines = {engine_config(point): number for number, (point, _, _) in reversed(list(enumerate(measured)))}
    with Bench() as bench:
        for point, basis, key in sorted(measured, key=lambda item: engines[engine_config(item[0])]):

            def measure(requests: Requests, point: Point = point) -> dict[str, Any]:
                outcome = bench.run(point, requests, lambda share: watcher.advanced(point.label, share))
                return figures(outcome, requests)

            yield _row(point, basis, key, measure)


def _simulated_row(item: tuple[Point, Basis, str]) -> Row:
    point, basis, key = item
    return _row(point, basis, key, lambda requests: figures(run_simulated(point, requests), requests))


def _row(point: Point, basis: Basis, key: str, serve: Callable[[Requests], dict[str, Any]]) -> Row:
    requests = point.workload.requests()
    row = {"key": key, **identity(point, requests), "basis": basis.name, "why": basis.why, "status": "ok"}
    try:
        row |= fitting(point, row["batch"])
        row |= serve(requests)
    except REFUSALS as error:
        row |= {"status": "infeasible", "reason": str(error)}
    return row


def _side_by_side(work: Sequence[tuple[Point, Basis, str]], workers: int) -> Generator[Row, None, None]:
    context = multiprocessing.get_context("spawn")
    leash, hand = context.Pipe(duplex=False)  # closing `hand`, or dying with it, ends the processes at once
    with concurrent.futures.ProcessPoolExecutor(workers, context, _obey, (leash,)) as pool:
        try:
            futures = [pool.submit(_simulated_row, item) for item in work]
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        except BaseException as error:
            hand.close()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise WorkerError("a process that simulated points died; the same command goes on with them") from None
            raise


def _obey(leash: Connection) -> None:
    """In a process of the pool: interruptions are the parent's to handle, and what ends it ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        with contextlib.suppress(OSError):
            leash.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
