"""Decode steps as graphs, on a platform that records by remembering what to run: padding, fixed inputs, idle ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splash.core.layout import LAYOUTS, Rows
from splash.core.memory import ArenaGeometry
from splash.core.step import Query, StepPlan
from splash.engine.graphs import buckets_for, padded_counts
from splash.layouts.rows import step_rows
from splash.layouts.tables import PageTables
from splash.platform.base import AttentionBackend, AttentionBatch, CapturableAttention, Graph, Graphs, QueryShape, Rank
from splash.scheduler.load import StepLoad
from tests.cpu import model_programs
from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for
from tests.pure.test_cost_model import tiny_model

_T = TypeVar("_T")


class Buffers:
    """Holds the batch that was loaded last."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.max_rows, self.max_pages = max_rows, max_pages
        self.batch: AttentionBatch | None = None

    def load(self, batch: AttentionBatch) -> None:
        assert len(batch.row_positions) == self.max_rows and len(batch.slots) <= self.max_pages
        self.batch = dataclasses.replace(batch, device_state={})


class RecordedAttention(AttentionBackend):
    """The CPU's attention, to whatever the buffers of a batch hold."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner

    def attend(self, q: torch.Tensor, pages: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int) -> Any:
        bound = batch.device_state.get("bound")
        return self.inner.attend(q, pages, bound.batch if isinstance(bound, Buffers) else batch, scale, value_dim)

    def attend_expanded(self, *arguments: Any) -> torch.Tensor:
        return self.inner.attend_expanded(*arguments)

    def buffers(self, max_rows: int, max_pages: int, shape: QueryShape) -> Buffers:
        return Buffers(max_rows, max_pages)

    def bind(self, batch: AttentionBatch, buffers: Buffers) -> None:
        batch.device_state["bound"] = buffers


class Recording(Graph):
    """Runs again what was captured, into the same result."""

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        again = self.work()
        if self.result is not None:
            with torch.inference_mode():
                self.result.copy_(again)


class Recorder(Graphs):
    def __init__(self, attention: CapturableAttention) -> None:
        self.attention = attention

    def capture(self, work: Callable[[], _T]) -> tuple[Graph, _T]:
        result = work()
        return Recording(work, result), result

    def clear(self) -> None:
        """Nothing is held."""


def generate(rank: Rank, **arguments: Any) -> dict[str, Any]:
    """`model_programs.generate` on a rank that records."""
    attention = RecordedAttention(rank.attention)
    return model_programs.generate(
        dataclasses.replace(rank, attention=attention, graphs=Recorder(attention)), **arguments
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_graphs_change_nothing(tiny_checkpoint: Callable[[str], Path], ranks: int) -> None:
    """More requests than the largest graph at first, none left on some ranks in the end, tokens known a step later."""
    path = str(tiny_checkpoint("base"))
    prompts = [tuple(range(5, 5 + length)) for length in (40, 3, 17, 1, 25, 60)]
    counts = (11, 4, 16, 7, 5, 13)
    geometry: ArenaGeometry = geometry_for(path, ranks, 16, 60)
    arguments = {
        "model": path,
        "geometry": geometry,
        "layouts": list(LAYOUTS),
        "prompts": prompts,
        "max_tokens": counts,
        "budget": 64,
    }
    kind = {"num_layers": geometry.spec.num_layers, "geometry": geometry, "timeout_s": 200.0}
    eager = run_group("tests.cpu.model_programs:generate", ranks, arguments, **kind)[0]
    graphs = run_group("tests.cpu.test_graphs:generate", ranks, {**arguments, "graph_rows": 4, "ahead": True}, **kind)[
        0
    ]
    for name in LAYOUTS:
        assert graphs[name]["tokens"] == eager[name]["tokens"], name
        for got, want in zip(graphs[name]["logits"], eager[name]["logits"], strict=True):
            assert np.abs(got - want).max() < 1e-4
        assert 0 < graphs[name]["replayed"] < graphs[name]["steps"], name
        assert eager[name]["replayed"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_with_short_prompts_are_replayed(tiny_checkpoint: Callable[[str], Path], ranks: int) -> None:
    """All of them where no step has more rows than were recorded: prompts at once and in chunks, and the decodes."""
    path = str(tiny_checkpoint("base"))
    prompts = [tuple(range(5, 5 + length)) for length in (7, 3, 20)]
    geometry: ArenaGeometry = geometry_for(path, ranks, 16, 60)
    arguments = {"model": path, "geometry": geometry, "layouts": list(LAYOUTS), "prompts": prompts}
    arguments |= {"max_tokens": (6, 9, 4), "budget": 8}
    kind = {"num_layers": geometry.spec.num_layers, "geometry": geometry, "timeout_s": 200.0}
    eager = run_group("tests.cpu.model_programs:generate", ranks, arguments, **kind)[0]
    graphs = run_group("tests.cpu.test_graphs:generate", ranks, {**arguments, "graph_rows": 8}, **kind)[0]
    for name in LAYOUTS:
        assert graphs[name]["tokens"] == eager[name]["tokens"], name
        for got, want in zip(graphs[name]["logits"], eager[name]["logits"], strict=True):
            assert np.abs(got - want).max() < 1e-4
        assert graphs[name]["replayed"] == graphs[name]["steps"] > 0, name


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), most=st.integers(1, 300))
def test_rows_fit_the_smallest_graph_that_has_room(counts: Sequence[int], most: int) -> None:
    buckets = buckets_for(most)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == min(most, 256)
    for layout in LAYOUTS.values():
        padded = padded_counts(counts, layout, buckets)
        if padded is None:
            assert sum(counts) > buckets[-1]
            continue
        assert sum(padded) >= sum(counts) and max(padded) in buckets
        if layout.rows is Rows.SPLIT:
            assert all(count <= room for count, room in zip(counts, padded, strict=True))


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    ranks=st.sampled_from([1, 2, 4]),
    most=st.integers(1, 300) | st.integers(1, 12),
)
def test_the_cost_model_knows_which_steps_there_are_graphs_for(owners: list[int], ranks: int, most: int) -> None:
    """As many rows of every rank where rows or pages are with their owner, as many in all elsewhere."""
    queries = [Query(index, 0, (1,), owner % ranks, True, ((0,) * ranks,)) for index, owner in enumerate(owners)]
    queries.sort(key=lambda query: query.owner)
    model = tiny_model(ranks, graph_rows=most)
    for name, layout in LAYOUTS.items():
        plan = StepPlan(0, 0, name, tuple(queries))
        rows = step_rows(plan, layout, 0, ranks, 4, PageTables(ranks))
        has_graph = padded_counts(rows.counts_T, layout, buckets_for(most)) is not None
        assert model.runs_as_graph(layout, StepLoad.of_plan(plan, ranks)) == has_graph, name
