"""What the tests of switching share: jobs, how to run them, and what must hold of every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for
from tests.cpu.replica import Job

PAGE_SIZE = 16
METHODS = ("blocking", "layerwise", "precopy")
Reference = Callable[[Sequence[Job]], dict[int, list[int]]]


def jobs_of(lengths: Sequence[int], counts: Sequence[int], seed: int = 0) -> tuple[Job, ...]:
    generator = np.random.default_rng(seed)
    prompts = [tuple(generator.integers(5, 512, length).tolist()) for length in lengths]
    return tuple(Job(prompt, count) for prompt, count in zip(prompts, counts, strict=True))


JOBS = jobs_of((150, 1, 17, 64, 90, 33), (40, 60, 30, 44, 25, 52))


JOBS = jobs_of((150, 1, 17, 64, 90, 33), (40, 60, 30, 44, 25, 52))


def run(
    model: str, program: str, ranks: int, num_pages: int, arguments: Mapping[str, object], timeout_s: float = 120.0
) -> list[Any]:
    """A program of `switch_programs` on arenas with room for the weights and `num_pages` pages."""
    geometry = geometry_for(model, ranks, PAGE_SIZE, num_pages)
    return run_group(
        f"tests.cpu.switch_programs:{program}",
        ranks,
        {"model": model, "geometry": geometry, **arguments},
        num_layers=geometry.spec.num_layers,
        geometry=geometry,
        timeout_s=timeout_s,
    )


def check(summary: Mapping[str, Any], expected: Mapping[int, list[int]]) -> None:
    """Outputs are those of the reference, and all pages are back."""
    for id, tokens in summary["tokens"].items():
        assert tokens == expected[id], f"request {id}: {summary['records']}"
    assert summary["pages_back"], summary["records"]
    assert summary["layout"] == summary["pool_layout"]
