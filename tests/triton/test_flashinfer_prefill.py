"""Prompts by FlashInfer: everything but its kernels, which plain attention stands in for here (tests/gpu has them)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splash.platform.cpu.attention import CpuAttention
from splash.platform.cuda.flashinfer_prefill import (
    NOPE_DIM,
    ROTARY_DIM,
    VALUE_DIM,
    FlashInferPrefill,
    RaggedPlan,
    expanding_weights,
    heads_at_once,
)
from tests.cpu.test_attention import PREFILL, Cache, Sequences

LATENT_DIM, PAGE, SCALE = 96, 16, 0.1
HEAD_BYTES = (NOPE_DIM + ROTARY_DIM + VALUE_DIM) * 2


class PlainKernels:
    """Causal attention sequence by sequence in float32; notes how many heads each call had."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.num_planned = 0

    def plan(self, row_starts: np.ndarray, key_starts: np.ndarray, num_heads: int, dtype: torch.dtype) -> RaggedPlan:
        self.num_planned += 1
        empty = torch.empty(0)
        return RaggedPlan(num_heads, None, empty, torch.from_numpy(row_starts), torch.from_numpy(key_starts))

    def run(
        self,
        plan: RaggedPlan,
        q_nhd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_ThV: torch.Tensor,
        out_nhV: torch.Tensor,
        scale: float,
    ) -> None:
        assert plan.num_heads == q_nhd.shape[1] == k_Thd.shape[1] == v_ThV.shape[1] == out_nhV.shape[1]
        self.heads.append(plan.num_heads)
        for sequence in range(len(plan.row_starts) - 1):
            rows = slice(*plan.row_starts[sequence : sequence + 2].tolist())
            keys = slice(*plan.key_starts[sequence : sequence + 2].tolist())
            q, k, v = (part.float().cpu() for part in (q_nhd[rows], k_Thd[keys], v_ThV[keys]))
            scores = torch.einsum("nhd,thd->hnt", q, k) * scale
            ahead = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)).logical_not()
            weights = scores.masked_fill(ahead, -torch.inf).softmax(dim=-1)
            out_nhV[rows] = torch.einsum("hnt,thv->nhv", weights, v).to(out_nhV)


def attend(
    sequences: Sequences, heads: int, budget: int, device: torch.device, ranks: int = 1
) -> tuple[torch.Tensor | None, torch.Tensor, PlainKernels]:
    """What FlashInfer's path makes of the pages of rank 0, what is wanted of all pages, and the kernels it used."""
    cache = Cache(sequences, PAGE, LATENT_DIM + ROTARY_DIM, True, torch.float16)
    num_rows = sum(len(rows) for _, rows in sequences)
    generator = torch.Generator().manual_seed(4)
    q_nHd = torch.randn(num_rows, heads, NOPE_DIM + ROTARY_DIM, generator=generator).half()
    kv_b_HEC = (torch.randn(heads, NOPE_DIM + VALUE_DIM, LATENT_DIM, generator=generator) * LATENT_DIM**-0.5).half()
    want = CpuAttention().attend_expanded(q_nHd, cache.pages_SPK, cache.batch(), kv_b_HEC, SCALE)
    kernels = PlainKernels()
    prefill = FlashInferPrefill(kernels, 4, budget)
    batch = cache.batch(0, ranks)
    for _ in range(2):  # a second layer, which plans nothing
        args = (q_nHd.to(device), cache.pages_SPK.to(device), batch, kv_b_HEC.to(device), SCALE)
        got = prefill.attend(*args)
    return got, want, kernels


@pytest.mark.parametrize(("keys_budget", "heads"), [(1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_heads_in_turns(device: torch.device, keys_budget: int, heads: list[int]) -> None:
    num_keys = sum(length for length, _ in PREFILL)
    got, want, kernels = attend(PREFILL, 5, keys_budget * num_keys * HEAD_BYTES, device)
    assert got is not None
    torch.testing.assert_close(got.cpu(), want, atol=5e-3, rtol=5e-3)
    assert kernels.heads == heads * 2 and kernels.num_planned == len(set(heads))


def test_later_keys_are_left_out(device: torch.device) -> None:
    """Rows in the middle of what is cached see no further than themselves."""
    got, want, _ = attend([(100, range(30, 60)), (50, []), (20, [5])], 2, 1 << 20, device)
    assert got is not None
    torch.testing.assert_close(got.cpu(), want, atol=5e-3, rtol=5e-3)


def test_what_it_does_not_do(device: torch.device) -> None:
    assert attend(PREFILL, 2, 100, device)[0] is None, "no room for one head"
    assert attend([(200, range(100, 200))], 2, 1 << 20, device, ranks=2)[0] is None, "rows see a part of the history"
    assert attend([(60, [3, 9, 20])], 2, 1 << 20, device)[0] is None, "rows that do not follow each other"


@given(st.integers(1, 128), st.integers(1, 128), st.integers(1, 100), st.integers(1, 140))
def test_heads_end_soonest(num_heads: int, most: int, tiles: int, programs: int) -> None:
    def rounds(heads: int) -> int:
        parts = [min(heads, num_heads - first) for first in range(0, num_heads, heads)]
        return sum(-(-part * tiles // programs) for part in parts)

    heads = heads_at_once(num_heads, most, tiles, programs)
    assert 1 <= heads <= min(most, num_heads)
    assert all(rounds(heads) <= rounds(other) for other in range(1, min(most, num_heads) + 1))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.integers(1, 5), st.integers(1, 6))
def test_one_product_makes_keys_and_values(heads: int, nope: int, rotary: int, value: int, latent: int) -> None:
    kv_b_hEC, cached_TK = torch.randn(heads, nope + value, latent), torch.randn(7, latent + rotary)
    made = (cached_TK @ expanding_weights(kv_b_hEC, nope, rotary).t()).view(7, heads, -1)
    plain = torch.einsum("tc,hec->the", cached_TK[:, :latent], kv_b_hEC)
    torch.testing.assert_close(made[..., :nope], plain[..., :nope])
    assert torch.equal(made[..., nope : nope + rotary], cached_TK[:, None, latent:].expand(-1, heads, -1))
    torch.testing.assert_close(made[..., nope + rotary :], plain[..., nope:])
