"""The grouped products where experts get very different numbers of rows: which block has what, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.platform.cpu.kernels import CpuKernels
from splash.platform.triton import experts
from splash.platform.triton.experts import GroupedTiles, max_blocks
from tests.triton.conftest import DEVICE

COUNTS = [(0, 17, 1, 0, 70, 33), (0, 0, 0, 0, 0, 64), (16, 32, 5, 31, 48, 0), (0, 1, 0, 0, 0, 0)]  # rows an expert gets


def chosen(counts: Sequence[int], elsewhere: int, seed: int = 0) -> torch.Tensor:
    """Experts [n, 1] of rows in any order, of which `elsewhere` go to experts before and behind these."""
    ids = [expert for expert, count in enumerate(counts) for _ in range(count)]
    ids += [-1 - i if i % 2 else len(counts) + i for i in range(elsewhere)]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(ids, dtype=torch.int64)[order].unsqueeze(1)


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any),
    elsewhere=st.integers(0, 9),
    height=st.sampled_from([4, 16]),
    at_once=st.sampled_from([2048, 1]),
)
def test_blocks_have_every_row_once(counts: list[int], elsewhere: int, height: int, at_once: int) -> None:
    expert_n1 = chosen(counts, elsewhere)
    num_blocks = max_blocks(len(expert_n1), len(counts), height)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_ASSIGNED_AT_ONCE", at_once)
        got = experts._assigned((expert_n1 + 3).to(DEVICE), 3, len(counts), num_blocks, height)
    blocks, pairs = (part.tolist() for part in got)
    seen: dict[int, list[int]] = {}
    for expert, first, rows in blocks:
        assert 0 <= rows <= height
        if rows:
            seen.setdefault(expert, []).extend(pairs[first : first + rows])
    for expert, count in enumerate(counts):
        assert sorted(seen.get(expert, [])) == (expert_n1[:, 0] == expert).nonzero()[:, 0].tolist()
        sizes = [rows for of, _, rows in blocks if of == expert and rows]
        assert len(sizes) == -(-count // height)  # no block more than must be
    assert set(seen) <= set(range(len(counts)))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("swap", [False, True], ids=["rows by weights", "weights by rows"])
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("heights", [(16, 32), (16, 32, 64), (32,)])
def test_tiles_of_several_heights(
    device: torch.device, counts: Sequence[int], swap: bool, tma: bool, heights: tuple[int, ...]
) -> None:
    """Empty experts, some with a row, some with more than the tallest tile, and all rows to one."""
    dim, width = 64, 32
    expert = chosen(counts, elsewhere=5)
    x, weight, beside = torch.randn(len(expert), dim), torch.rand(len(expert), 1), torch.randn(len(expert), dim)
    w13 = torch.randn(len(counts), 2 * width, dim) * dim**-0.5
    w2 = torch.randn(len(counts), dim, width) * width**-0.5
    tiles = GroupedTiles(heights, 32, 32, 4, (1,) * len(heights), tma=tma, swap=swap)
    args = [part.to(device) for part in (x, expert, weight, w13, w2)]
    got = experts.experts(*args, 0, beside.to(device), tiles, tiles)
    want = CpuKernels().experts(x, expert, weight, w13, w2, 0, beside)
    torch.testing.assert_close(got.cpu(), want, atol=2e-5, rtol=2e-5)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=8), height=st.sampled_from([1, 4, 16]))
def test_max_blocks_is_enough_for_any_choice(counts: list[int], height: int) -> None:
    assert sum(-(-count // height) for count in counts) <= max_blocks(sum(counts), len(counts), height)
