"""Stages: seconds of one matrix product, one attention, one collective, on one rank of given hardware.

A stage takes the larger of its arithmetic over the rate that the hardware reaches and its bytes over the bandwidth that
it reaches; a collective takes its latency and the bytes that the slowest rank receives over its bandwidth:

    t(stage) = max(flops / (peak x share), bytes / (bandwidth x share))        [s]
    t(collective) = latency + bytes received / bandwidth                       [s], 0 with one rank

Nothing here knows a layout: rows, heads and keys are given. All methods return seconds of one layer. A multiplication
and an addition are two operations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from splash.core.errors import ConfigError
from splash.core.hardware import Collective, Hardware
from splash.core.spec import DTYPE_BYTES, ModelSpec, kv_format
from splash.scheduler.load import chunk_pairs

MICRO = 1e-6


class Chunk(NamedTuple):
    """A query of several rows: its owner, its rows, and the positions before them."""

    owner: int
    rows: int
    start: int


class Stages:
    """What the parts of one model cost on one kind of hardware.

    Args:
        spec: the model.
        hardware: every rank's device; `costs` must be there.
        ranks: T.
        dtype: of weights: "float32", "bfloat16" or "fp8". Activations are float32 or else bfloat16.
        kv_dtype: of the cache.
        page_size: token positions a page.

    Raises:
        ConfigError: the hardware has no costs, or no rate for `dtype`.
    """

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, ranks: int, dtype: str, kv_dtype: str, page_size: int
    ) -> None:
        if hardware.costs is None:
            raise ConfigError("hardware.costs", f"is missing in the description of {hardware.name}")
        for field, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
            if value not in DTYPE_BYTES:
                raise ConfigError(field, f"must be one of {', '.join(DTYPE_BYTES)}, not {value!r}")
        self.spec = spec
        self.ranks = ranks
        self.costs = costs = hardware.costs
        self.kv = kv_format(spec, kv_dtype)
        self.page_size = page_size
        self.top_k = None if spec.indexer is None else spec.indexer.top_k
        self.weight_size = DTYPE_BYTES[dtype]
        self.activation_size = max(2, self.weight_size)
        activation_dtype = "float32" if dtype == "float32" else "bfloat16"
        # Attention and the head compute in the activations' dtype whatever the weights are; routers in float32.
        activation_flops = hardware.tflops(activation_dtype) * 1e12
        self._gemm_flops = hardware.tflops(dtype) * 1e12 * costs.gemm
        self._head_flops = activation_flops * costs.gemm
        self._router_flops = (hardware.fp32_tflops or hardware.bf16_tflops) * 1e12 * costs.gemm
        self._absorbed_flops = activation_flops * costs.absorbed
        self._decode_flops = activation_flops * costs.decode
        self._expanded_flops = activation_flops * costs.expanded
        self._indexer_flops = hardware.tflops("float32" if dtype == "float32" else "fp8") * 1e12 * costs.indexer
        self._bytes_s = hardware.memory_gb_s * 1e9 * costs.memory
        self._movement_bytes_s = hardware.memory_gb_s * 1e9 * costs.movement
        self._cache_bytes_s = hardware.memory_gb_s * 1e9 * costs.decode_memory
        self._sequence_s = costs.attention_us * MICRO

    # --- matrix products ---

    def _gemm(self, rows: float, inner: int, outer: int) -> float:
        """[rows, inner] x [inner, outer]; weights and activations are moved once."""
        if not rows:
            return 0.0
        moved = inner * outer * self.weight_size + rows * (inner + outer) * self.activation_size
        return max(2 * rows * inner * outer / self._gemm_flops, moved / self._bytes_s)

    def down(self, rows: float) -> float:
        """Q-A and KV-A, and the indexer's projections, which every rank has whole."""
        spec = self.spec
        seconds = self._gemm(rows, spec.hidden_size, (spec.q_lora_rank or 0) + spec.latent_dim)
        if (index := spec.indexer) is not None:
            seconds += self._gemm(rows, spec.query_input_dim, index.num_heads * index.head_dim)
            seconds += self._gemm(rows, spec.hidden_size, index.num_heads + index.head_dim)
        return seconds

    def up(self, rows: float, heads: int) -> float:
        """Q-B."""
        return self._gemm(rows, self.spec.query_input_dim, heads * self.spec.qk_head_dim)

    def into_latent(self, rows: float, heads: int) -> float:
        """Absorption: q_nope W_UK, a product a head."""
        return self._per_head(rows, heads, self.spec.qk_nope_head_dim)

    def out_of_latent(self, rows: float, heads: int) -> float:
        """W_UV, a product a head."""
        return self._per_head(rows, heads, self.spec.v_head_dim)

    def _per_head(self, rows: float, heads: int, dim: int) -> float:
        if not rows:
            return 0.0
        latent = self.spec.kv_lora_rank
        moved = heads * (dim * latent * self.weight_size + rows * (dim + latent) * self.activation_size)
        return max(2 * rows * heads * dim * latent / self._gemm_flops, moved / self._bytes_s)

    def output(self, rows: float, heads: int) -> float:
        """O."""
        return self._gemm(rows, heads * self.spec.v_head_dim, self.spec.hidden_size)

    def movement(
        self, rows: float, absorbed_rows: float, heads: int, rearranged: float = 0.0, gathered_bytes: float = 0.0
    ) -> float:
        """Activations that are read and written between products.

        Two norms and two residuals move about 10 D elements a row; queries are rotated, absorbed ones put together and
        their results taken apart. An exchange does the same for `rearranged` rows times heads, and reads and writes
        the `gathered_bytes` of pages.
        """
        spec = self.spec
        elements = rows * (10 * spec.hidden_size + 4 * heads * spec.qk_head_dim)
        elements += (absorbed_rows * heads + rearranged) * 2 * (spec.latent_dim + spec.kv_lora_rank)
        return (elements * self.activation_size + 2 * gathered_bytes) / self._movement_bytes_s

    # --- attention ---

    def attend_singles(self, pairs: float, keys: float, sequences: float, heads: int) -> float:
        """Absorbed attention of single rows that see `keys` keys in all and attend to `pairs` of them."""
        if not sequences:
            return 0.0
        attention = self._absorbed(pairs, pairs, heads, self._decode_flops)
        return attention + self._index(keys, keys) + sequences * self._sequence_s

    def attend_absorbed(self, chunk: Chunk, heads: int, share: float = 1.0, key_share: float = 1.0) -> float:
        """Absorbed attention of a share of a chunk's pairs, to a share of its keys."""
        dense, keys = chunk_pairs(chunk.rows, chunk.start) * share, (chunk.start + chunk.rows) * key_share
        if self.top_k is None:
            return self._absorbed(dense, keys, heads, self._absorbed_flops) + self._sequence_s
        # Every row has keys of its own, so none is read for several rows.
        pairs = chunk_pairs(chunk.rows, chunk.start, self.top_k) * share
        attention = self._absorbed(pairs, pairs, heads, self._absorbed_flops)
        return attention + self._index(dense, keys) + self._sequence_s

    def _absorbed(self, pairs: float, keys: float, heads: int, rate: float) -> float:
        """A pair and head costs 2 (C + R) for the score and 2 C for the value; `keys` are read once for all heads."""
        flops = pairs * heads * 2 * (self.spec.latent_dim + self.spec.kv_lora_rank)
        return max(flops / rate, keys * self.kv.latent_bytes / self._cache_bytes_s)

    def attend_expanded(self, chunk: Chunk, heads: int, share: float = 1.0) -> float:
        """Expanded attention of a share of a chunk's rows to all of its keys, which KV-B makes.

        A key and head costs 2 C (N + V) to expand, a pair and head 2 (N + R) + 2 V. The expanded is written and read.
        """
        spec = self.spec
        keys, dims = chunk.start + chunk.rows, spec.qk_nope_head_dim + spec.v_head_dim
        moved = keys * (self.kv.latent_bytes + 2 * heads * (dims + spec.qk_rope_head_dim) * self.activation_size)
        expansion = max(keys * heads * 2 * spec.kv_lora_rank * dims / self._gemm_flops, moved / self._bytes_s)
        return expansion + self.expanded_pairs(chunk, heads) * share + self._sequence_s

    def expanded_pairs(self, chunk: Chunk, heads: int) -> float:
        """The part of expanded attention that comes after the expansion."""
        dims = self.spec.qk_head_dim + self.spec.v_head_dim
        return chunk_pairs(chunk.rows, chunk.start) * heads * 2 * dims / self._expanded_flops

    def _index(self, pairs: float, keys: float) -> float:
        """The indexer: 2 H_I D_I a pair, keys read once, float32 scores written and then read by top-k."""
        index = self.spec.indexer
        if index is None:
            return 0.0
        flops = pairs * 2 * index.num_heads * index.head_dim
        scores = max(flops / self._indexer_flops, keys * self.kv.indexer_bytes / self._bytes_s)
        return scores + pairs * 8 / self._bytes_s

    # --- feed-forward ---

    def mlp(self, rows: int, inner: float) -> float:
        """A SwiGLU MLP of which `inner` of the intermediate dim is on the rank."""
        hidden = self.spec.hidden_size
        moved = 3 * hidden * inner * self.weight_size + rows * (2 * hidden + 3 * inner) * self.activation_size
        return max(6 * rows * hidden * inner / self._gemm_flops, moved / self._bytes_s)

    def busiest_experts(self, num_rows: int) -> tuple[float, float]:
        """(rows, distinct experts) of a layer's routed experts on the rank that has most of them.

        Each of n rows chooses k of E experts uniformly: a rank's E / T experts get m = n k / T rows in the mean, and
        each is chosen by any with p = 1 - (1 - k / E)^n. The largest of T sums lies about sqrt(2 ln T) standard
        deviations above the mean: sqrt(m) for rows, sqrt(E p (1 - p) / T) for experts.
        """
        moe = self.spec.moe
        if moe is None or not num_rows:
            return 0.0, 0.0
        spread = math.sqrt(2 * math.log(self.ranks))
        mean = num_rows * moe.top_k / self.ranks
        local = moe.num_experts / self.ranks
        most = num_rows * min(moe.top_k, math.ceil(local))
        rows = min((mean + spread * math.sqrt(mean)) * self.costs.expert_skew, most)
        chosen = 1 - (1 - moe.top_k / moe.num_experts) ** num_rows
        distinct = local * chosen + spread * math.sqrt(local * chosen * (1 - chosen))
        return rows, min(distinct, math.ceil(local), rows)

    def routed_experts(self, num_rows: int) -> float:
        """Router, whole on every rank and in float32, and the busiest rank's experts."""
        moe = self.spec.moe
        assert moe is not None
        hidden = self.spec.hidden_size
        rows, distinct = self.busiest_experts(num_rows)
        expert, router = 3 * hidden * moe.intermediate_size, hidden * moe.num_experts
        moved = distinct * expert * self.weight_size
        moved += rows * (2 * hidden + 3 * moe.intermediate_size) * self.activation_size
        seconds = max(2 * rows * expert / self._gemm_flops, moved / self._bytes_s)
        seconds += max(2 * num_rows * router / self._router_flops, 4 * router / self._bytes_s)
        return seconds + distinct * self.costs.expert_us * MICRO

    def lm_head(self, sampled: int) -> float:
        """A rank's share of the vocabulary for `sampled` rows, then float32 logits written and read by the sampler."""
        spec, share = self.spec, -(-self.spec.vocab_size // self.ranks)
        weights = share * spec.hidden_size * self.activation_size
        scores = max(2 * sampled * share * spec.hidden_size / self._head_flops, weights / self._bytes_s)
        return scores + sampled * spec.vocab_size * 8 / self._bytes_s

    # --- collectives ---

    def collective(self, cost: Collective, received: float) -> float:
        """A collective in which the slowest rank receives so many bytes."""
        return 0.0 if self.ranks == 1 else cost.latency_us * MICRO + received / (cost.gb_s * 1e9)

    def all_reduce(self, size: float) -> float:
        """Every rank has `size` bytes: a reduce-scatter and an all-gather of them."""
        return self.collective(self.costs.all_reduce, 2 * size * (1 - 1 / self.ranks))

    def all_gather(self, total: float) -> float:
        """`total` bytes in even shares."""
        return self.collective(self.costs.all_gather, total * (1 - 1 / self.ranks))

    def reduce_scatter(self, size: float) -> float:
        """Every rank has `size` bytes and keeps an even share of the sum: a ring, or direct reads."""
        return self.collective(self.costs.reduce_scatter, size * (1 - 1 / self.ranks))

    def merge(self, rows: float) -> float:
        """Merge every rank's parts of `rows` with all heads: all-gather of LSE, weighted reduce-scatter of parts.

        With an indexer, ranks first tell each other their best keys with their scores, 8 bytes each.
        """
        elements = rows * self.spec.num_heads
        seconds = self.all_gather(self.ranks * elements * 4)
        seconds += self.reduce_scatter(elements * self.spec.kv_lora_rank * self.activation_size)
        return seconds if self.top_k is None else seconds + self.all_gather(self.ranks * rows * self.top_k * 8)

    def page_bytes(self, chunk: Chunk) -> int:
        """Bytes of the pages that a chunk attends to, of one layer."""
        return -(-(chunk.start + chunk.rows) // self.page_size) * self.page_size * self.kv.token_bytes
