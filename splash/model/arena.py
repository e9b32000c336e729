"""What a layer's arena holds, as tensors: the attention projections and the KV pages, views of the same bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from splash.core.layout import Layout, Projections
from splash.core.memory import ArenaGeometry
from splash.layouts.project import Heads


class LayerArena:
    """Views of one arena of one rank. Addresses never change: a layout only chooses among the views.

    Attributes:
        pages_SPK: [slots, page size, C + R], every slot, those under weights included.
        modules: Q-B [H, N + R, Q], KV-B [H, N + V, C] and O [H, V, D], whole, whatever of them is resident.
    """

    def __init__(self, arena: Tensor, geometry: ArenaGeometry, rank: int, dtype: torch.dtype) -> None:
        spec, heads = geometry.spec, geometry.spec.num_heads
        shapes = {
            "q_b": (heads, spec.qk_head_dim, spec.query_input_dim),
            "kv_b": (heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank),
            "o": (heads, spec.v_head_dim, spec.hidden_size),
        }
        self.modules: dict[str, Tensor] = {}
        for name, (offset, size) in geometry.modules.items():
            self.modules[name] = arena[offset : offset + size].view(dtype).view(shapes[name])
        self.pages_SPK = arena.view(dtype).view(geometry.num_slots, geometry.page_size, spec.latent_dim)
        self._nope_dim = spec.qk_nope_head_dim
        self._whole = self._heads(slice(0, heads))
        share = heads // geometry.ranks
        self._own = self._heads(slice(share * rank, share * (rank + 1))) if heads % geometry.ranks == 0 else None

    def _heads(self, heads: slice) -> Heads:
        return Heads(
            q_b=self.modules["q_b"][heads],
            kv_b=self.modules["kv_b"][heads],
            o=self.modules["o"][heads].flatten(0, 1),
            nope_dim=self._nope_dim,
        )

    def heads(self, layout: Layout) -> Heads:
        """The projections that this rank uses in `layout`."""
        if layout.projections is Projections.REPLICATED:
            return self._whole
        assert self._own is not None, "sharded projections need T to divide the heads"
        return self._own
