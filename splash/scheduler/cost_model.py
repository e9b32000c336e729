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
from splash.scheduler.footprint import Fit, fits
from splash.scheduler.load import StepLoad
from splash.scheduler.stages import MICRO, Chunk, Stages
from splash.scheduler.switch_cost import Method, SwitchCost, switch_cost

# Operations besides collectives, counted in the code that launches them: a layer's attention without its exchange, its
# feed-forward part, what each exchange adds, and the step's ends.
ATTENTION_OPS = 24
DENSE_OPS = 6
EXPERT_OPS = 30
OWNER_OPS = 6
HEAD_OPS = 14
SINGLES_OPS = 16
CHUNKS_OPS = 4
END_OPS = 12

_BOUNDLESS = 1 << 40  # slots
_REMEMBERED = 1 << 14  # costs of each kind that are kept: decoding asks for the same few again and again

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


@dataclass(frozen=True, slots=True)
class _Attention:
    """The attention part of one layer, up to and including O, on the slowest rank: seconds, and operations launched."""

    projections: float
    attention: float
    movement: float
    exchange: float = 0.0
    ops: int = ATTENTION_OPS

    @property
    def seconds(self) -> float:
        return self.projections + self.attention + self.movement + self.exchange


class CostModel:
    """Predicts steps of one model on one group of ranks.

    Args:
        spec: the model.
        hardware: every rank's device; `costs` must be there.
        ranks: T.
        dtype: of weights: "float32", "bfloat16" or "fp8". Activations are float32 or else bfloat16.
        page_size: token positions a page.
        kv_dtype: of the cache; None takes `dtype`.
        graph_rows: steps without chunks and of at most so many rows run as graphs, which need no launches.
        cheapest_forms: a what-if: chunks attend absorbed or expanded as is predicted to be faster, and cp gathers
            histories or queries. False predicts what the model does: chunks are expanded from
            `ModelSpec.expanded_rows` rows on, with sharded projections to gathered history, and cp gathers histories.

    Attributes:
        layouts: the layouts that these ranks can serve in; those that would need unequal head groups are missing.
        stages: what the parts of the model cost.
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
        graph_rows: int = 512,
        cheapest_forms: bool = False,
    ) -> None:
        self.spec = spec
        self.hardware = hardware
        self.ranks = ranks
        self.dtype = dtype
        self.page_size = page_size
        self.graph_rows = graph_rows
        self.cheapest_forms = cheapest_forms
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
        self._projections = functools.lru_cache(_REMEMBERED)(self._sum_projections)
        self._after_attention = functools.lru_cache(_REMEMBERED)(self._sum_after_attention)

    def steps(self, load: StepLoad, layouts: Sequence[Layout] | None = None) -> dict[Layout, StepCost]:
        """The cost of `load` in some layouts, or else in every layout that these ranks can serve in."""
        after = self._after_attention(load.num_rows, load.num_sampled)
        return {layout: self._cheapest(layout, load, after)[0] for layout in layouts or self.layouts}

    def step(self, layout: Layout, load: StepLoad) -> StepCost:
        """The cost of `load` in `layout`. An empty load costs what every step does."""
        assert layout in self.layouts, f"{self.ranks} ranks cannot serve in {layout}"
        return self._cheapest(layout, load, self._after_attention(load.num_rows, load.num_sampled))[0]

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

    def _cheapest(
        self, layout: Layout, load: StepLoad, after: tuple[float, float, float]
    ) -> tuple[StepCost, _Attention | None]:
        """The form of attention with which the whole step is cheapest: where launches show, fewer of them may win."""
        assert load.ranks == self.ranks
        forms = self._attention(layout, load) if load.num_rows else (None,)
        steps = [(self._step_with(layer, layout, load, after), layer) for layer in forms]
        return min(steps, key=lambda step: step[0].seconds)

    def _step_with(
        self, layer: _Attention | None, layout: Layout, load: StepLoad, after: tuple[float, float, float]
    ) -> StepCost:
        """The cost with one form of attention; None where there are no rows."""
        costs, num_layers = self.stages.costs, self.spec.num_layers
        parts = dict.fromkeys(STAGES, 0.0)
        parts["host"] = (costs.step_us + costs.request_us * len(load.rows_q)) * MICRO
        if layer is not None:
            parts["projections"] = layer.projections * num_layers
            parts["attention"] = layer.attention * num_layers
            parts["exchange"] = layer.exchange * num_layers
            parts["movement"] = layer.movement * num_layers
            parts["experts"], parts["dense"], parts["head"] = after
            parts["reduction"] = self._reductions(layout, load)
            if layout.rows is Rows.SPLIT and load.num_sampled:
                parts["head"] += self.stages.all_gather(load.num_sampled * self._row_bytes)
            communication = parts["exchange"] + parts["reduction"]
            parts["overlap"] = -min(costs.overlap * parts["attention"], communication)
            device = sum(parts.values()) - parts["host"]
            parts["launch"] = self._launch(load, self._num_operations(layer), device)
        return StepCost(layout, sum(parts.values()), parts)

    # --- the attention part of a layer ---

    def _attention(self, layout: Layout, load: StepLoad) -> tuple[_Attention, ...]:
        """The forms that a layout has a choice of."""
        is_sharded = layout.projections is Projections.SHARDED
        match layout.kv:
            case KV.POSITION:
                return (self._sharded_striped(load),) if is_sharded else self._split_striped(load)
            case KV.REQUEST:
                return (self._sharded_owned(load) if is_sharded else self._split_owned(load),)
            case KV.REPLICATED:
                return (self._local(self._whole(load), self.spec.num_heads // self.ranks),)

    def _whole(self, load: StepLoad) -> _Part:
        pairs = sum(load.single_pairs_T(self.stages.top_k))
        return _Part(load.num_rows, load.num_singles, sum(load.single_keys_T), pairs, _chunks(load))

    def _by_owner(self, load: StepLoad) -> list[_Part]:
        chunks: list[list[Chunk]] = [[] for _ in range(load.ranks)]
        for chunk in _chunks(load):
            chunks[chunk.owner].append(chunk)
        pairs_T = load.single_pairs_T(self.stages.top_k)
        return [
            _Part(load.rows_T[rank], load.singles_T[rank], load.single_keys_T[rank], pairs_T[rank], tuple(chunks[rank]))
            for rank in range(load.ranks)
        ]

    def _local(self, part: _Part, heads: int) -> _Attention:
        """Rows, the heads for them and their whole history are on the rank."""
        stages, absorbed_rows = self.stages, part.num_singles
        attention = stages.attend_singles(part.single_pairs, part.single_keys, part.num_singles, heads)
        if part.chunks:
            absorbed, expanded = self._forms(part.chunks, heads)
            absorbed_rows += _rows(absorbed)
            attention += sum([stages.attend_absorbed(chunk, heads) for chunk in absorbed])
            attention += sum([stages.attend_expanded(chunk, heads) for chunk in expanded])
        return _Attention(
            projections=self._projections(part.rows, part.rows, absorbed_rows, absorbed_rows, heads),
            attention=attention,
            movement=stages.movement(part.rows, absorbed_rows, heads),
        )

    def _split_owned(self, load: StepLoad) -> _Attention:
        """dp: between two collectives a rank does all of its own, so the slowest by the sum is waited for."""
        layers = [self._local(part, self.spec.num_heads) for part in self._candidates(load)]
        return layers[0] if len(layers) == 1 else max(layers, key=lambda layer: layer.seconds)

    def _candidates(self, load: StepLoad) -> Sequence[_Part]:
        """The parts of the ranks that may be the slowest: who has no fewer rows and no fewer keys takes as long."""
        if load.num_chunks or self.stages.top_k is not None:
            return list(set(self._by_owner(load)))
        most_keys: dict[int, int] = {}  # by number of rows
        for rows, keys in zip(load.singles_T, load.single_keys_T, strict=True):
            most_keys[rows] = max(keys, most_keys.get(rows, 0))
        parts: list[_Part] = []
        for rows, keys in sorted(most_keys.items(), reverse=True):
            if not parts or keys > parts[-1].single_keys:
                parts.append(_Part(rows, rows, keys, keys, ()))
        return parts

    def _sharded_owned(self, load: StepLoad) -> _Attention:
        """dop: all rows with own heads are exchanged for own rows with all heads, and back."""
        stages, ranks, heads = self.stages, self.ranks, self.spec.num_heads // self.ranks
        chunks = _chunks(load)
        absorbed, expanded = self._gathered_forms(chunks, heads, held=0.0)
        own_rows = list(load.singles_T)
        # Equal ranks are predicted once.
        singles_T = list(zip(load.single_pairs_T(stages.top_k), load.single_keys_T, own_rows, strict=True))
        seconds = {each: stages.attend_singles(*each, self.spec.num_heads) for each in set(singles_T)}
        attention_T = [seconds[each] for each in singles_T]
        for chunk in absorbed:
            own_rows[chunk.owner] += chunk.rows
            attention_T[chunk.owner] += stages.attend_absorbed(chunk, self.spec.num_heads)
        rows, exchange = sum(own_rows), 0.0
        if rows:
            # A rank sends what is not its own and receives its own from T - 1 peers, forth with C + R and back with C.
            sent = max(max(own_rows) * (ranks - 1), rows - min(own_rows)) * heads * stages.activation_size
            exchange = stages.collective(stages.costs.all_to_all, sent * self.spec.latent_dim)
            exchange += stages.collective(stages.costs.all_to_all, sent * self.spec.kv_lora_rank)
        if expanded:
            size = sum(stages.page_bytes(chunk) for chunk in expanded)
            exchange += stages.collective(stages.costs.all_gather, size)
        return _Attention(
            projections=self._projections(load.num_rows, load.num_rows, rows, rows, heads),
            attention=max(attention_T) + sum(stages.attend_expanded(chunk, heads) for chunk in expanded),
            movement=stages.movement(load.num_rows, rows, heads, max(own_rows) * self.spec.num_heads),
            exchange=exchange,
            ops=ATTENTION_OPS + OWNER_OPS,
        )

    def _sharded_striped(self, load: StepLoad) -> _Attention:
        """dcp: heads are gathered, every rank attends with all of them to its pages, parts are merged and scattered."""
        stages, heads = self.stages, self.spec.num_heads // self.ranks
        absorbed, expanded = self._gathered_forms(_chunks(load), heads, held=1 / self.ranks)
        rows, exchange = load.num_singles + _rows(absorbed), 0.0
        if rows:
            queries = rows * self.spec.num_heads * self.spec.latent_dim
            exchange = stages.all_gather(queries * stages.activation_size) + stages.merge(rows)
        if expanded:
            exchange += stages.all_gather(sum(stages.page_bytes(chunk) for chunk in expanded))
        attention = self._attend_stripes(load, absorbed)
        attention += sum(stages.attend_expanded(chunk, heads) for chunk in expanded)
        return _Attention(
            projections=self._projections(load.num_rows, load.num_rows, rows, rows, heads),
            attention=attention,
            # Queries and results of all heads are put in order, and results weighed.
            movement=stages.movement(load.num_rows, rows, heads, 2 * rows * self.spec.num_heads),
            exchange=exchange,
            ops=ATTENTION_OPS + HEAD_OPS,
        )

    def _split_striped(self, load: StepLoad) -> tuple[_Attention, ...]:
        """cp: single rows go to every rank; chunks stay and histories are gathered, or their queries travel too."""
        chunks = _chunks(load)
        staying = self._striped(load, chunks, ())
        if not (chunks and self.cheapest_forms):
            return (staying,)
        return staying, self._striped(load, (), chunks)

    def _striped(self, load: StepLoad, staying: Sequence[Chunk], travelling: Sequence[Chunk]) -> _Attention:
        stages, heads, spec = self.stages, self.spec.num_heads, self.spec
        own_singles = -(-load.num_singles // self.ranks)
        own_chunk = load.striped_chunk_rows(self.page_size) if load.num_chunks else 0
        own = own_singles + own_chunk
        sent, own_sent = load.num_singles + _rows(travelling), own if travelling else own_singles
        share = own_chunk / max(1, _rows(staying))  # of a chunk's rows, and so of its pairs
        absorbed, expanded = self._forms(staying, heads, share)
        own_absorbed = share * _rows(absorbed)
        attention = sum(stages.attend_absorbed(chunk, heads, share) for chunk in absorbed)
        attention += sum(stages.attend_expanded(chunk, heads, share) for chunk in expanded)
        exchange, gathered, ops = 0.0, 0, ATTENTION_OPS
        if staying:
            gathered = sum(stages.page_bytes(chunk) for chunk in staying)
            exchange = stages.all_gather(gathered)
            ops += CHUNKS_OPS
        if sent:
            width = (spec.query_input_dim + spec.latent_dim) * stages.activation_size
            exchange += stages.all_gather(sent * width) + stages.merge(sent)
            attention += self._attend_stripes(load, travelling)
            ops += SINGLES_OPS
        up = sent + (own_chunk if staying else 0)
        return _Attention(
            projections=self._projections(own, up, own_absorbed + sent, own_absorbed + own_sent, heads),
            attention=attention,
            movement=stages.movement(own, own_absorbed + sent, heads, sent * heads, gathered / self.ranks),
            exchange=exchange,
            ops=ops,
        )

    def _attend_stripes(self, load: StepLoad, chunks: Sequence[Chunk]) -> float:
        """Absorbed attention of singles and of `chunks` with all heads, to a rank's pages."""
        stages, heads, seconds = self.stages, self.spec.num_heads, 0.0
        if load.num_singles:
            keys = load.striped_single_keys(self.page_size)
            # The best keys fall on ranks as all keys do.
            pairs = keys * sum(load.single_pairs_T(stages.top_k)) / max(1, sum(load.single_keys_T))
            seconds = stages.attend_singles(pairs, keys, load.num_singles, heads)
        share = 1 / self.ranks
        return seconds + sum(stages.attend_absorbed(chunk, heads, share, share) for chunk in chunks)

    def _sum_projections(self, own: float, up: float, absorbed: float, valued: float, heads: int) -> float:
        """All projections, by the rows that go through each."""
        stages = self.stages
        return (
            stages.down(own)
            + stages.up(up, heads)
            + stages.into_latent(absorbed, heads)
            + stages.out_of_latent(valued, heads)
            + stages.output(own, heads)
        )

    def _forms(
        self, chunks: Sequence[Chunk], heads: int, share: float = 1.0
    ) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """(absorbed, expanded): chunks by the form in which they attend where heads and history are at hand."""
        if not chunks or self.stages.top_k is not None:  # sparse attention is always absorbed
            return chunks, ()
        is_expanded = [
            self._absorbed_seconds(chunk, heads, share) > self.stages.attend_expanded(chunk, heads, share)
            if self.cheapest_forms
            else chunk.rows >= self.spec.expanded_rows
            for chunk in chunks
        ]
        return _divide(chunks, is_expanded)

    def _gathered_forms(
        self, chunks: Sequence[Chunk], heads: int, held: float
    ) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
        """The same where heads are sharded: expanding takes the history, of which a rank has `held`, absorbing the
        exchange of queries and results. Attention itself is shared by the ranks either way."""
        stages = self.stages
        if not chunks or stages.top_k is not None:
            return chunks, ()
        if not self.cheapest_forms:
            return _divide(chunks, [chunk.rows >= self.spec.expanded_rows for chunk in chunks])
        width = heads * (self.spec.latent_dim + self.spec.kv_lora_rank) * stages.activation_size
        missing = 0.0 if self.ranks == 1 else 1 - held
        is_expanded = []
        for chunk in chunks:
            exchanged = chunk.rows * width * (1 - 1 / self.ranks) / (stages.costs.all_to_all.gb_s * 1e9)
            gathered = stages.page_bytes(chunk) * missing / (stages.costs.all_gather.gb_s * 1e9)
            absorbed = self._absorbed_seconds(chunk, heads, 1.0) + exchanged
            is_expanded.append(absorbed > stages.attend_expanded(chunk, heads) + gathered)
        return _divide(chunks, is_expanded)

    def _absorbed_seconds(self, chunk: Chunk, heads: int, share: float) -> float:
        """Absorbed attention of a chunk with its way into the latent space and out of it."""
        stages, rows = self.stages, chunk.rows * share
        return (
            stages.attend_absorbed(chunk, heads, share)
            + stages.into_latent(rows, heads)
            + stages.out_of_latent(rows, heads)
        )

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
        _, layer = self._cheapest(layout, load, self._after_attention(load.num_rows, load.num_sampled))
        assert layer is not None
        return self._num_operations(layer)

    def _num_operations(self, layer: _Attention) -> int:
        num_layers = self.spec.num_layers
        feedforward = self._num_moe * EXPERT_OPS + (num_layers - self._num_moe) * DENSE_OPS
        return num_layers * layer.ops + feedforward + END_OPS

    def _launch(self, load: StepLoad, ops: int, device: float) -> float:
        """Operations take some time however small; without a graph, the host may be slower than the device."""
        costs = self.stages.costs
        seconds = ops * costs.op_us * MICRO
        if load.num_chunks or load.num_rows > self.graph_rows:
            seconds += max(0.0, ops * costs.launch_us * MICRO - device - seconds)
        return seconds


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank attends with: rows, singles, keys that singles see, pairs that they attend to, chunks."""

    rows: int
    num_singles: int
    single_keys: int
    single_pairs: int
    chunks: tuple[Chunk, ...]


def _chunks(load: StepLoad) -> tuple[Chunk, ...]:
    return tuple(Chunk(*chunk) for chunk in load.chunks)


def _rows(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.rows for chunk in chunks)


def _divide(chunks: Sequence[Chunk], chosen: Sequence[bool]) -> tuple[Sequence[Chunk], Sequence[Chunk]]:
    """(those not chosen, those chosen)."""
    pairs = list(zip(chunks, chosen, strict=True))
    return [chunk for chunk, picked in pairs if not picked], [chunk for chunk, picked in pairs if picked]
