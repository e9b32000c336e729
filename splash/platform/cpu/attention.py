"""Paged latent attention in plain torch, on any device: the CPU's production path and everybody's numeric oracle.

Pages ascend within a sequence, so a row sees the first so many of its sequence's listed keys. That count is all that
a mask needs; it is worked out once a step and kept in `AttentionBatch.device_state` for every layer.

Shape suffixes as in `splash.platform.base`, and: m rows of a block, L keys of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from splash.platform.base import AttentionBackend, AttentionBatch

_SCORE_ELEMENTS = 1 << 20  # scores held at once: 4 MiB, which stay in cache and bound the memory of long histories
_MAX_BLOCK_ROWS = 64  # rows of a block; smaller blocks skip more of the keys that lie in their future
_MAX_GROUP_BYTES = 1 << 20  # float32 keys of a group, which are read twice and should stay in cache between
_EXPANDED_ELEMENTS = 1 << 24  # keys and values expanded at once: 64 MiB
_FREE_PADDING = 32 << 10  # padded scores that cost less than the calls that they save


class CpuAttention(AttentionBackend):
    """Attention in float32: sequences of one row in groups that share a softmax, others in blocks of rows."""

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
        key = f"torch:expanded:{page_size}:{num_heads}"
        plan = cast("tuple[tuple[_Keys, tuple[_Block, ...]], ...] | None", batch.device_state.get(key))
        if plan is None:
            plan = tuple(_sequences(batch, page_size, num_heads, q_nHd.device))
            batch.device_state[key] = plan
        latent_dim = kv_b_HEC.shape[2]
        nope_dim = head_dim - (key_dim - latent_dim)
        value_dim = kv_b_HEC.shape[1] - nope_dim
        flat_LK = _flat(pages_SPK)
        q_Hnd = (q_nHd.float() * scale).transpose(0, 1).contiguous()
        out_nHV = q_nHd.new_empty(num_rows, num_heads, value_dim)
        kv_b = kv_b_HEC.float()
        for keys, blocks in plan:
            latents_LK = keys.read(pages_SPK, flat_LK)
            # Some heads at a time, so that what is expanded stays within bounds however long the history.
            step = max(1, _EXPANDED_ELEMENTS // (keys.num * kv_b.shape[1]))
            for first in range(0, num_heads, step):
                heads = slice(first, min(first + step, num_heads))
                keys_hdL, values_hLV = _expand(latents_LK, kv_b[heads], nope_dim)
                for block in blocks:
                    out = _attend_heads(q_Hnd[heads, block.start : block.stop], keys_hdL, values_hLV, block)
                    out_nHV[block.start : block.stop, heads] = out.transpose(0, 1).to(out_nHV.dtype)
        return out_nHV

    def attend(
        self, q_nHK: torch.Tensor, pages_SPK: torch.Tensor, batch: AttentionBatch, scale: float, value_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_heads, key_dim = q_nHK.shape
        page_size = pages_SPK.shape[1]
        state_key = f"torch: {num_heads} heads, pages of {page_size}"
        plan = cast("_Plan | None", batch.device_state.get(state_key))
        if plan is None:
            plan = batch.device_state[state_key] = _plan(batch, page_size, num_heads, 4 * key_dim, q_nHK.device)

        # All positions in one dim, unless pages are spaced (an arena's slots are aligned).
        flat_LK = _flat(pages_SPK)
        scaled_nHK = q_nHK.float() * scale
        out_nHC = scaled_nHK.new_empty(num_rows, num_heads, value_dim)
        # The log-sum-exp is the largest score less the log of its probability, which costs no further pass of exp.
        score_nH = scaled_nHK.new_empty(num_rows, num_heads)
        probability_nH = scaled_nHK.new_empty(num_rows, num_heads)
        for group in plan.groups:
            rows = slice(group.start, group.start + len(group.keys))
            keys_BLK = [keys.read(pages_SPK, flat_LK) for keys in group.keys]
            _attend_group(scaled_nHK[rows], keys_BLK, group, out_nHC[rows], score_nH[rows], probability_nH[rows])
        for keys, blocks in plan.blocks:
            keys_LK = keys.read(pages_SPK, flat_LK)
            for block in blocks:
                rows = slice(block.start, block.stop)
                _attend_block(scaled_nHK[rows], keys_LK, block, out_nHC[rows], score_nH[rows], probability_nH[rows])
        lse_nH = score_nH - probability_nH.log_()
        if plan.blind_rows is not None:
            out_nHC[plan.blind_rows] = 0.0
            lse_nH[plan.blind_rows] = -torch.inf
        return out_nHC.to(q_nHK.dtype), lse_nH


def _flat(pages_SPK: torch.Tensor) -> torch.Tensor | None:
    """The cache as [S * P, C + R], or None where slots are not dense."""
    is_dense = pages_SPK.stride(0) == pages_SPK.shape[1] * pages_SPK.stride(1)
    return pages_SPK.flatten(0, 1) if is_dense else None


@dataclass(frozen=True)
class _Keys:
    """Where the first `num` keys of a sequence are: in `slots`, which are one extent from flat position `first` on."""

    num: int
    first: int | None  # None where the slots are scattered
    slots: torch.Tensor

    def read(self, pages_SPK: torch.Tensor, flat_LK: torch.Tensor | None) -> torch.Tensor:
        """[L, C + R] float32: a view where the slots are one extent and the cache is float32, else a copy."""
        if self.first is not None and flat_LK is not None:
            return flat_LK[self.first : self.first + self.num].float()
        return pages_SPK.index_select(0, self.slots).flatten(0, 1)[: self.num].float()


@dataclass(frozen=True)
class _Group:
    """Sequences of one row each, rows `start`, `start + 1`, ..., every one of which sees all of its `keys`."""

    start: int
    keys: tuple[_Keys, ...]
    most: int  # keys of the longest
    padded: bool


@dataclass(frozen=True)
class _Block:
    """Rows `start` to `stop` of one sequence. All see the first `common` keys, none any beyond the first `most`."""

    start: int
    stop: int
    common: int
    most: int
    hidden_m1L: torch.Tensor | None  # of keys common .. most, whether a row must not see it


@dataclass(frozen=True)
class _Plan:
    groups: tuple[_Group, ...]
    blocks: tuple[tuple[_Keys, tuple[_Block, ...]], ...]
    blind_rows: torch.Tensor | None  # [n] bool, the rows that see nothing; None where there are none


def _attend_group(
    q_BHK: torch.Tensor,
    keys_BLK: list[torch.Tensor],
    group: _Group,
    out_BHC: torch.Tensor,
    score_BH: torch.Tensor,
    probability_BH: torch.Tensor,
) -> None:
    """Write the output, the largest score and its probability of each sequence's row."""
    shape = (*q_BHK.shape[:2], group.most)
    scores = q_BHK.new_full(shape, -torch.inf) if group.padded else q_BHK.new_empty(shape)
    value_dim = out_BHC.shape[2]
    for q_HK, keys_LK, score_HL in zip(q_BHK.unbind(0), keys_BLK, scores.unbind(0), strict=True):
        torch.mm(q_HK, keys_LK.T, out=score_HL[:, : keys_LK.shape[0]])
    probabilities = torch.softmax(scores, dim=-1)
    for probability_HL, keys_LK, out_HC in zip(probabilities.unbind(0), keys_BLK, out_BHC.unbind(0), strict=True):
        torch.mm(probability_HL[:, : keys_LK.shape[0]], keys_LK[:, :value_dim], out=out_HC)
    torch.amax(scores, dim=-1, out=score_BH)
    torch.amax(probabilities, dim=-1, out=probability_BH)


def _attend_block(
    q_mHK: torch.Tensor,
    keys_LK: torch.Tensor,
    block: _Block,
    out_mHC: torch.Tensor,
    score_mH: torch.Tensor,
    probability_mH: torch.Tensor,
) -> None:
    """Write the output, the largest score and its probability. Rows that see nothing get NaN."""
    num_rows, num_heads, key_dim = q_mHK.shape
    keys_LK = keys_LK[: block.most]
    scores = torch.mm(q_mHK.reshape(num_rows * num_heads, key_dim), keys_LK.T)
    if block.hidden_m1L is not None:
        scores.view(num_rows, num_heads, -1)[:, :, block.common :].masked_fill_(block.hidden_m1L, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1)
    torch.mm(probabilities, keys_LK[:, : out_mHC.shape[2]], out=out_mHC.view(num_rows * num_heads, -1))
    torch.amax(scores, dim=-1, out=score_mH.view(-1))
    torch.amax(probabilities, dim=-1, out=probability_mH.view(-1))


def _expand(latents_LK: torch.Tensor, kv_b_hEC: torch.Tensor, nope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [h, N + R, L] and values [h, L, V] of some heads."""
    num_heads, _, latent_dim = kv_b_hEC.shape
    expanded_hEL = torch.matmul(kv_b_hEC, latents_LK[:, :latent_dim].t())
    rotary_RL = latents_LK[:, latent_dim:].t()
    keys_hdL = torch.cat((expanded_hEL[:, :nope_dim], rotary_RL.expand(num_heads, -1, -1)), dim=1)
    return keys_hdL, expanded_hEL[:, nope_dim:].transpose(1, 2)


def _attend_heads(q_hmd: torch.Tensor, keys_hdL: torch.Tensor, values_hLV: torch.Tensor, block: _Block) -> torch.Tensor:
    """[h, m, V] of one block of rows."""
    scores = torch.bmm(q_hmd, keys_hdL[:, :, : block.most])
    if block.hidden_m1L is not None:
        scores[:, :, block.common :].masked_fill_(block.hidden_m1L.transpose(0, 1), -torch.inf)
    return torch.bmm(torch.softmax(scores, dim=-1), values_hLV[:, : block.most])


def _sequences(
    batch: AttentionBatch, page_size: int, num_heads: int, device: torch.device
) -> Iterator[tuple[_Keys, tuple[_Block, ...]]]:
    """The keys and the blocks of rows of each sequence that has rows. Every row sees something."""
    positions = cast(np.ndarray, batch.row_positions)
    row_starts, page_starts = cast(np.ndarray, batch.row_starts), cast(np.ndarray, batch.page_starts)
    all_slots, all_numbers = cast(np.ndarray, batch.slots), cast(np.ndarray, batch.numbers)
    for b in range(len(row_starts) - 1):
        start, stop = int(row_starts[b]), int(row_starts[b + 1])
        if start < stop:
            pages = slice(int(page_starts[b]), int(page_starts[b + 1]))
            visible = _visible(positions[start:stop], all_numbers[pages], page_size)
            keys = _keys(all_slots[pages], int(visible.max()), page_size, device)
            yield keys, _blocks(visible, start, num_heads, device)


def _keys(slots: np.ndarray, num: int, page_size: int, device: torch.device) -> _Keys:
    """The first `num` keys of a sequence whose pages are in `slots`."""
    slots = slots[: -(-num // page_size)]  # nobody sees later pages
    return _Keys(
        num=num,
        first=int(slots[0]) * page_size if (np.diff(slots) == 1).all() else None,
        slots=torch.from_numpy(np.ascontiguousarray(slots)).to(device),
    )


def _plan(batch: AttentionBatch, page_size: int, num_heads: int, key_bytes: int, device: torch.device) -> _Plan:
    positions = cast(np.ndarray, batch.row_positions)
    row_starts, page_starts = cast(np.ndarray, batch.row_starts), cast(np.ndarray, batch.page_starts)
    all_slots, all_numbers = cast(np.ndarray, batch.slots), cast(np.ndarray, batch.numbers)
    singles: list[tuple[int, _Keys]] = []
    blocks = []
    blind = np.zeros(len(positions), dtype=bool)
    for b in range(len(row_starts) - 1):
        start, stop = int(row_starts[b]), int(row_starts[b + 1])
        if start == stop:
            continue
        pages = slice(int(page_starts[b]), int(page_starts[b + 1]))
        visible = _visible(positions[start:stop], all_numbers[pages], page_size)
        blind[start:stop] = visible == 0
        most = int(visible.max())
        if not most:
            continue
        keys = _keys(all_slots[pages], most, page_size, device)
        if stop - start == 1:
            singles.append((start, keys))
        else:
            blocks.append((keys, _blocks(visible, start, num_heads, device)))
    groups = _groups(singles, num_heads, key_bytes)
    return _Plan(tuple(groups), tuple(blocks), torch.from_numpy(blind).to(device) if blind.any() else None)


def _groups(singles: list[tuple[int, _Keys]], num_heads: int, key_bytes: int) -> list[_Group]:
    """Group neighbouring rows as long as padding them to the longest is cheap."""
    groups: list[_Group] = []
    for row, keys in singles:
        last = groups[-1] if groups else None
        if last is not None and last.start + len(last.keys) == row:
            members, most = (*last.keys, keys), max(last.most, keys.num)
            total, padded = sum(member.num for member in members), most * len(members)
            cheap = (padded - total) * num_heads <= max(_FREE_PADDING, total * num_heads // 2)
            if cheap and padded * num_heads <= _SCORE_ELEMENTS and total * key_bytes <= _MAX_GROUP_BYTES:
                groups[-1] = _Group(last.start, members, most, padded != total)
                continue
        groups.append(_Group(row, (keys,), keys.num, False))
    return groups


def _visible(positions: np.ndarray, numbers: np.ndarray, page_size: int) -> np.ndarray:
    """How many of the keys in pages `numbers` a row at each position sees, int64 [rows]."""
    whole = np.searchsorted(numbers, positions // page_size)  # pages wholly in the past
    padded = np.append(numbers, -1)
    partial = np.where(padded[whole] == positions // page_size, positions % page_size + 1, 0)
    return whole * page_size + partial


def _blocks(visible: np.ndarray, first_row: int, num_heads: int, device: torch.device) -> tuple[_Block, ...]:
    """Cut a sequence's rows into blocks that bound the scores. Blocks that see nothing are left out."""
    blocks = []
    start = 0
    while start < len(visible):
        most = int(visible[start : start + _MAX_BLOCK_ROWS].max())
        size = max(1, min(_MAX_BLOCK_ROWS, _SCORE_ELEMENTS // (num_heads * max(most, 1))))
        seen = visible[start : start + size]
        common, most = int(seen.min()), int(seen.max())
        if most:
            hidden = None if common == most else np.arange(common, most) >= seen[:, None, None]
            blocks.append(
                _Block(
                    start=first_row + start,
                    stop=first_row + start + len(seen),
                    common=common,
                    most=most,
                    hidden_m1L=None if hidden is None else torch.from_numpy(hidden).to(device),
                )
            )
        start += size
    return tuple(blocks)
