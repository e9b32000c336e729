"""From a checkpoint to a rank's weights: shares of what is sharded, head groups in the arena, the rest whole."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor

from splash.core.layout import Layout, Projections
from splash.core.memory import ArenaGeometry
from splash.core.spec import ModelSpec
from splash.model.arena import LayerArena
from splash.model.feedforward import DenseMlp, ExpertMlp, share
from splash.model.rope import deinterleave
from splash.platform.base import Rank


class Source(Protocol):
    """Where tensors come from: a `Checkpoint`, or a `DummyCheckpoint`."""

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        """A tensor of the expected whole `shape`, or a slice of its first and second dims."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms, Q-A and KV-A are whole on every rank; Q-B, KV-B and O are in the arena.

    Attributes:
        down: [Q + C + R, D], Q-A and then KV-A, rotary rows in half-split order. Q is 0 where queries are projected
            straight from the hidden state.
        q_a_norm: [Q].
        feedforward: DenseMlp or ExpertMlp.
    """

    input_norm: Tensor
    down: Tensor
    q_a_norm: Tensor
    kv_a_norm: Tensor
    post_norm: Tensor
    feedforward: DenseMlp | ExpertMlp
    arena: LayerArena


@dataclass(frozen=True)
class ModelWeights:
    """A rank's weights. `embedding` and `lm_head` are this rank's rows `vocab` of the vocabulary, [V_r, D]."""

    embedding: Tensor
    lm_head: Tensor
    vocab: slice
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]

    def num_bytes(self) -> int:
        """Bytes of the weights outside the arenas; tied tensors count once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(self)}.values())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
    return []


class Loader:
    """Loads one rank's weights in one dtype."""

    def __init__(self, source: Source, geometry: ArenaGeometry, group: Rank, dtype: torch.dtype) -> None:
        self._source = source
        self._geometry = geometry
        self._spec: ModelSpec = geometry.spec
        self._group = group
        self._dtype = dtype

    def load(self, layout: Layout) -> ModelWeights:
        """Read everything that this rank holds in `layout`.

        Raises:
            CheckpointError: a tensor is absent or has another shape than config.json says.
        """
        spec = self._spec
        vocab = self._share(spec.vocab_size)
        table = (spec.vocab_size, spec.hidden_size)
        embedding = self._read("model.embed_tokens.weight", *table, rows=vocab)
        tied = spec.tie_word_embeddings
        return ModelWeights(
            embedding=embedding,
            lm_head=embedding if tied else self._read("lm_head.weight", *table, rows=vocab),
            vocab=vocab,
            final_norm=self._read("model.norm.weight", spec.hidden_size),
            layers=tuple(self._layer(layer, layout) for layer in range(spec.num_layers)),
        )

    def _share(self, total: int) -> slice:
        return share(total, self._group.rank, self._group.size)

    def _read(self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        tensor = self._source.read(name, shape, rows, columns)
        return tensor.to(self._group.device, self._dtype).contiguous()

    def _layer(self, layer: int, layout: Layout) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{layer}."
        attention = prefix + "self_attn."
        hidden, latent, q_lora = spec.hidden_size, spec.kv_lora_rank, spec.q_lora_rank
        kv_a = self._read(attention + "kv_a_proj_with_mqa.weight", spec.latent_dim, hidden)
        down = [kv_a[:latent], deinterleave(kv_a[latent:], spec.rope.interleave)]
        if q_lora is not None:
            down.insert(0, self._read(attention + "q_a_proj.weight", q_lora, hidden))
        arena = LayerArena(self._group.arenas.local(layer), self._geometry, self._group.rank, self._dtype)
        self._load_heads(attention, arena, layout)
        return LayerWeights(
            input_norm=self._read(prefix + "input_layernorm.weight", hidden),
            down=torch.cat(down),
            q_a_norm=kv_a.new_empty(0) if q_lora is None else self._read(attention + "q_a_layernorm.weight", q_lora),
            kv_a_norm=self._read(attention + "kv_a_layernorm.weight", latent),
            post_norm=self._read(prefix + "post_attention_layernorm.weight", hidden),
            feedforward=self._feedforward(layer, prefix + "mlp."),
            arena=arena,
        )

    def _load_heads(self, prefix: str, arena: LayerArena, layout: Layout) -> None:
        spec = self._spec
        heads, nope, value = spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim
        own = slice(0, heads) if layout.projections is Projections.REPLICATED else self._share(heads)
        count = own.stop - own.start

        def rows(dim: int) -> slice:
            return slice(own.start * dim, own.stop * dim)

        name = "q_proj" if spec.q_lora_rank is None else "q_b_proj"
        q_b = self._read(
            f"{prefix}{name}.weight", heads * spec.qk_head_dim, spec.query_input_dim, rows=rows(spec.qk_head_dim)
        ).view(count, spec.qk_head_dim, -1)
        arena.modules["q_b"][own, :nope] = q_b[:, :nope]
        arena.modules["q_b"][own, nope:] = deinterleave(q_b[:, nope:], spec.rope.interleave)
        kv_b = self._read(
            prefix + "kv_b_proj.weight", heads * (nope + value), spec.kv_lora_rank, rows=rows(nope + value)
        )
        arena.modules["kv_b"][own] = kv_b.view(count, nope + value, -1)
        o = self._read(prefix + "o_proj.weight", spec.hidden_size, heads * value, columns=rows(value))
        arena.modules["o"][own] = o.t().view(count, value, spec.hidden_size)

    def _dense(self, prefix: str, intermediate: int) -> DenseMlp:
        hidden, own = self._spec.hidden_size, self._share(intermediate)
        gate = self._read(prefix + "gate_proj.weight", intermediate, hidden, rows=own)
        up = self._read(prefix + "up_proj.weight", intermediate, hidden, rows=own)
        return DenseMlp(
            gate_up=torch.cat((gate, up)),
            down=self._read(prefix + "down_proj.weight", hidden, intermediate, columns=own),
        )

    def _feedforward(self, layer: int, prefix: str) -> DenseMlp | ExpertMlp:
        spec, moe = self._spec, self._spec.moe
        if moe is None or not spec.is_moe_layer(layer):
            return self._dense(prefix, spec.intermediate_size)
        hidden, size, own = spec.hidden_size, moe.intermediate_size, self._share(moe.num_experts)
        w13 = torch.empty(own.stop - own.start, 2 * size, hidden, dtype=self._dtype, device=self._group.device)
        w2 = torch.empty(own.stop - own.start, hidden, size, dtype=self._dtype, device=self._group.device)
        for place, expert in enumerate(range(own.start, own.stop)):
            name = f"{prefix}experts.{expert}."
            w13[place, :size] = self._read(name + "gate_proj.weight", size, hidden)
            w13[place, size:] = self._read(name + "up_proj.weight", size, hidden)
            w2[place] = self._read(name + "down_proj.weight", hidden, size)
        router = self._source.read(prefix + "gate.weight", (moe.num_experts, hidden))
        bias = self._source.read(prefix + "gate.e_score_correction_bias", (moe.num_experts,))
        shared = None
        if moe.num_shared_experts:
            shared = self._dense(prefix + "shared_experts.", size * moe.num_shared_experts)
        return ExpertMlp(
            moe=moe,
            router=router.to(self._group.device, torch.float32),
            bias=bias.to(self._group.device, torch.float32),
            w13=w13,
            w2=w2,
            first_expert=own.start,
            shared=shared,
        )
