"""The CPU's kernels against Hugging Face's DeepseekV3 modules and against plain definitions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from splash.core.spec import MoeSpec
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


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    KERNELS.rotate(x, cos, sin, out)
    return out


@pytest.mark.parametrize("heads", [1, 3])
def test_rotate(heads: int) -> None:
    """Half-split as in `apply_rotary_pos_emb`, whose cos and sin repeat the halves."""
    num_rows, dim = 9, 16
    x = torch.randn(num_rows, heads, dim)
    angle = torch.rand(num_rows, dim // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    heads_first = x.unsqueeze(0).transpose(1, 2)
    want, _ = hf.apply_rotary_pos_emb(heads_first, heads_first, *(torch.cat((t, t), -1)[None] for t in (cos, sin)))
    want = want[0].transpose(0, 1)
    torch.testing.assert_close(rotated(x, cos, sin), want)
    KERNELS.rotate(x, cos, sin, x)
    torch.testing.assert_close(x, want)


def test_rotate_is_the_interleaved_form_after_deinterleaving() -> None:
    """DeepSeek's checkpoints pair (x0, x1), (x2, x3), ...: taking evens first turns that into half-split."""
    q = torch.randn(1, 2, 5, 8)
    angle = torch.rand(5, 4) * 6
    tables = [torch.cat((t, t), -1)[None] for t in (angle.cos(), angle.sin())]
    want, _ = hf.apply_rotary_pos_emb_interleave(q, q, *tables)
    evens_first = torch.cat((q[..., ::2], q[..., 1::2]), -1)[0].transpose(0, 1)
    torch.testing.assert_close(rotated(evens_first, angle.cos(), angle.sin()), want[0].transpose(0, 1))


def test_rotate_computes_bfloat16_in_float32() -> None:
    x, angle = torch.randn(6, 1, 8).bfloat16(), torch.rand(6, 4)
    want = rotated(x.float(), angle.cos(), angle.sin()).bfloat16()
    assert torch.equal(rotated(x, angle.cos(), angle.sin()), want)


@pytest.mark.parametrize("query", [0, 12])
def test_latents_are_normed_beside_rotated_keys(query: int) -> None:
    down, angle = torch.randn(3, query + 10 + 4), torch.rand(3, 2)
    q_weight, kv_weight, turn = torch.rand(query), torch.rand(10), (angle.cos(), angle.sin())
    got_query, got = KERNELS.latent_rows(down, q_weight, kv_weight, 1e-6, *turn)
    assert got_query.shape == (3, query)
    if query:
        torch.testing.assert_close(got_query, KERNELS.rms_norm(down[:, :query], q_weight, 1e-6))
    torch.testing.assert_close(got[:, :10], KERNELS.rms_norm(down[:, query:-4], kv_weight, 1e-6))
    torch.testing.assert_close(got[:, 10:], rotated(down[:, None, -4:], *turn)[:, 0])
    pages = torch.zeros(2, 4, 14)
    stored = KERNELS.latent_store(down, q_weight, kv_weight, 1e-6, *turn, pages, torch.tensor([6, -1, 1]))
    assert torch.equal(stored, got_query)
    assert torch.equal(pages.flatten(0, 1)[[6, 1]], got[[0, 2]]) and not pages.flatten(0, 1)[[0, 2, 3, 4, 5, 7]].any()


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


@pytest.mark.parametrize(("groups", "top_groups", "norm"), [(1, 1, True), (4, 2, True), (4, 3, False), (4, 4, True)])
def test_route_is_their_router(groups: int, top_groups: int, norm: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=20, moe_intermediate_size=6, n_routed_experts=16, num_experts_per_tok=3, n_group=groups,
        topk_group=top_groups, norm_topk_prob=norm, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = hf.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.uniform_(-0.5, 0.5)
    moe = MoeSpec(16, 3, 6, 1, groups, top_groups, norm, 2.5)
    x = torch.randn(50, 20)
    with torch.no_grad():
        _, want_weight, want_expert = theirs(x)
        expert, weight = KERNELS.route(x, theirs.weight, theirs.e_score_correction_bias, moe)
    want = torch.zeros(50, 16).scatter_(1, want_expert, want_weight)
    torch.testing.assert_close(torch.zeros(50, 16).scatter_(1, expert, weight), want)


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
    assert torch.equal(KERNELS.experts(x, expert, weight, w13, w2, 0, x), x)
    assert KERNELS.experts(x[:0], expert[:0], weight[:0], w13, w2, 0).shape == (0, 6)


def test_experts_in_bfloat16_are_summed_in_float32() -> None:
    x, w13, w2 = torch.randn(4, 16).bfloat16(), torch.randn(2, 12, 16).bfloat16(), torch.randn(2, 16, 6).bfloat16()
    expert, weight = torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    want = KERNELS.experts(x.float(), expert, weight, w13.float(), w2.float(), 0)
    got = KERNELS.experts(x, expert, weight, w13, w2, 0)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.05 * want.abs().max().item(), rtol=0.02)
