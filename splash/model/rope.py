"""Rotary embedding tables. Frequencies follow YaRN (arXiv 2309.00071, section 3.2) as DeepSeek-V3 uses it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splash.core.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Angular frequency of each rotary pair: [dim / 2] float32, radians a position.

    YaRN keeps the frequencies that turn more than `beta_fast` times within the original context, divides those by
    `factor` that turn fewer than `beta_slow` times, and blends linearly between.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    base = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return base

    def pair_turning(turns: float) -> float:
        """The (fractional) pair index that turns so often within the original context."""
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), dim - 1)
    span = high - low if high > low else 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / rope.factor * stretched + base * (1 - stretched)


def deinterleave(weight: Tensor, interleave: bool) -> Tensor:
    """Reorder the last-but-one dim, rotary outputs [..., R, in], so that half-split rotation applies.

    Pairs (x0, x1), (x2, x3), ... become (x0, x2, ...), (x1, x3, ...). Queries and keys are reordered alike, so scores
    do not change, and cached keys equal Hugging Face's.
    """
    return torch.cat((weight[..., 0::2, :], weight[..., 1::2, :]), dim=-2) if interleave else weight


class RotaryTable:
    """cos and sin of every position up to `length`, scaled by YaRN's factor: [length, R / 2] float32."""

    def __init__(self, rope: RopeSpec, dim: int, length: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, dim))
        self.cos = (angles.cos() * rope.cos_sin_factor).to(device)
        self.sin = (angles.sin() * rope.cos_sin_factor).to(device)
