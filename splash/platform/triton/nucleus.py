"""Where the nucleus of a distribution ends (Holtzman et al., arXiv 1904.09751), without sorting and without the host.

One program a row halves the interval in which the lowest score that stays must lie. Each pass over the row adds up what
the middle and all above it weigh, and moves an end of the interval to the score next to the middle: so the passes end
at a score, after some 15 to 20 over a vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splash.platform.triton.launch import next_power_of_2

_BLOCK = 4096
_WARPS = 16


@triton.jit
def nucleus_kernel(scores_ptr, top_p_ptr, floor_ptr, V, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The floor of each row's nucleus: scores [m, V] of at most 0, which every row has; top_p [m] float64."""
    row = tl.program_id(0)
    row_ptr = scores_ptr + row.to(tl.int64) * V
    x_X = tl.arange(0, BLOCK)
    total_X = tl.zeros([BLOCK], dtype=tl.float64)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        score_X = tl.load(row_ptr + start + x_X, mask=start + x_X < V, other=float("-inf"))
        total_X += tl.exp(score_X).to(tl.float64)
    total, top_p = tl.sum(total_X), tl.load(top_p_ptr + row)
    needed = top_p * total
    # All scores below this together weigh less than what may be dropped.
    low = tl.log(((1.0 - top_p) * total / V).to(tl.float32))
    high = low * 0.0
    while low < high:
        middle = (low + high) * 0.5
        middle = tl.where(middle > low, middle, high)  # between neighbours there is none
        weight_X = tl.zeros([BLOCK], dtype=tl.float64)
        above_X = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        below_X = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            score_X = tl.load(row_ptr + start + x_X, mask=start + x_X < V, other=float("-inf"))
            is_above_X = score_X >= middle
            weight_X += tl.where(is_above_X, tl.exp(score_X), 0.0).to(tl.float64)
            above_X = tl.minimum(above_X, tl.where(is_above_X, score_X, float("inf")))
            below_X = tl.maximum(below_X, tl.where(is_above_X, float("-inf"), score_X))
        is_enough = tl.sum(weight_X) >= needed
        low = tl.where(is_enough, tl.min(above_X), low)
        high = tl.where(is_enough, high, tl.max(below_X))
    tl.store(floor_ptr + row, low)


def nucleus_floor(scores_mV: torch.Tensor, top_p_m: torch.Tensor) -> torch.Tensor:
    """`Kernels.nucleus_floor`."""
    assert scores_mV.dtype == torch.float32 and top_p_m.dtype == torch.float64
    num_rows, vocab_size = scores_mV.shape
    floor_m = torch.empty(num_rows, dtype=torch.float32, device=scores_mV.device)
    if num_rows:
        nucleus_kernel[(num_rows,)](
            scores_mV.contiguous(), top_p_m.contiguous(), floor_m, vocab_size,
            BLOCK=min(_BLOCK, next_power_of_2(vocab_size)), STAGES=4, num_warps=_WARPS,
        )  # fmt: skip
    return floor_m
