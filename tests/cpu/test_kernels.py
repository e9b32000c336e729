"""The CPU's kernels against Hugging Face's DeepseekV3 modules and against plain definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from splash.platform.cpu.kernels import CpuKernels

KERNELS = CpuKernels()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    theirs = hf.DeepseekV3RMSNorm(96, eps=1e-6).to(dtype)
    theirs.weight.data.uniform_(0.5, 2.0)
    x = (torch.randn(7, 96) * 5).to(dtype)
    torch.testing.assert_close(KERNELS.rms_norm(x, theirs.weight.data, 1e-6), theirs(x).data)
    assert torch.equal(KERNELS.rms_norm(x[:0], theirs.weight.data, 1e-6), x[:0])


def test_rms_norm_uses_eps() -> None:
    x = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(KERNELS.rms_norm(x, torch.ones(4), 3e-6), x / 2e-3)


@pytest.mark.parametrize("heads", [None, 3])
def test_rotate(heads: int | None) -> None:
    """Half-split as in `apply_rotary_pos_emb`, whose cos and sin repeat the halves."""
    num_rows, dim = 9, 16
    x = torch.randn(num_rows, dim) if heads is None else torch.randn(num_rows, heads, dim)
    angle = torch.rand(num_rows, dim // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    heads_first = x.view(1, num_rows, -1, dim).transpose(1, 2)
    want, _ = hf.apply_rotary_pos_emb(heads_first, heads_first, *(torch.cat((t, t), -1)[None] for t in (cos, sin)))
    torch.testing.assert_close(KERNELS.rotate(x, cos, sin), want.transpose(1, 2).reshape(x.shape))


def test_rotate_is_the_interleaved_form_after_deinterleaving() -> None:
    """DeepSeek's checkpoints pair (x0, x1), (x2, x3), ...: taking evens first turns that into half-split."""
    q = torch.randn(1, 2, 5, 8)
    angle = torch.rand(5, 4) * 6
    tables = [torch.cat((t, t), -1)[None] for t in (angle.cos(), angle.sin())]
    want, _ = hf.apply_rotary_pos_emb_interleave(q, q, *tables)
    evens_first = torch.cat((q[..., ::2], q[..., 1::2]), -1)[0].transpose(0, 1)
    got = KERNELS.rotate(evens_first, angle.cos(), angle.sin())
    torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_rotate_computes_bfloat16_in_float32() -> None:
    x, angle = torch.randn(6, 8).bfloat16(), torch.rand(6, 4)
    want = KERNELS.rotate(x.float(), angle.cos(), angle.sin()).bfloat16()
    assert torch.equal(KERNELS.rotate(x, angle.cos(), angle.sin()), want)


def test_silu_and_mul() -> None:
    x = torch.randn(5, 12)
    gate, up = x[:, :6], x[:, 6:]
    torch.testing.assert_close(KERNELS.silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("spaced", [False, True])
def test_store(spaced: bool) -> None:
    whole = torch.zeros(6, 4, 8 if spaced else 5, dtype=torch.bfloat16)
    pages, index, rows = whole[:, :, :5], torch.tensor([23, 0, 9]), torch.randn(3, 5)
    KERNELS.store(pages, index, rows)
    want = torch.zeros(24, 5, dtype=torch.bfloat16)
    want[index] = rows.bfloat16()
    assert torch.equal(pages.reshape(24, 5), want)
    assert not whole[:, :, 5:].any()
    KERNELS.store(pages, index[:0], rows[:0])
    assert torch.equal(pages.reshape(24, 5), want)


@given(
    st.lists(
        st.lists(st.sampled_from([-200.0, -1.0, 0.0, 3.0, 200.0, -torch.inf]), min_size=2, max_size=2),
        max_size=4,
        min_size=1,
    )
)
def test_merge_weighs_parts_and_never_gives_nan(lses: list[list[float]]) -> None:
    lses_TnH = torch.tensor(lses).unsqueeze(1)  # [T, 1, 2]
    outs_TnHC = torch.randn(*lses_TnH.shape, 3)
    outs_TnHC[lses_TnH == -torch.inf] = 0.0
    out, lse = KERNELS.merge(outs_TnHC, lses_TnH)
    total = lses_TnH.double().logsumexp(0)
    weight = (lses_TnH.double() - total).exp().nan_to_num(0.0)
    torch.testing.assert_close(lse.double(), total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), (weight.unsqueeze(-1) * outs_TnHC).sum(0), atol=1e-5, rtol=1e-5)


def test_merge_of_nothing_is_zero_and_minus_infinity() -> None:
    out, lse = KERNELS.merge(torch.zeros(3, 2, 4, 5), torch.full((3, 2, 4), -torch.inf))
    assert torch.equal(out, torch.zeros(2, 4, 5)) and torch.equal(lse, torch.full((2, 4), -torch.inf))


def their_experts(num_experts: int, top_k: int, hidden: int, width: int) -> torch.nn.Module:
    """Hugging Face's routed experts, one plain loop."""
    config = DeepseekV3Config(
        hidden_size=hidden, moe_intermediate_size=width, n_routed_experts=num_experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = "eager"
    experts = hf.DeepseekV3Experts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_experts_of_all_ranks_add_up_to_the_whole(num_rows: int) -> None:
    num_experts, top_k, hidden, width = 8, 3, 24, 10
    theirs = their_experts(num_experts, top_k, hidden, width)
    x = torch.randn(num_rows, hidden)
    expert = torch.rand(num_rows, num_experts).topk(top_k).indices
    expert[0] = torch.tensor([0, 1, 2])  # the first row has no expert in the second half
    weight = torch.rand(num_rows, top_k)
    with torch.no_grad():
        want = theirs(x, expert, weight)
    w13, w2 = theirs.gate_up_proj.data, theirs.down_proj.data
    for ranks in (1, 2, 4):
        share = num_experts // ranks
        parts = [
            KERNELS.experts(x, expert, weight, w13[first : first + share], w2[first : first + share], first)
            for first in range(0, num_experts, share)
        ]
        torch.testing.assert_close(torch.stack(parts).sum(0), want, atol=1e-5, rtol=1e-5)
        if ranks == 2:
            assert not parts[1][0].any()


def test_experts_with_no_rows_or_none_chosen_here() -> None:
    w13, w2 = torch.randn(2, 8, 6), torch.randn(2, 6, 4)
    x, expert, weight = torch.randn(3, 6), torch.full((3, 2), 7), torch.ones(3, 2)
    assert torch.equal(KERNELS.experts(x, expert, weight, w13, w2, 0), torch.zeros(3, 6))
    assert KERNELS.experts(x[:0], expert[:0], weight[:0], w13, w2, 0).shape == (0, 6)


def test_experts_in_bfloat16_are_summed_in_float32() -> None:
    x, w13, w2 = torch.randn(4, 16).bfloat16(), torch.randn(2, 12, 16).bfloat16(), torch.randn(2, 16, 6).bfloat16()
    expert, weight = torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    want = KERNELS.experts(x.float(), expert, weight, w13.float(), w2.float(), 0)
    got = KERNELS.experts(x, expert, weight, w13, w2, 0)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.05 * want.abs().max().item(), rtol=0.02)
