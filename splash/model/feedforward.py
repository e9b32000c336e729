"""The part of a layer after attention: one dense MLP, or routed experts beside a shared one.

Every form returns a partial sum over ranks: the dense and shared MLPs are sharded over their intermediate dim, experts
are dealt out whole. Neither ever moves, whatever the layout of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from splash.core.spec import MoeSpec
from splash.platform.kernels import Kernels


@dataclass(frozen=True)
class DenseMlp:
    """SwiGLU MLP, this rank's share of the intermediate dim: gate_up [2 I, D] (gate first), down [D, I]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x_ND: Tensor, kernels: Kernels) -> Tensor:
        return kernels.product(kernels.silu_and_mul(kernels.product(x_ND, self.gate_up.t())), self.down.t())


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
        expert_Nk, weight_Nk = kernels.route(x_ND, self.router, self.bias, self.moe)
        shared_ND = None if self.shared is None else self.shared(x_ND, kernels)
        return kernels.experts(x_ND, expert_Nk, weight_Nk, self.w13, self.w2, self.first_expert, shared_ND)


def share(total: int, rank: int, ranks: int) -> slice:
    """Rank's contiguous share of `total` items: sizes differ by at most one, and may be zero."""
    return slice(total * rank // ranks, total * (rank + 1) // ranks)
