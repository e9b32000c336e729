"""Every layout on GPUs says what the CPU says: the same tokens in float32, and logits as close as bfloat16 allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from splash.core.layout import LAYOUTS
from splash.model.config import load_model_config
from tests.gpu.conftest import MODEL, generate

pytestmark = pytest.mark.gpu
LENGTHS, COUNTS = (300, 3, 64, 130, 1, 77), (20, 24, 22, 20, 30, 21)
BF16_TOLERANCE = 2e-2  # of a row of logits, after four layers of products that are rounded to 8 bits


@cache
def _prompts() -> tuple[tuple[int, ...], ...]:
    generator = np.random.default_rng(7)
    vocab = load_model_config(MODEL).spec.vocab_size
    return tuple(tuple(generator.integers(5, vocab, length).tolist()) for length in LENGTHS)


@cache
def _oracle() -> dict[str, Any]:
    return generate(_prompts(), COUNTS, ["tp"], 1, 512)["tp"]


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_float32_says_the_same_tokens(ranks: int, attention: str) -> None:
    """Chunks beside decodes, ranks without rows, whatever attends."""
    found = generate(_prompts(), COUNTS, list(LAYOUTS), ranks, 150, platform="cuda", attention=attention)
    for name, result in found.items():
        assert result["tokens"] == _oracle()["tokens"], name
        assert result["pages_back"], name
        for got, want in zip(result["logits"], _oracle()["logits"], strict=True):
            error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
            assert error.max() < 1e-4, f"{name}: {error.max():.2e}"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bfloat16_is_as_close_as_its_precision(ranks: int) -> None:
    """First tokens only: after one that differs the texts part."""
    found = generate(_prompts(), [1] * len(COUNTS), list(LAYOUTS), ranks, 150, "bfloat16", platform="cuda")
    for name, result in found.items():
        for got, want in zip(result["logits"], _oracle()["logits"], strict=True):
            error = np.linalg.norm(got[0] - want[0]) / np.linalg.norm(want[0])
            assert error < BF16_TOLERANCE, f"{name}: {error:.2e}"


def test_one_request_leaves_ranks_without_rows() -> None:
    found = generate(_prompts()[:1], COUNTS[:1], list(LAYOUTS), 4, 64, platform="cuda")
    for name, result in found.items():
        assert result["tokens"] == _oracle()["tokens"][:1], name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens_reach_the_next_step_without_the_host(ranks: int) -> None:
    """Into graphs where every rank has a GPU of its own, and into steps without them."""
    found = generate(_prompts(), COUNTS, list(LAYOUTS), ranks, 150, platform="cuda", graph_rows=8, ahead=True)
    for name, result in found.items():
        assert result["tokens"] == _oracle()["tokens"], name
        assert result["pages_back"], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_say_what_steps_without_them_say(dtype: str) -> None:
    """Batches of a graph's size and between two."""
    kind = {"platform": "cuda", "dtype": dtype}
    eager = generate(_prompts(), COUNTS, list(LAYOUTS), 1, 150, **kind)
    graphs = generate(_prompts(), COUNTS, list(LAYOUTS), 1, 150, graph_rows=8, **kind)
    for name in LAYOUTS:
        assert 2 * graphs[name]["replayed"] > graphs[name]["steps"] and eager[name]["replayed"] == 0, name
        assert dtype != "float32" or graphs[name]["tokens"] == _oracle()["tokens"], name
        for number, (got, want) in enumerate(zip(graphs[name]["logits"], eager[name]["logits"], strict=True)):
            # Other numbers of rows are other products in bfloat16: texts may part where two tokens are as likely.
            pairs = zip(graphs[name]["tokens"][number], eager[name]["tokens"][number], strict=True)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(want) - 1) + 1
            error = np.linalg.norm(got[:same] - want[:same], axis=1) / np.linalg.norm(want[:same], axis=1)
            assert error.max() < (1e-4 if dtype == "float32" else BF16_TOLERANCE), f"{name}: {error.max():.2e}"
