"""One forward of a step through the whole model, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from splash.core.layout import Rows
from splash.core.spec import ModelSpec
from splash.layouts.exchange import AttentionInputs, Exchange, Rotary, make_exchange
from splash.layouts.inputs import StepInputs
from splash.layouts.rows import StepRows
from splash.model.feedforward import share
from splash.model.loader import LayerWeights, ModelWeights
from splash.model.rope import RotaryTable
from splash.platform.base import Rank
from splash.platform.kernels import Kernels

LATENT_NORM_EPS = 1e-6  # of the Q-A and KV-A norms, whatever `rms_norm_eps` says (DeepSeek's reference does the same)


@dataclass(frozen=True)
class SampledRows:
    """Which rows are sampled.

    Attributes:
        index: [m] rows of this rank.
        counts: sampled rows by rank, where rows are split over ranks; else None, and `index` has them all.
        place: [samples] where each lies among those of all ranks; None as `counts`.
    """

    index: Tensor
    counts: tuple[int, ...] | None
    place: Tensor | None


@dataclass(frozen=True)
class PreparedStep:
    """A step whose host part is done. `tokens` and `positions` are int64 [N]; `sampled` is None where no row is."""

    rows: StepRows
    tokens: Tensor
    positions: Tensor
    exchange: Exchange
    sampled: SampledRows | None


class _Stream:
    """The residual stream of some rows: `x_nD`, and what is still to be added to it, which the next norm does."""

    def __init__(self, x_nD: Tensor, kernels: Kernels, eps: float) -> None:
        self.x_nD = x_nD
        self.delta_nD: Tensor | None = None
        self._kernels = kernels
        self._eps = eps

    def norm(self, weight_D: Tensor) -> Tensor:
        """The norm of the sum, [n, D]."""
        if self.delta_nD is None:
            return self._kernels.rms_norm(self.x_nD, weight_D, self._eps)
        normed_nD, self.x_nD = self._kernels.add_rms_norm(self.x_nD, self.delta_nD, weight_D, self._eps)
        self.delta_nD = None
        return normed_nD

    def whole(self) -> Tensor:
        """The sum, [n, D]."""
        return self.x_nD if self.delta_nD is None else self.x_nD + self.delta_nD


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
        assert spec.vocab_size < 1 << 24, "`most_likely` exchanges tokens as float32"

    def prepare(self, rows: StepRows, inputs: StepInputs) -> PreparedStep:
        """The host's part of a step."""
        return PreparedStep(
            rows=rows,
            tokens=inputs.upload(rows.tokens_N),
            positions=inputs.upload(rows.positions_N),
            exchange=make_exchange(rows, self._spec, self._group, inputs),
            sampled=self._prepare_sampled(rows, inputs),
        )

    def _prepare_sampled(self, rows: StepRows, inputs: StepInputs) -> SampledRows | None:
        if not len(rows.sampled):
            return None
        if rows.layout.rows is Rows.REPLICATED or self._group.size == 1:
            return SampledRows(inputs.upload(rows.sampled), None, None)
        ends = np.cumsum(rows.counts_T)
        home_s = np.searchsorted(ends, rows.sampled, side="right")
        order = np.argsort(home_s, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        counts = tuple(np.bincount(home_s, minlength=rows.ranks).tolist())
        mine = rows.sampled[home_s == rows.rank] - rows.own.start
        return SampledRows(inputs.upload(mine), counts, inputs.upload(place))

    @torch.inference_mode()
    def forward(self, step: PreparedStep, arrive: Callable[[int], None] | None = None) -> Tensor | None:
        """Run a step: the device's part, which never waits for the device itself.

        Args:
            step: prepared for this step's rows.
            arrive: called with each layer before it is computed; returns once the layer's state is in the arena.

        Returns:
            Scores after each row of `rows.sampled`, over this rank's share of the vocabulary: [samples, V / T]. None
            where nothing is sampled. `gather` and `most_likely` tell what all ranks found.
        """
        rows, exchange = step.rows, step.exchange
        exchange.start(Rotary(self._rotary.cos[step.positions], self._rotary.sin[step.positions]))
        stream = _Stream(self._embed(step), self._group.kernels, self._spec.rms_norm_eps)
        for number, layer in enumerate(self._weights.layers):
            if arrive is not None:
                arrive(number)
            self._layer(layer, stream, rows, exchange)
        return None if step.sampled is None else self._scores(stream.whole(), step.sampled)

    @torch.inference_mode()
    def gather(self, scores_sv: Tensor) -> Tensor | None:
        """The logits of which every rank has a part: float32 [samples, vocabulary] on rank 0, None elsewhere."""
        if self._group.size == 1:
            return scores_sv.float()
        ranks = self._group.size
        vocabs = [share(self._spec.vocab_size, rank, ranks) for rank in range(ranks)]
        missing = max(vocab.stop - vocab.start for vocab in vocabs) - scores_sv.shape[1]
        padded = functional.pad(scores_sv, (0, missing)) if missing else scores_sv.contiguous()  # pads of 0 copy
        parts_Tsv = self._group.comm.all_gather(padded, [len(padded)] * ranks)
        if self._group.rank:
            return None
        parts = zip(parts_Tsv.view(ranks, *padded.shape).unbind(0), vocabs, strict=True)
        return torch.cat([part[:, : vocab.stop - vocab.start] for part, vocab in parts], dim=1).float()

    @torch.inference_mode()
    def most_likely(self, scores_sv: Tensor) -> Tensor:
        """The token with the highest logit, of equal ones the first: int64 [samples], on every rank."""
        if self._group.size == 1:
            return scores_sv.argmax(dim=1)
        best_s, token_s = scores_sv.max(dim=1)
        # Both in one exchange: as float32 a token is exact, and so is what its score was rounded to.
        token_s = token_s + self._weights.vocab.start
        pair_2s = torch.stack((best_s.float(), token_s.float()))
        pairs_T2s = self._group.comm.all_gather(pair_2s, [2] * self._group.size).view(-1, *pair_2s.shape)
        winner_s = pairs_T2s[:, 0].argmax(dim=0, keepdim=True)
        return pairs_T2s[:, 1].gather(0, winner_s).squeeze(0).long()

    def _embed(self, step: PreparedStep) -> Tensor:
        """Embedding with a sharded vocabulary: each rank looks up the tokens that it has, and the parts are summed."""
        vocab, table_VD = self._weights.vocab, self._weights.embedding
        if self._group.size == 1:
            return functional.embedding(step.tokens, table_VD)
        local = step.tokens - vocab.start
        held = (local >= 0) & (local < vocab.stop - vocab.start)
        # Looked up whether held or not, so that no shape depends on the tokens.
        x_ND = functional.embedding(local.clamp(0, len(table_VD) - 1), table_VD).masked_fill(~held.unsqueeze(1), 0)
        return self._reduce(x_ND, step.rows)

    def _reduce(self, partial_ND: Tensor, rows: StepRows) -> Tensor:
        """Sum partial rows over ranks, leaving each rank the rows that it holds at a layer boundary."""
        if self._group.size == 1:
            return partial_ND
        if rows.layout.rows is Rows.REPLICATED:
            return self._group.comm.all_reduce(partial_ND)
        return self._group.comm.reduce_scatter(partial_ND, rows.counts_T)

    def _layer(self, layer: LayerWeights, stream: _Stream, rows: StepRows, exchange: Exchange) -> None:
        split = rows.layout.rows is Rows.SPLIT
        attended = self._attention(layer, stream.norm(layer.input_norm), rows, exchange)
        # With split rows every rank has all heads, so its rows are complete.
        stream.delta_nD = attended if split else self._reduce(attended, rows)
        del attended
        normed = stream.norm(layer.post_norm)
        if split and self._group.size > 1:
            normed = self._group.comm.all_gather(normed, rows.counts_T)
        stream.delta_nD = self._reduce(layer.feedforward(normed, self._group.kernels), rows)

    def _attention(self, layer: LayerWeights, x_nD: Tensor, rows: StepRows, exchange: Exchange) -> Tensor:
        spec = self._spec
        heads = layer.arena.heads(rows.layout)
        values_nhV = exchange.run(
            AttentionInputs(
                heads=heads,
                x_nD=x_nD,
                down_nX=self._group.kernels.product(x_nD, layer.down.t()),
                q_norm_Q=layer.q_a_norm,
                kv_norm_C=layer.kv_a_norm,
                eps=LATENT_NORM_EPS,
                pages_SPK=layer.arena.pages_SPK,
                scale=spec.softmax_scale,
                value_dim=spec.kv_lora_rank,
                group=self._group,
            )
        )
        return heads.output(values_nhV, self._group.kernels)

    def _scores(self, x_nD: Tensor, sampled: SampledRows) -> Tensor:
        """Final norm and LM head of the sampled rows only, for this rank's share of the vocabulary."""
        group, weights = self._group, self._weights
        x_sD = x_nD[sampled.index]
        if sampled.counts is not None and sampled.place is not None:
            x_sD = group.comm.all_gather(x_sD, sampled.counts)[sampled.place]
        return group.kernels.rms_norm(x_sD, weights.final_norm, self._spec.rms_norm_eps) @ weights.lm_head.t()
