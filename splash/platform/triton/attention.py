"""The attention backend over the Triton kernels: plans, tile sizes, workspaces and launches."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

import numpy as np
import torch

from splash.platform.base import AttentionBackend, AttentionBatch, QueryShape
from splash.platform.host_copies import upload
from splash.platform.triton import expanded
from splash.platform.triton.absorbed import attend_kernel, merge_splits_kernel
from splash.platform.triton.launch import Target, Tiles, describable, descriptor, next_power_of_2, target_of
from splash.platform.triton.plan import (
    SEGMENT_FIELDS,
    SPLIT_FIELDS,
    ExpandedPlan,
    max_partials,
    max_segments,
    plan_absorbed,
    plan_expanded,
)
from splash.platform.triton.rows import gather_rows

LOG2E = 1.4426950408889634
_EXPANDED_BYTES = 512 << 20  # keys and values expanded at once
_MIN_EXPANDED_HEADS = 8  # with fewer heads at once there would be too few programs; keys are cut into windows instead


def absorbed_tiles(target: Target, dtype: torch.dtype) -> Tiles:
    """rows: pairs of a block; columns: keys of a tile."""
    if dtype == torch.float32:
        return Tiles(16, 16, 0, warps=4, stages=1)
    if target.kind == "hip":
        return Tiles(32, 32, 0, warps=4, stages=1)
    if target.kind == "interpreter":
        return Tiles(16, 32, 0, warps=4, stages=1)
    if target.has_tma:
        return Tiles(64, 64, 0, warps=8, stages=2, tma=True)
    return Tiles(16, 32, 0, warps=4, stages=2)


def expanded_tiles(target: Target, dtype: torch.dtype, value_dim: int) -> Tiles:
    """rows: rows of a block; columns: keys of a tile."""
    if dtype == torch.float32:
        return Tiles(16, 16, 0, warps=4, stages=1)
    if target.kind == "hip":
        return Tiles(64, 32, 0, warps=4, stages=1)
    if target.kind == "interpreter":
        return Tiles(16, 32, 0, warps=4, stages=1)
    if target.has_tma:
        return Tiles(128, 128 if value_dim <= 128 else 64, 0, warps=8, stages=2, tma=True)
    return Tiles(64, 32, 0, warps=4, stages=2)


@dataclass(frozen=True)
class _Shape:
    """What a plan on the device is for: it fits every layer with these."""

    num_heads: int
    page_size: int
    tiles: Tiles
    programs: int

    @property
    def key(self) -> str:
        return f"triton: {self.num_heads} heads, pages of {self.page_size}, {self.tiles.rows} x {self.tiles.columns}"


class AbsorbedBuffers:
    """A plan of absorbed attention on the device, at addresses that never change, so that a graph can hold them.

    One int32 tensor holds all of it, so that a step uploads it in one copy: segments, splits, visible keys, slots.
    """

    def __init__(self, shape: _Shape, max_rows: int, max_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.max_rows, self.max_pages = max_rows, max_pages
        self.max_segments, self.max_splits, _ = max_segments(
            max_rows, shape.num_heads, shape.tiles.rows, shape.programs
        )
        self._sizes = (self.max_segments * SEGMENT_FIELDS, self.max_splits * SPLIT_FIELDS, max_rows, max_pages)
        total = sum(self._sizes)
        # Two, so that one can be written while the other's upload waits behind the device's work.
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(total, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
        self._uploaded = [torch.cuda.Event() for _ in range(2)] if is_cuda else []
        self._turn = 0
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self.segments, self.splits, self.visible, self.slots = self._device.split(self._sizes)
        self.num_segments, self.num_splits = self.max_segments, self.max_splits  # programs to launch

    def load(self, batch: AttentionBatch) -> None:
        """Plan `batch` and upload it on the current stream. Waits only for the upload before the last one."""
        shape = self.shape
        plan = plan_absorbed(
            batch, shape.page_size, shape.num_heads, shape.tiles.rows, shape.tiles.columns, shape.programs
        )
        assert len(plan.visible) <= self.max_rows and len(plan.slots) <= self.max_pages
        self._turn ^= 1
        if self._uploaded:
            self._uploaded[self._turn].synchronize()
        host = self._hosts[self._turn].numpy()
        start = 0
        for part, size in zip((plan.segments, plan.splits, plan.visible, plan.slots), self._sizes, strict=True):
            host[start : start + part.size] = part.reshape(-1)
            host[start + part.size : start + size] = 0  # a segment or split of no pairs is no work
            start += size
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._uploaded:
            self._uploaded[self._turn].record()
        self._planned = (len(plan.segments), len(plan.splits))

    def fit(self) -> None:
        """Launch what the loaded plan needs, not all that the buffers hold: for a batch that no graph captures."""
        self.num_segments, self.num_splits = self._planned


class TritonAttention(AttentionBackend):
    """Attention by the kernels of this package, in float32, bfloat16 or float16."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._target = target_of(self._device)
        self._partials: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._expanded_bytes = _EXPANDED_BYTES
        # Gluon, which only Hopper's kernel needs, is experimental: nothing else should depend on it.
        is_hopper = self._target.capability == 9
        self._hopper = import_module("splash.platform.triton.hopper") if is_hopper else None
        self._hopper_expanded = import_module("splash.platform.triton.hopper_expanded") if is_hopper else None

    def buffers(self, max_rows: int, max_pages: int, shape: QueryShape) -> AbsorbedBuffers:
        """Buffers for batches of at most so many rows and pages."""
        plan_shape = self._shape(shape.num_heads, shape.page_size, shape.dtype)
        return AbsorbedBuffers(plan_shape, max_rows, max_pages, self._device)

    def bind(self, batch: AttentionBatch, buffers: AbsorbedBuffers) -> None:
        """Have `attend` of `batch` use what `buffers` hold at the time that its kernels run."""
        batch.device_state[buffers.shape.key] = buffers

    def attend(
        self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_heads, _key_dim = q_nHK.shape
        page_size = pages_SPK.shape[1]
        assert page_size & (page_size - 1) == 0, "the page size is a power of two"
        out_nHC = q_nHK.new_empty(num_rows, num_heads, value_dim)
        lse_nH = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q_nHK.device)
        if not num_rows:
            return out_nHC, lse_nH
        q_nHK = q_nHK if q_nHK.stride(2) == 1 else q_nHK.contiguous()
        pages_SPK = pages_SPK if pages_SPK.stride(2) == 1 else pages_SPK.contiguous()
        shape = self._shape(num_heads, page_size, q_nHK.dtype)
        plan = cast("AbsorbedBuffers | None", batch.device_state.get(shape.key))
        if plan is None:
            num_pages = len(cast(np.ndarray, batch.slots))
            plan = AbsorbedBuffers(shape, num_rows, num_pages, self._device)
            plan.load(batch)
            plan.fit()
            batch.device_state[shape.key] = plan
        partials = self._workspace(shape, value_dim)
        if self._hopper is not None and self._hopper.fits(q_nHK, pages_SPK, value_dim):
            self._hopper.attend(
                q_nHK, pages_SPK, plan.segments, plan.num_segments, plan.visible, plan.slots, out_nHC, lse_nH,
                *partials, scale * LOG2E, value_dim,
            )  # fmt: skip
        else:
            _launch_absorbed(q_nHK, pages_SPK, plan, out_nHC, lse_nH, partials, scale)
        if plan.num_splits:
            rows = shape.tiles.rows
            pairs, unroll = (1, 8) if plan.num_splits * rows <= 2048 else (4, 4)
            merge_splits_kernel[(plan.num_splits, rows // pairs)](
                *partials, plan.splits, out_nHC, lse_nH, num_heads, out_nHC.stride(0), out_nHC.stride(1),
                C=value_dim, BLOCK_C=max(16, next_power_of_2(value_dim)), BLOCK_M=rows, PAIRS=pairs, UNROLL=unroll,
            )  # fmt: skip
        return out_nHC, lse_nH

    def attend_expanded(
        self,
        q_nHd: torch.Tensor,
        pages_SPK: torch.Tensor,
        batch: AttentionBatch,
        kv_b_HEC: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = q_nHd.shape
        page_size, key_dim = pages_SPK.shape[1:]
        latent_dim = kv_b_HEC.shape[2]
        nope_dim = head_dim - (key_dim - latent_dim)
        value_dim = kv_b_HEC.shape[1] - nope_dim
        dims = (nope_dim, value_dim, latent_dim)
        out_nHV = q_nHd.new_empty(num_rows, num_heads, value_dim)
        if not num_rows:
            return out_nHV
        q_nHd = q_nHd if q_nHd.stride(2) == 1 else q_nHd.contiguous()
        tiles = expanded_tiles(self._target, q_nHd.dtype, value_dim)
        state_key = f"triton: expanded, pages of {page_size}, {tiles.rows} rows"
        plan = cast("_ExpandedOnDevice | None", batch.device_state.get(state_key))
        if plan is None:
            plan = batch.device_state[state_key] = _upload(plan_expanded(batch, page_size, tiles.rows), self._device)
        num_keys = len(plan.keys)
        latents_TK = gather_rows(_dense(pages_SPK), plan.keys)
        key_bytes = (nope_dim + value_dim) * q_nHd.element_size()
        heads, window = self._chunks(num_keys, num_heads, key_bytes, tiles.columns)
        has_windows = window < num_keys
        for first in range(0, num_heads, heads):
            count = min(heads, num_heads - first)
            out_nhV = out_nHV[:, first : first + count]
            state_nhV = torch.empty(out_nhV.shape, dtype=torch.float32, device=self._device) if has_windows else out_nhV
            lse_nh = torch.empty(num_rows, count, dtype=torch.float32, device=self._device)
            kv_b_EC = kv_b_HEC[first : first + count].flatten(0, 1)
            for start in range(0, num_keys, window):
                latents = latents_TK[start : start + window]
                kv_TE = latents[:, :latent_dim] @ kv_b_EC.t()
                if self._hopper_expanded is not None and self._hopper_expanded.fits(q_nHd, kv_TE, latents, dims):
                    self._hopper_expanded.attend(
                        q_nHd, kv_TE, latents, plan.blocks, plan.visible, state_nhV, lse_nh, scale * LOG2E, start,
                        first, has_windows, dims,
                    )  # fmt: skip
                    continue
                _launch_expanded(
                    q_nHd, kv_TE, latents, plan, state_nhV, lse_nh, scale, start, first, has_windows, dims, tiles
                )  # fmt: skip
            if has_windows:
                out_nhV.copy_(state_nhV)
        return out_nHV

    def _shape(self, num_heads: int, page_size: int, dtype: torch.dtype) -> _Shape:
        return _Shape(num_heads, page_size, absorbed_tiles(self._target, dtype), self._target.processors)

    def _workspace(self, shape: _Shape, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial results of split blocks: [partials, rows, C] and [partials, rows] float32, kept for good."""
        key = (shape.tiles.rows, value_dim)
        if key not in self._partials:
            lead = (max_partials(shape.programs), shape.tiles.rows)
            self._partials[key] = (
                torch.empty(*lead, value_dim, dtype=torch.float32, device=self._device),
                torch.empty(lead, dtype=torch.float32, device=self._device),
            )
        return self._partials[key]

    def _chunks(self, num_keys: int, num_heads: int, key_bytes: int, block_keys: int) -> tuple[int, int]:
        """Heads at once, and keys at once: as many heads as the budget holds for all keys, else few and fewer keys."""
        heads = min(num_heads, self._expanded_bytes // (key_bytes * num_keys))
        least = min(num_heads, _MIN_EXPANDED_HEADS)
        if heads >= least:
            return -(-num_heads // -(-num_heads // heads)), num_keys  # as even as can be
        window = max(block_keys, self._expanded_bytes // (key_bytes * least) // block_keys * block_keys)
        return least, window


@dataclass(frozen=True)
class _ExpandedOnDevice:
    blocks: torch.Tensor
    visible: torch.Tensor
    keys: torch.Tensor


def _upload(plan: ExpandedPlan, device: torch.device) -> _ExpandedOnDevice:
    return _ExpandedOnDevice(
        upload(torch.from_numpy(plan.blocks), device),
        upload(torch.from_numpy(plan.visible), device),
        upload(torch.from_numpy(plan.keys), device),
    )


def _launch_absorbed(
    q_nHK: torch.Tensor,
    pages_SPK: torch.Tensor,
    plan: AbsorbedBuffers,
    out_nHC: torch.Tensor,
    lse_nH: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> None:
    """Run the plan's segments by the kernel that every target compiles."""
    tiles, page_size, value_dim = plan.shape.tiles, pages_SPK.shape[1], out_nHC.shape[2]
    rotary_dim = q_nHK.shape[2] - value_dim
    block_c, block_r = max(16, next_power_of_2(value_dim)), max(16, next_power_of_2(rotary_dim))
    latents = rotaries = None
    flat_LK = _flat(pages_SPK)
    is_whole = block_c == value_dim and rotary_dim in (0, block_r) and page_size % tiles.columns == 0
    if tiles.tma and is_whole and flat_LK is not None and describable(flat_LK):
        latents = descriptor(flat_LK, tiles.columns, block_c)
        rotaries = descriptor(flat_LK, tiles.columns, block_r)
    attend_kernel[(plan.num_segments,)](
        q_nHK, pages_SPK, latents, rotaries, plan.segments, plan.visible, plan.slots, out_nHC, lse_nH, *partials,
        scale * LOG2E, plan.shape.num_heads, q_nHK.stride(0), q_nHK.stride(1),
        pages_SPK.stride(0), pages_SPK.stride(1), out_nHC.stride(0), out_nHC.stride(1),
        C=value_dim, R=rotary_dim, BLOCK_C=block_c, BLOCK_R=block_r, BLOCK_M=tiles.rows, BLOCK_N=tiles.columns,
        PAGE=page_size, USE_TMA=latents is not None, STAGES=tiles.stages, PRECISION=tiles.precision,
        num_warps=tiles.warps,
    )  # fmt: skip


def _launch_expanded(
    q_nHd: torch.Tensor,
    kv_TE: torch.Tensor,
    latents_TK: torch.Tensor,
    plan: _ExpandedOnDevice,
    out_nhV: torch.Tensor,
    lse_nh: torch.Tensor,
    scale: float,
    window_start: int,
    first_head: int,
    has_windows: bool,
    dims: tuple[int, int, int],
    tiles: Tiles,
) -> None:
    """Attend the heads of `kv_TE` to the keys that it holds: gathered keys `window_start` and on."""
    nope_dim, value_dim, latent_dim = dims
    rotary_dim = latents_TK.shape[1] - latent_dim
    # The largest power of two that N holds, and a power of two for the rest.
    first = max(16, 1 << (nope_dim.bit_length() - 1))
    second = 0 if nope_dim <= first else max(16, next_power_of_2(nope_dim - first))
    block_r, block_v = max(16, next_power_of_2(rotary_dim)), max(16, next_power_of_2(value_dim))
    is_whole = first + second == nope_dim and rotary_dim in (0, block_r) and block_v == value_dim
    tma = tiles.tma and is_whole and describable(kv_TE) and describable(latents_TK)
    num_heads, columns = out_nhV.shape[1], tiles.columns
    expanded.expanded_kernel[(len(plan.blocks), num_heads)](
        q_nHd, kv_TE, latents_TK,
        descriptor(kv_TE, columns, first) if tma else None,
        descriptor(kv_TE, columns, second) if tma and second else None,
        descriptor(latents_TK, columns, block_r) if tma and rotary_dim else None,
        descriptor(kv_TE, columns, block_v) if tma else None,
        plan.blocks, plan.visible, out_nhV, lse_nh,
        scale * LOG2E, window_start, window_start + len(kv_TE), len(kv_TE), first_head,
        q_nHd.stride(0), q_nHd.stride(1), kv_TE.stride(0), latents_TK.stride(0), out_nhV.stride(0), out_nhV.stride(1),
        num_heads,
        N=nope_dim, V=value_dim, C=latent_dim, R=rotary_dim, FIRST=first, SECOND=second, BLOCK_R=block_r,
        BLOCK_V=block_v, BLOCK_M=tiles.rows, BLOCK_N=columns, USE_TMA=tma, WINDOWS=has_windows, STAGES=tiles.stages,
        PRECISION=tiles.precision, num_warps=tiles.warps,
    )  # fmt: skip


def _flat(pages_SPK: torch.Tensor) -> torch.Tensor | None:
    """The cache as [S * P, K] without a copy, or None where slots are not dense."""
    is_dense = pages_SPK.stride(0) == pages_SPK.shape[1] * pages_SPK.stride(1)
    return pages_SPK.flatten(0, 1) if is_dense else None


def _dense(pages_SPK: torch.Tensor) -> torch.Tensor:
    """The cache as [S * P, K]; a copy where slots are not dense, which an arena's are."""
    flat = _flat(pages_SPK)
    return pages_SPK.reshape(-1, pages_SPK.shape[2]) if flat is None else flat


__all__ = ["AbsorbedBuffers", "TritonAttention", "absorbed_tiles", "expanded_tiles"]
