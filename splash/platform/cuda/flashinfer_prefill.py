"""Expanded attention of prompts by FlashInfer's kernels for Hopper, over keys and values that are made for a few heads.

The kernels want every head's key in one piece, rotary part included. One product makes keys and values of several heads
from cache rows of latent and rotary key: its weights are the heads' rows of kv_b, and ones where a key takes over the
rotary part, which bfloat16 multiplies and adds exactly. So nothing is copied to a head after the product.

A batch is planned once a step, from lengths that the host knows, and planning waits for nothing on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch

from splash.platform.base import AttentionBatch
from splash.platform.cuda.flashinfer_mla import sequences
from splash.platform.host_copies import upload
from splash.platform.triton.plan import plan_expanded
from splash.platform.triton.rows import gather_rows

NOPE_DIM, ROTARY_DIM, VALUE_DIM = 128, 64, 128  # of a head, as DeepSeek's are: what the kernels are compiled for
_TILE_ROWS = 128  # of one head, that a program takes at a time
_EXPANDED_BYTES = 768 << 20  # keys and values at once
_WORK_BYTES = 8 << 20  # of a plan; FlashInfer's own advice
_WORK_FIELDS = 7  # int32 of each tile in a plan


@dataclass
class RaggedPlan:
    """Which tiles each program takes, for a number of heads: FlashInfer's own note, and its lists on the device."""

    num_heads: int
    launch: Any
    work: torch.Tensor
    row_starts: torch.Tensor
    key_starts: torch.Tensor


class RaggedKernels(Protocol):
    """Causal attention over keys and values one sequence after another, each sequence's last row at its last key."""

    def plan(self, row_starts: np.ndarray, key_starts: np.ndarray, num_heads: int, dtype: torch.dtype) -> RaggedPlan:
        """Of a batch, [B + 1] each. Waits only for the upload of the plan before the last one."""

    def run(
        self,
        plan: RaggedPlan,
        q_nhd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_ThV: torch.Tensor,
        out_nhV: torch.Tensor,
        scale: float,
    ) -> None:
        """Fill `out`. All may be views whose last dim is dense."""


class FlashInferKernels:
    """FlashInfer's functions for Hopper (fa3), compiled when they are first planned for, which takes minutes once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused = torch.empty(16, dtype=torch.uint8, device=device)  # these kernels have no partial results
        # Two, so that one can be written while the other's upload waits behind the device's work.
        self._hosts = [torch.empty(_WORK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._uploaded = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._modules: dict[torch.dtype, Any] = {}

    def _module(self, dtype: torch.dtype) -> Any:
        if dtype not in self._modules:
            from flashinfer.prefill import get_batch_prefill_module

            no_rotation, no_window, no_cap, full_precision = 0, False, False, False
            self._modules[dtype] = get_batch_prefill_module(
                "fa3", dtype, dtype, dtype, torch.int32, NOPE_DIM + ROTARY_DIM, VALUE_DIM,
                no_rotation, no_window, no_cap, full_precision,
            )  # fmt: skip
        return self._modules[dtype]

    def plan(self, row_starts: np.ndarray, key_starts: np.ndarray, num_heads: int, dtype: torch.dtype) -> RaggedPlan:
        rows, keys = (torch.from_numpy(starts.astype(np.int32)) for starts in (row_starts, key_starts))
        batch_size = len(rows) - 1
        work = torch.empty(_WORK_BYTES, dtype=torch.uint8, device=self._device)
        self._turn ^= 1
        self._uploaded[self._turn].synchronize()
        launch = self._module(dtype).plan(
            self._unused, work, self._hosts[self._turn], rows, keys, keys.diff(), int(row_starts[-1]), batch_size,
            num_heads, num_heads, 1, False, NOPE_DIM + ROTARY_DIM, VALUE_DIM, True, -1,
        )  # fmt: skip
        self._uploaded[self._turn].record()
        return RaggedPlan(num_heads, launch, work, upload(rows, self._device), upload(keys, self._device))

    def run(
        self,
        plan: RaggedPlan,
        q_nhd: torch.Tensor,
        k_Thd: torch.Tensor,
        v_ThV: torch.Tensor,
        out_nhV: torch.Tensor,
        scale: float,
    ) -> None:
        causal, rows_first, no_window, early = 1, 0, -1, False
        no_mask = no_slopes = no_items = None
        self._module(q_nhd.dtype).ragged_run(
            self._unused, plan.work, plan.launch, q_nhd, k_Thd, v_ThV, plan.row_starts, plan.key_starts, out_nhV, None,
            causal, rows_first, no_window, early, no_mask, no_mask, no_slopes, no_items, no_items, no_items,
            0.0, scale, 1.0, 1e4, 0,
        )  # fmt: skip


@dataclass
class _Prompts:
    """A batch on the device: where its keys are, and a plan for each number of heads at once."""

    keys: torch.Tensor
    row_starts: np.ndarray
    key_starts: np.ndarray
    plans: dict[int, RaggedPlan] = field(default_factory=dict)

    @property
    def num_tiles(self) -> int:
        """Of one head."""
        return int((-(-np.diff(self.row_starts) // _TILE_ROWS)).sum())


class FlashInferPrefill:
    """`AttentionBackend.attend_expanded` for what FlashInfer's kernels do.

    Args:
        kernels: what attends.
        num_programs: that the device runs at once.
        expanded_bytes: most that keys and values take at once.
    """

    def __init__(self, kernels: RaggedKernels, num_programs: int, expanded_bytes: int = _EXPANDED_BYTES) -> None:
        self._kernels = kernels
        self._num_programs = num_programs
        self._expanded_bytes = expanded_bytes

    def attend(
        self,
        q_nHd: torch.Tensor,
        pages_SPK: torch.Tensor,
        batch: AttentionBatch,
        kv_b_HEC: torch.Tensor,
        scale: float,
    ) -> torch.Tensor | None:
        """[n, H, V], or None where another has to do it: other dims, rows that are not the last of the keys that they
        see, and keys of which one head takes more room than there is.
        """
        num_rows, num_heads, head_dim = q_nHd.shape
        page_size, key_dim = pages_SPK.shape[1:]
        latent_dim = kv_b_HEC.shape[2]
        rotary_dim = key_dim - latent_dim
        dims = (head_dim - rotary_dim, rotary_dim, kv_b_HEC.shape[1] - (head_dim - rotary_dim))
        suits = dims == (NOPE_DIM, ROTARY_DIM, VALUE_DIM) and q_nHd.dtype in (torch.bfloat16, torch.float16)
        if not num_rows or not suits or pages_SPK.dtype != q_nHd.dtype:
            return None
        prompts = _prompts(batch, page_size, pages_SPK.device)
        if prompts is None:
            return None
        width = NOPE_DIM + ROTARY_DIM + VALUE_DIM
        most = self._expanded_bytes // (len(prompts.keys) * width * q_nHd.element_size())
        per_head = prompts.num_tiles
        most = min(most, _WORK_BYTES // 2 // (per_head * _WORK_FIELDS * 4))
        if most < 1:
            return None
        heads = heads_at_once(num_heads, most, per_head, self._num_programs)
        latents_TK = gather_rows(pages_SPK.reshape(-1, key_dim), prompts.keys)
        q_nHd = q_nHd if q_nHd.stride(2) == 1 else q_nHd.contiguous()
        out_nHV = q_nHd.new_empty(num_rows, num_heads, VALUE_DIM)
        for first in range(0, num_heads, heads):
            part = slice(first, min(first + heads, num_heads))
            weights_FK = expanding_weights(kv_b_HEC[part], NOPE_DIM, rotary_dim)
            kv_ThF = (latents_TK @ weights_FK.t()).view(len(latents_TK), -1, width)
            plan = self._planned(prompts, kv_ThF.shape[1], q_nHd.dtype)
            keys, values = kv_ThF.split((NOPE_DIM + ROTARY_DIM, VALUE_DIM), dim=2)
            self._kernels.run(plan, q_nHd[:, part], keys, values, out_nHV[:, part], scale)
        return out_nHV

    def _planned(self, prompts: _Prompts, num_heads: int, dtype: torch.dtype) -> RaggedPlan:
        if num_heads not in prompts.plans:
            prompts.plans[num_heads] = self._kernels.plan(prompts.row_starts, prompts.key_starts, num_heads, dtype)
        return prompts.plans[num_heads]


def _prompts(batch: AttentionBatch, page_size: int, device: torch.device) -> _Prompts | None:
    """The batch, made once a step; None where a sequence's rows are not the last of the keys that they see."""
    key = f"flashinfer: prompts, pages of {page_size}"
    if key not in batch.device_state:
        causal, prompts = sequences(batch, page_size), None
        if causal is not None:
            lengths = causal.lengths.numpy()
            keys = plan_expanded(batch, page_size, _TILE_ROWS).keys
            assert len(keys) == lengths.sum()
            key_starts = np.concatenate(([0], np.cumsum(lengths)))
            row_starts = cast(np.ndarray, batch.row_starts)
            prompts = _Prompts(upload(torch.from_numpy(keys), device), row_starts, key_starts)
        batch.device_state[key] = prompts
    return cast("_Prompts | None", batch.device_state[key])


def expanding_weights(kv_b_hEC: torch.Tensor, nope_dim: int, rotary_dim: int) -> torch.Tensor:
    """[h (N + R + V), C + R]: times a cache row [C + R], every head's key [N + R] and value [V], E = N + V."""
    heads, expanded_dim, latent_dim = kv_b_hEC.shape
    key_dim = nope_dim + rotary_dim
    weights = kv_b_hEC.new_zeros(heads, expanded_dim + rotary_dim, latent_dim + rotary_dim)
    weights[:, :nope_dim, :latent_dim] = kv_b_hEC[:, :nope_dim]
    weights[:, nope_dim:key_dim, latent_dim:].diagonal(dim1=1, dim2=2).fill_(1.0)
    weights[:, key_dim:, :latent_dim] = kv_b_hEC[:, nope_dim:]
    return weights.flatten(0, 1)


def heads_at_once(num_heads: int, most: int, tiles: int, programs: int) -> int:
    """At most `most` of a number of heads, so that programs which each take a tile at a time end soonest in all.

    Args:
        tiles: of one head, taken to be alike.
    """

    def rounds(heads: int) -> int:
        whole, rest = divmod(num_heads, heads)
        return whole * -(-heads * tiles // programs) - (-rest * tiles // programs)

    return min(range(min(most, num_heads), 0, -1), key=rounds)
