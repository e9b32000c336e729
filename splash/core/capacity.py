"""What fits: bytes of attention weights a rank, KV tokens of the group and the longest context, in any layout.

Everything is computed from the holder matrices of `ownership` and the slots of `memory`, so that the answer is the one
the engine will find: exact to the slot, and with no case for any particular layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splash.core.errors import CapacityError
from splash.core.layout import Layout, check_layout
from splash.core.memory import ArenaGeometry, slots_for
from splash.core.ownership import page_holders, weight_holders
from splash.core.spec import DTYPE_BYTES, KVFormat, ModelSpec


@dataclass(frozen=True)
class Capacity:
    """What a group of ranks can hold in one layout.

    Attributes:
        attention_bytes: bytes of Q-B, KV-B and O on the rank that holds most, all layers.
        page_slots: slots on the rank that has fewest, each of which holds one page of every layer.
        kv_tokens: distinct tokens that the whole group holds when load is balanced.
        longest_context: tokens of each of the `batch` equally long requests that fit together.
    """

    attention_bytes: int
    page_slots: int
    kv_tokens: int
    longest_context: int


def geometry_for_budget(
    spec: ModelSpec, kv: KVFormat, page_size: int, weight_bytes: int, ranks: int, budget_bytes: int
) -> ArenaGeometry:
    """The largest arenas, one a layer, that take at most `budget_bytes` a rank in all.

    Raises:
        CapacityError: not even the attention weights fit.
    """
    num_slots = slots_for(spec, kv, page_size, weight_bytes, max(budget_bytes, 0) // spec.num_layers)
    try:
        return ArenaGeometry(spec, kv, page_size, weight_bytes, ranks, num_slots)
    except CapacityError as error:
        raise CapacityError(f"{budget_bytes / 2**30:.2f} GiB a rank are left for arenas: {error}") from None


def capacity(geometry: ArenaGeometry, layout: Layout, batch: int) -> Capacity:
    """What fits in arenas of that geometry in `layout`, for `batch` requests of equal length and balanced owners.

    Raises:
        ConfigError: the layout needs unequal head groups.
    """
    check_layout(layout, geometry.spec.num_heads, geometry.ranks)
    slots = page_slots(geometry, layout)
    return Capacity(
        attention_bytes=int(attention_bytes(geometry, layout).max()) * geometry.spec.num_layers,
        page_slots=int(slots.min()),
        kv_tokens=_balanced_pages(slots, layout) * geometry.page_size,
        longest_context=_longest_request(slots, layout, batch) * geometry.page_size,
    )


def attention_bytes(geometry: ArenaGeometry, layout: Layout) -> npt.NDArray[np.int64]:
    """[T], bytes of one layer's Q-B, KV-B and O that each rank holds."""
    groups = weight_holders(layout, geometry.ranks).sum(axis=0, dtype=np.int64)
    held: npt.NDArray[np.int64] = groups * geometry.attention_bytes // geometry.ranks
    return held


def page_slots(geometry: ArenaGeometry, layout: Layout) -> npt.NDArray[np.int64]:
    """[T], slots of each rank that may hold pages."""
    return np.array([len(geometry.page_slots(layout, rank)) for rank in range(geometry.ranks)], dtype=np.int64)


def freed_bytes(geometry: ArenaGeometry, layout: Layout, baseline: Layout) -> int:
    """Bytes of attention weights a rank, all layers, that `layout` does without and `baseline` holds."""
    less = attention_bytes(geometry, baseline) - attention_bytes(geometry, layout)
    return int(less.min()) * geometry.spec.num_layers


def page_loads(layout: Layout, ranks: int, num_pages: int, requests: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[T], pages on each rank when rank w owns `requests[w]` requests of `num_pages` pages each."""
    owner, number = np.divmod(np.arange(ranks * ranks), ranks)
    period = page_holders(number, owner, layout, ranks).reshape(ranks, ranks, ranks)
    # Holders depend on a page's number only modulo T, so whole periods multiply.
    whole, rest = divmod(num_pages, ranks)
    of_one = whole * period.sum(axis=1, dtype=np.int64) + period[:, :rest].sum(axis=1, dtype=np.int64)
    loads: npt.NDArray[np.int64] = requests @ of_one
    return loads


def other_weight_bytes(spec: ModelSpec, dtype: str, ranks: int) -> dict[str, int]:
    """Bytes a rank of all weights but Q-B, KV-B and O, which no layout moves, by kind.

    Experts are expert-parallel; dense MLPs and shared experts are cut along their intermediate dim, the embedding and
    the LM head along the vocabulary; the rest is replicated. Where weights are "fp8", the vocabulary and the norms stay
    in bfloat16 and quantisation scales (0.02 % at one float32 a 128 x 128 block) are left out; routers are float32.
    """
    element = DTYPE_BYTES[dtype]
    wide = max(element, DTYPE_BYTES["bfloat16"])
    dims, moe = spec.hidden_size, spec.moe
    num_moe = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    experts = router = 0
    mlps = 3 * dims * spec.intermediate_size * (spec.num_layers - num_moe)
    if moe is not None:
        expert = 3 * dims * moe.intermediate_size
        experts = math.ceil(moe.num_experts / ranks) * expert * num_moe
        mlps += moe.num_shared_experts * expert * num_moe
        router = (dims + 1) * moe.num_experts * num_moe
    vocabulary = math.ceil(spec.vocab_size / ranks) * dims * (1 if spec.tie_word_embeddings else 2)
    query_rank = spec.q_lora_rank or 0
    projections = dims * (query_rank + spec.latent_dim)
    norms = 2 * dims + query_rank + spec.kv_lora_rank
    if spec.indexer is not None:
        index = spec.indexer
        projections += index.num_heads * (spec.query_input_dim * index.head_dim + dims) + dims * index.head_dim
        norms += 2 * index.head_dim
    replicated = projections * spec.num_layers * element + (norms * spec.num_layers + dims) * wide
    return {
        "experts": experts * element,
        "dense_and_shared_mlp": math.ceil(mlps / ranks) * element,
        "embedding_and_lm_head": vocabulary * wide,
        "replicated": replicated + router * DTYPE_BYTES["float32"],
    }


def activation_bytes(spec: ModelSpec, dtype: str, rows: int, samples: int, ranks: int) -> int:
    """Bytes that a step of `rows` rows, `samples` of which are sampled, needs at most at once on a rank, weights apart.

    The larger of attention, feed-forward and sampling, each with every intermediate that lives at the same time, beside
    the rows themselves. Every rank may come to have all heads of all rows (a request that is alone on its owner).
    """
    element, wide = DTYPE_BYTES["bfloat16" if dtype == "fp8" else dtype], DTYPE_BYTES["float32"]
    held = 4 * rows * spec.hidden_size * element  # residual, normed, attended, and what a collective returns
    head = 2 * spec.qk_head_dim + 2 * spec.latent_dim + 3 * spec.kv_lora_rank + 2 * spec.v_head_dim
    attention = rows * (spec.num_heads * head + 2 * (spec.query_input_dim + spec.latent_dim)) * element
    feedforward = 3 * rows * math.ceil(spec.intermediate_size / ranks) * element
    if spec.moe is not None:
        pairs = rows * spec.moe.top_k
        routed = pairs * (3 * spec.moe.intermediate_size + 2 * spec.hidden_size) * element
        feedforward = max(feedforward, routed + rows * (spec.hidden_size + 4 * spec.moe.num_experts) * wide)
    sampling = 3 * samples * spec.vocab_size * wide
    return held + max(attention, feedforward, sampling)


def _balanced_pages(slots: npt.NDArray[np.int64], layout: Layout) -> int:
    """Distinct pages that fit when every rank owns equally many and every page number mod T occurs equally often."""
    ranks = len(slots)
    loads = page_loads(layout, ranks, ranks, np.ones(ranks, dtype=np.int64))
    return int((slots * ranks**2 // loads).min())


def _longest_request(slots: npt.NDArray[np.int64], layout: Layout, batch: int) -> int:
    """Most pages a request, for `batch` requests of equal length dealt out to the ranks in turn."""
    ranks = len(slots)
    requests = np.bincount(np.arange(batch) % ranks, minlength=ranks).astype(np.int64)
    fits, too_long = 0, int(slots.sum()) + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if (page_loads(layout, ranks, middle, requests) <= slots).all():
            fits = middle
        else:
            too_long = middle
    return fits
