"""Multi-head latent attention, the parts that a rank computes by itself.

With W_UK and W_UV the halves of KV-B, a head's score is q_nope . (W_UK c) = (q_nope W_UK) . c (DeepSeek-V2, section
2.1.3). So attention has two forms. *Absorbed*: queries are moved into the latent space once, and every head attends to
the same cached [latent | rotary key]. *Expanded*: the history's keys and values are computed from the latents, and each
head attends to its own. Absorbed reads and computes less for few rows, expanded computes less for many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from splash.platform.kernels import Kernels


@dataclass(frozen=True)
class Heads:
    """The projections of some heads, as views of an arena.

    Attributes:
        q_b: [h, N + R, Q]; Q is the hidden size where the model has no q-lora.
        kv_b: [h, N + V, C], each head's W_UK and then its W_UV.
        o: [h * V, D].
        nope_dim: N.
    """

    q_b: Tensor
    kv_b: Tensor
    o: Tensor
    nope_dim: int

    def queries(self, x_nQ: Tensor, kernels: Kernels) -> Tensor:
        """Queries [n, h, N + R], not rotated yet, of rows with Q-B input `x_nQ`."""
        num_heads, head_dim, _ = self.q_b.shape
        return kernels.product(x_nQ, self.q_b.flatten(0, 1).t()).view(-1, num_heads, head_dim)

    def rotate_(self, q_nhd: Tensor, cos_nR: Tensor, sin_nR: Tensor, kernels: Kernels) -> Tensor:
        """`queries` rotated in place, for attention in the expanded form."""
        rotary_nhR = q_nhd[..., self.nope_dim :]
        kernels.rotate(rotary_nhR, cos_nR, sin_nR, rotary_nhR)
        return q_nhd

    def absorb(self, q_nhd: Tensor, cos_nR: Tensor, sin_nR: Tensor, kernels: Kernels) -> Tensor:
        """`queries` rotated and moved into the latent space: [n, h, C + R]."""
        num_rows, num_heads, head_dim = q_nhd.shape
        nope, latent = self.nope_dim, self.kv_b.shape[2]
        q_nhK = q_nhd.new_empty(num_rows, num_heads, latent + head_dim - nope)
        # Both parts are written in place: bmm takes a result whose rows lie apart.
        out_hnC = q_nhK[..., :latent].transpose(0, 1)
        torch.bmm(q_nhd[..., :nope].transpose(0, 1), self.kv_b[:, :nope], out=out_hnC)
        kernels.rotate(q_nhd[..., nope:], cos_nR, sin_nR, q_nhK[..., latent:])
        return q_nhK

    def values(self, out_nhC: Tensor) -> Tensor:
        """Attention in the latent space moved out of it: [n, h, C] -> [n, h, V]."""
        w_uv_hCV = self.kv_b[:, self.nope_dim :].transpose(1, 2)
        values_nhV = out_nhC.new_empty(*out_nhC.shape[:2], w_uv_hCV.shape[2])
        torch.bmm(out_nhC.transpose(0, 1), w_uv_hCV, out=values_nhV.transpose(0, 1))
        return values_nhV

    def output(self, values_nhV: Tensor, kernels: Kernels) -> Tensor:
        """[n, D]; partial unless these are all the heads."""
        return kernels.product(values_nhV.flatten(1), self.o)
