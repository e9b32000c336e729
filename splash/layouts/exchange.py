"""The exchanges around attention. One class for each way that rows, heads and pages can fail to be in one place.

    projections   KV          before attention                    after attention
    sharded       replicated  nothing                             nothing
    replicated    request     nothing                             nothing
    sharded       request     short: all-to-all of heads to rows  the reverse all-to-all
                              long chunks: all-gather of history  nothing
    sharded       position    short: all-gather of heads          LSE-weighted reduce-scatter over heads
                              long chunks: all-gather of history  nothing
    replicated    position    single rows: all-gather of rows     LSE-weighted reduce-scatter over rows
                              chunks: all-gather of history       nothing

Where a rank has the heads and the whole history of a row, long chunks attend in the expanded form. With sharded
projections their history is gathered for that: it is smaller than their queries in the latent space, and each rank
expands it for its own heads alone.

An exchange is built once a step from the rows and used by every layer. Every rank enters every collective of its
layout, whatever rows it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splash.core.layout import KV, Projections
from splash.core.spec import ModelSpec
from splash.core.step import NO_SLOT
from splash.layouts.inputs import StepInputs
from splash.layouts.project import Heads
from splash.layouts.rows import NO_QUERY, QueryPages, StepRows, run_edges
from splash.platform.base import AttentionBatch, Rank


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer brings to its exchange.

    Attributes:
        heads: the projections that this rank uses.
        x_nD: this rank's rows.
        down_nX: [n, Q + C + R], their products with Q-A and KV-A.
        q_norm_Q: the query norm's weight; Q is 0 where queries are projected from `x_nD`.
        kv_norm_C: the latent norm's.
        eps: of both norms.
        pages_SPK: this rank's cache of the layer.
        scale: softmax scale.
        value_dim: C.
        group: the rank's device.
    """

    heads: Heads
    x_nD: Tensor
    down_nX: Tensor
    q_norm_Q: Tensor
    kv_norm_C: Tensor
    eps: float
    pages_SPK: Tensor
    scale: float
    value_dim: int
    group: Rank

    def rows(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Q-B's input for this rank's rows, and what is cached of them: [n, Q] and [n, C + R]."""
        query_nQ, latent_nK = self.group.kernels.latent_rows(
            self.down_nX, self.q_norm_Q, self.kv_norm_C, self.eps, rotary.cos, rotary.sin
        )
        return (query_nQ if len(self.q_norm_Q) else self.x_nD), latent_nK

    def store(self, index_n: Tensor, rotary: Rotary) -> Tensor:
        """`rows`, of which what is cached goes to `index_n` (as `Kernels.store`). Returns Q-B's input, [n, Q]."""
        query_nQ = self.group.kernels.latent_store(
            self.down_nX, self.q_norm_Q, self.kv_norm_C, self.eps, rotary.cos, rotary.sin, self.pages_SPK, index_n
        )
        return query_nQ if len(self.q_norm_Q) else self.x_nD

    def absorbed(self, query_nQ: Tensor, rotary: Rotary) -> Tensor:
        """Queries [n, h, C + R] in the latent space of some rows with these inputs of Q-B."""
        heads = self.heads
        return heads.absorb(heads.queries(query_nQ, self.group.kernels), rotary.cos, rotary.sin, self.group.kernels)

    def attend(self, q_nHK: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Absorbed attention to this rank's pages: [n, H, C] and the log-sum-exp [n, H]."""
        return self.group.attention.attend(q_nHK, self.pages_SPK, batch, self.scale, self.value_dim)


@dataclass(frozen=True)
class Rotary:
    """cos and sin of some rows, [n, R / 2] float32."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Rotary:
        return Rotary(self.cos[rows], self.sin[rows])


class Exchange(ABC):
    """Stores the step's keys and attends, leaving this rank's projected heads of its rows.

    Made by the host, which uploads what the device needs; `start` and `run` only queue work on the device.
    """

    rotary: Rotary

    def __init__(self, rows: StepRows, group: Rank) -> None:
        self.rows = rows
        self.group = group

    def start(self, rotary_N: Rotary) -> None:
        """Begin a step, whose rows are rotated like this."""
        self.rotary = rotary_N[self.rows.local]

    @abstractmethod
    def run(self, inputs: AttentionInputs) -> Tensor:
        """Attention: [n, h, V] for this rank's rows and the heads of `inputs`."""


def store_index(rows: StepRows, selection: slice | np.ndarray, step: StepInputs) -> Tensor:
    """Where this rank caches each of some rows, as `Kernels.store` takes it; negative where another rank does."""
    slots_n = rows.slots(selection)
    flat_n = slots_n * rows.page_size + rows.positions_N[selection] % rows.page_size
    return step.upload(np.where(slots_n == NO_SLOT, NO_SLOT, flat_n))


def attention_batch(
    rows: StepRows, selection: slice | np.ndarray, pages: QueryPages, step: StepInputs, num_heads: int
) -> AttentionBatch:
    """The batch in which `selection`, rows of this rank in global order, attends to `pages` of each query."""
    edges = run_edges(rows.query_N[selection])
    seen = pages.of(rows.query_N[selection][edges[:-1]])
    batch = AttentionBatch(
        row_positions=rows.positions_N[selection],
        row_starts=edges,
        slots=seen.slots,
        numbers=seen.numbers,
        page_starts=seen.starts,
    )
    step.attends(batch, num_heads)
    return batch


class LocalAttention:
    """Attention of rows whose heads and whole history are on this rank, each chunk in the form that computes less.

    Args:
        selection: the rows, in global order.
        pages: of each query, in the cache that `run` is given.
        spec: chunks of `spec.expanded_rows` rows attend in the expanded form.
        num_heads: heads that attend.
    """

    def __init__(
        self,
        rows: StepRows,
        selection: slice,
        pages: QueryPages,
        spec: ModelSpec,
        num_heads: int,
        group: Rank,
        step: StepInputs,
    ) -> None:
        query_n = rows.query_N[selection]
        lengths = np.diff(run_edges(query_n))
        is_long_n = np.repeat(lengths >= spec.expanded_rows, lengths) & (query_n != NO_QUERY)
        self._group = group
        self._parts = []
        for is_expanded in (False, True):
            chosen = np.flatnonzero(is_long_n == is_expanded)
            if len(chosen):
                batch = attention_batch(rows, chosen + selection.start, pages, step, num_heads)
                index = None if len(chosen) == len(query_n) else step.upload(chosen)
                self._parts.append((is_expanded, index, batch))

    def run(self, inputs: AttentionInputs, query_nQ: Tensor, rotary: Rotary, pages_SPK: Tensor) -> Tensor:
        """[n, h, V] from Q-B's input and the cache that holds the rows' history."""
        heads, attention, kernels = inputs.heads, self._group.attention, self._group.kernels
        q_nhd = heads.queries(query_nQ, kernels)
        outs = []
        for is_expanded, index, batch in self._parts:
            q, turn = (q_nhd, rotary) if index is None else (q_nhd[index], rotary[index])
            if is_expanded:
                q = heads.rotate_(q, turn.cos, turn.sin, kernels)
                out = attention.attend_expanded(q, pages_SPK, batch, heads.kv_b, inputs.scale)
            else:
                q = heads.absorb(q, turn.cos, turn.sin, kernels)
                latent, _ = attention.attend(q, pages_SPK, batch, inputs.scale, inputs.value_dim)
                out = heads.values(latent)
            if index is None:
                return out
            outs.append((index, out))
        values_nhV = q_nhd.new_empty(*q_nhd.shape[:2], heads.kv_b.shape[1] - heads.nope_dim)
        for index, out in outs:
            values_nhV[index] = out
        return values_nhV


class LocalExchange(Exchange):
    """Rows, the heads projected for them and their pages are on this rank already."""

    def __init__(self, rows: StepRows, spec: ModelSpec, group: Rank, step: StepInputs) -> None:
        super().__init__(rows, group)
        self._index = store_index(rows, rows.local, step)
        sharded = rows.layout.projections is Projections.SHARDED
        num_heads = spec.num_heads // group.size if sharded else spec.num_heads
        self._attention = LocalAttention(rows, rows.local, rows.held_pages, spec, num_heads, group, step)

    def run(self, inputs: AttentionInputs) -> Tensor:
        query_nQ = inputs.store(self._index, self.rotary)
        return self._attention.run(inputs, query_nQ, self.rotary, inputs.pages_SPK)


class History:
    """The pages of some queries, gathered from the ranks that hold them into a workspace on every rank.

    Attributes:
        pages: of every query of the step, as places in the workspace; those that are not gathered have none.
    """

    def __init__(self, rows: StepRows, queries: Sequence[int], step: StepInputs) -> None:
        holders, owned = [], []
        for query in queries:
            slots_cT = rows.tables[query].slots_cT
            holder_c = (slots_cT != NO_SLOT).argmax(axis=1)
            holders.append(holder_c)
            owned.append(slots_cT[holder_c == rows.rank, rows.rank])
        holder_all = np.concatenate(holders)
        self._counts = [int(count) for count in np.bincount(holder_all, minlength=rows.ranks)]
        # Where each page lands: ranks one after another, and within a rank in (query, page) order.
        order = np.argsort(holder_all, kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        lengths = np.zeros(len(rows.queries) + 1, dtype=np.int64)
        lengths[np.array(queries) + 1] = [len(holder_c) for holder_c in holders]
        numbers = np.concatenate([np.arange(len(holder_c)) for holder_c in holders])
        self.pages = QueryPages(place, numbers, np.cumsum(lengths))
        self._slots = step.upload(np.concatenate(owned).astype(np.int64))

    def gather(self, pages_SPK: Tensor, group: Rank) -> Tensor:
        """The workspace, [pages, page size, C + R]. Every rank enters."""
        return group.comm.all_gather(pages_SPK[self._slots], self._counts)


class ShardedExchange(Exchange):
    """Heads are sharded, rows are everywhere, and nobody has the whole history of all: what its two kinds share.

    Chunks of `spec.expanded_rows` rows attend in the expanded form to gathered history; `_run_short` is for the others.
    """

    def __init__(self, rows: StepRows, spec: ModelSpec, group: Rank, step: StepInputs) -> None:
        super().__init__(rows, group)
        self._index = store_index(rows, rows.local, step)
        self._num_rows = len(rows.query_N)
        self._short_rows = np.arange(self._num_rows)
        long = self._long_chunks(rows, spec)
        if len(long):
            is_long_N = np.isin(rows.query_N, long)
            chosen, self._short_rows = np.flatnonzero(is_long_N), np.flatnonzero(~is_long_N)
            self._long_index, self._short_index = step.upload(chosen), step.upload(self._short_rows)
            self._history = History(rows, long.tolist(), step)
            num_heads = spec.num_heads // group.size
            self._long_batch = attention_batch(rows, chosen, self._history.pages, step, num_heads)

    @staticmethod
    def _long_chunks(rows: StepRows, spec: ModelSpec) -> np.ndarray:
        """The queries that attend in the expanded form. None in most steps, which need not look for them."""
        if not rows.is_chunk_N.any():
            return np.empty(0, dtype=np.int64)
        lengths = np.array([len(query.tokens) for query in rows.queries], dtype=np.int64)
        return np.flatnonzero((lengths >= spec.expanded_rows) & (lengths > 1))

    @abstractmethod
    def _run_short(self, inputs: AttentionInputs, query_nQ: Tensor, rotary: Rotary) -> Tensor:
        """[n, h, V] of all rows but those of long chunks, in global order, from Q-B's input."""

    def run(self, inputs: AttentionInputs) -> Tensor:
        query_NQ = inputs.store(self._index, self.rotary)
        num_short = len(self._short_rows)
        if num_short == self._num_rows:
            return self._run_short(inputs, query_NQ, self.rotary)
        if not num_short:
            return self._run_long(inputs, query_NQ, self.rotary)
        long, short = self._long_index, self._short_index
        long_nhV = self._run_long(inputs, query_NQ[long], self.rotary[long])
        values_NhV = long_nhV.new_empty(self._num_rows, *long_nhV.shape[1:])
        values_NhV[long] = long_nhV
        values_NhV[short] = self._run_short(inputs, query_NQ[short], self.rotary[short])
        return values_NhV

    def _run_long(self, inputs: AttentionInputs, query_nQ: Tensor, rotary: Rotary) -> Tensor:
        heads, group = inputs.heads, self.group
        history = self._history.gather(inputs.pages_SPK, group)
        q_nhd = heads.rotate_(heads.queries(query_nQ, group.kernels), rotary.cos, rotary.sin, group.kernels)
        return group.attention.attend_expanded(q_nhd, history, self._long_batch, heads.kv_b, inputs.scale)


class OwnerExchange(ShardedExchange):
    """Pages are with their owner: exchange (all rows, own heads) for (own rows, all heads).

    Heads of rank t arrive as block t, so all heads are in order once the blocks lie side by side.
    """

    def __init__(self, rows: StepRows, spec: ModelSpec, group: Rank, step: StepInputs) -> None:
        super().__init__(rows, spec, group, step)
        edges = np.searchsorted(self._short_rows, np.cumsum([0, *rows.counts_T]))
        own = self._short_rows[edges[rows.rank] : edges[rows.rank + 1]]
        self._batch = attention_batch(rows, own, rows.held_pages, step, spec.num_heads)
        self._by_owner = np.diff(edges).tolist()
        self._own = [len(own)] * rows.ranks

    def _run_short(self, inputs: AttentionInputs, query_nQ: Tensor, rotary: Rotary) -> Tensor:
        comm, ranks, own = self.group.comm, self.group.size, self._own[0]
        q_nhK = inputs.absorbed(query_nQ, rotary)
        q_TnhK = comm.all_to_all(q_nhK, self._by_owner, self._own).view(ranks, own, *q_nhK.shape[1:])
        out_nHC, _ = inputs.attend(q_TnhK.transpose(0, 1).flatten(1, 2), self._batch)
        out_TnhC = out_nHC.view(own, ranks, q_nhK.shape[1], inputs.value_dim).transpose(0, 1).contiguous()
        return inputs.heads.values(comm.all_to_all(out_TnhC.flatten(0, 1), self._own, self._by_owner))


class HeadExchange(ShardedExchange):
    """Heads and pages are both sharded: every rank attends with all heads to its own pages, then parts are merged."""

    def __init__(self, rows: StepRows, spec: ModelSpec, group: Rank, step: StepInputs) -> None:
        super().__init__(rows, spec, group, step)
        self._batch = attention_batch(rows, self._short_rows, rows.held_pages, step, spec.num_heads)

    def _run_short(self, inputs: AttentionInputs, query_nQ: Tensor, rotary: Rotary) -> Tensor:
        q_nhK = inputs.absorbed(query_nQ, rotary)
        heads_T = [q_nhK.shape[1]] * self.group.size
        q_HnK = self.group.comm.all_gather(q_nhK.transpose(0, 1).contiguous(), heads_T)
        out_nHC, lse_nH = inputs.attend(q_HnK.transpose(0, 1).contiguous(), self._batch)
        out_hnC = merge_parts(out_nHC.transpose(0, 1), lse_nH.t(), heads_T, self.group)
        return inputs.heads.values(out_hnC.transpose(0, 1))


class PositionExchange(Exchange):
    """Heads are replicated, pages are sharded by position, rows are split.

    Single rows go to every rank (as Q-B inputs, which are smaller than queries), attend to each rank's own pages and
    are merged. Rows of chunks stay: the history that they attend to is gathered, in rank order, into a workspace.
    """

    def __init__(self, rows: StepRows, spec: ModelSpec, group: Rank, step: StepInputs) -> None:
        super().__init__(rows, group)
        own = rows.own
        home_N = np.repeat(np.arange(rows.ranks), rows.counts_T)
        singles = np.flatnonzero(~rows.is_chunk_N)
        self._single_counts = [int(count) for count in np.bincount(home_N[singles], minlength=rows.ranks)]
        self._num_chunk = rows.counts_T[rows.rank] - self._single_counts[rows.rank]
        chunk = slice(own.start, own.start + self._num_chunk)
        self._has_singles = len(singles) > 0
        if self._has_singles:
            self._single_index = step.upload(singles)
            self._single_store = store_index(rows, singles, step)
            self._single_batch = attention_batch(rows, singles, rows.held_pages, step, spec.num_heads)
        self._has_chunks = len(singles) < len(home_N)
        if self._has_chunks:
            self._chunk_store = store_index(rows, chunk, step)
            queries = [query for query in range(len(rows.queries)) if len(rows.queries[query].tokens) > 1]
            self._history = History(rows, queries, step)
            pages = self._history.pages
            self._chunk_attention = LocalAttention(rows, chunk, pages, spec, spec.num_heads, group, step)

    def start(self, rotary_N: Rotary) -> None:
        super().start(rotary_N)
        if self._has_singles:
            self._single_rotary = rotary_N[self._single_index]

    def run(self, inputs: AttentionInputs) -> Tensor:
        n = self._num_chunk
        query_nQ, latent_nK = inputs.rows(self.rotary)
        parts = []
        if self._has_chunks:
            parts.append(self._run_chunks(inputs, query_nQ[:n], latent_nK[:n]))
        if self._has_singles:
            parts.append(self._run_singles(inputs, query_nQ[n:], latent_nK[n:]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _run_chunks(self, inputs: AttentionInputs, query_nQ: Tensor, latent_nK: Tensor) -> Tensor:
        self.group.kernels.store(inputs.pages_SPK, self._chunk_store, latent_nK)
        history = self._history.gather(inputs.pages_SPK, self.group)
        return self._chunk_attention.run(inputs, query_nQ, self.rotary[: self._num_chunk], history)

    def _run_singles(self, inputs: AttentionInputs, query_nQ: Tensor, latent_nK: Tensor) -> Tensor:
        width = query_nQ.shape[1]
        rows = self.group.comm.all_gather(torch.cat((query_nQ, latent_nK), dim=1), self._single_counts)
        self.group.kernels.store(inputs.pages_SPK, self._single_store, rows[:, width:])
        q_nHK = inputs.absorbed(rows[:, :width], self._single_rotary)
        out_nHC, lse_nH = inputs.attend(q_nHK, self._single_batch)
        return inputs.heads.values(merge_parts(out_nHC, lse_nH, self._single_counts, self.group))


def merge_parts(out_aC: Tensor, lse_a: Tensor, counts: Sequence[int], group: Rank) -> Tensor:
    """Merge every rank's attention over its own keys and scatter the result along the first dim by `counts`.

    `out_aC` is [a, ..., C], `lse_a` [a, ...]. Each rank weighs its part by exp(lse - lse of all), so that the
    reduction is a plain sum. A part that saw nothing weighs 0; a row that no rank has keys for gives 0.
    """
    size = group.size
    if size == 1:
        return out_aC
    length = lse_a.shape[0]
    lse_Ta = group.comm.all_gather(lse_a.contiguous(), [length] * size).view(size, *lse_a.shape)
    total_a = torch.logsumexp(lse_Ta, dim=0)
    weight_a = torch.where(torch.isneginf(lse_a), torch.zeros_like(lse_a), torch.exp(lse_a - total_a))
    weighted = (out_aC * weight_a.unsqueeze(-1)).to(out_aC.dtype)
    return group.comm.reduce_scatter(weighted.contiguous(), counts)


def make_exchange(rows: StepRows, spec: ModelSpec, group: Rank, step: StepInputs) -> Exchange:
    """The exchange that the placements of the rows' layout call for."""
    layout = rows.layout
    sharded = layout.projections is Projections.SHARDED
    if layout.kv is KV.POSITION:
        return (HeadExchange if sharded else PositionExchange)(rows, spec, group, step)
    if layout.kv is KV.REQUEST and sharded:
        return OwnerExchange(rows, spec, group, step)
    return LocalExchange(rows, spec, group, step)
