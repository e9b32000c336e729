"""Real steps of a real group, timed: rows and contexts are chosen, tokens and what the cache holds do not matter."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from splash.core.layout import DP, LAYOUTS, Layout, Projections, check_layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.request import SamplingParams
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.core.step import NO_SLOT, NewRequest, Query, StepPlan
from splash.engine.config import EngineConfig
from splash.engine.executor import LocalGroup
from splash.engine.messages import Run
from splash.model.choice import ModelChoice
from splash.model.config import resolve_model_path
from splash.platform.base import Platform
from splash.scheduler.load import StepLoad


class StepBench:
    """A group that runs the steps it is told to, in any layout. A context manager: leaving ends the ranks.

    The ranks hold all projections, which every layout finds its own in, so pages never lie where weights may be.

    Args:
        model: whose steps.
        load_format: "safetensors", or "dummy" for random weights.
        platform: what to run on.
        ranks: T.
        dtype: "float32" or "bfloat16".
        page_size: token positions a page.
        num_pages: pages that a step may need on a rank.
        timeout_s: longest time of a step.
    """

    def __init__(
        self,
        model: ModelChoice,
        load_format: str,
        platform: Platform,
        ranks: int,
        dtype: str,
        page_size: int,
        num_pages: int,
        timeout_s: float,
    ) -> None:
        contents, spec = model.contents(), model.spec()
        kv, weight_bytes = kv_format(spec, dtype), DTYPE_BYTES[dtype]
        weights = ArenaGeometry(spec, kv, page_size, weight_bytes, ranks, num_slots=1 << 40).num_weight_slots
        self.geometry = ArenaGeometry(spec, kv, page_size, weight_bytes, ranks, weights + num_pages)
        config = EngineConfig(
            model=model.path or model.name,
            load_format=load_format,
            layout=DP.name,
            ranks=ranks,
            dtype=dtype,
            page_size=page_size,
            step_timeout_s=timeout_s,
        )
        directory = model.name if model.path is None else str(resolve_model_path(model.path))
        self._group = LocalGroup(
            config, directory, contents, platform, ranks, self.geometry, async_scheduling=platform.is_queued
        )
        self._runs_ahead = platform.is_queued
        self._group.start(spec.max_position_embeddings)
        self._draw = np.random.default_rng(0)
        self._step = 0
        self._request = 0
        self._release: tuple[int, ...] = ()

    def __enter__(self) -> StepBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.close()

    def layouts(self) -> list[Layout]:
        """The layouts that these ranks can serve in."""
        spec, ranks = self.geometry.spec, self.geometry.ranks
        return [
            layout
            for layout in LAYOUTS.values()
            if layout.projections is Projections.REPLICATED or spec.num_heads % ranks == 0
        ]

    def measure(self, layout: Layout, load: StepLoad, repeats: int = 5) -> float:
        """Median seconds of the step of `load` in `layout`; the first is left out.

        As in the engine: between two answers where steps are queued on a device, each sent while the one before it
        runs; else from sending a step to its answer.

        Raises:
            WorkerError: a rank died, failed or hung.
        """
        check_layout(layout, self.geometry.spec.num_heads, self.geometry.ranks)
        queries, new = self._queries(layout, load)
        bare = [Query(q.request, q.start, q.tokens, q.owner, q.sample) for q in queries]
        times, sent, answered = [], deque([self._submit(layout, queries, new)]), 0.0
        for to_send in range(repeats, -1, -1):
            if to_send and self._runs_ahead:
                sent.append(self._submit(layout, bare, ()))
            self._group.collect()
            before, answered = answered, time.perf_counter()
            times.append(answered - max(before, sent.popleft()))
            if to_send and not self._runs_ahead:
                sent.append(self._submit(layout, bare, ()))
        self._release = tuple(query.request for query in queries)
        return statistics.median(times[1:])

    def _submit(self, layout: Layout, queries: Sequence[Query], new: Sequence[NewRequest]) -> float:
        """Send a step, and say when."""
        plan = StepPlan(self._step, 0, layout.name, tuple(queries), tuple(new), self._release, self._release)
        self._step += 1
        self._release = ()
        now = time.perf_counter()
        self._group.submit(Run(plan))
        return now

    def _queries(self, layout: Layout, load: StepLoad) -> tuple[list[Query], list[NewRequest]]:
        geometry = self.geometry
        # Slots ascend, so that a request's pages lie together, as the engine's allocator prefers too.
        free = [geometry.page_slots(DP, rank)[::-1].tolist() for rank in range(geometry.ranks)]
        queries, new = [], []
        for number, index in enumerate(np.argsort(load.owner_q, kind="stable").tolist()):
            owner, rows, start = (int(column[index]) for column in (load.owner_q, load.rows_q, load.start_q))
            numbers = np.arange(-(-(start + rows) // geometry.page_size))
            held = page_holders(numbers, np.full(len(numbers), owner), layout, geometry.ranks)
            pages = tuple(
                tuple(free[rank].pop() if holds else NO_SLOT for rank, holds in enumerate(row)) for row in held.tolist()
            )
            sample = number < load.num_sampled
            # Different tokens, or a router would send all rows to the same experts.
            tokens = tuple(self._draw.integers(0, geometry.spec.vocab_size, rows).tolist())
            queries.append(Query(self._request, start, tokens, owner, sample, pages))
            new.append(NewRequest(self._request, (1,), SamplingParams(temperature=0.0, ignore_eos=True), 0))
            self._request += 1
        return queries, new
