"""The part of a layer after attention: one dense MLP, or routed experts beside a shared one.

Every form returns a partial sum over ranks: the dense and shared MLPs are sharded over their intermediate dim, experts
are dealt out whole. Neither ever moves, whatever the layout of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splash.core.spec import MoeSpec
from splash.platform.base import Kernels


@dataclass(frozen=True)
class DenseMlp:
    """SwiGLU MLP, this rank's share of the intermediate dim: gate_up [2 I, D] (gate first), down [D, I]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x_ND: Tensor, kernels: Kernels) -> Tensor:
        return kernels.silu_and_mul(x_ND @ self.gate_up.t()) @ self.down.t()


@dataclass(frozen=True)
class ExpertMlp:
    """Routed and shared experts. The router is whole on every rank; w13 [E, 2 I, D], w2 [E, D, I] are this rank's."""

    moe: MoeSpec
    router: Tensor  # [experts, D] float32
    bias: Tensor  # [experts] float32
    w13: Tensor
    w2: Tensor
    first_expert: int
    shared: DenseMlp | None

    def __call__(self, x_ND: Tensor, kernels: Kernels) -> Tensor:
        expert_Nk, weight_Nk = route(x_ND, self.router, self.bias, self.moe)
        out = kernels.experts(x_ND, expert_Nk, weight_Nk, self.w13, self.w2, self.first_expert)
        return out if self.shared is None else out + self.shared(x_ND, kernels)


def route(x_ND: Tensor, router: Tensor, bias: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """Group-limited sigmoid routing with a correction bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Experts are chosen by score + bias within the best groups (a group counts the sum of its two best), and weighted by
    score without bias.

    Returns:
        expert ids int64 [N, k] and weights float32 [N, k].
    """
    scores = (x_ND.float() @ router.t()).sigmoid()
    choice = scores + bias
    if moe.top_k_groups < moe.num_groups:
        grouped = choice.view(len(choice), moe.num_groups, -1)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = group_scores.topk(moe.top_k_groups, dim=-1).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    expert = choice.topk(moe.top_k, dim=-1).indices
    weight = scores.gather(1, expert)
    if moe.norm_topk_prob:
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
    return expert, weight * moe.routed_scaling_factor


def share(total: int, rank: int, ranks: int) -> slice:
    """Rank's contiguous share of `total` items: sizes differ by at most one, and may be zero."""
    return slice(total * rank // ranks, total * (rank + 1) // ranks)
