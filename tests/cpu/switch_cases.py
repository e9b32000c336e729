"""What the tests of switching share: jobs, how to run them, and what must hold of every run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from splash.core.layout import LAYOUTS
from splash.core.ownership import page_holders, weight_holders
from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for
from tests.cpu.replica import Job

PAGE_SIZE = 16
# Every direction between two of five layouts once, ending where it begins.
CIRCUIT = "tp dp tp cp tp dop tp dcp dp cp dp dop dp dcp cp dop cp dcp dop dcp tp".split()
METHODS = ("blocking", "layerwise", "precopy")
Reference = Callable[[Sequence[Job]], dict[int, list[int]]]


def jobs_of(lengths: Sequence[int], counts: Sequence[int], seed: int = 0) -> tuple[Job, ...]:
    generator = np.random.default_rng(seed)
    prompts = [tuple(generator.integers(5, 512, length).tolist()) for length in lengths]
    return tuple(Job(prompt, count) for prompt, count in zip(prompts, counts, strict=True))


JOBS = jobs_of((150, 1, 17, 64, 90, 33), (40, 60, 30, 44, 25, 52))


def run(
    model: str,
    program: str,
    ranks: int,
    num_pages: int,
    arguments: Mapping[str, object],
    timeout_s: float = 120.0,
    platform: str = "cpu",
    attention: str = "auto",
) -> list[Any]:
    """A program of `switch_programs` on arenas with room for the weights and `num_pages` pages."""
    geometry = geometry_for(model, ranks, PAGE_SIZE, num_pages)
    return run_group(
        f"tests.cpu.switch_programs:{program}",
        ranks,
        {"model": model, "geometry": geometry, **arguments},
        num_layers=geometry.spec.num_layers,
        geometry=geometry,
        platform=platform,
        attention=attention,
        timeout_s=timeout_s,
    )


def check(summary: Mapping[str, Any], expected: Mapping[int, list[int]]) -> None:
    """Outputs are those of the reference, and all pages are back."""
    for id, tokens in summary["tokens"].items():
        assert tokens == expected[id], f"request {id}: {summary['records']}"
    assert summary["pages_back"], summary["records"]
    assert summary["layout"] == summary["pool_layout"]


def check_walk(results: Sequence[Mapping[str, Any]], hops: Sequence[str]) -> None:
    """After every hop of `switch_programs.walk` each rank holds what the layout says, bit for bit as at first."""
    ranks, written = len(results), results[0]["written"]
    first: dict[Any, str] = {}
    for hop, layout in enumerate(hops):
        seen = [result["seen"][hop] for result in results]
        assert {one["layout"] for one in seen} == {layout}, results[0]["records"]
        for rank, one in enumerate(seen):
            groups = np.flatnonzero(weight_holders(LAYOUTS[layout], ranks)[:, rank])
            assert sorted(one["weights"]) == groups.tolist()
            for key, digest in itertools.chain(one["pages"].items(), one["weights"].items()):
                assert first.setdefault(key, digest) == digest, f"{key} on rank {rank} after hop {hop} to {layout}"
        assert hop < 5 or seen[0]["running"]
        for request in seen[0]["running"]:
            positions = written[request]
            numbers = np.arange(-(-positions // PAGE_SIZE))
            owner = next((rank for rank, one in enumerate(seen) if (request, 0) in one["pages"]), 0)
            rule = page_holders(numbers, np.full(len(numbers), owner), LAYOUTS[layout], ranks)
            held = [[(request, int(number)) in one["pages"] for one in seen] for number in numbers]
            assert held == rule.tolist(), f"request {request} in {layout}"
