"""The operations around attention in plain torch, on any device, in float32 inside."""

from __future__ import annotations

import torch
from torch.nn import functional

from splash.platform.base import Kernels


class CpuKernels(Kernels):
    """Kernels whose results are those of Hugging Face's DeepseekV3 modules, in any floating dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype == torch.float32:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight

    def add_rms_norm(
        self, x_nD: torch.Tensor, residual_nD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_nD = x_nD + residual_nD
        return self.rms_norm(total_nD, weight_D, eps), total_nD

    def latent_rows(
        self, kv_nK: torch.Tensor, weight_C: torch.Tensor, eps: float, cos_nR: torch.Tensor, sin_nR: torch.Tensor
    ) -> torch.Tensor:
        latent_nC, key_nR = kv_nK.tensor_split((len(weight_C),), dim=1)
        return torch.cat((self.rms_norm(latent_nC, weight_C, eps), self.rotate(key_nR, cos_nR, sin_nR)), dim=-1)

    def rotate(self, x: torch.Tensor, cos_nR: torch.Tensor, sin_nR: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            cos_nR, sin_nR = cos_nR.unsqueeze(1), sin_nR.unsqueeze(1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos_nR - second * sin_nR, second * cos_nR + first * sin_nR), dim=-1).to(x.dtype)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def store(self, pages_SPK: torch.Tensor, index_n: torch.Tensor, rows_nK: torch.Tensor) -> None:
        page_size = pages_SPK.shape[1]
        held_n = index_n >= 0
        if not bool(held_n.all()):
            index_n, rows_nK = index_n[held_n], rows_nK[held_n]
        if pages_SPK.is_contiguous():
            pages_SPK.view(-1, pages_SPK.shape[2]).index_copy_(0, index_n, rows_nK.to(pages_SPK.dtype))
        else:
            pages_SPK[index_n // page_size, index_n % page_size] = rows_nK.to(pages_SPK.dtype)

    def merge(self, outs_TnHC: torch.Tensor, lses_TnH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse_nH = torch.logsumexp(lses_TnH, dim=0)
        # Where every part is empty, -inf - 0 keeps the weights at 0; -inf - -inf would be NaN.
        weight_TnH = (lses_TnH - lse_nH.masked_fill(lse_nH == -torch.inf, 0.0)).exp_()
        return (outs_TnHC.float() * weight_TnH.unsqueeze(-1)).sum(dim=0).to(outs_TnHC.dtype), lse_nH

    def experts(
        self,
        x_nD: torch.Tensor,
        expert_nk: torch.Tensor,
        weight_nk: torch.Tensor,
        w13_EID: torch.Tensor,
        w2_EDI: torch.Tensor,
        first_expert: int,
    ) -> torch.Tensor:
        num_experts, top_k = w13_EID.shape[0], expert_nk.shape[1]
        chosen = (expert_nk - first_expert).reshape(-1)
        order = chosen.argsort(stable=True)
        sorted_experts = chosen[order]
        # The pairs of local expert e are order[bounds[e] : bounds[e + 1]].
        bounds = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=x_nD.device)).tolist()
        out_nD = torch.zeros(x_nD.shape, dtype=torch.float32, device=x_nD.device)
        if bounds[0] == bounds[-1]:
            return out_nD.to(x_nD.dtype)
        local = order[bounds[0] : bounds[-1]]
        token = local // top_k
        x_pD = x_nD[token]
        y_pD = torch.empty_like(x_pD)
        for expert in range(num_experts):
            start, stop = bounds[expert] - bounds[0], bounds[expert + 1] - bounds[0]
            if start < stop:
                hidden = self.silu_and_mul(torch.mm(x_pD[start:stop], w13_EID[expert].T))
                torch.mm(hidden, w2_EDI[expert].T, out=y_pD[start:stop])
        weighted = y_pD.float() * weight_nk.reshape(-1)[local].unsqueeze(1)
        return out_nD.index_add_(0, token, weighted).to(x_nD.dtype)
