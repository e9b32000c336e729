"""FlashInfer against the CPU's attention: planned anew each step, and in a graph that is replayed with other plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splash.platform.base import BLIND_LSE, AttentionBatch, QueryShape
from splash.platform.cpu.attention import CpuAttention
from tests.cpu.test_attention import Cache, Sequences, queries

pytestmark = pytest.mark.gpu
KEY_DIM, VALUE_DIM, SCALE, TOLERANCE = 576, 512, 0.05, 2e-2
DECODES: list[Sequences] = [
    [(700, [699]), (64, [63]), (65, [64]), (1, [0])],
    [(5000, [4999]), (3000, [2999]), (17, [16]), (128, [127])],
    [(40, [39]), (4096, [4095]), (4095, [4094]), (300, [299])],
]


def backend() -> object:
    pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    from splash.platform.cuda.flashinfer_mla import FlashInferAttention
    from splash.platform.triton.attention import TritonAttention

    device = torch.device("cuda")
    return FlashInferAttention(device, TritonAttention(device))


@pytest.mark.parametrize("heads", [2, 16, 128])
@pytest.mark.parametrize("budget", [4 << 20, 768 << 20], ids=["some heads", "all"])
def test_prompts(heads: int, budget: int) -> None:
    """Whole prompts, chunks after a history, and a row alone; planned once for several layers."""
    pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    from splash.platform.cuda.flashinfer_prefill import FlashInferKernels, FlashInferPrefill

    device = torch.device("cuda")
    prefill = FlashInferPrefill(FlashInferKernels(device), 132, budget)
    for sequences in ([(300, range(300)), (1000, range(700, 1000)), (70, [69]), (9, [])], [(1500, range(1371, 1500))]):
        cache = Cache(sequences, 64, KEY_DIM, True, torch.bfloat16)
        num_rows, batch = sum(len(rows) for _, rows in sequences), cache.batch()
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            q_nHd = torch.randn(num_rows, heads, 192, generator=generator).bfloat16()
            kv_b_HEC = (torch.randn(heads, 256, 512, generator=generator) * 512**-0.5).bfloat16()
            got = prefill.attend(q_nHd.cuda(), cache.pages_SPK.cuda(), batch, kv_b_HEC.cuda(), SCALE)
            want = CpuAttention().attend_expanded(q_nHd, cache.pages_SPK, batch, kv_b_HEC, SCALE)
            assert got is not None
            torch.testing.assert_close(got.cpu(), want, atol=TOLERANCE, rtol=TOLERANCE)


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = (part.cpu() for part in got)
    is_blind = torch.isneginf(want[1])
    assert not out[is_blind].any() and (lse[is_blind] < BLIND_LSE).all()
    torch.testing.assert_close(out, want[0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(lse[~is_blind], want[1][~is_blind], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_batches_of_a_step(heads: int) -> None:
    """Decodes, causal chunks, and rows whose sequence has no pages here."""
    attention = backend()
    for sequences in (DECODES[0], [(300, range(300)), (150, range(100, 150)), (70, [69])]):
        cache = Cache(sequences, 64, KEY_DIM, True, torch.bfloat16)
        q_nHK, pages_SPK = queries(cache, heads, torch.bfloat16), cache.pages_SPK
        for rank, ranks in ((0, 1), (1, 2)):
            want = CpuAttention().attend(q_nHK, pages_SPK, cache.batch(rank, ranks), SCALE, VALUE_DIM)
            got = attention.attend(q_nHK.cuda(), pages_SPK.cuda(), cache.batch(rank, ranks), SCALE, VALUE_DIM)
            check(got, want)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_graph_attends_as_it_is_planned(heads: int) -> None:
    """Rows of a graph that are idle, and those that see nothing of what is here, stay out of it."""
    attention, num_rows, max_pages = backend(), 6, 400
    buffers = attention.buffers(num_rows, max_pages, QueryShape(heads, KEY_DIM, VALUE_DIM, 64, torch.bfloat16))
    caches = [Cache(sequences, 64, KEY_DIM, True, torch.bfloat16) for sequences in DECODES]
    q_nHK = torch.zeros(num_rows, heads, KEY_DIM, dtype=torch.bfloat16, device="cuda")
    pages_SPK = torch.zeros(max_pages, 64, KEY_DIM, dtype=torch.bfloat16, device="cuda")
    recorded = with_idle(caches[0].batch(), num_rows)
    attention.bind(recorded, buffers)
    buffers.load(recorded)
    attention.attend(q_nHK, pages_SPK, recorded, SCALE, VALUE_DIM)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention.attend(q_nHK, pages_SPK, recorded, SCALE, VALUE_DIM)
    for cache in caches:
        for rank, ranks in ((0, 1), (1, 2)):
            batch, q = with_idle(cache.batch(rank, ranks), num_rows), queries(cache, heads, torch.bfloat16)
            q = torch.cat((q, torch.randn(num_rows - len(q), heads, KEY_DIM).bfloat16()))
            q_nHK.copy_(q)
            pages_SPK[: len(cache.pages_SPK)].copy_(cache.pages_SPK)
            buffers.load(batch)
            graph.replay()
            check(got, CpuAttention().attend(q, cache.pages_SPK, batch, SCALE, VALUE_DIM))


def with_idle(batch: AttentionBatch, num_rows: int) -> AttentionBatch:
    """The batch with idle rows behind it, in one sequence without pages."""
    positions = np.zeros(num_rows, dtype=np.int64)
    positions[: len(batch.row_positions)] = batch.row_positions
    row_starts = np.append(batch.row_starts, num_rows)
    return AttentionBatch(
        positions, row_starts, batch.slots, batch.numbers, np.append(batch.page_starts, len(batch.slots))
    )
