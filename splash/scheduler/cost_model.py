"""What a step costs in each layout, predicted from what it is made of and what the hardware does.

A step is a chain of stages (`splash.scheduler.stages`), each of which needs the one before, so their times add:

    t(step) = host + sum over layers and stages + launch - min(overlap x attention, communication)        [s]

Which rows, heads and keys a stage has on the slowest rank follows from the two placements of the layout, as in
`splash.layouts.exchange` and `splash.model.transformer`; collectives and their sizes are exactly theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from splash.core.capacity import geometry_for_budget, other_weight_bytes
from splash.core.hardware import GIB, Hardware
from splash.core.layout import KV, LAYOUTS, Layout, Projections, Rows
from splash.core.memory import ArenaGeometry
from splash.core.spec import ModelSpec
from splash.core.step import REPLAYED_KEYS, REPLAYED_ROWS
from splash.scheduler.attention_costs import REMEMBERED, AttentionCost, AttentionCosts
from splash.scheduler.footprint import Fit, fits
from splash.scheduler.load import StepLoad
from splash.scheduler.stages import MICRO, Stages
from splash.scheduler.switch_cost import Method, SwitchCost, switch_cost

# Operations besides collectives, counted in the code that launches them: a layer's feed-forward part, the step's ends.
DENSE_OPS = 6
EXPERT_OPS = 30
END_OPS = 12

_BOUNDLESS = 1 << 40  # slots

STAGES = (
    "projections",  # Q-A, KV-A, Q-B, absorption, W_UV and O, and the indexer's
    "attention",  # scores and values, the expansion of latents, the indexer's scores
    "exchange",  # collectives around attention
    "experts",  # router and routed experts
    "dense",  # dense MLPs and shared experts
    "reduction",  # collectives at the ends of a layer's two parts, and of the embedding
    "movement",  # norms, residuals, rotation: activations read and written
    "head",  # LM head, its collectives and sampling
    "launch",  # operations that take longer to start than to run
    "host",  # planning and sending the step
    "overlap",  # communication hidden behind attention, negative
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The predicted cost of one step in one layout.

    Attributes:
        layout: the layout.
        seconds: time of the step: the sum of `stages`.
        stages: stage -> seconds over all layers; `STAGES` explains each.
    """

    layout: Layout
    seconds: float
    stages: dict[str, float]


class CostModel:
    """Predicts steps of one model on one group of ranks.

    Args:
        spec: the model.
        hardware: every rank's device; `costs` must be there.
        ranks: T.
        dtype: of weights: "float32", "bfloat16" or "fp8". Activations are float32 or else bfloat16.
        page_size: token positions a page.
        kv_dtype: of the cache; None takes `dtype`.
        graph_rows: most requests that run at once, where steps are recorded as graphs, which need no launches; 0 where
            they are not.
        cheapest_forms: a what-if: chunks attend absorbed or expanded as is predicted to be faster, and cp gathers
            histories or queries. False predicts what the model does: chunks are expanded from
            `ModelSpec.expanded_rows` rows on, with sharded projections to gathered history, and cp gathers histories.

    Attributes:
        layouts: the layouts that these ranks can serve in; those that would need unequal head groups are missing.
        stages: what the parts of the model cost.
        attention: what the attention part of a layer costs.
        geometry: sizes of modules and slots, in arenas without bounds.

    Raises:
        ConfigError: the hardware has no costs, or no rate for `dtype`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        ranks: int,
        dtype: str,
        page_size: int = 64,
        kv_dtype: str | None = None,
        graph_rows: int = REPLAYED_ROWS,
        cheapest_forms: bool = False,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self.ranks = ranks
        self.dtype = dtype
        self.page_size = page_size
        self._graph_rows = min(graph_rows, REPLAYED_ROWS)
        self.stages = Stages(spec, hardware, ranks, dtype, kv_dtype or dtype, page_size)
        self.layouts = tuple(
            layout
            for layout in LAYOUTS.values()
            if layout.projections is Projections.REPLICATED or spec.num_heads % ranks == 0
        )
        self._num_moe = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
        # Only the sizes of modules and slots are asked of it, which do not depend on the number of slots.
        self.geometry = ArenaGeometry(
            spec, self.stages.kv, page_size, self.stages.weight_size, ranks, num_slots=_BOUNDLESS
        )
        self._row_bytes = spec.hidden_size * self.stages.activation_size
        self.attention = AttentionCosts(self.stages, cheapest_forms)
        self._after_attention = functools.lru_cache(REMEMBERED)(self._sum_after_attention)

    def steps(self, load: StepLoad, layouts: Sequence[Layout] | None = None) -> dict[Layout, StepCost]:
        """The cost of `load` in some layouts, or else in every layout that these ranks can serve in."""
        return {layout: self._cheapest(layout, load)[0] for layout in layouts or self.layouts}

    def step(self, layout: Layout, load: StepLoad) -> StepCost:
        """The cost of `load` in `layout`. An empty load costs what every step does."""
        assert layout in self.layouts, f"{self.ranks} ranks cannot serve in {layout}"
        return self._cheapest(layout, load)[0]

    def switch(
        self, source: Layout, target: Layout, load: StepLoad, method: Method, cached_pages: int = 0
    ) -> SwitchCost:
        """The cost of going on with `load` in another layout; see `splash.scheduler.switch_cost`."""
        return switch_cost(self, source, target, load, method, cached_pages)

    def planned_geometry(self, mem_fraction: float = 1.0) -> ArenaGeometry:
        """The largest arenas that the hardware's memory has room for beside other weights and the reserve.

        Raises:
            CapacityError: not even the attention weights fit.
        """
        budget = int(self.hardware.memory_gib * mem_fraction * GIB) - int(self.hardware.reserve_gib * GIB)
        budget -= sum(other_weight_bytes(self.spec, self.dtype, self.ranks).values())
        stages = self.stages
        return geometry_for_budget(self.spec, stages.kv, self.page_size, stages.weight_size, self.ranks, budget)

    def fits(self, layout: Layout, load: StepLoad, geometry: ArenaGeometry, mem_fraction: float = 1.0) -> Fit:
        """Whether the requests of `load` fit in arenas of `geometry` in `layout`, with the numbers."""
        return fits(layout, load, geometry, self.hardware, self.dtype, mem_fraction)

    def _cheapest(self, layout: Layout, load: StepLoad) -> tuple[StepCost, AttentionCost | None]:
        """The form of attention with which the whole step is cheapest: where launches show, fewer of them may win."""
        assert load.ranks == self.ranks
        if load.num_chunks and self.stages.costs.launch_us and self.runs_as_graph(layout, load):
            load = load.in_single_rows
        forms = self.attention.forms(layout, load) if load.num_rows else (None,)
        steps = [(self.step_with(layer, layout, load), layer) for layer in forms]
        return min(steps, key=lambda step: step[0].seconds)

    def step_with(self, layer: AttentionCost | None, layout: Layout, load: StepLoad) -> StepCost:
        """The cost with one form of attention; None where there are no rows."""
        costs, num_layers = self.stages.costs, self.spec.num_layers
        parts = dict.fromkeys(STAGES, 0.0)
        parts["host"] = (costs.step_us + costs.request_us * load.num_queries) * MICRO
        if layer is None:
            return StepCost(layout, parts["host"], parts)
        parts["projections"] = layer.projections * num_layers
        parts["exchange"] = layer.exchange * num_layers
        parts["movement"] = layer.movement * num_layers
        parts["experts"], parts["dense"], parts["head"] = self._after_attention(load.num_rows, load.num_sampled)
        parts["reduction"] = self._reductions(layout, load)
        if layout.rows is Rows.SPLIT and load.num_sampled:
            parts["head"] += self.stages.all_gather(load.num_sampled * self._row_bytes)
        return StepCost(layout, self.attend(parts, layer.attention, layer.ops, self.runs_as_graph(layout, load)), parts)

    def attend(self, parts: dict[str, float], layer_s: float, layer_ops: int, is_graph: bool) -> float:
        """Seconds of a step, of which the stages that do not depend on how many keys are attended to are known.

        Args:
            parts: by stage; takes in those that do depend on it.
            layer_s: seconds of a layer's attention.
            layer_ops: operations of the attention part of a layer.
            is_graph: whether the step is replayed as a whole.
        """
        costs = self.stages.costs
        attention = parts["attention"] = layer_s * self.spec.num_layers
        parts["overlap"] = -min(costs.overlap * attention, parts["exchange"] + parts["reduction"])
        parts["launch"] = 0.0
        device = sum(parts.values()) - parts["host"]
        parts["launch"] = self._launch(is_graph, self._num_operations(layer_ops), device)
        return sum(parts.values())

    # --- the rest of the step ---

    def _reductions(self, layout: Layout, load: StepLoad) -> float:
        """Collectives outside attention: two a layer, and the embedding's.

        Replicated rows: partial sums of O and of the feed-forward part are all-reduced. Split rows: gathered before the
        feed-forward part and reduce-scattered after it; a rank receives its rows of T - 1 partial sums.
        """
        stages, num_layers = self.stages, self.spec.num_layers
        if layout.rows is Rows.REPLICATED:
            return (2 * num_layers + 1) * stages.all_reduce(load.num_rows * self._row_bytes)
        if layout.kv is KV.POSITION:
            most = -(-load.num_singles // self.ranks)
            most += load.striped_chunk_rows(self.page_size) if load.num_chunks else 0
            least = (load.num_rows - most) // max(1, self.ranks - 1)
        else:
            most, least = max(load.rows_T), min(load.rows_T)
        gather = stages.collective(stages.costs.all_gather, (load.num_rows - least) * self._row_bytes)
        scatter = stages.collective(stages.costs.reduce_scatter, most * (self.ranks - 1) * self._row_bytes)
        return num_layers * gather + (num_layers + 1) * scatter

    def _sum_after_attention(self, rows: int, num_sampled: int) -> tuple[float, float, float]:
        """(experts, dense, head) of a step: every rank sees all rows, so they are the same in every layout.

        Experts are expert-parallel, other MLPs are cut along their intermediate dim, the head along the vocabulary.
        """
        stages, spec = self.stages, self.spec
        if not rows:
            return 0.0, 0.0, 0.0
        moe, num_moe = spec.moe, self._num_moe
        experts, dense = 0.0, (spec.num_layers - num_moe) * stages.mlp(rows, spec.intermediate_size / self.ranks)
        if moe is not None:
            experts = num_moe * stages.routed_experts(rows)
            if moe.num_shared_experts:
                inner = moe.num_shared_experts * moe.intermediate_size / self.ranks
                dense += num_moe * stages.mlp(rows, inner)
        if not num_sampled:
            return experts, dense, 0.0
        logits = num_sampled * spec.vocab_size * stages.activation_size
        return experts, dense, stages.lm_head(num_sampled) + stages.all_gather(logits)

    def operations(self, layout: Layout, load: StepLoad) -> int:
        """Operations besides collectives in the step of a load that is not empty."""
        _, layer = self._cheapest(layout, load)
        assert layer is not None
        return self._num_operations(layer.ops)

    def _num_operations(self, layer_ops: int) -> int:
        num_layers = self.spec.num_layers
        feedforward = self._num_moe * EXPERT_OPS + (num_layers - self._num_moe) * DENSE_OPS
        return num_layers * layer_ops + feedforward + END_OPS

    def runs_as_graph(self, layout: Layout, load: StepLoad) -> bool:
        """Whether such a step is replayed as a whole, its chunks as single rows: see `splash.engine.graphs`.

        Where rows or pages are with their owner, a graph has as many rows of every rank as of the one with most.
        """
        if load.num_chunks:
            return load.num_rows <= self._graph_rows and load.seen_keys <= REPLAYED_KEYS
        if layout.kv is KV.REQUEST:
            return max(load.rows_T) <= self._graph_rows
        if layout.rows is Rows.SPLIT:  # evenly
            return load.num_rows <= self._graph_rows * self.ranks
        return load.num_rows <= self._graph_rows

    def replays_all_layers(self, layout: Layout, load: StepLoad) -> bool:
        """Whether such a step waits for all layers of a layer-wise switch. With chunks it runs layer by layer."""
        return self.stages.costs.launch_us > 0 and not load.num_chunks and self.runs_as_graph(layout, load)

    def _launch(self, is_graph: bool, ops: int, device: float) -> float:
        """Operations take some time however small; without a graph, the host may be slower than the device."""
        costs = self.stages.costs
        seconds = ops * costs.op_us * MICRO
        if not is_graph:
            seconds += max(0.0, ops * costs.launch_us * MICRO - device - seconds)
        return seconds
