"""What the attention part of a layer costs in each layout: projections, attention, and the exchange around it.

Which rows, heads and keys a stage has on the slowest rank follows from the two placements of the layout, as in
`splash.layouts.exchange`; collectives and their sizes are exactly theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splash.core.layout import KV, Layout, Projections
from splash.scheduler.load import StepLoad
from splash.scheduler.stages import Chunk, Stages

# Operations besides collectives, counted in the code that launches them: a layer's attention without its exchange, and
# what each exchange adds.
ATTENTION_OPS = 24
OWNER_OPS = 6
HEAD_OPS = 14
SINGLES_OPS = 16
CHUNKS_OPS = 4

REMEMBERED = 1 << 14  # costs of each kind that are kept: decoding asks for the same few again and again


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """The attention part of one layer, up to and including O, on the slowest rank: seconds, and operations launched."""

    projections: float
    attention: float
    movement: float
    exchange: float = 0.0
    ops: int = ATTENTION_OPS

    @property
    def seconds(self) -> float:
        return self.projections + self.attention + self.movement + self.exchange


class DecodeForm(NamedTuple):
    """The attention part of one layer on the slowest of some ranks that differ only in the keys that they attend to.

    Attributes:
        layer: what it costs.
        keys: of each rank, the keys that its rows see, and how many rows it has.
        heads: of each row.
    """

    layer: AttentionCost
    keys: list[tuple[int, int]]
    heads: int


class AttentionCosts:
    """Predicts the attention part of one layer.

    Args:
        stages: what the parts of the model cost.
        cheapest_forms: see `splash.scheduler.cost_model.CostModel`.
    """

    def __init__(self, stages: Stages, cheapest_forms: bool) -> None:
        self.stages = stages
        self.spec = stages.spec
        self.ranks = stages.ranks
        self.page_size = stages.page_size
        self.cheapest_forms = cheapest_forms
        self._projections = functools.lru_cache(REMEMBERED)(self._sum_projections)

    def forms(self, layout: Layout, load: StepLoad) -> tuple[AttentionCost, ...]:
        """The forms that a layout has a choice of."""
        is_sharded = layout.projections is Projections.SHARDED
        match layout.kv:
            case KV.POSITION:
                return (self._sharded_striped(load),) if is_sharded else self._split_striped(load)
            case KV.REQUEST:
                return (self._sharded_owned(load) if is_sharded else self._split_owned(load),)
            case KV.REPLICATED:
                return (self._local(self._whole(load), self.spec.num_heads // self.ranks),)

    def decode_forms(self, layout: Layout, load: StepLoad) -> list[DecodeForm] | None:
        """A load that only decodes by what may be the slowest, the one with most rows first.

        None where attention takes more than the number of rows and keys to predict.
        """
        if layout.kv is KV.POSITION or self.stages.top_k is not None:
            return None
        (layer,) = self.forms(layout, load)
        if layout.kv is KV.REPLICATED:
            keys = [(sum(load.single_keys_T), load.num_singles)]
            return [DecodeForm(layer, keys, self.spec.num_heads // self.ranks)]
        heads, parts = self.spec.num_heads, self._candidates(load)
        keys = [(part.single_keys, part.num_singles) for part in parts]
        if layout.projections is Projections.SHARDED:  # all layers are alike but for the attention of a rank's own rows
            return [DecodeForm(layer, keys, heads)]
        return [DecodeForm(self._local(part, heads), [own], heads) for part, own in zip(parts, keys, strict=True)]

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

    def _local(self, part: _Part, heads: int) -> AttentionCost:
        """Rows, the heads for them and their whole history are on the rank."""
        stages, absorbed_rows = self.stages, part.num_singles
        attention = stages.attend_singles(part.single_pairs, part.single_keys, part.num_singles, heads)
        if part.chunks:
            absorbed, expanded = self._forms(part.chunks, heads)
            absorbed_rows += _rows(absorbed)
            attention += sum([stages.attend_absorbed(chunk, heads) for chunk in absorbed])
            attention += sum([stages.attend_expanded(chunk, heads) for chunk in expanded])
        return AttentionCost(
            projections=self._projections(part.rows, part.rows, absorbed_rows, absorbed_rows, heads),
            attention=attention,
            movement=stages.movement(part.rows, absorbed_rows, heads),
        )

    def _split_owned(self, load: StepLoad) -> AttentionCost:
        """dp: between two collectives a rank does all of its own, so the slowest by the sum is waited for."""
        layers = [self._local(part, self.spec.num_heads) for part in self._candidates(load)]
        return layers[0] if len(layers) == 1 else max(layers, key=lambda layer: layer.seconds)

    def _candidates(self, load: StepLoad) -> Sequence[_Part]:
        """The parts of the ranks that may be the slowest: of those without chunks, who has no fewer rows and no fewer
        keys takes as long."""
        if self.stages.top_k is not None:
            return list(set(self._by_owner(load)))
        parts: list[_Part] = []
        owners = {chunk[0] for chunk in load.chunks}
        if owners:
            parts = list({part for part in self._by_owner(load) if part.chunks})
        most_keys: dict[int, int] = {}  # by number of rows
        for rank, (rows, keys) in enumerate(zip(load.singles_T, load.single_keys_T, strict=True)):
            if rank not in owners:
                most_keys[rows] = max(keys, most_keys.get(rows, 0))
        most = -1
        for rows, keys in sorted(most_keys.items(), reverse=True):
            if keys > most:
                parts.append(_Part(rows, rows, keys, keys, ()))
                most = keys
        return parts

    def _sharded_owned(self, load: StepLoad) -> AttentionCost:
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
        return AttentionCost(
            projections=self._projections(load.num_rows, load.num_rows, rows, rows, heads),
            attention=max(attention_T) + sum(stages.attend_expanded(chunk, heads) for chunk in expanded),
            movement=stages.movement(load.num_rows, rows, heads, max(own_rows) * self.spec.num_heads),
            exchange=exchange,
            ops=ATTENTION_OPS + OWNER_OPS,
        )

    def _sharded_striped(self, load: StepLoad) -> AttentionCost:
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
        return AttentionCost(
            projections=self._projections(load.num_rows, load.num_rows, rows, rows, heads),
            attention=attention,
            # Queries and results of all heads are put in order, and results weighed.
            movement=stages.movement(load.num_rows, rows, heads, 2 * rows * self.spec.num_heads),
            exchange=exchange,
            ops=ATTENTION_OPS + HEAD_OPS,
        )

    def _split_striped(self, load: StepLoad) -> tuple[AttentionCost, ...]:
        """cp: single rows go to every rank; chunks stay and histories are gathered, or their queries travel too."""
        chunks = _chunks(load)
        staying = self._striped(load, chunks, ())
        if not (chunks and self.cheapest_forms):
            return (staying,)
        return staying, self._striped(load, (), chunks)

    def _striped(self, load: StepLoad, staying: Sequence[Chunk], travelling: Sequence[Chunk]) -> AttentionCost:
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
        return AttentionCost(
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
