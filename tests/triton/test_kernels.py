"""The Triton kernels around attention against the CPU's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.spec import MoeSpec
from splash.platform.cpu.kernels import CpuKernels
from splash.platform.triton import experts, nucleus, pages, route
from splash.platform.triton.kernels import TritonKernels
from splash.platform.triton.launch import Tiles, target_of
from splash.platform.triton.products import Products, split
from splash.platform.triton.rows import gather_rows

# The interpreter warns of log(0) = -inf, which is what an empty history has.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

ORACLE = CpuKernels()
HALF = {torch.float32: 2e-5, torch.float16: 2e-3}


@pytest.fixture
def kernels(device: torch.device) -> TritonKernels:
    return TritonKernels(device)


def close(got: torch.Tensor, want: torch.Tensor, tol: float = 2e-5) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, atol=tol, rtol=tol)


@pytest.mark.parametrize("dtype", HALF)
def test_norms(kernels: TritonKernels, device: torch.device, dtype: torch.dtype) -> None:
    wide = (torch.randn(6, 90) * 3).to(dtype)
    x, weight = wide[:, :48], torch.rand(48).to(dtype)
    close(kernels.rms_norm(x.to(device), weight.to(device), 1e-6), ORACLE.rms_norm(x, weight, 1e-6), HALF[dtype])
    headed = x.reshape(2, 3, 48)
    close(
        kernels.rms_norm(headed.to(device), weight.to(device), 1e-6), ORACLE.rms_norm(headed, weight, 1e-6), HALF[dtype]
    )
    other = torch.randn(6, 48).to(dtype)
    normed, total = kernels.add_rms_norm(x.to(device), other.to(device), weight.to(device), 1e-5)
    close(total, x + other, 0)
    close(normed, ORACLE.rms_norm(x + other, weight, 1e-5), HALF[dtype])
    assert kernels.rms_norm(x[:0].to(device), weight.to(device), 1e-6).shape == (0, 48)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("heads", [1, 19])
def test_rotate(kernels: TritonKernels, device: torch.device, heads: int, dtype: torch.dtype) -> None:
    """From a slice of wider heads to one of others, and in place."""
    x, angle = torch.randn(5, heads, 17).to(dtype), torch.rand(5, 6)
    cos, sin = angle.cos(), angle.sin()
    want = torch.empty(5, heads, 12, dtype=dtype)
    ORACLE.rotate(x[..., 5:], cos, sin, want)
    out = torch.zeros(5, heads, 20, dtype=dtype, device=device)
    kernels.rotate(x.to(device)[..., 5:], cos.to(device), sin.to(device), out[..., 8:])
    close(out[..., 8:], want, HALF[dtype])
    assert not out[..., :8].any()
    x_here = x.to(device)
    kernels.rotate(x_here[..., 5:], cos.to(device), sin.to(device), x_here[..., 5:])
    close(x_here[..., 5:], want, HALF[dtype])
    assert torch.equal(x_here[..., :5].cpu(), x[..., :5])
    kernels.rotate(out[:0], cos[:0].to(device), sin[:0].to(device), out[:0])


@pytest.mark.parametrize(("query", "rotary"), [(0, 8), (24, 8), (33, 0)])
@pytest.mark.parametrize("dtype", HALF)
def test_latents_go_to_rows_or_to_the_cache(
    kernels: TritonKernels, device: torch.device, query: int, rotary: int, dtype: torch.dtype
) -> None:
    wide, angle = torch.randn(4, 100).to(dtype), torch.rand(4, rotary // 2)
    down = wide[:, : query + 40 + rotary]
    norms = torch.rand(query).to(dtype), torch.rand(40).to(dtype)
    args = (down, *norms, 1e-6, angle.cos(), angle.sin())
    here = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    want_query, want = ORACLE.latent_rows(*args)
    got_query, got = kernels.latent_rows(*here)
    close(got_query, want_query, HALF[dtype])
    close(got, want, HALF[dtype])
    cache = torch.zeros(3, 4, 40 + rotary, dtype=dtype, device=device)
    close(kernels.latent_store(*here, cache, torch.tensor([9, -1, 0, 4], device=device)), want_query, HALF[dtype])
    expected = torch.zeros(12, 40 + rotary, dtype=dtype)
    expected[[9, 0, 4]] = want[[0, 2, 3]]
    close(cache.flatten(0, 1), expected, HALF[dtype])
    empty = [x[:0] if isinstance(x, torch.Tensor) and x.dim() == 2 else x for x in here]
    assert [part.shape for part in kernels.latent_rows(*empty)] == [(0, query), (0, 40 + rotary)]


def test_store(kernels: TritonKernels, device: torch.device) -> None:
    whole = torch.zeros(6, 4, 8, dtype=torch.float16, device=device)
    rows, index = torch.randn(4, 5), torch.tensor([23, 0, -1, 9])
    kernels.store(whole[:, :, :5], index.to(device), rows.to(device))
    want = torch.zeros(24, 8, dtype=torch.float16)
    want[index[[0, 1, 3]], :5] = rows[[0, 1, 3]].half()
    close(whole.flatten(0, 1), want, 1e-3)  # the interpreter truncates where a device rounds


def test_silu_and_mul(kernels: TritonKernels, device: torch.device) -> None:
    x = torch.randn(5, 3000)
    close(kernels.silu_and_mul(x.to(device)), ORACLE.silu_and_mul(x))


def routed(got: tuple[torch.Tensor, torch.Tensor], num_experts: int) -> torch.Tensor:
    """What a row gives each expert: chosen ones in any order."""
    expert, weight = (part.cpu() for part in got)
    assert expert.dtype == torch.int64 and weight.dtype == torch.float32
    assert all(len(set(row)) == len(row) for row in expert.tolist())
    return torch.zeros(len(expert), num_experts).scatter_(1, expert, weight)


@settings(max_examples=12)
@given(
    rows=st.sampled_from([1, 3, 19]),
    split_rows=st.sampled_from([2, 256]),
    groups=st.integers(1, 5),
    group_size=st.integers(1, 9),
    norm=st.booleans(),
    data=st.data(),
)
def test_route(rows: int, split_rows: int, groups: int, group_size: int, norm: bool, data: st.DataObject) -> None:
    top_groups = data.draw(st.integers(1, groups), label="top groups")
    top_k = data.draw(st.integers(1, min(8, top_groups * group_size)), label="top k")
    num_experts, dim = groups * group_size, data.draw(st.sampled_from([7, 300]), label="dim")
    moe = MoeSpec(num_experts, top_k, 8, 1, groups, top_groups, norm, 2.5)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    x, router = (torch.randn(n, dim, generator=generator) for n in (rows, num_experts))
    bias = torch.randn(num_experts, generator=generator)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with mock.patch.object(route, "_SPLIT_ROWS", split_rows):
        got = TritonKernels(device).route(x.to(device), (router * dim**-0.5).to(device), bias.to(device), moe)
    want = ORACLE.route(x, router * dim**-0.5, bias, moe)
    close(routed(got, num_experts), routed(want, num_experts))


def test_route_takes_the_first_of_equal_ones_and_survives_nan(kernels: TritonKernels, device: torch.device) -> None:
    moe = MoeSpec(12, 3, 8, 0, num_groups=4, top_k_groups=2)
    x, router, bias = torch.zeros(3, 6, device=device), torch.rand(12, 6, device=device), torch.zeros(12, device=device)
    x[2] = torch.nan
    bias[7] = 1.0
    expert, weight = kernels.route(x, router, bias, moe)
    assert expert[:2].tolist() == [[7, 0, 1]] * 2  # groups 2 and then 0
    assert torch.allclose(weight[:2].cpu(), torch.full((2, 3), 1 / 3))
    assert sorted(expert[2].tolist()) == [0, 1, 2]  # where nothing is known, still experts that are there
    assert kernels.route(x[:0], router, bias, moe)[0].shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 128, 1000])
def test_route_at_deepseek_dims(kernels: TritonKernels, device: torch.device, rows: int) -> None:
    moe = MoeSpec(256, 8, 2048, 1, num_groups=8, top_k_groups=4, routed_scaling_factor=2.5)
    x, router = torch.randn(rows, 7168).bfloat16(), torch.randn(256, 7168) * 7168**-0.5
    bias = torch.rand(256) * 0.1
    got = routed(kernels.route(x.to(device), router.to(device), bias.to(device), moe), 256)
    want = routed(ORACLE.route(x, router, bias, moe), 256)
    same = ((got > 0) == (want > 0)).all(1)  # two products may differ over scores that are all but equal
    assert same.float().mean() > 0.98
    close(got[same], want[same], 1e-4)


@pytest.mark.parametrize("at_once", [2048, 1], ids=["one program", "many"])
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (40, torch.float32), (9, torch.float16)])
def test_experts(
    kernels: TritonKernels,
    device: torch.device,
    rows: int,
    dtype: torch.dtype,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts, "_ASSIGNED_AT_ONCE", at_once)
    num_experts, top_k, dim, width = 6, 2, 40, 24
    x, weight = torch.randn(rows, dim).to(dtype), torch.rand(rows, top_k)
    expert = torch.rand(rows, num_experts).topk(top_k).indices
    expert[: rows // 2, 0] = 3  # more than a block of one expert
    beside = torch.randn(rows, dim).to(dtype)
    w13 = (torch.randn(num_experts, 2 * width, dim) * dim**-0.5).to(dtype)
    w2 = (torch.randn(num_experts, dim, width) * width**-0.5).to(dtype)
    for first, count in ((0, 6), (2, 3)):
        local = slice(first, first + count)
        args = (x, expert, weight, w13[local], w2[local])
        here = tuple(t.to(device) for t in args)
        tol = 2e-5 if dtype == torch.float32 else 5e-3
        close(kernels.experts(*here, first), ORACLE.experts(*args, first), tol)
        got = kernels.experts(*here, first, beside.to(device))
        close(got, ORACLE.experts(*args, first, beside), tol)


def test_experts_with_no_rows_or_none_chosen_here(kernels: TritonKernels, device: torch.device) -> None:
    w13, w2 = torch.randn(2, 8, 6, device=device), torch.randn(2, 6, 4, device=device)
    x, weight = torch.randn(3, 6, device=device), torch.ones(3, 2, device=device)
    expert = torch.tensor([[7, -1]] * 3, device=device)
    assert not kernels.experts(x, expert, weight, w13, w2, 0).any()
    assert torch.equal(kernels.experts(x, expert, weight, w13, w2, 0, x), x)
    assert torch.equal(kernels.experts(x, expert, weight, w13[:0], w2[:0], 0, x), x)
    assert kernels.experts(x[:0], expert[:0], weight[:0], w13, w2, 0).shape == (0, 6)


@pytest.mark.parametrize("width", [16, 3])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_by_index(device: torch.device, width: int, index_dtype: torch.dtype) -> None:
    source = torch.randn(9, 2, width, device=device)
    index = torch.tensor([4, -1, 0, 8], dtype=index_dtype, device=device)
    got = gather_rows(source, index)
    assert torch.equal(got[[0, 2, 3]], source[[4, 0, 8]]) and not got[1].any()


@pytest.mark.parametrize("unit", [16, 1, 4], ids=["words", "bytes", "both"])
def test_extents_are_copied_byte_for_byte_in_every_region(
    device: torch.device, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "CHUNK_BYTES", 64)
    sources = [torch.randint(0, 256, (4000,), dtype=torch.uint8, device=device) for _ in range(3)]
    targets = [torch.zeros(4000, dtype=torch.uint8, device=device) for _ in range(3)]
    extents = np.array([(0, 12, 9), (20, 40, 0), (32, 100, 20)], dtype=np.int64) * unit
    table, regions = pages.chunk_table(extents, device), pages.region_table(targets, sources, device)
    assert [bool(len(chunks)) for chunks in (table.words, table.bytes)] == [unit != 1, unit != 16]
    pages.copy_chunks(regions[1:], table, programs=3)
    pages.copy_chunks(regions[:0], table, programs=3)
    for target, source in zip(targets[1:], sources[1:], strict=True):
        want = torch.zeros_like(target)
        for to, start, size in extents.tolist():
            want[to : to + size] = source[start : start + size]
        assert torch.equal(target, want)
    assert not targets[0].any()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 200)), max_size=6), st.integers(1, 4))
def test_split_extents_cover_what_they_split(extents: list[tuple[int, int, int]], chunk: int) -> None:
    table = np.array(extents, dtype=np.int64).reshape(-1, 3)
    got = pages.split_extents(table, 16 * chunk)
    want = {(to + i, start + i) for to, start, size in extents for i in range(size)}
    assert {(to + i, start + i) for to, start, size in got.tolist() for i in range(size)} == want
    assert not len(got) or (got[:, 2].min() > 0 and got[:, 2].max() <= 16 * chunk)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("k_inner", [True, False], ids=["rows of w^T", "rows of w"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 288, 40), (16, 64, 32), (5, 37, 100), (17, 64, 40)])
def test_products_of_few_rows(
    kernels: TritonKernels, device: torch.device, dtype: torch.dtype, k_inner: bool, rows: int, depth: int, columns: int
) -> None:
    """Split over the summed dim and not, ends within a tile, and more rows than the kernel takes; twice each."""
    x = torch.randn(rows, depth + 3).to(dtype)[:, :depth]
    w = (torch.randn(columns, depth).t() if k_inner else torch.randn(depth, columns)).to(dtype) * depth**-0.5
    for _ in range(2):  # the first leaves the counters as the second needs them
        close(kernels.product(x.to(device), w.to(device)), x @ w, HALF[dtype])


@pytest.mark.parametrize("k_inner", [True, False], ids=["rows of w^T", "rows of w"])
def test_product_tiles_through_tensor_descriptors(device: torch.device, k_inner: bool) -> None:
    """The last tile of columns reaches beyond the matrix; parts are uneven."""
    tiles = Tiles(16, 32, 32, warps=4, stages=1, tma=True)
    x, w = torch.randn(3, 160), torch.randn(72, 160).t()
    x, w = x.to(device), (w if k_inner else w.contiguous()).to(device)
    for parts in (1, 2):
        close(Products(target_of(device), device).run(x, w, tiles, parts), (x @ w).cpu(), 1e-4)


@given(blocks=st.integers(1, 300), tiles=st.integers(1, 500), processors=st.integers(1, 300))
def test_a_product_has_no_more_parts_than_there_is_room_for(blocks: int, tiles: int, processors: int) -> None:
    parts = split(blocks, tiles, processors)
    assert 1 <= parts <= tiles and (parts == 1 or blocks * parts <= 2 * processors)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_products_in_bfloat16_at_deepseek_shapes(device: torch.device, rows: int) -> None:
    """Compared with float32 on the device, twice in a row, and equal each time: parts are added in one order."""
    kernels = TritonKernels(device)
    for depth, columns in ((7168, 2112), (1536, 24576), (7168, 4096), (2048, 7168), (16384, 7168)):
        x = torch.randn(rows, depth, device=device).bfloat16()
        for w in (torch.randn(columns, depth, device=device).t(), torch.randn(depth, columns, device=device)):
            w = w.bfloat16() * depth**-0.5
            want = (x.float() @ w.float()).bfloat16()
            first, second = kernels.product(x, w), kernels.product(x, w)
            assert torch.equal(first, second)
            torch.testing.assert_close(first, want, atol=2e-2, rtol=2e-2)


@settings(max_examples=30)
@given(
    vocab=st.sampled_from([1, 5, 300]),
    spread=st.sampled_from([0.0, 1e-6, 0.5, 4.0, 40.0]),
    top_ps=st.lists(st.sampled_from([1e-6, 0.03, 0.5, 0.9, 0.999, 1 - 1e-9]), min_size=1, max_size=3),
    kept=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_the_nucleus_ends_where_sorting_ends_it(
    vocab: int, spread: float, top_ps: list[float], kept: int, seed: int
) -> None:
    """Blocks smaller than the row, scores that are equal, and some that were dropped before."""
    logits = torch.randn(len(top_ps), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits * 64).round() / 64 if seed % 2 else logits  # with equal ones
    scores = logits - logits.amax(-1, keepdim=True)
    scores = scores.masked_fill(scores < scores.topk(min(kept, vocab)).values[:, -1:], -torch.inf)
    top_p = torch.tensor(top_ps, dtype=torch.float64)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with mock.patch.object(nucleus, "_BLOCK", 64):
        floor = TritonKernels(device).nucleus_floor(scores.to(device), top_p.to(device)).cpu()
    weights = scores.double().exp()
    for weight, score, low, p in zip(weights, scores, floor, top_ps, strict=True):
        assert bool((score == low).any())
        needed = p * float(weight.sum())
        # To the precision of weights in float32: without its lowest score the nucleus falls short, with it it does not.
        assert float(weight[score >= low].sum()) >= needed * (1 - 1e-5)
        assert float(weight[score > low].sum()) < needed * (1 + 1e-5)
    certain = [  # where no rounding could decide otherwise, the very score that sorting finds
        all(abs(float(weight[score >= s].sum()) / (p * float(weight.sum())) - 1) > 1e-5 for s in score.unique())
        for weight, score, p in zip(weights, scores, top_ps, strict=True)
    ]
    want = ORACLE.nucleus_floor(scores, top_p)
    assert torch.equal(floor[certain], want[certain])


def test_the_nucleus_of_a_whole_vocabulary(kernels: TritonKernels, device: torch.device) -> None:
    logits = torch.randn(4, 20_000) * torch.tensor([[0.0], [0.3], [2.0], [6.0]])
    scores = logits - logits.amax(-1, keepdim=True)
    top_p = torch.full((4,), 0.9, dtype=torch.float64)
    got, want = kernels.nucleus_floor(scores.to(device), top_p.to(device)), ORACLE.nucleus_floor(scores, top_p)
    close(got, want, 1e-4)  # the score, or one next to it
    assert kernels.nucleus_floor(scores[:0].to(device), top_p[:0].to(device)).shape == (0,)


@pytest.mark.gpu
def test_top_p_does_not_wait_for_the_device(kernels: TritonKernels, device: torch.device) -> None:
    scores = torch.randn(8, 129_280, device=device).clamp(max=0)
    top_p = torch.full((8,), 0.9, dtype=torch.float64, device=device)
    kernels.nucleus_floor(scores, top_p)
    with torch.cuda.device(device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernels.nucleus_floor(scores, top_p)
        finally:
            torch.cuda.set_sync_debug_mode("default")
