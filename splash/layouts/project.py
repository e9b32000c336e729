"""Absorbed multi-head latent attention, the parts that a rank computes by itself.

With W_UK and W_UV the halves of KV-B, a head's score is q_nope . (W_UK c) = (q_nope W_UK) . c, so queries are moved
into the latent space once and every head attends to the same cached [latent | rotary key] (DeepSeek-V2, section 2.1.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from splash.platform.base import Kernels


@dataclass(frozen=True)
class Heads:
    """The projections of some heads, as views of an arena.

    Attributes:
        q_b: [h, N + R, Q]; Q is the hidden size where the model has no q-lora.
        w_uk: [h, N, C].
        w_uv: [h, V, C].
        o: [h * V, D].
    """

    q_b: Tensor
    w_uk: Tensor
    w_uv: Tensor
    o: Tensor

    def queries(self, x_nQ: Tensor, cos_nR: Tensor, sin_nR: Tensor, kernels: Kernels) -> Tensor:
        """Absorbed queries [n, h, K] of rows with Q-B input `x_nQ`."""
        num_heads, head_dim, _ = self.q_b.shape
        nope_dim = self.w_uk.shape[1]
        q_nhd = (x_nQ @ self.q_b.flatten(0, 1).t()).view(-1, num_heads, head_dim)
        latent_hnC = torch.bmm(q_nhd[..., :nope_dim].transpose(0, 1), self.w_uk)
        rotary_nhR = kernels.rotate(q_nhd[..., nope_dim:], cos_nR, sin_nR)
        return torch.cat((latent_hnC.transpose(0, 1), rotary_nhR), dim=-1)

    def output(self, out_nhC: Tensor) -> Tensor:
        """[n, D] from attention in the latent space; partial unless these are all the heads."""
        out_hnV = torch.bmm(out_nhC.transpose(0, 1), self.w_uv.transpose(1, 2))
        return out_hnV.transpose(0, 1).flatten(1) @ self.o
