"""The Triton attention backend against the CPU's, which is checked against a dense reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.platform.base import AttentionBatch, QueryShape
from splash.platform.cpu.attention import CpuAttention
from splash.platform.triton import attention
from splash.platform.triton.attention import TritonAttention
from splash.platform.triton.launch import Tiles
from tests.cpu.test_attention import Cache, Sequences, any_sequences, queries

# The interpreter warns of log(0) = -inf, which is what an empty history has.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

DECODE = [(70, [69]), (1, [0]), (33, [32]), (64, [63])]
PREFILL = [(24, range(24)), (40, range(33, 40)), (9, [8]), (5, range(5))]


def check(
    device: torch.device, cache: Cache, num_heads: int, value_dim: int, rank: int = 0, ranks: int = 1, tol: float = 2e-5
) -> None:
    q_nHK = queries(cache, num_heads, cache.pages_SPK.dtype)
    scale = q_nHK.shape[2] ** -0.5
    want, want_lse = CpuAttention().attend(q_nHK, cache.pages_SPK, cache.batch(rank, ranks), scale, value_dim)
    backend = TritonAttention(device)
    got, lse = backend.attend(q_nHK.to(device), cache.pages_SPK.to(device), cache.batch(rank, ranks), scale, value_dim)
    assert got.dtype == q_nHK.dtype and lse.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), want, atol=tol, rtol=tol)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=max(tol, 2e-5), rtol=2e-5)


@pytest.mark.parametrize("heads", [8, 12, 16])
@pytest.mark.parametrize("sequences", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_few_heads(device: torch.device, heads: int, sequences: Sequences) -> None:
    check(device, Cache(sequences, 16, 40, True, torch.float32), heads, 32)


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_many_heads(device: torch.device, heads: int) -> None:
    check(device, Cache([(20, [19]), (7, [0, 5, 6])], 16, 40, True, torch.float32), heads, 32)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("value_dim", "rotary_dim"), [(64, 16), (16, 0), (20, 6)])
def test_any_page_size_and_dims(device: torch.device, page_size: int, value_dim: int, rotary_dim: int) -> None:
    for sequences in (DECODE, PREFILL):
        check(device, Cache(sequences, page_size, value_dim + rotary_dim, True, torch.float32), 4, value_dim)


def test_half_precision(device: torch.device) -> None:
    """float16: what the interpreter does with bfloat16 is not what a device does."""
    for sequences in (DECODE, PREFILL):
        check(device, Cache(sequences, 16, 80, True, torch.float16), 8, 64, tol=4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("heads", [8, 12, 16, 64, 128])
def test_bfloat16_at_deepseek_dims(device: torch.device, heads: int, page_size: int) -> None:
    """On the device tiles are loaded by the tensor copy engine here, and gathered where pages are small."""
    for sequences in ([(1000, [999]), (64, [63]), (65, [64])], [(300, range(300)), (150, range(100, 150))]):
        check(device, Cache(sequences, page_size, 576, True, torch.bfloat16), heads, 512, tol=2e-2)


def test_the_keys_of_a_few_rows_are_split_and_merged(device: torch.device) -> None:
    cache = Cache([(700, [699]), (40, [39])], 16, 40, True, torch.float32)
    shape = TritonAttention(device)._shape(4, 16, torch.float32)
    plan = attention.plan_absorbed(cache.batch(), 16, 4, shape.tiles.rows, shape.tiles.columns, shape.programs)
    assert len(plan.splits)
    check(device, cache, 4, 32)


def test_tiles_through_tensor_descriptors(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles come by descriptor, the last one gathered: what lies beyond the end of a sequence is NaN here."""
    tiles = Tiles(16, 16, 0, warps=4, stages=1, tma=True)
    monkeypatch.setattr(attention, "absorbed_tiles", lambda target, dtype: tiles)
    for sequences in (DECODE, PREFILL):
        check(device, Cache(sequences, 32, 48, True, torch.float32), 4, 32)


def test_rows_of_a_sequence_without_pages_see_nothing(device: torch.device) -> None:
    cache = Cache([(20, [19]), (3, [1, 2])], 16, 40, False, torch.float32)
    batch = cache.batch()
    none = AttentionBatch(
        batch.row_positions, batch.row_starts, batch.slots[:2], batch.numbers[:2], np.array([0, 2, 2])
    )
    q_nHK = queries(cache, 4).to(device)
    out, lse = TritonAttention(device).attend(q_nHK, cache.pages_SPK.to(device), none, 0.2, 32)
    assert not out[1:].any() and (lse[1:] == -torch.inf).all()
    assert torch.isfinite(lse[0]).all() and out[0].any()


def test_spaced_pages_and_strided_queries(device: torch.device) -> None:
    cache = Cache(PREFILL, 16, 24, False, torch.float32)
    spaced = torch.full((*cache.pages_SPK.shape[:2], 40), torch.nan)
    spaced[:, :, :24] = cache.pages_SPK
    q_nHK = queries(cache, 4)
    transposed = q_nHK.transpose(0, 1).contiguous().transpose(0, 1)
    want, want_lse = CpuAttention().attend(q_nHK, cache.pages_SPK, cache.batch(), 0.2, 16)
    out, lse = TritonAttention(device).attend(
        transposed.to(device), spaced.to(device)[:, :, :24], cache.batch(), 0.2, 16
    )
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=2e-5, rtol=2e-5)


@settings(max_examples=8)
@given(
    sequences=any_sequences(),
    page_size=st.sampled_from([1, 2, 16, 64]),
    ranks=st.integers(1, 3),
    heads=st.integers(1, 5),
)
def test_any_batch(sequences: Sequences, page_size: int, ranks: int, heads: int) -> None:
    cache = Cache(sequences, page_size, 12, True, torch.float32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for rank in range(ranks):
        check(device, cache, heads, 8, rank, ranks)


def test_bound_buffers_serve_one_batch_after_another(device: torch.device) -> None:
    backend = TritonAttention(device)
    buffers = backend.buffers(max_rows=6, max_pages=20, shape=QueryShape(4, 40, 32, 16, torch.float32))
    addresses = [part.data_ptr() for part in (buffers.segments, buffers.splits, buffers.visible, buffers.slots)]
    captured = None
    for sequences in (DECODE, [(100, [99])], [(40, range(35, 40)), (2, [1])]):
        cache = Cache(sequences, 16, 40, True, torch.float32)
        batch, q_nHK = cache.batch(), queries(cache, 4)
        captured = captured or batch
        backend.bind(captured, buffers)
        buffers.load(batch)
        out, lse = backend.attend(q_nHK.to(device), cache.pages_SPK.to(device), captured, 0.2, 32)
        want, want_lse = CpuAttention().attend(q_nHK, cache.pages_SPK, batch, 0.2, 32)
        torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.cpu(), want_lse, atol=2e-5, rtol=2e-5)
    assert addresses == [part.data_ptr() for part in (buffers.segments, buffers.splits, buffers.visible, buffers.slots)]


def check_expanded(
    device: torch.device,
    sequences: Sequences,
    dims: tuple[int, int, int, int],
    heads: int,
    dtype: torch.dtype,
    tol: float,
) -> None:
    nope, rotary, value, latent = dims
    cache = Cache(sequences, 16, latent + rotary, True, dtype)
    num_rows = sum(len(rows) for _, rows in sequences)
    q_nHd = torch.randn(num_rows, heads, nope + rotary).to(dtype)
    kv_b_HEC = (torch.randn(heads, nope + value, latent) * latent**-0.5).to(dtype)
    scale = (nope + rotary) ** -0.5
    want = CpuAttention().attend_expanded(q_nHd, cache.pages_SPK, cache.batch(), kv_b_HEC, scale)
    args = (q_nHd.to(device), cache.pages_SPK.to(device), cache.batch(), kv_b_HEC.to(device), scale)
    got = TritonAttention(device).attend_expanded(*args)
    torch.testing.assert_close(got.cpu(), want, atol=tol, rtol=tol)


@pytest.mark.parametrize(
    "dims", [(32, 16, 32, 64), (48, 16, 64, 32), (8, 4, 20, 24), (16, 0, 16, 32)], ids=["plain", "two", "odd", "nope"]
)
def test_expanded(device: torch.device, dims: tuple[int, int, int, int]) -> None:
    check_expanded(device, PREFILL, dims, 3, torch.float32, 5e-5)


@pytest.mark.parametrize("budget", [1, 8000], ids=["least", "few keys"])
def test_expanded_in_windows_and_some_heads_at_a_time(
    device: torch.device, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_EXPANDED_BYTES", budget)
    monkeypatch.setattr(attention, "_MIN_EXPANDED_HEADS", 2)
    check_expanded(device, PREFILL, (16, 16, 16, 32), 5, torch.float32, 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 64, 128, 512), (192, 64, 256, 512)], ids=["deepseek", "glm"])
def test_expanded_in_bfloat16(device: torch.device, dims: tuple[int, int, int, int]) -> None:
    sequences: Sequence[tuple[int, Sequence[int]]] = [(700, range(300, 700)), (200, range(200))]
    check_expanded(device, sequences, dims, 4, torch.bfloat16, 2e-2)
