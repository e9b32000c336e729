"""Random weights in the place of a checkpoint."""

from __future__ import annotations

import pytest
import torch

from splash.core.spec import MoeSpec
from splash.model.dummy import DummyCheckpoint
from splash.platform.cpu.kernels import CpuKernels

MOE = MoeSpec(num_experts=32, top_k=4, intermediate_size=8, num_shared_experts=0, num_groups=4, top_k_groups=2)
PREFIX, HIDDEN, ROWS = "model.layers.{}.mlp.gate.", 64, 200


def chosen(same_experts: bool, layer: int) -> set[tuple[int, ...]]:
    """The experts that rows choose together."""
    source = DummyCheckpoint(torch.device("cpu"), torch.bfloat16, same_experts)
    name = PREFIX.format(layer)
    router = source.read(name + "weight", (MOE.num_experts, HIDDEN)).float()
    bias = source.read(name + "e_score_correction_bias", (MOE.num_experts,)).float()
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    experts, _ = CpuKernels().route(rows, router, bias, MOE)
    return {tuple(sorted(row)) for row in experts.tolist()}


def test_rows_choose_experts_by_themselves() -> None:
    together = chosen(False, 0)
    assert len(together) > ROWS // 2 and len({expert for row in together for expert in row}) == MOE.num_experts


@pytest.mark.parametrize("layer", [0, 1])
def test_all_rows_choose_the_same_experts(layer: int) -> None:
    assert len(chosen(True, layer)) == 1


def test_layers_have_favourites_of_their_own() -> None:
    assert chosen(True, 0) != chosen(True, 1)
