"""Absorbed attention by FlashInfer's paged MLA kernels, with another backend for what they do not do."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import torch

from splash.platform.base import AttentionBackend, AttentionBatch, AttentionBuffers, CapturableAttention
from splash.platform.host_copies import upload

LATENT_DIM, ROTARY_DIM = 512, 64  # what the kernels are written for
_WORKSPACE_BYTES = 128 << 20  # partial results of split histories; FlashInfer's own advice
_WRAPPERS = 4  # plans alive at once; a step has no more batches than this
_LN_2 = math.log(2.0)
_BOUND = "flashinfer: left to the other backend"


class FlashInferAttention(AttentionBackend):
    """FlashInfer for bfloat16 and float16 at 512 + 64, where each sequence has one row or is causal to its end.

    Args:
        device: this rank's.
        other: attends where FlashInfer does not: other dims and dtypes, rows that are not the last positions of their
            pages, and the expanded form.
    """

    def __init__(self, device: torch.device, other: CapturableAttention) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._other = other
        self._make = BatchMLAPagedAttentionWrapper
        self._kernels = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: list[_Wrapper] = []
        self._next = 0

    def attend(
        self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        suits = (
            q_nHK.dtype in (torch.bfloat16, torch.float16)
            and (value_dim, q_nHK.shape[2] - value_dim) == (LATENT_DIM, ROTARY_DIM)
            and pages_SPK.dtype == q_nHK.dtype
        )
        suits &= _BOUND not in batch.device_state
        shape = self._sequences(batch, pages_SPK.shape[1]) if suits and q_nHK.shape[0] else None
        if shape is None:
            return self._other.attend(q_nHK, pages_SPK, batch, scale, value_dim)
        key = f"flashinfer: {q_nHK.shape[1]} heads, {scale}"
        planned = cast("tuple[_Wrapper, int] | None", batch.device_state.get(key))
        if planned is None or planned[0].plans != planned[1]:
            wrapper = self._wrapper()
            wrapper.plan(shape, q_nHK.shape[1], pages_SPK.shape[1], scale, q_nHK.dtype)
            planned = batch.device_state[key] = (wrapper, wrapper.plans)
        return planned[0].run(q_nHK, pages_SPK)

    def attend_expanded(
        self,
        q_nHd: torch.Tensor,
        pages_SPK: torch.Tensor,
        batch: AttentionBatch,
        kv_b_HEC: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        return self._other.attend_expanded(q_nHd, pages_SPK, batch, kv_b_HEC, scale)

    def buffers(
        self, max_rows: int, max_pages: int, num_heads: int, page_size: int, dtype: torch.dtype
    ) -> AttentionBuffers:
        """Those of the other backend: FlashInfer's plan of a batch decides its launch, which a graph keeps."""
        return self._other.buffers(max_rows, max_pages, num_heads, page_size, dtype)

    def bind(self, batch: AttentionBatch, buffers: AttentionBuffers) -> None:
        """Have the other backend attend for `batch`."""
        batch.device_state[_BOUND] = buffers
        self._other.bind(batch, buffers)

    def _wrapper(self) -> _Wrapper:
        if len(self._wrappers) < _WRAPPERS:
            self._wrappers.append(_Wrapper(self._make(self._workspace, backend=self._kernels)))
        self._next += 1
        return self._wrappers[self._next % len(self._wrappers)]

    def _sequences(self, batch: AttentionBatch, page_size: int) -> Sequences | None:
        key = f"flashinfer: pages of {page_size}"
        if key not in batch.device_state:
            batch.device_state[key] = sequences(batch, page_size)
        return cast("Sequences | None", batch.device_state[key])


class Sequences:
    """A batch as FlashInfer wants it: int32 arrays on the host.

    Attributes:
        row_starts, page_starts: [B + 1].
        slots: pages of each sequence in turn, those that no row sees left out.
        lengths: [B] keys that the last row of each sequence sees.
        blind: [n] bool, rows that see nothing; None where there are none.
    """

    def __init__(
        self,
        row_starts: np.ndarray,
        page_starts: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        blind: np.ndarray | None,
    ) -> None:
        self.row_starts = torch.from_numpy(row_starts.astype(np.int32))
        self.page_starts = torch.from_numpy(page_starts.astype(np.int32))
        self.slots = torch.from_numpy(slots.astype(np.int32))
        self.lengths = torch.from_numpy(lengths.astype(np.int32))
        self.blind = None if blind is None else torch.from_numpy(blind)

    @property
    def causal(self) -> bool:
        """Whether a sequence has several rows, each of which sees one key more than the row before."""
        return bool((self.row_starts.diff() > 1).any())


def sequences(batch: AttentionBatch, page_size: int) -> Sequences | None:
    """The batch for FlashInfer, or None where a sequence's rows are not the last of the keys that it has."""
    positions, row_starts = cast(np.ndarray, batch.row_positions), cast(np.ndarray, batch.row_starts)
    slots, numbers = cast(np.ndarray, batch.slots), cast(np.ndarray, batch.numbers)
    page_starts = cast(np.ndarray, batch.page_starts)
    lengths = np.zeros(len(row_starts) - 1, dtype=np.int64)
    kept = []
    for b, (start, stop) in enumerate(itertools.pairwise(row_starts.tolist())):
        pages = slice(int(page_starts[b]), int(page_starts[b + 1]))
        last = int(positions[stop - 1]) if stop > start else -1
        number, offset = divmod(last, page_size)
        whole = int(np.searchsorted(numbers[pages], number))  # pages wholly in the past of the last row
        is_present = whole < pages.stop - pages.start and numbers[pages][whole] == number
        lengths[b] = whole * page_size + (offset + 1 if is_present else 0)
        if stop - start > 1:
            follows = np.array_equal(positions[start:stop], np.arange(last - (stop - start) + 1, last + 1))
            if not follows or lengths[b] != last + 1:  # a page is elsewhere, so rows do not see one key more each
                return None
        kept.append(slots[pages][: -(-int(lengths[b]) // page_size)])
    starts = np.r_[0, np.cumsum([len(part) for part in kept])]
    blind = np.repeat(lengths == 0, np.diff(row_starts))
    return Sequences(row_starts, starts, np.concatenate([*kept, slots[:0]]), lengths, blind if blind.any() else None)


class _Wrapper:
    """One of FlashInfer's wrappers, which keeps one plan. `plans` counts those it has made."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._blind: torch.Tensor | None = None
        self._uploaded = torch.cuda.Event()
        self.plans = 0

    def plan(self, batch: Sequences, num_heads: int, page_size: int, scale: float, dtype: torch.dtype) -> None:
        """Plan the batch for this many heads. Waits for the upload of the plan before, which it overwrites."""
        self._uploaded.synchronize()
        self.plans += 1
        self._blind = None if batch.blind is None else upload(batch.blind, self._wrapper.device)
        starts, pages = batch.row_starts, batch.page_starts
        self._wrapper.plan(
            starts, pages, batch.slots, batch.lengths, num_heads, LATENT_DIM, ROTARY_DIM, page_size, batch.causal,
            scale, dtype, dtype,
        )  # fmt: skip
        self._uploaded.record()

    def run(self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and the natural log-sum-exp, which FlashInfer gives in base 2."""
        q_latent, q_rotary = q_nHK.split((LATENT_DIM, ROTARY_DIM), dim=-1)
        latents, keys = pages_SPK.split((LATENT_DIM, ROTARY_DIM), dim=-1)
        out = torch.empty(q_latent.shape, dtype=q_nHK.dtype, device=q_nHK.device)
        out, lse = self._wrapper.run(q_latent, q_rotary, latents, keys, out=out, return_lse=True)
        lse = lse * _LN_2
        if self._blind is not None:
            hidden = self._blind.unsqueeze(1)
            out, lse = out.masked_fill(hidden.unsqueeze(2), 0.0), lse.masked_fill(hidden, -torch.inf)
        return out, lse
