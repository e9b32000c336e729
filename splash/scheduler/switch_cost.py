"""What a switch of layout costs: bytes, and the time that requests notice.

With b bytes a rank and layer (received or sent, the more), r the rate of one-sided reads and L layers, a layer's state
takes t = begin + b / r seconds, weights and pages each at their own rate. The three ways to carry a switch out:

    blocking    exposed = L t: everything, then the next step
    layer-wise  exposed = t + (L - 1) (max(0, t - c) + (s - 1) min(t, c)): the first layer, then of each layer what the
                compute c of the one before does not hide, and what the transfer slows that compute down (s);
                as blocking where the step is replayed as a graph, which waits for all layers
    pre-copy    exposed = begin + the pages written since they were copied, one a request; before that, ordinary steps
                run beside copies at a share of r and take `slowdown` times as long

To each comes a constant for planning, agreeing and committing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from splash.core.layout import KV, Layout
from splash.scheduler.footprint import Footprint, Ints, received_weight_bytes
from splash.scheduler.load import StepLoad
from splash.scheduler.stages import MICRO

if TYPE_CHECKING:
    from splash.scheduler.cost_model import CostModel

Method = Literal["blocking", "layerwise", "precopy"]
SWITCH_METHODS: tuple[Method, ...] = ("blocking", "layerwise", "precopy")


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """The predicted cost of one switch.

    Attributes:
        method: how it is carried out.
        kv_bytes: received by each rank, over all layers.
        weight_bytes: the same for attention weights.
        exposed_s: time that the committing step takes longer, seconds.
        background_s: time that copies run beside ordinary steps before, seconds.
        background_steps: those steps.
        slowdown: time of those steps over their time without copies.
    """

    method: Method
    kv_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    exposed_s: float
    background_s: float
    background_steps: int
    slowdown: float

    @property
    def seconds(self) -> float:
        """Time that serving loses: what is exposed, and what background steps take longer."""
        return self.exposed_s + self.background_s * (1 - 1 / self.slowdown)


def switch_cost(
    model: CostModel, source: Layout, target: Layout, load: StepLoad, method: Method, cached_pages: int = 0
) -> SwitchCost:
    """The cost of going on with `load` in another layout, owners staying as they are.

    Args:
        model: of the steps before and after.
        source: the layout now.
        target: the layout wanted.
        load: the running requests, as in the step that commits.
        method: how the switch is carried out.
        cached_pages: idle pages of the cache that move as well, about evenly spread.
    """
    received, sent = np.zeros(load.ranks, dtype=np.int64), np.zeros(load.ranks, dtype=np.int64)
    for footprint in (Footprint.of(load, model.page_size), Footprint.even(cached_pages, load.ranks)):
        received += footprint.received(source, target)
        sent += footprint.sent(source, target)
    weights = received_weight_bytes(model.geometry, source, target)
    return _cost(model, source, target, load, method, received, sent, weights)


def rebalance_cost(model: CostModel, layout: Layout, load: StepLoad, owner_q: Ints, method: Method) -> SwitchCost:
    """The cost of going on with `load` in the same layout, which keeps pages with their owners, with other owners.

    Args:
        model: of the steps before and after.
        layout: the layout.
        load: the running requests, as in the step that commits.
        owner_q: int64 [q], the new owner of each.
        method: how the change is carried out.
    """
    assert layout.kv is KV.REQUEST
    pages_q = -(-load.context_q // model.page_size)
    moves_q = owner_q != load.owner_q
    received = np.bincount(owner_q[moves_q], pages_q[moves_q], load.ranks).astype(np.int64)
    sent = np.bincount(load.owner_q[moves_q], pages_q[moves_q], load.ranks).astype(np.int64)
    return _cost(model, layout, layout, load, method, received, sent, 0)


def _cost(
    model: CostModel,
    source: Layout,
    target: Layout,
    load: StepLoad,
    method: Method,
    received: Ints,
    sent: Ints,
    weights: int,
) -> SwitchCost:
    """The cost of moves: int64 [T], pages that each rank receives and sends, and bytes of a layer's weights."""
    costs, geometry, num_layers = model.stages.costs, model.geometry, model.spec.num_layers
    busiest = int(np.maximum(received, sent).max())
    pages_s = busiest * geometry.slot_bytes / (costs.page_pull_gb_s * 1e9)
    weights_s = weights / (costs.pull_gb_s * 1e9)
    moves = busiest > 0 or weights > 0
    begin = costs.pull_us * MICRO if moves else 0.0
    layer_s = begin + pages_s + weights_s

    exposed, background, steps, slowdown = costs.switch_us * MICRO, 0.0, 0, 1.0
    waits_for_all = model.replays_all_layers(target, load)
    if moves and (method == "blocking" or (method == "layerwise" and waits_for_all)):
        exposed += num_layers * layer_s
    elif moves and method == "layerwise":
        compute = model.step(target, load).seconds / num_layers
        hidden = min(layer_s, compute)
        late = layer_s - hidden + (costs.pull_slowdown - 1) * hidden
        exposed += layer_s + (num_layers - 1) * late
    elif moves:
        slowdown = costs.trickle_slowdown
        background = num_layers * (pages_s + weights_s) / costs.trickle
        steps = math.ceil(background / (model.step(source, load).seconds * slowdown))
        written = min(busiest, len(load.rows_q))
        exposed += begin + num_layers * written * geometry.slot_bytes / (costs.page_pull_gb_s * 1e9)
    return SwitchCost(
        method=method,
        kv_bytes=tuple(int(pages) * geometry.slot_bytes * num_layers for pages in received),
        weight_bytes=(weights * num_layers,) * model.ranks,
        exposed_s=exposed,
        background_s=background,
        background_steps=steps,
        slowdown=slowdown,
    )
