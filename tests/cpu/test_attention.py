"""The CPU's attention against a dense float64 reference that knows nothing of pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.platform.base import AttentionBatch
from splash.platform.cpu import attention
from splash.platform.cpu.attention import CpuAttention

Sequences = Sequence[tuple[int, Sequence[int]]]  # (length of the history, positions of the rows)


class Cache:
    """A cache with every sequence's keys in pages at slots of their own, and the dense keys beside it."""

    def __init__(self, sequences: Sequences, page_size: int, key_dim: int, scattered: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.page_size = page_size
        self.sequences = sequences
        num_pages = [-(-length // page_size) for length, _ in sequences]
        num_slots = sum(num_pages) + 3
        # Slots and positions that hold nothing are NaN: reading one shows.
        self.pages_SPK = torch.full((num_slots, page_size, key_dim), torch.nan, dtype=dtype)
        slots = np.random.default_rng(2).permutation(num_slots) if scattered else np.arange(num_slots)
        self.slots = np.split(slots[: sum(num_pages)], np.cumsum(num_pages)[:-1])
        self.keys = []
        for (length, _), own in zip(sequences, self.slots, strict=True):
            keys = torch.randn(length, key_dim, generator=generator).to(dtype)
            self.keys.append(keys)
            for position in range(length):
                self.pages_SPK[own[position // page_size], position % page_size] = keys[position]

    def batch(self, rank: int = 0, ranks: int = 1) -> AttentionBatch:
        """The rows, and the pages whose number is `rank` modulo `ranks`."""
        numbers = [np.arange(rank, len(own), ranks) for own in self.slots]
        slots = [own[mine] for own, mine in zip(self.slots, numbers, strict=True)]
        rows = [np.asarray(positions, dtype=np.int64) for _, positions in self.sequences]
        return AttentionBatch(
            row_positions=np.concatenate(rows),
            row_starts=starts(rows),
            slots=np.concatenate(slots).astype(np.int64),
            numbers=np.concatenate(numbers).astype(np.int64),
            page_starts=starts(numbers),
        )

    def reference(
        self, q_nHK: torch.Tensor, scale: float, value_dim: int, rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Row by row in float64."""
        outs, lses = [], []
        rows = iter(q_nHK.double())
        for (length, positions), keys in zip(self.sequences, self.keys, strict=True):
            held = torch.arange(length) // self.page_size % ranks == rank
            for position in positions:
                seen = keys[held & (torch.arange(length) <= position)].double()
                scores = next(rows) @ seen.T * scale
                outs.append(scores.softmax(dim=-1) @ seen[:, :value_dim])
                lses.append(scores.logsumexp(dim=-1))
        return torch.stack(outs), torch.stack(lses)


def starts(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)]).astype(np.int64)


def queries(cache: Cache, num_heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    num_rows = sum(len(positions) for _, positions in cache.sequences)
    shape = (num_rows, num_heads, cache.pages_SPK.shape[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_attends(
    cache: Cache, num_heads: int, value_dim: int, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32
) -> None:
    q_nHK = queries(cache, num_heads, dtype)
    scale = q_nHK.shape[2] ** -0.5
    out, lse = CpuAttention().attend(q_nHK, cache.pages_SPK, cache.batch(rank, ranks), scale, value_dim)
    want_out, want_lse = cache.reference(q_nHK, scale, value_dim, rank, ranks)
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), want_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5)


DECODE = [(300, [299]), (299, [298]), (1, [0]), (64, [63]), (65, [64]), (128, [127])]
PREFILL = [(200, range(200)), (77, range(60, 77)), (130, [129]), (5, range(5))]


@pytest.mark.parametrize("scattered", [False, True], ids=["extents", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "value_dim", "rotary_dim"), [(2, 512, 64), (8, 64, 16), (5, 64, 16), (1, 16, 0)])
def test_against_the_reference(heads: int, value_dim: int, rotary_dim: int, page_size: int, scattered: bool) -> None:
    for sequences in (DECODE, PREFILL):
        cache = Cache(sequences, page_size, value_dim + rotary_dim, scattered, torch.float32)
        assert_attends(cache, heads, value_dim)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_parts_of_position_sharded_history_merge_to_the_whole(page_size: int) -> None:
    """Every rank's part matches the reference on its pages, empty parts included, and they merge to the whole."""
    ranks, value_dim = 3, 64
    for sequences in (DECODE, PREFILL):
        cache = Cache(sequences, page_size, value_dim + 16, True, torch.float32)
        q_nHK = queries(cache, 4)
        parts = []
        for rank in range(ranks):
            assert_attends(cache, 4, value_dim, rank, ranks)
            parts.append(CpuAttention().attend(q_nHK, cache.pages_SPK, cache.batch(rank, ranks), 0.1, value_dim))
        outs_TnHC, lses_TnH = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        lse = torch.logsumexp(lses_TnH, dim=0)
        out = (outs_TnHC * (lses_TnH - lse).exp().unsqueeze(-1)).sum(dim=0)
        want_out, want_lse = cache.reference(q_nHK, 0.1, value_dim)
        torch.testing.assert_close(out.double(), want_out, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("budget", [1, 1 << 24], ids=["head by head", "all heads"])
@pytest.mark.parametrize("scattered", [False, True], ids=["extents", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_attention_is_the_same_attention(
    monkeypatch: pytest.MonkeyPatch, budget: int, scattered: bool, dtype: torch.dtype
) -> None:
    """Keys and values expanded by KV-B, against dense per-head attention in float64, for any rows."""
    monkeypatch.setattr(attention, "_EXPANDED_ELEMENTS", budget)
    nope_dim, rotary_dim, value_dim, latent_dim, num_heads = 12, 8, 20, 48, 3
    sequences = [(150, list(range(20, 150))), (40, [39]), (70, [*range(0, 16), *range(48, 64)])]
    cache = Cache(sequences, 16, latent_dim + rotary_dim, scattered, dtype)
    generator = torch.Generator().manual_seed(4)
    kv_b = (torch.randn(num_heads, nope_dim + value_dim, latent_dim, generator=generator) / 7).to(dtype)
    num_rows = sum(len(positions) for _, positions in sequences)
    q = torch.randn(num_rows, num_heads, nope_dim + rotary_dim, generator=generator).to(dtype)
    out = CpuAttention().attend_expanded(q, cache.pages_SPK, cache.batch(), kv_b, 0.2)
    assert out.dtype == dtype and out.shape == (num_rows, num_heads, value_dim)
    rows = iter(range(num_rows))
    for (_, positions), keys in zip(sequences, cache.keys, strict=True):
        expanded = torch.einsum("hec,lc->lhe", kv_b.double(), keys[:, :latent_dim].double())
        rotary = keys[:, None, latent_dim:].double().expand(-1, num_heads, -1)
        keys_LHd = torch.cat((expanded[..., :nope_dim], rotary), dim=-1)
        for position in positions:
            row = next(rows)
            scores = torch.einsum("hd,lhd->hl", q[row].double(), keys_LHd[: position + 1]) * 0.2
            expected = torch.einsum("hl,lhv->hv", scores.softmax(-1), expanded[: position + 1, :, nope_dim:])
            error = (out[row].double() - expected).norm() / expected.norm()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def test_rows_that_see_nothing() -> None:
    """No pages at all, only pages of the future, and no rows: among rows that do see something."""
    page_size, value_dim = 4, 8
    cache = Cache([(9, [2]), (6, [0, 1, 4, 5]), (4, []), (4, [3])], page_size, value_dim + 4, True, torch.float32)
    batch = cache.batch(1, 2)  # pages 1, 3, ...: positions 4 .. 7
    q_nHK = queries(cache, 3)
    out, lse = CpuAttention().attend(q_nHK, cache.pages_SPK, batch, 1.0, value_dim)
    assert (lse == -torch.inf).all(dim=1).tolist() == [True, True, True, False, False, True]
    assert torch.equal(out[lse == -torch.inf], torch.zeros(4 * 3, value_dim))
    assert_attends(cache, 3, value_dim, 1, 2)


def test_no_rows() -> None:
    cache = Cache([(4, [])], 4, 12, False, torch.float32)
    out, lse = CpuAttention().attend(queries(cache, 3), cache.pages_SPK, cache.batch(), 1.0, 8)
    assert out.shape == (0, 3, 8) and lse.shape == (0, 3)


def test_bfloat16_scores_are_float32() -> None:
    for sequences in (DECODE, PREFILL):
        assert_attends(Cache(sequences, 16, 80, True, torch.bfloat16), 4, 64, dtype=torch.bfloat16)


def test_long_prefill_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SCORE_ELEMENTS", 256)
    assert_attends(Cache(PREFILL, 16, 24, True, torch.float32), 4, 16)


def test_decode_in_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_GROUP_BYTES", 20_000)
    monkeypatch.setattr(attention, "_FREE_PADDING", 0)
    assert_attends(Cache(DECODE, 16, 24, True, torch.float32), 4, 16)


def test_strided_queries_and_spaced_pages() -> None:
    """Queries come transposed out of a batched product, and pages may be a slice of wider ones."""
    cache = Cache(DECODE, 16, 24, False, torch.float32)
    spaced = torch.full((*cache.pages_SPK.shape[:2], 40), torch.nan)
    spaced[:, :, :24] = cache.pages_SPK
    taller = torch.full((cache.pages_SPK.shape[0], 20, 24), torch.nan)
    taller[:, :16] = cache.pages_SPK
    q_nHK = queries(cache, 4)
    transposed = q_nHK.transpose(0, 1).contiguous().transpose(0, 1)
    want, want_lse = CpuAttention().attend(q_nHK, cache.pages_SPK, cache.batch(), 0.2, 16)
    for pages in (spaced[:, :, :24], taller[:, :16]):
        out, lse = CpuAttention().attend(transposed, pages, cache.batch(), 0.2, 16)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)


def test_what_is_derived_from_a_batch_is_kept_for_the_next_layer() -> None:
    cache = Cache(PREFILL, 16, 24, True, torch.float32)
    batch, q_nHK = cache.batch(), queries(cache, 4)
    first = CpuAttention().attend(q_nHK, cache.pages_SPK, batch, 0.2, 16)
    state = dict(batch.device_state)
    assert len(state) == 1
    second = CpuAttention().attend(q_nHK, cache.pages_SPK, batch, 0.2, 16)
    assert all(batch.device_state[key] is value for key, value in state.items())
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    CpuAttention().attend(q_nHK[:, :1], cache.pages_SPK, batch, 0.2, 16)  # another number of heads is another plan
    assert len(batch.device_state) == 2


@st.composite
def any_sequences(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 70))
        rows = draw(st.sets(st.integers(0, length - 1), max_size=12))  # rows need not be consecutive
        sequences.append((length, sorted(rows)))
    return sequences if any(rows for _, rows in sequences) else [*sequences, (1, [0])]


@settings(max_examples=60)
@given(
    sequences=any_sequences(),
    page_size=st.sampled_from([1, 2, 16, 64]),
    ranks=st.integers(1, 4),
    scattered=st.booleans(),
    heads=st.integers(1, 5),
)
def test_any_batch(sequences: Sequences, page_size: int, ranks: int, scattered: bool, heads: int) -> None:
    cache = Cache(sequences, page_size, 12, scattered, torch.float32)
    for rank in range(ranks):
        assert_attends(cache, heads, 8, rank, ranks)
