"""The fused operations that a platform has.

Shape suffixes: n rows, H heads, Q q-lora rank, C kv-lora rank, K = C + R, R rotary dim, D hidden size, P page size,
S slots, E experts, k chosen ones, I intermediate dim, m sampled rows, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from splash.core.spec import MoeSpec


class Kernels(ABC):
    """Fused operations around attention. All are pure functions of their tensors unless they say otherwise."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 inside. [..., D] -> [..., D]."""

    @abstractmethod
    def add_rms_norm(
        self, x_nD: torch.Tensor, residual_nD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm of the sum, the sum), both [n, D]."""

    @abstractmethod
    def product(self, x_nK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
        """x @ w with weights, which may be a transposed view: [n, K] and [K, N] -> [n, N]."""

    @abstractmethod
    def latent_rows(
        self,
        down_nX: torch.Tensor,
        q_weight_Q: torch.Tensor,
        kv_weight_C: torch.Tensor,
        eps: float,
        cos_nR: torch.Tensor,
        sin_nR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows the products with Q-A and KV-A: norms, and the rotation of the keys.

        Args:
            down_nX: [n, Q + C + R] rows of [query | latent | rotary key]; Q is 0 where the model has no q-lora.
            q_weight_Q: the query norm's weight.
            kv_weight_C: the latent norm's.
            eps: of both norms.
            cos_nR: [n, R / 2] float32, and `sin_nR` alike.

        Returns:
            the queries normed [n, Q]; and what is cached, the latents normed beside the keys rotated, [n, C + R].
        """

    @abstractmethod
    def latent_store(
        self,
        down_nX: torch.Tensor,
        q_weight_Q: torch.Tensor,
        kv_weight_C: torch.Tensor,
        eps: float,
        cos_nR: torch.Tensor,
        sin_nR: torch.Tensor,
        pages_SPK: torch.Tensor,
        index_n: torch.Tensor,
    ) -> torch.Tensor:
        """`latent_rows`, of which the second result is written as `store` does. Returns the first, [n, Q]."""

    @abstractmethod
    def rotate(self, x_nHR: torch.Tensor, cos_nR: torch.Tensor, sin_nR: torch.Tensor, out_nHR: torch.Tensor) -> None:
        """Half-split rotary embedding of [n, heads, R]; cos and sin are [n, R / 2] float32.

        Both may be slices of wider heads. `out_nHR` may be `x_nHR` itself.
        """

    @abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of the last dim. [n, 2 I] -> [n, I]."""

    @abstractmethod
    def store(self, pages_SPK: torch.Tensor, index_n: torch.Tensor, rows_nK: torch.Tensor) -> None:
        """Write rows into the cache at flat positions slot * P + offset, int64 [n]. Negative ones are left out."""

    @abstractmethod
    def route(
        self, x_nD: torch.Tensor, router_ED: torch.Tensor, bias_E: torch.Tensor, moe: MoeSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Group-limited sigmoid routing with a correction bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

        Experts are chosen by score + bias within the best groups (a group counts the sum of its two best), and weighted
        by score without bias. Which of equal ones is chosen is left open, and so is the order of those chosen.

        Args:
            x_nD: [n, D] rows.
            router_ED: [E, D] float32; the scores are the sigmoid of the product, in float32.
            bias_E: [E] float32.
            moe: how many experts, groups and choices there are, and how weights are scaled.

        Returns:
            expert ids int64 [n, k] and weights float32 [n, k].
        """

    @abstractmethod
    def experts(
        self,
        x_nD: torch.Tensor,
        expert_nk: torch.Tensor,
        weight_nk: torch.Tensor,
        w13_EID: torch.Tensor,
        w2_EDI: torch.Tensor,
        first_expert: int,
        beside_nD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Partial mixture-of-experts output of the local experts first_expert .. first_expert + E - 1.

        Args:
            x_nD: [n, D] rows.
            expert_nk: [n, k] int64 global expert ids chosen by the router.
            weight_nk: [n, k] float32 weights.
            w13_EID: [E, 2 I, D] gate and up projections, gate first.
            w2_EDI: [E, D, I] down projection.
            first_expert: global id of local expert 0.
            beside_nD: [n, D], what a shared expert gives, to be added.

        Returns:
            [n, D]: sum over the chosen experts that are local of weight * w2(silu(gate x) * up x); zero where none is.
        """

    @abstractmethod
    def nucleus_floor(self, scores_mV: torch.Tensor, top_p_m: torch.Tensor) -> torch.Tensor:
        """The lowest score that stays in the nucleus: what scores higher falls short of `top_p` of the mass.

        Args:
            scores_mV: [m, V] float32, whose softmax is the distribution; the maximum of each row is 0.
            top_p_m: [m] float64, above 0 and below 1.

        Returns:
            one of each row's scores, [m] float32.
        """
