"""What the CPU says about the shipped model: the oracle of the tests here, asked once a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from splash.model.config import resolve_model_path
from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for
from tests.cpu.replica import Job, Limits
from tests.cpu.switch_cases import run

MODEL = str(resolve_model_path("builtin:scribe"))
PAGE_SIZE = 64


def generate(
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    layouts: Sequence[str],
    ranks: int,
    budget: int,
    dtype: str = "float32",
    model: str = MODEL,
    page_size: int = PAGE_SIZE,
    graph_rows: int = 0,
    ahead: bool = False,
    **kind: Any,
) -> dict[str, Any]:
    """Greedy generation by a group, as rank 0 sees it."""
    pages = sum(-(-(len(p) + count) // page_size) + 1 for p, count in zip(prompts, counts, strict=True))
    geometry = geometry_for(model, ranks, page_size, pages, dtype)
    results: dict[str, Any] = run_group(
        "tests.cpu.model_programs:generate",
        ranks,
        {
            "model": model,
            "geometry": geometry,
            "layouts": layouts,
            "prompts": prompts,
            "max_tokens": counts,
            "budget": budget,
            "dtype": dtype,
            "graph_rows": graph_rows,
            "ahead": ahead,
        },
        num_layers=geometry.spec.num_layers,
        geometry=geometry,
        timeout_s=300.0,
        collective_timeout_s=60.0,
        **kind,
    )[0]
    return results


@pytest.fixture(scope="session")
def oracle() -> Callable[[Sequence[Job]], dict[int, list[int]]]:
    """Greedy tokens of jobs on one rank of the CPU, with nobody switching."""
    known: dict[tuple[Job, ...], dict[int, list[int]]] = {}

    def tokens(jobs: Sequence[Job]) -> dict[int, list[int]]:
        key = tuple(jobs)
        if key not in known:
            limits = Limits(budget=512, max_num_seqs=32, prefix_cache=False)
            known[key] = run(MODEL, "serve", 1, 600, {"layout": "tp", "jobs": key, "limits": limits})[0]["tokens"]
        return known[key]

    return tokens
