"""Virtual hardware: a clock that only steps move, and an executor that asks the cost model how long they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from splash.core.layout import parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.step import StepOutput, StepPlan
from splash.engine.messages import Result, Run
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad
from splash.scheduler.stages import MICRO
from splash.switch.manifest import RankCopies, rank_copies
from splash.switch.orders import CopyAhead, SwitchOrder, SwitchOutcome, Vote
from splash.switch.prepared import chain

TOKEN, END_TOKEN = 0, 1  # what is generated, and what ends an output


class VirtualClock:
    """Seconds from 0 that pass when they are told to.

    Attributes:
        now: the time in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedExecutor:
    """Carries out steps in the time that a cost model predicts. Every token is `TOKEN`, and the last one `END_TOKEN`.

    - A step takes `CostModel.step` of its queries in its layout.
    - A step beside which copies are made ahead of a switch takes `trickle_slowdown` times as long, or as long as those
      take at the share `trickle` of the rates of one-sided reads, if that is longer.
    - A step that commits a switch takes longer by what is exposed of the bytes that its manifest moves, by the formulas
      of `splash.scheduler.switch_cost`.

    Args:
        model: predicts the steps.
        geometry: of the arenas.
        clock: moved on to the end of a step when it is collected.
        total_tokens: by request, tokens of its prompt and its whole output.
        submitted: told of each plan when it begins, of its load, and of the seconds that it will take.

    Attributes:
        copy_bytes: what a rank can copy within the last step, without a switch, at the share `trickle`; 0 before there
            was one. Reads of pages set the pace.
    """

    def __init__(
        self,
        model: CostModel,
        geometry: ArenaGeometry,
        clock: VirtualClock,
        total_tokens: Sequence[int],
        submitted: Callable[[StepPlan, StepLoad, float], None],
    ) -> None:
        self._model = model
        self._geometry = geometry
        self._clock = clock
        self._total_tokens = total_tokens
        self._submitted = submitted
        self._in_flight: tuple[float, Result] | None = None
        self._copying: CopyAhead | None = None  # behind the step in flight
        self._told = 0, 0  # a switch, and the digest of what was told of it
        self.copy_bytes = 0

    def submit(self, run: Run) -> None:
        """See `Executor`."""
        assert self._in_flight is None, "a step is in flight"
        plan, costs = run.plan, self._model.stages.costs
        layout = parse_layout(plan.layout)
        load = StepLoad.of_plan(plan, self._model.ranks)
        seconds = self._model.step(layout, load).seconds
        self.copy_bytes = int(seconds * costs.trickle * costs.page_pull_gb_s * 1e9)
        outcome = None
        if self._copying is not None and self._copying.copies_anything:
            seconds = max(seconds * costs.trickle_slowdown, self._trickle_seconds(self._copying))
        self._copying = None
        if run.commit is not None:
            outcome = SwitchOutcome(exposed_s=costs.switch_us * MICRO)
            seconds += outcome.exposed_s
        elif run.switch is not None:
            waits_for_all = self._model.replays_all_layers(layout, load)
            outcome = self._switch(run.switch, seconds, run.switch.layerwise and not waits_for_all)
            seconds += outcome.exposed_s
        total = self._total_tokens
        sampled = [query for query in plan.queries if query.sample]
        tokens = [
            END_TOKEN if query.start + len(query.tokens) + 1 == total[query.request] else TOKEN for query in sampled
        ]
        requests = tuple([query.request for query in sampled])
        output = StepOutput(plan.step, plan.epoch, requests, tuple(tokens), (None,) * len(tokens))
        self._in_flight = self._clock.now + seconds, Result(output, outcome)
        self._submitted(plan, load, seconds)

    def copy_ahead(self, order: CopyAhead) -> None:
        """See `Executor`."""
        told = self._told[1] if self._told[0] == order.switch else 0
        self._told = order.switch, chain(chain(told, order.prepared), order.rest or ())
        self._copying = order

    def votes(self) -> list[Vote]:
        """See `Executor`."""
        return [Vote(rank, *self._told) for rank in range(self._geometry.ranks)]

    def collect(self) -> Result:
        """See `Executor`."""
        assert self._in_flight is not None, "no step is in flight"
        self._clock.now, result = self._in_flight
        self._in_flight = None
        return result

    def check(self) -> None:
        """Nothing can die."""

    def restart(self, layout: str) -> None:
        """Nothing is to be started anew."""

    def close(self) -> None:
        """Nothing was started."""

    def _trickle_seconds(self, order: CopyAhead) -> float:
        moved = _Moved(self._geometry.ranks)
        for rank in range(self._geometry.ranks):
            moved.add_pages(
                rank, order.rank_copies(rank), self._geometry.kv.token_bytes * self._geometry.spec.num_layers
            )
            moved.add_weights(rank, [peer for _, peer, _ in order.weights[rank]], self._group_bytes)
        return self._seconds(moved) / self._model.stages.costs.trickle

    def _switch(self, order: SwitchOrder, step_s: float, layerwise: bool) -> SwitchOutcome:
        """What comes of a switch whose step takes `step_s` by itself, and may begin before all layers are there."""
        manifest, geometry, costs = order.manifest, self._geometry, self._model.stages.costs
        moved = _Moved(geometry.ranks)  # of one layer
        for rank in range(geometry.ranks):
            copies = rank_copies(manifest, geometry, rank)
            moved.add_pages(rank, copies, geometry.kv.token_bytes)
            moved.add_weights(rank, [peer for _, peer in copies.weights], self._group_bytes)
        num_layers, compute = geometry.spec.num_layers, step_s / geometry.spec.num_layers
        exposed, bytes_s = costs.switch_us * MICRO, self._seconds(moved)
        if bytes_s and layerwise:
            layer_s = costs.pull_us * MICRO + bytes_s
            hidden = min(layer_s, compute)
            exposed += layer_s + (num_layers - 1) * (layer_s - hidden + (costs.pull_slowdown - 1) * hidden)
        elif bytes_s:
            settled = bool(manifest.settled_pT().any()) or any(manifest.weights_settled)
            was_copied_ahead = settled or any(manifest.first)
            num_begins = 1 if was_copied_ahead else num_layers
            exposed += num_begins * costs.pull_us * MICRO + num_layers * bytes_s
        return SwitchOutcome(
            kv_bytes=tuple((moved.pages_received * num_layers).tolist()),
            weight_bytes=tuple((moved.weights_received * num_layers).tolist()),
            exposed_s=exposed,
        )

    @property
    def _group_bytes(self) -> int:
        """Bytes of one head group of one layer's weights."""
        return self._geometry.attention_bytes // self._geometry.ranks

    def _seconds(self, moved: _Moved) -> float:
        """Time of moves at full rate. A rank that sends more than it receives is as busy with that; moves within a rank
        are read from and written to its own memory."""
        costs, hardware = self._model.stages.costs, self._model.hardware
        pages = np.maximum(moved.pages_received, moved.pages_sent) / (costs.page_pull_gb_s * 1e9)
        weights = np.maximum(moved.weights_received, moved.weights_sent) / (costs.pull_gb_s * 1e9)
        local = 2 * moved.within / (hardware.memory_gb_s * costs.movement * 1e9)
        return float((pages + weights + local).max())


class _Moved:
    """Bytes by rank, int64 [T]."""

    def __init__(self, ranks: int) -> None:
        self.pages_received, self.pages_sent, self.weights_received, self.weights_sent, self.within = np.zeros(
            (5, ranks), dtype=np.int64
        )

    def add_pages(self, rank: int, copies: RankCopies, token_bytes: int) -> None:
        """Count the pages that `rank` copies."""
        size = (copies.last - copies.first) * token_bytes
        from_peer = np.bincount(copies.peer, size, len(self.within)).astype(np.int64)
        self.within[rank] += from_peer[rank]
        from_peer[rank] = 0
        self.pages_sent += from_peer
        self.pages_received[rank] += from_peer.sum()

    def add_weights(self, rank: int, peers: list[int], group_bytes: int) -> None:
        """Count a head group that `rank` fetches from each of `peers`."""
        self.weights_received[rank] += len(peers) * group_bytes
        for peer in peers:
            self.weights_sent[peer] += group_bytes
