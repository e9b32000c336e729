"""Memory on a GPU: as many tokens fit as the plan says, and when all are there nothing runs out of memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from splash.core.capacity import capacity
from splash.core.hardware import GIB, Hardware
from splash.core.layout import LAYOUTS
from splash.core.request import SamplingParams
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM
from splash.model.choice import ModelChoice
from splash.model.config import read_model_config
from splash.plan import PlanSettings, make_plan
from splash.platform.cuda.platform import CudaPlatform
from splash.settings import build, compose
from tests.gpu.conftest import MODEL

pytestmark = pytest.mark.gpu
DUMMY: dict[str, Any] = {"hardware": "cuda", "load_format": "dummy", "dtype": "bfloat16", "prefix_cache": False}
RANKS, ROWS, LENGTH, COUNT = 2, 8192, 350, 24  # enough tokens that nobody ends before the last prompt is in


def test_as_many_tokens_fit_as_the_plan_says() -> None:
    """A model of DeepSeek-V3's width in every layout; ranks share the GPU, and with it its memory."""
    overrides = ["model=deepseek_v3", "model.num_layers=4", "model.num_experts=16", "+hardware=h200"]
    config = compose("plan", overrides)
    choice = build(ModelChoice, config["model"], "model.")
    hardware = build(Hardware, config["hardware"], "hardware.")
    share = CudaPlatform().devices()[0].total_bytes / RANKS / GIB
    plan = make_plan(
        PlanSettings(choice, dataclasses.replace(hardware, memory_gib=share), RANKS, "bfloat16", 16, 64, 0.9, "json")
    )
    assert plan.shortage is None and set(plan.capacities) == set(LAYOUTS)
    with LLM(MODEL, model_config=choice.contents(), ranks=RANKS, max_batched_tokens=ROWS, **DUMMY) as llm:
        for name, planned in plan.capacities.items():
            llm.switch(name)
            pages = llm.engine.scheduler.pool.num_total
            found = capacity(llm.engine._geometry, LAYOUTS[name], 16)
            assert min(pages) == found.page_slots, name
            assert abs(found.kv_tokens / planned.kv_tokens - 1) < 0.01, f"{name}: {found} where {planned} was planned"


def test_a_full_cache_leaves_room_for_the_largest_prefill_and_a_switch() -> None:
    """All the memory that is free is given to SPLASH, which fills every layout with chunks of the largest size."""
    import torch

    room = 9 * GIB // 2  # for both ranks: contexts, workspaces and the staging of a switch take most of it
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - room, dtype=torch.uint8, device="cuda")
    model = {**read_model_config(MODEL), "num_hidden_layers": 12}
    generator = np.random.default_rng(0)
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"max_batched_tokens": ROWS, "max_num_seqs": 512, "mem_fraction": 1.0}
    with LLM(MODEL, model_config=model, ranks=RANKS, layout="tp", max_restarts=0, **options, **DUMMY) as llm:
        engine, names = llm.engine, list(LAYOUTS)
        for name, following in zip(names, [*names[1:], names[0]], strict=True):
            llm.switch(name)
            num_requests = capacity(engine._geometry, LAYOUTS[name], 1).kv_tokens // LENGTH + 8
            for number in range(num_requests):
                prompt = tuple(generator.integers(5, model["vocab_size"], LENGTH).tolist())
                engine.add_request(GenerationRequest(f"{name} {number}", prompt, params, 0))
            ended, fullest, switched = 0, 0.0, None
            while ended < num_requests:
                ended += sum(output.finish_reason == "length" for output in engine.step())
                pool = engine.scheduler.pool
                # A page belongs to one rank or to all: where one is full, no more requests come in.
                fullest = max(fullest, 1 - min(n / of for n, of in zip(pool.num_free, pool.num_total, strict=True)))
                if switched is None and fullest > 0.95:
                    switched = engine.switch(following, "blocking")
            assert switched is not None and fullest > 0.95, f"{name} was filled to {fullest:.2f}"
            while engine.switcher.active is not None:
                engine.step()
    assert ballast.numel() == free - room
