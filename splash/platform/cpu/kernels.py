"""The operations around attention in plain torch, on any device, in float32 inside."""

from __future__ import annotations

import torch
from torch.nn import functional

from splash.core.spec import MoeSpec
from splash.platform.kernels import Kernels

_NUCLEUS = 128  # tokens looked at before the whole vocabulary is sorted


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

    def product(self, x_nK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
        return x_nK @ w_KN

    def latent_rows(
        self,
        down_nX: torch.Tensor,
        q_weight_Q: torch.Tensor,
        kv_weight_C: torch.Tensor,
        eps: float,
        cos_nR: torch.Tensor,
        sin_nR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ends = (len(q_weight_Q), len(q_weight_Q) + len(kv_weight_C))
        query_nQ, latent_nC, key_nR = down_nX.tensor_split(ends, dim=1)
        if len(q_weight_Q):
            query_nQ = self.rms_norm(query_nQ, q_weight_Q, eps)
        latent_nC = self.rms_norm(latent_nC, kv_weight_C, eps)
        return query_nQ, torch.cat((latent_nC, _rotated(key_nR, cos_nR, sin_nR)), dim=-1)

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
        query_nQ, latent_nK = self.latent_rows(down_nX, q_weight_Q, kv_weight_C, eps, cos_nR, sin_nR)
        self.store(pages_SPK, index_n, latent_nK)
        return query_nQ

    def rotate(self, x_nHR: torch.Tensor, cos_nR: torch.Tensor, sin_nR: torch.Tensor, out_nHR: torch.Tensor) -> None:
        out_nHR.copy_(_rotated(x_nHR, cos_nR.unsqueeze(1), sin_nR.unsqueeze(1)))

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

    def route(
        self, x_nD: torch.Tensor, router_ED: torch.Tensor, bias_E: torch.Tensor, moe: MoeSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (x_nD.float() @ router_ED.t()).sigmoid()
        choice = scores + bias_E
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
        routed_nD = self._routed(x_nD, expert_nk, weight_nk, w13_EID, w2_EDI, first_expert)
        return routed_nD if beside_nD is None else routed_nD + beside_nD

    def nucleus_floor(self, scores_mV: torch.Tensor, top_p_m: torch.Tensor) -> torch.Tensor:
        """As `Kernels.nucleus_floor`.

        The nucleus is mostly small, and sorting a vocabulary is slow: a full sort only where the likeliest few do not
        do. A device is waited for to know.
        """
        needed_m1 = top_p_m.unsqueeze(1) * scores_mV.double().exp().sum(dim=-1, keepdim=True)
        ordered = scores_mV.topk(min(_NUCLEUS, scores_mV.shape[1]), dim=-1).values
        cumulative = ordered.double().exp().cumsum(dim=-1)
        if bool((cumulative[:, -1:] < needed_m1).any()):
            ordered = scores_mV.sort(dim=-1, descending=True).values
            cumulative = ordered.double().exp().cumsum(dim=-1)
        num_kept_m1 = 1 + (cumulative[:, :-1] < needed_m1).sum(dim=-1, keepdim=True)
        return ordered.gather(1, num_kept_m1 - 1).squeeze(1)

    def _routed(
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


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
