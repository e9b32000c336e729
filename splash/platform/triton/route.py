"""Which experts a row goes to: scores by a product in float32, then the choice, one row a program.

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
_MAX_EXPERTS = 64  # experts of a program of the product
_LEAST = tl.constexpr(-1e38)  # what NaN counts as; what cannot be chosen is _NEVER
_UNROLL = tl.constexpr(16)
_NEVER = tl.constexpr(-(1 << 62))
_LOW = tl.constexpr(0xFFFF)  # bits of an expert's number


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
    sum_EN = tl.zeros([BLOCK_E, BLOCK_N], dtype=tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        k_K = split * DEPTH + k + tl.arange(0, BLOCK_K)
        x_NK = tl.load(x_N[:, None] + k_K[None, :], mask=(n_N < num_rows)[:, None] & (k_K < D)[None, :], other=0.0)
        mask_EK = (e_E < num_experts)[:, None] & (k_K < D)[None, :]
        router_EK = tl.load(router_E[:, None] + k_K[None, :], mask=mask_EK, other=0.0)
        if x_NK.dtype == tl.bfloat16:
            # Three products of bfloat16 are one of float32: each takes 8 of its 24 bits. Tensor cores make them.
            for _ in tl.static_range(3):
                high_EK = router_EK.to(tl.bfloat16)
                sum_EN = tl.dot(high_EK, x_NK.T, sum_EN)
                router_EK -= high_EK.to(tl.float32)
        else:
            sum_EN = tl.dot(router_EK, x_NK.to(tl.float32).T, sum_EN, input_precision="ieee")
    part_EN = part_ptr + (split * num_rows + n_N)[None, :] * num_experts + e_E[:, None]
    tl.store(part_EN, sum_EN, mask=(n_N < num_rows)[None, :] & (e_E < num_experts)[:, None])


@triton.jit
def _ranked(value, number):
    """int64 that order as float32 values do, of equal ones the first number first."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 16) | (_LOW - number)


@triton.jit
def _value(ranked):
    bits = (ranked >> 16).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _score(part_ptr, place, mask, stride, splits):
    logit = tl.zeros(place.shape, dtype=tl.float32)
    for first in range(0, splits, _UNROLL):
        for step in tl.static_range(_UNROLL):  # independent loads, in flight together
            is_part = mask & (first + step + tl.zeros_like(place) < splits)
            logit += tl.load(part_ptr + (first + step) * stride + place, mask=is_part, other=0.0)
    return 1.0 / (1.0 + tl.exp(-logit))


@triton.jit
def choose_kernel(
    part_ptr, bias_ptr, expert_ptr, weight_ptr, num_rows, num_experts, group_size, splits, scaling,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, NORM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The TOP_K best experts of a row among its TOP_GROUPS best groups, best first; of equal ones the first."""
    row = tl.program_id(0)
    g_G, s_S, k_K = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    e_GS = g_G[:, None] * group_size + s_S[None, :]
    is_expert_GS = (g_G < GROUPS)[:, None] & (s_S < group_size)[None, :]
    part_ptr += row * num_experts
    stride = num_rows * num_experts
    choice_GS = _score(part_ptr, e_GS, is_expert_GS, stride, splits)
    choice_GS += tl.load(bias_ptr + e_GS, mask=is_expert_GS, other=0.0)
    choice_GS = tl.where(choice_GS == choice_GS, choice_GS, _LEAST)
    ranked_GS = tl.where(is_expert_GS, _ranked(choice_GS, e_GS), _NEVER)
    if TOP_GROUPS < GROUPS:
        first_G = tl.max(ranked_GS, 1)
        second_G = tl.max(tl.where(ranked_GS == first_G[:, None], _NEVER, ranked_GS), 1)
        total_G = _value(first_G) + tl.where(second_G == _NEVER, 0.0, _value(second_G))  # a group may be of one expert
        ranked_G = tl.where(g_G < GROUPS, _ranked(total_G, g_G), _NEVER)
        is_kept_G = g_G < 0
        for _ in tl.static_range(TOP_GROUPS):
            is_best_G = ranked_G == tl.max(ranked_G, 0)
            is_kept_G |= is_best_G
            ranked_G = tl.where(is_best_G, _NEVER, ranked_G)
        ranked_GS = tl.where(is_kept_G[:, None], ranked_GS, _NEVER)
    expert_K = tl.zeros([BLOCK_K], dtype=tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(ranked_GS, 1), 0)
        ranked_GS = tl.where(ranked_GS == best, _NEVER, ranked_GS)
        expert_K = tl.where(k_K == k, _LOW - (best & _LOW), expert_K)
    weight_K = _score(part_ptr, expert_K, k_K < TOP_K, stride, splits)
    if NORM:
        weight_K /= tl.sum(tl.where(k_K < TOP_K, weight_K, 0.0), 0) + 1e-20
    tl.store(expert_ptr + row * TOP_K + k_K, expert_K, mask=k_K < TOP_K)
    tl.store(weight_ptr + row * TOP_K + k_K, weight_K * scaling, mask=k_K < TOP_K)


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
    choose_kernel[(num_rows,)](
        parts, bias_E, expert_nk, weight_nk, num_rows, num_experts, group_size, len(parts), moe.routed_scaling_factor,
        GROUPS=groups, TOP_GROUPS=top_groups, TOP_K=top_k, NORM=moe.norm_topk_prob,
        BLOCK_G=next_power_of_2(groups), BLOCK_S=next_power_of_2(group_size), BLOCK_K=next_power_of_2(top_k),
        num_warps=1,
    )  # fmt: skip
    return expert_nk, weight_nk


def _split_scores(x_nD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """x router^T in parts to be added up: float32 [splits, n, E]."""
    (num_rows, dim), num_experts = x_nD.shape, len(router_ED)
    block_n, block_e = (16 if num_rows <= 16 else 32), min(_MAX_EXPERTS, max(16, next_power_of_2(num_experts)))
    depth = 128 if num_experts <= 64 else 256  # parts enough to fill the device, and not too many to add up
    splits = triton.cdiv(dim, depth)
    parts = torch.empty(splits, num_rows, num_experts, dtype=torch.float32, device=x_nD.device)
    scores_kernel[(splits, triton.cdiv(num_rows, block_n), triton.cdiv(num_experts, block_e))](
        x_nD, router_ED, parts, num_rows, num_experts, dim, x_nD.stride(0),
        BLOCK_N=block_n, BLOCK_E=block_e, BLOCK_K=64, DEPTH=depth,
    )  # fmt: skip
    return parts
