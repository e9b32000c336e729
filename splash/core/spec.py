"""ModelSpec: the dimensions of a model, read once and passed around. No torch, no files.

Dimension letters used across the project:
    H heads, N nope dim a head, R rotary dim, V value dim a head, C kv-lora rank, Q q-lora rank, D hidden size,
    n rows, T ranks, P page size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding parameters, named as in Hugging Face's `rope_parameters`.

    `mscale` and `mscale_all_dim` follow DeepSeek's YaRN: both 0 means that neither is applied.
    """

    theta: float = 10000.0
    type: str = "default"  # "default" or "yarn"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    interleave: bool = True  # pairs are (x0, x1), (x2, x3), ... rather than (x0, x[R/2]), ...

    @property
    def softmax_mscale(self) -> float:
        """m such that the softmax scale is multiplied by m^2: 0.1 mscale_all_dim ln(factor) + 1 (YaRN, DeepSeek-V3)."""
        if self.type == "default" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim)

    @property
    def cos_sin_factor(self) -> float:
        """Factor on cos and sin. YaRN: m(mscale) / m(mscale_all_dim) where both are given, else m(1)."""
        if self.type == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature: 0.1 mscale ln(factor) + 1, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class MoeSpec:
    """Mixture-of-experts parameters of the layers from `ModelSpec.first_dense_layers` on."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared_experts: int
    num_groups: int = 1
    top_k_groups: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True)
class IndexerSpec:
    """Sparse-attention indexer (DeepSeek Sparse Attention): its cached key is one head of `head_dim` a token."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions of a multi-head-latent-attention transformer of the DeepSeek-V3 family."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    first_dense_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    moe: MoeSpec | None = None
    indexer: IndexerSpec | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    @property
    def qk_head_dim(self) -> int:
        """Query-key dim a head before absorption: N + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements cached a token a layer, which is also the absorbed query-key dim: C + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(N + R)^-1/2 times YaRN's m^2. Never (C + R)^-1/2: absorption changes the dims, not the scale."""
        return self.rope.softmax_mscale**2 / math.sqrt(self.qk_head_dim)

    @property
    def query_input_dim(self) -> int:
        """Input dim of Q-B: the q-lora rank, or the hidden size where the model has no q-lora."""
        return self.hidden_size if self.q_lora_rank is None else self.q_lora_rank

    @property
    def expanded_rows(self) -> int:
        """Rows of one sequence from which expanded attention takes less arithmetic than absorbed.

        A head and pair costs 2 (C + R) + 2 C absorbed and 2 (N + R) + 2 V expanded; expanding a key costs 2 C (N + V) a
        head. The key count cancels: n (2 C - N - V) > C (N + V).
        """
        expanded = self.qk_nope_head_dim + self.v_head_dim
        saved = 2 * self.kv_lora_rank - expanded
        return self.kv_lora_rank * expanded // saved + 1 if saved > 0 else 1 << 62

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` routes to experts rather than through one dense MLP."""
        return self.moe is not None and layer >= self.first_dense_layers

    def head_elements(self) -> dict[str, int]:
        """Elements of one head of each module whose ownership a layout decides, in arena order."""
        return {
            "q_b": self.qk_head_dim * self.query_input_dim,
            "kv_b": (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank,
            "o": self.v_head_dim * self.hidden_size,
        }


@dataclass(frozen=True)
class KVFormat:
    """How one token of one layer is cached, in bytes, plane by plane.

    A page stores its planes one after another: all latents of the page, then all indexer keys, so that whatever is
    cached with a page moves with it.
    """

    latent_bytes: int  # latent, rotary key and any quantisation scales
    indexer_bytes: int = 0  # indexer key and its scale

    @property
    def token_bytes(self) -> int:
        """Bytes a token a layer."""
        return self.latent_bytes + self.indexer_bytes


def kv_format(spec: ModelSpec, dtype: str) -> KVFormat:
    """The cache format of `spec` in `dtype` ("float32", "bfloat16" or "fp8").

    FP8 keeps the latent in FP8 with one float32 scale a 128 elements and the rotary key in bfloat16 (656 bytes at
    512 + 64). An indexer key is always FP8 with one float32 scale a 128 elements (132 bytes at 128).
    """
    if dtype == "fp8":
        latent = spec.kv_lora_rank + 4 * math.ceil(spec.kv_lora_rank / 128) + 2 * spec.qk_rope_head_dim
    else:
        latent = spec.latent_dim * DTYPE_BYTES[dtype]
    indexer = 0
    if spec.indexer is not None:
        indexer = spec.indexer.head_dim + 4 * math.ceil(spec.indexer.head_dim / 128)
    return KVFormat(latent, indexer)


DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "fp8": 1}
