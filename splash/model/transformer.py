"""One forward of a step through the whole model, on one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from splash.core.layout import Rows
from splash.core.spec import ModelSpec
from splash.layouts.exchange import AttentionInputs, Exchange, Rotary, make_exchange
from splash.layouts.rows import StepRows
from splash.model.loader import LayerWeights, ModelWeights
from splash.model.rope import RotaryTable
from splash.platform.base import Rank

LATENT_NORM_EPS = 1e-6  # of the Q-A and KV-A norms, whatever `rms_norm_eps` says (DeepSeek's reference does the same)


class Transformer:
    """A DeepSeek-V3 style decoder over a group of ranks.

    Between layers a rank holds all rows or its own, as the layout says (`Layout.rows`). The feed-forward part needs all
    rows on every rank, so split rows are gathered before it and scattered in the reduction after it.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, rotary: RotaryTable, group: Rank) -> None:
        self._spec = spec
        self._weights = weights
        self._rotary = rotary
        self._group = group

    @torch.inference_mode()
    def forward(self, rows: StepRows, arrive: Callable[[int], None] | None = None) -> Tensor | None:
        """Run a step.

        Args:
            rows: the step's rows.
            arrive: called with each layer before it is computed; returns once the layer's state is in the arena.

        Returns:
            Logits after each row of `rows.sampled`: float32 [samples, vocabulary] on rank 0, None elsewhere.
        """
        group, layout = self._group, rows.layout
        positions = torch.from_numpy(rows.positions_N).to(group.device)
        rotary = Rotary(self._rotary.cos[positions], self._rotary.sin[positions])
        exchange = make_exchange(layout, rows, rotary, group, self._spec.expanded_rows)
        x_nD = self._embed(rows)
        for number, layer in enumerate(self._weights.layers):
            if arrive is not None:
                arrive(number)
            x_nD = self._layer(layer, x_nD, rows, exchange)
        return self._logits(x_nD, rows)

    def _embed(self, rows: StepRows) -> Tensor:
        """Embedding with a sharded vocabulary: each rank looks up the tokens that it has, and the parts are summed."""
        vocab = self._weights.vocab
        tokens = torch.from_numpy(rows.tokens_N).to(self._group.device)
        local = tokens - vocab.start
        held = (local >= 0) & (local < vocab.stop - vocab.start)
        x_ND = torch.zeros(
            len(tokens), self._spec.hidden_size, dtype=self._weights.embedding.dtype, device=tokens.device
        )
        x_ND[held] = self._weights.embedding[local[held]]
        return self._reduce(x_ND, rows)

    def _reduce(self, partial_ND: Tensor, rows: StepRows) -> Tensor:
        """Sum partial rows over ranks, leaving each rank the rows that it holds at a layer boundary."""
        if self._group.size == 1:
            return partial_ND
        if rows.layout.rows is Rows.REPLICATED:
            return self._group.comm.all_reduce(partial_ND)
        return self._group.comm.reduce_scatter(partial_ND, rows.counts_T)

    def _layer(self, layer: LayerWeights, x_nD: Tensor, rows: StepRows, exchange: Exchange) -> Tensor:
        kernels, eps, split = self._group.kernels, self._spec.rms_norm_eps, rows.layout.rows is Rows.SPLIT
        attended = self._attention(layer, kernels.rms_norm(x_nD, layer.input_norm, eps), rows, exchange)
        # With split rows every rank has all heads, so its rows are complete.
        x_nD = x_nD + (attended if split else self._reduce(attended, rows))
        normed = kernels.rms_norm(x_nD, layer.post_norm, eps)
        if split and self._group.size > 1:
            normed = self._group.comm.all_gather(normed, rows.counts_T)
        return x_nD + self._reduce(layer.feedforward(normed, kernels), rows)

    def _attention(self, layer: LayerWeights, x_nD: Tensor, rows: StepRows, exchange: Exchange) -> Tensor:
        kernels, spec = self._group.kernels, self._spec
        query = x_nD
        if layer.q_a is not None and layer.q_a_norm is not None:
            query = kernels.rms_norm(x_nD @ layer.q_a.t(), layer.q_a_norm, LATENT_NORM_EPS)
        kv = x_nD @ layer.kv_a.t()
        latent = kernels.rms_norm(kv[:, : spec.kv_lora_rank], layer.kv_a_norm, LATENT_NORM_EPS)
        key = kernels.rotate(kv[:, spec.kv_lora_rank :], exchange.rotary.cos, exchange.rotary.sin)
        heads = layer.arena.heads(rows.layout)
        values_nhV = exchange.run(
            AttentionInputs(
                heads=heads,
                query_nQ=query,
                latent_nK=torch.cat((latent, key), dim=-1),
                pages_SPK=layer.arena.pages_SPK,
                scale=spec.softmax_scale,
                value_dim=spec.kv_lora_rank,
                group=self._group,
            )
        )
        return heads.output(values_nhV)

    def _logits(self, x_nD: Tensor, rows: StepRows) -> Tensor | None:
        """Final norm and LM head of the sampled rows only; every rank scores its share of the vocabulary."""
        group, weights = self._group, self._weights
        if not len(rows.sampled):
            return None
        if rows.layout.rows is Rows.REPLICATED or group.size == 1:
            x_sD = x_nD[torch.from_numpy(rows.sampled).to(group.device)]
        else:
            x_sD = self._gather_sampled(x_nD, rows)
        normed = group.kernels.rms_norm(x_sD, weights.final_norm, self._spec.rms_norm_eps)
        logits_Vs = weights.lm_head @ normed.t()
        if group.size > 1:
            vocab = self._spec.vocab_size
            counts = [vocab * (rank + 1) // group.size - vocab * rank // group.size for rank in range(group.size)]
            logits_Vs = group.comm.all_gather(logits_Vs, counts)
        return logits_Vs.t().float() if group.rank == 0 else None

    def _gather_sampled(self, x_nD: Tensor, rows: StepRows) -> Tensor:
        """Sampled rows of split rows, on every rank, in plan order."""
        own, device = rows.own, self._group.device
        ends = torch.tensor(rows.counts_T).cumsum(0)
        home_s = torch.searchsorted(ends, torch.from_numpy(rows.sampled), right=True)
        counts = torch.bincount(home_s, minlength=rows.ranks).tolist()
        order = torch.argsort(home_s, stable=True)
        mine = [int(row) - own.start for row in rows.sampled if own.start <= row < own.stop]
        gathered = self._group.comm.all_gather(x_nD[torch.tensor(mine, dtype=torch.int64, device=device)], counts)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return gathered[place.to(device)]
