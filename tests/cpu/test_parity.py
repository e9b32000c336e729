"""Every layout, on every number of ranks, against Hugging Face transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splash.core.errors import ConfigError
from splash.core.layout import LAYOUTS, check_layout
from splash.model.config import load_model_config
from tests.cpu.group import run_group
from tests.cpu.model_programs import geometry_for

LOGITS_TOLERANCE = 1e-4  # relative, in float32
LENGTHS = (300, 1, 17, 64)


@cache
def _oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
def _reference(path: Path, prompt: tuple[int, ...], count: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits that chose them, from transformers."""
    oracle = _oracle(path)
    with torch.no_grad():
        output = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return output.sequences[0, len(prompt) :].tolist(), torch.stack(output.logits, dim=1)[0].numpy()


def _usable(path: Path, ranks: int) -> list[str]:
    num_heads = load_model_config(path).spec.num_heads
    usable = []
    for name, layout in LAYOUTS.items():
        try:
            check_layout(layout, num_heads, ranks)
        except ConfigError:
            continue
        usable.append(name)
    return usable


def _prompts(path: Path, lengths: tuple[int, ...], seed: int = 0) -> list[tuple[int, ...]]:
    vocab = load_model_config(path).spec.vocab_size
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(0, vocab, length).tolist()) for length in lengths]


def _check(
    path: Path, ranks: int, layouts: list[str], prompts: list[tuple[int, ...]], count: int, budget: int, page_size: int
) -> dict[str, Any]:
    counts = [count + number for number in range(len(prompts))]
    pages = sum(-(-(len(prompt) + count) // page_size) + 1 for prompt, count in zip(prompts, counts, strict=True))
    geometry = geometry_for(str(path), ranks, page_size, pages)
    results: dict[str, Any] = run_group(
        "tests.cpu.model_programs:generate",
        ranks,
        {
            "model": str(path),
            "geometry": geometry,
            "layouts": layouts,
            "prompts": prompts,
            "max_tokens": counts,
            "budget": budget,
        },
        num_layers=geometry.spec.num_layers,
        geometry=geometry,
        timeout_s=240.0,
    )[0]
    for name in layouts:
        for number, prompt in enumerate(prompts):
            tokens, logits = _reference(path, prompt, counts[number])
            where = f"layout {name}, {ranks} ranks, budget {budget}, prompt of {len(prompt)}"
            error = np.linalg.norm(results[name]["logits"][number] - logits, axis=1) / np.linalg.norm(logits, axis=1)
            assert error.max() < LOGITS_TOLERANCE, f"{where}: logits differ by {error.max():.2e} at {error.argmax()}"
            assert results[name]["tokens"][number] == tokens, where
        assert results[name]["pages_back"], f"layout {name}: pages were lost"
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["base", "no_q_lora", "odd", "wide"])
def test_layouts_match_transformers(tiny_checkpoint: Callable[[str], Path], name: str, ranks: int) -> None:
    """Mixed lengths in one batch, prefill chunks beside decodes, 64 greedy tokens and more of one shape of model."""
    path, count = tiny_checkpoint(name), 64 if name == "base" else 20
    _check(path, ranks, _usable(path, ranks), _prompts(path, LENGTHS), count=count, budget=77, page_size=16)


@pytest.mark.parametrize("budget", [16, 33, 512])
def test_chunking_changes_nothing(tiny_checkpoint: Callable[[str], Path], budget: int) -> None:
    path = tiny_checkpoint("base")
    _check(path, 2, list(LAYOUTS), _prompts(path, (200, 3, 90), seed=1), count=8, budget=budget, page_size=32)


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_size_changes_nothing(tiny_checkpoint: Callable[[str], Path], page_size: int) -> None:
    path = tiny_checkpoint("odd")
    _check(path, 3, list(LAYOUTS), _prompts(path, (70, 2, 64), seed=2), count=6, budget=50, page_size=page_size)


def test_one_request_leaves_ranks_idle(tiny_checkpoint: Callable[[str], Path]) -> None:
    path = tiny_checkpoint("base")
    _check(path, 4, list(LAYOUTS), _prompts(path, (40,), seed=3), count=8, budget=64, page_size=16)


def test_preemption_changes_nothing(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Too few pages for all requests at once: some are computed again, and nobody can tell."""
    path = tiny_checkpoint("base")
    prompts = _prompts(path, (60, 50, 40, 30), seed=4)
    counts = [40] * 4
    geometry = geometry_for(str(path), 2, 16, 9)
    results = run_group(
        "tests.cpu.model_programs:generate",
        2,
        {
            "model": str(path),
            "geometry": geometry,
            "layouts": ["tp", "dp"],
            "prompts": prompts,
            "max_tokens": counts,
            "budget": 64,
        },
        num_layers=geometry.spec.num_layers,
        geometry=geometry,
    )[0]
    assert results["dp"]["preemptions"] > 0
    for layout in results.values():
        assert layout["tokens"] == [_reference(path, prompt, 40)[0] for prompt in prompts]


@pytest.mark.parametrize("ranks", [2, 4])
def test_long_prompts(tiny_checkpoint: Callable[[str], Path], ranks: int) -> None:
    """A prompt close to the model's length, beside a short one."""
    path = tiny_checkpoint("wide")
    _check(path, ranks, list(LAYOUTS), _prompts(path, (2000, 100), seed=5), count=8, budget=600, page_size=64)


SCRIBE = Path(str(resources.files("splash"))) / "data" / "scribe"


def _recall_prompt(length: int, seed: int) -> tuple[tuple[int, ...], str]:
    """(prompt of about `length` tokens, answer): nine facts early in running text, and a question about the first."""
    from splash.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(SCRIBE)
    generator = np.random.default_rng(seed)
    names = ["Moses", "Aaron", "Ruth", "Esther", "Daniel", "Judah", "Joseph", "Simon", "Levi"]
    values = [f"{value:05d}" for value in generator.integers(10_000, 100_000, len(names))]
    facts = "".join(f" The number of {name} is {value}." for name, value in zip(names, values, strict=True))
    filler = tokenizer.encode(" And it came to pass in those days, that the children of Israel went up to the city.")
    question = tokenizer.encode(" What is the number of Moses?")
    prompt = tokenizer.encode(facts)
    while len(prompt) + len(filler) + len(question) < length:
        prompt += filler
    return (*prompt, *question), f" {values[0]}."


@pytest.mark.parametrize(
    ("ranks", "layouts", "length"),
    [(1, ("tp",), 1500), (2, tuple(LAYOUTS), 4000), (3, ("dp", "cp"), 1500), (4, ("dop", "dcp", "cp"), 1500)],
)
def test_the_shipped_model_recalls_across_4000_tokens(ranks: int, layouts: tuple[str, ...], length: int) -> None:
    """Logits and tokens equal transformers', and the answer is right, which a damaged page would show."""
    from splash.engine.tokenizer import Tokenizer

    asked = [_recall_prompt(*each) for each in ((length, 0), (700, 1))]
    prompts = [prompt for prompt, _ in asked]
    results = _check(SCRIBE, ranks, list(layouts), prompts, count=7, budget=1024, page_size=64)
    tokenizer = Tokenizer.load(SCRIBE)
    for name in layouts:
        for (_, answer), tokens in zip(asked, results[name]["tokens"], strict=True):
            assert tokenizer.decode(tokens).startswith(answer)


def test_the_shipped_model_writes_as_transformers_does() -> None:
    from splash.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(SCRIBE)
    prompts = [
        tuple(tokenizer.encode(text)) for text in ("And God said", "Moses", "The kings of the earth and all people")
    ]
    _check(SCRIBE, 2, list(LAYOUTS), prompts, count=32, budget=128, page_size=64)
