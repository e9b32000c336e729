"""Absorbed attention by FlashInfer's paged MLA kernels, with another backend for what they do not do.

A batch is planned once a step, from lengths that the host knows: FlashInfer cuts it into pieces of work there, writes
them to pinned memory and queues one copy of fixed size. So planning waits for nothing, and since the launch depends on
the number of heads alone, a graph can hold the kernel and be replayed with another plan in the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from splash.platform.base import AttentionBackend, AttentionBatch, AttentionBuffers, CapturableAttention, QueryShape
from splash.platform.host_copies import Staging, upload
from splash.platform.triton.plan import visible_keys

if TYPE_CHECKING:
    from splash.platform.cuda.flashinfer_prefill import FlashInferPrefill

LATENT_DIM, ROTARY_DIM = 512, 64  # what the kernels are written for
_PARTIAL_BYTES = 128 << 20  # partial results of split histories; FlashInfer's own advice
_SCHEDULE_BYTES = 1 << 20  # pieces of work, of which FlashInfer allows 16,384
_CAUSAL, _ALL = 1, 0  # FlashInfer's MaskMode
_BOUND = "flashinfer: bound"


class FlashInferAttention(AttentionBackend):
    """FlashInfer for bfloat16 and float16 at 512 + 64, where each sequence has one row or is causal to its end.

    Args:
        device: this rank's.
        other: attends where FlashInfer does not: other dims and dtypes, rows that are not the last positions of their
            pages, and graphs of GPUs other than Hopper's.
        prefill: the expanded form, as far as it goes; None leaves it to `other`.
    """

    def __init__(
        self, device: torch.device, other: CapturableAttention, prefill: FlashInferPrefill | None = None
    ) -> None:
        self._other = other
        self._prefill = prefill
        self._device = device
        self._is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._planner = _Planner(device, "fa3" if self._is_hopper else "fa2")

    def attend(
        self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `AttentionBackend.attend`; the log-sum-exp of a row that sees nothing is below `BLIND_LSE`, not -inf."""
        num_rows, num_heads, key_dim = q_nHK.shape
        page_size = pages_SPK.shape[1]
        plan: _Plan | None = None
        if _BOUND in batch.device_state:
            bound = batch.device_state[_BOUND]
            plan = bound.plan if isinstance(bound, FlashInferBuffers) else None
        elif num_rows and _suits(QueryShape(num_heads, key_dim, value_dim, page_size, q_nHK.dtype)):
            plan = self._planned(batch, num_heads, page_size, q_nHK.dtype)
        if plan is None or pages_SPK.dtype != q_nHK.dtype:
            return self._other.attend(q_nHK, pages_SPK, batch, scale, value_dim)
        return self._planner.run(plan, q_nHK, pages_SPK, scale)

    def _planned(self, batch: AttentionBatch, num_heads: int, page_size: int, dtype: torch.dtype) -> _Plan | None:
        key = f"flashinfer: {num_heads} heads, pages of {page_size}"
        if key not in batch.device_state:
            made = sequences(batch, page_size)
            plan = None if made is None else _Plan(num_heads, dtype, self._device)
            if plan is not None and made is not None:
                plan.slots = upload(made.slots, self._device)
                self._planner.plan(plan, made)
            batch.device_state[key] = plan
        return cast("_Plan | None", batch.device_state[key])

    def attend_expanded(
        self,
        q_nHd: torch.Tensor,
        pages_SPK: torch.Tensor,
        batch: AttentionBatch,
        kv_b_HEC: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        if self._prefill is not None:
            out = self._prefill.attend(q_nHd, pages_SPK, batch, kv_b_HEC, scale)
            if out is not None:
                return out
        return self._other.attend_expanded(q_nHd, pages_SPK, batch, kv_b_HEC, scale)

    def buffers(self, max_rows: int, max_pages: int, shape: QueryShape) -> AttentionBuffers:
        """FlashInfer's where its kernels are the faster ones, else those of the other backend."""
        if self._is_hopper and max_rows and _suits(shape):
            return FlashInferBuffers(self._planner, max_rows, max_pages, shape, self._device)
        return self._other.buffers(max_rows, max_pages, shape)

    def bind(self, batch: AttentionBatch, buffers: AttentionBuffers) -> None:
        batch.device_state[_BOUND] = buffers
        if not isinstance(buffers, FlashInferBuffers):
            self._other.bind(batch, buffers)


def _suits(shape: QueryShape) -> bool:
    return (
        shape.dtype in (torch.bfloat16, torch.float16)
        and shape.value_dim == LATENT_DIM
        and shape.key_dim == LATENT_DIM + ROTARY_DIM
    )


class FlashInferBuffers:
    """The plan of a batch at addresses that never change. Every row is a sequence of its own, so rows may be any."""

    def __init__(
        self, planner: _Planner, max_rows: int, max_pages: int, shape: QueryShape, device: torch.device
    ) -> None:
        self.max_rows, self._page_size = max_rows, shape.page_size
        self._planner = planner
        self.plan = _Plan(shape.num_heads, shape.dtype, device)
        self.plan.slots = torch.zeros(max_pages, dtype=torch.int32, device=device)
        self._staging = Staging(self.plan.slots)

    def load(self, batch: AttentionBatch) -> None:
        """Plan `batch` and upload it on the current stream. Waits only for the upload before the last one."""
        made = single_rows(batch, self._page_size)
        assert len(made.lengths) == self.max_rows, "FlashInfer's launch is for as many rows as were recorded"
        self._staging.next()[: len(made.slots)] = made.slots
        self._staging.send(len(made.slots))
        before = self.plan.launch
        self._planner.plan(self.plan, made)
        assert before is None or list(before) == list(self.plan.launch), "a graph keeps its launch"


class Sequences:
    """A batch as FlashInfer wants it: int32 tensors on the host.

    Attributes:
        row_starts: [B + 1].
        page_starts: [B + 1], where the pages of each sequence begin; the last one is not used.
        slots: those of all sequences, pages that no row sees included.
        lengths: [B] keys that the last row of each sequence sees.
    """

    def __init__(self, row_starts: np.ndarray, page_starts: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.row_starts = torch.from_numpy(row_starts.astype(np.int32))
        self.page_starts = torch.from_numpy(page_starts.astype(np.int32))
        self.slots = torch.from_numpy(slots.astype(np.int32))
        self.lengths = torch.from_numpy(lengths.astype(np.int32))

    @property
    def causal(self) -> bool:
        """Whether a sequence has several rows, each of which sees one key more than the row before."""
        return bool((self.row_starts.diff() > 1).any())


def sequences(batch: AttentionBatch, page_size: int) -> Sequences | None:
    """The batch for FlashInfer, or None where a sequence's rows are not the last of the keys that it has."""
    positions, row_starts = cast(np.ndarray, batch.row_positions), cast(np.ndarray, batch.row_starts)
    visible, counts = visible_keys(batch, page_size), np.diff(row_starts)
    lengths = np.zeros(len(counts), dtype=np.int64)
    lengths[counts > 0] = visible[row_starts[1:][counts > 0] - 1]
    # A row of several must see one key more than the one before, and the last one all that there are.
    of_several = np.repeat(counts > 1, counts)
    if not np.array_equal(visible[of_several], positions[of_several] + 1):
        return None
    is_first = np.zeros(len(positions) + 1, dtype=bool)
    is_first[row_starts] = True
    if not np.all((np.diff(positions) == 1) | is_first[1:-1]):
        return None
    return Sequences(row_starts, cast(np.ndarray, batch.page_starts), cast(np.ndarray, batch.slots), lengths)


def single_rows(batch: AttentionBatch, page_size: int) -> Sequences:
    """The batch for FlashInfer with every row as a sequence of its own."""
    row_starts, page_starts = cast(np.ndarray, batch.row_starts), cast(np.ndarray, batch.page_starts)
    visible = visible_keys(batch, page_size)
    first_page = np.repeat(page_starts[:-1], np.diff(row_starts))
    return Sequences(
        np.arange(len(visible) + 1), np.append(first_page, page_starts[-1]), cast(np.ndarray, batch.slots), visible
    )


class _Plan:
    """A plan on the device.

    Attributes:
        schedule: uint8 [_SCHEDULE_BYTES], the pieces of work.
        slots: int32 [pages] at least.
        launch: FlashInfer's own note of how to launch the kernel; None until planned.
        is_causal: see `Sequences.causal`.
    """

    slots: torch.Tensor

    def __init__(self, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.dtype = num_heads, dtype
        self.schedule = torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, device=device)
        self.launch: Any = None
        self.is_causal = False


class _Planner:
    """FlashInfer's two functions, with the memory that all plans share."""

    def __init__(self, device: torch.device, kernels: str) -> None:
        from flashinfer.mla import get_batch_mla_module

        self._make, self._kernels = get_batch_mla_module, kernels
        self._partials = torch.empty(_PARTIAL_BYTES, dtype=torch.uint8, device=device)
        # Two, so that one can be written while the other's upload waits behind the device's work.
        self._hosts = [torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._uploaded = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._modules: dict[torch.dtype, Any] = {}

    def _module(self, dtype: torch.dtype) -> Any:
        """FlashInfer's kernels for a dtype, compiled where that has not been done."""
        if dtype not in self._modules:
            self._modules[dtype] = self._make(
                self._kernels, dtype, dtype, dtype, torch.int32, LATENT_DIM, ROTARY_DIM, False
            )
        return self._modules[dtype]

    def plan(self, plan: _Plan, batch: Sequences) -> None:
        """Plan a batch and queue the upload. Waits only for the upload before the last one."""
        self._turn ^= 1
        self._uploaded[self._turn].synchronize()
        plan.is_causal = batch.causal
        plan.launch = self._module(plan.dtype).plan(
            self._partials, plan.schedule, self._hosts[self._turn], batch.row_starts, batch.page_starts, batch.lengths,
            plan.num_heads, LATENT_DIM, plan.is_causal,
        )  # fmt: skip
        self._uploaded[self._turn].record()

    def run(
        self, plan: _Plan, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and the natural log-sum-exp."""
        q_latent, q_rotary = q_nHK.split((LATENT_DIM, ROTARY_DIM), dim=-1)
        latents, keys = pages_SPK.split((LATENT_DIM, ROTARY_DIM), dim=-1)
        out = torch.empty(q_latent.shape, dtype=q_nHK.dtype, device=q_nHK.device)
        lse = torch.empty(q_latent.shape[:2], dtype=torch.float32, device=q_nHK.device)
        self._module(plan.dtype).run(
            self._partials, plan.schedule, plan.launch, q_latent, q_rotary, latents, keys, plan.slots, out, lse,
            _CAUSAL if plan.is_causal else _ALL, plan.num_heads, pages_SPK.shape[1], scale, True,
        )  # fmt: skip
        return out, lse
