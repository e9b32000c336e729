"""Which experts a row goes to: scores by a product in float32, then the choice, a few rows a program.

For few rows the product is split over the hidden dim as well, so that many programs read the router; the choice adds up
the parts, in a fixed order. For many rows it is the library's product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash.core.spec import MoeSpec
from splash.platform.triton.launch import next_power_of_2

_SPLIT_ROWS = 256  # most rows whose product is split
_SPLIT_DEPTH = 256
_CHOSEN_ROWS = 4  # rows of a program that chooses
_LEAST = tl.constexpr(-1e38)  # what NaN counts as; what cannot be chosen is -inf


@triton.jit
def scores_kernel(
    x_ptr, router_ptr, part_ptr, num_rows, num_experts, D, x_row,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Part [split, n, E] of x router^T, of DEPTH hidden dims."""
    split = tl.program_id(0)
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    e_E = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    x_N, router_E = x_ptr + n_N.to(tl.int64) * x_row, router_ptr + e_E * D
    sum_NE = tl.zeros([BLOCK_N, BLOCK_E], dtype=tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        k_K = split * DEPTH + k + tl.arange(0, BLOCK_K)
        x_NK = tl.load(x_N[:, None] + k_K[None, :], mask=(n_N < num_rows)[:, None] & (k_K < D)[None, :], other=0.0)
        mask_EK = (e_E < num_experts)[:, None] & (k_K < D)[None, :]
        router_EK = tl.load(router_E[:, None] + k_K[None, :], mask=mask_EK, other=0.0)
        sum_NE = tl.dot(x_NK.to(tl.float32), router_EK.T, sum_NE, input_precision="ieee")
    part_NE = part_ptr + (split * num_rows + n_N)[:, None] * num_experts + e_E[None, :]
    tl.store(part_NE, sum_NE, mask=(n_N < num_rows)[:, None] & (e_E < num_experts)[None, :])


@triton.jit
def choose_kernel(
    part_ptr, bias_ptr, expert_ptr, weight_ptr, num_rows, num_experts, group_size, scaling,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, NORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The TOP_K best experts of each row among its TOP_GROUPS best groups; of equal ones the first."""
    n_N, g_G, s_S, k_K = (
        tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S),
        tl.arange(0, BLOCK_K),
    )  # fmt: skip
    e_GS = g_G[:, None] * group_size + s_S[None, :]
    is_expert_GS = (g_G < GROUPS)[:, None] & (s_S < group_size)[None, :]
    is_expert_NGS = (n_N < num_rows)[:, None, None] & is_expert_GS[None, :, :]
    place_NGS = n_N[:, None, None] * num_experts + e_GS[None, :, :]
    logit_NGS = tl.zeros([BLOCK_N, BLOCK_G, BLOCK_S], dtype=tl.float32)
    for split in tl.static_range(SPLITS):  # independent loads, in flight together
        logit_NGS += tl.load(part_ptr + split * num_rows * num_experts + place_NGS, mask=is_expert_NGS, other=0.0)
    score_NGS = 1.0 / (1.0 + tl.exp(-logit_NGS))
    choice_NGS = score_NGS + tl.load(bias_ptr + e_GS, mask=is_expert_GS, other=0.0)[None, :, :]
    choice_NGS = tl.where(choice_NGS == choice_NGS, choice_NGS, _LEAST)
    choice_NGS = tl.where(is_expert_GS[None, :, :], choice_NGS, -float("inf"))
    if TOP_GROUPS < GROUPS:
        best_NG = tl.max(choice_NGS, 2)
        first_NG = tl.min(tl.where(choice_NGS == best_NG[:, :, None], s_S[None, None, :], BLOCK_S), 2)
        others_NGS = tl.where(s_S[None, None, :] == first_NG[:, :, None], -float("inf"), choice_NGS)
        second_NG = tl.max(others_NGS, 2)
        total_NG = best_NG + tl.where(second_NG == -float("inf"), 0.0, second_NG)  # a group may be of one expert
        total_NG = tl.where((g_G < GROUPS)[None, :], total_NG, -float("inf"))
        is_kept_NG = tl.zeros([BLOCK_N, BLOCK_G], dtype=tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            most_N = tl.max(total_NG, 1)
            group_N = tl.min(tl.where(total_NG == most_N[:, None], g_G[None, :], BLOCK_G), 1)
            is_it_NG = g_G[None, :] == group_N[:, None]
            is_kept_NG = tl.where(is_it_NG, 1, is_kept_NG)
            total_NG = tl.where(is_it_NG, -float("inf"), total_NG)
        choice_NGS = tl.where(is_kept_NG[:, :, None] == 1, choice_NGS, -float("inf"))
    expert_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.int32)
    weight_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        most_N = tl.max(tl.max(choice_NGS, 2), 1)
        is_most_NGS = choice_NGS == most_N[:, None, None]
        expert_N = tl.min(tl.min(tl.where(is_most_NGS, e_GS[None, :, :], BLOCK_G * BLOCK_S), 2), 1)
        is_it_NGS = (e_GS[None, :, :] == expert_N[:, None, None]) & is_expert_GS[None, :, :]
        weight_N = tl.sum(tl.sum(tl.where(is_it_NGS, score_NGS, 0.0), 2), 1)
        choice_NGS = tl.where(is_it_NGS, -float("inf"), choice_NGS)
        expert_NK = tl.where(k_K[None, :] == k, expert_N[:, None], expert_NK)
        weight_NK = tl.where(k_K[None, :] == k, weight_N[:, None], weight_NK)
    if NORM:
        weight_NK = weight_NK / (tl.sum(weight_NK, 1) + 1e-20)[:, None]
    mask_NK = (n_N < num_rows)[:, None] & (k_K < TOP_K)[None, :]
    place_NK = n_N[:, None] * TOP_K + k_K[None, :]
    tl.store(expert_ptr + place_NK, expert_NK.to(tl.int64), mask=mask_NK)
    tl.store(weight_ptr + place_NK, weight_NK * scaling, mask=mask_NK)


def route(
    x_nD: torch.Tensor, router_ED: torch.Tensor, bias_E: torch.Tensor, moe: MoeSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Kernels.route` of rows that are dense; best first."""
    num_rows, num_experts, top_k = len(x_nD), len(router_ED), moe.top_k
    expert_nk = torch.empty(num_rows, top_k, dtype=torch.int64, device=x_nD.device)
    weight_nk = torch.empty(num_rows, top_k, dtype=torch.float32, device=x_nD.device)
    if not num_rows:
        return expert_nk, weight_nk
    parts = _split_scores(x_nD, router_ED) if num_rows <= _SPLIT_ROWS else (x_nD.float() @ router_ED.t()).unsqueeze(0)
    is_limited = moe.top_k_groups < moe.num_groups
    groups, top_groups = (moe.num_groups, moe.top_k_groups) if is_limited else (1, 1)
    group_size = num_experts // groups
    choose_kernel[(triton.cdiv(num_rows, _CHOSEN_ROWS),)](
        parts, bias_E, expert_nk, weight_nk, num_rows, num_experts, group_size, moe.routed_scaling_factor,
        SPLITS=len(parts), GROUPS=groups, TOP_GROUPS=top_groups, TOP_K=top_k, NORM=moe.norm_topk_prob,
        BLOCK_N=_CHOSEN_ROWS, BLOCK_G=next_power_of_2(groups), BLOCK_S=next_power_of_2(group_size),
        BLOCK_K=next_power_of_2(top_k),
    )  # fmt: skip
    return expert_nk, weight_nk


def _split_scores(x_nD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """x router^T in parts to be added up: float32 [splits, n, E]."""
    (num_rows, dim), num_experts = x_nD.shape, len(router_ED)
    splits = triton.cdiv(dim, _SPLIT_DEPTH)
    parts = torch.empty(splits, num_rows, num_experts, dtype=torch.float32, device=x_nD.device)
    block_n, block_e = (16, 32) if num_rows <= 16 else (32, 64)
    scores_kernel[(splits, triton.cdiv(num_rows, block_n), triton.cdiv(num_experts, block_e))](
        x_nD, router_ED, parts, num_rows, num_experts, dim, x_nD.stride(0),
        BLOCK_N=block_n, BLOCK_E=block_e, BLOCK_K=64, DEPTH=_SPLIT_DEPTH,
    )  # fmt: skip
    return parts
