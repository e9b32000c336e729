"""Programs for `run_group` that serve a model: every rank schedules alike, and rank 0 tells what it sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from splash.core.layout import LAYOUTS
from splash.core.memory import ArenaGeometry
from splash.core.request import SamplingParams
from splash.core.spec import DTYPE_BYTES, kv_format
from splash.core.step import StepOutput, StepPlan
from splash.engine.runner import ModelRunner
from splash.model.config import load_model_config
from splash.platform.base import Rank
from splash.scheduler.config import SchedulerConfig
from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.scheduler import Scheduler


def geometry_for(model: str, ranks: int, page_size: int, num_pages: int, dtype: str = "float32") -> ArenaGeometry:
    """Arenas with room for the weights and `num_pages` pages."""
    spec = load_model_config(model).spec
    kv, weight_bytes = kv_format(spec, dtype), DTYPE_BYTES[dtype]
    weights = ArenaGeometry(spec, kv, page_size, weight_bytes, ranks, 1 << 40).num_weight_slots
    return ArenaGeometry(spec, kv, page_size, weight_bytes, ranks, weights + num_pages)


def generate(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    layouts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    budget: int,
    dtype: str = "float32",
    graph_rows: int = 0,
    ahead: bool = False,
) -> dict[str, Any]:
    """Greedy generation in each of `layouts`, one after another, with decode steps of `graph_rows` rows as graphs. With
    `ahead`, each step is planned and run before the tokens of the one before are known.

    Returns, by layout: `tokens` a prompt; on rank 0 `logits` a prompt, float32 [max_tokens, V]; `pages_back`, whether
    every page was free again at the end; `steps`; and how many of them were `replayed` as graphs.
    """
    torch.set_grad_enabled(False)
    shared = (prompts, max_tokens, budget, dtype, graph_rows, ahead)
    return {name: _generate(rank, model, geometry, name, *shared) for name in layouts}


def _generate(
    rank: Rank,
    model: str,
    geometry: ArenaGeometry,
    layout: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    budget: int,
    dtype: str,
    graph_rows: int,
    ahead: bool,
) -> dict[str, Any]:
    max_model_len = max(len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True))
    runner = ModelRunner(model, geometry, rank, layout, dtype, max_model_len, (), graph_rows=graph_rows)
    config = SchedulerConfig(len(prompts), budget, max_model_len, frozenset(), geometry.page_size)
    scheduler = Scheduler(config, PrefixCache.of_geometry(geometry, LAYOUTS[layout]))
    for number, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
        scheduler.add(number, prompt, SamplingParams(max_tokens=count, temperature=0.0), 0)
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    steps = 0
    in_flight: deque[StepOutput] = deque()
    while scheduler.has_work:
        if in_flight:
            scheduler.foresee()
        plan = scheduler.schedule()
        if plan is not None:
            steps += 1
            plan = msgspec.structs.replace(plan, greedy=steps % 2 == 0)  # ranks learn tokens in either way
            output, chosen, scores = _agree(rank, plan, runner)
            runner._last.remember(plan, chosen)
            in_flight.append(output)
            if scores is not None:
                for place, request in enumerate(output.requests):
                    logits[request].append(scores[place].cpu().numpy().copy())
        if plan is None or len(in_flight) > ahead:
            for progress in scheduler.apply(in_flight.popleft()):
                tokens[progress.id].append(progress.token)
    return {
        "tokens": tokens,
        "logits": [np.stack(rows) if rows else None for rows in logits],
        "pages_back": scheduler.pool.num_free == scheduler.pool.num_total,
        "steps": steps,
        "replayed": runner.graph_steps,
        "preemptions": scheduler.num_preemptions,
    }


def _agree(rank: Rank, plan: StepPlan, runner: ModelRunner) -> tuple[StepOutput, Tensor | None, Tensor | None]:
    """The output of a step, on every rank; what the runner may know of its tokens; and on rank 0 the logits."""
    requests = tuple(query.request for query in plan.queries if query.sample)
    scores = runner.scores(plan)
    if scores is None:
        return StepOutput(plan.step, plan.epoch, requests, (), ()), None, None
    logits, known = runner._transformer.gather(scores), runner._transformer.most_likely(scores)
    assert (logits is None) == (rank.rank > 0)
    chosen = known[:0] if logits is None else logits.argmax(dim=-1)
    tokens = rank.comm.all_gather(chosen, [len(requests), *[0] * (rank.size - 1)]).tolist()
    assert tokens == known.tolist()
    output = StepOutput(plan.step, plan.epoch, requests, tuple(tokens), (None,) * len(requests))
    return output, known if plan.greedy or not rank.rank else None, logits
