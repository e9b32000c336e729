"""The cost policy: the layout that is predicted to be fastest over the outlook, where changing to it pays.

A switch is proposed to the fastest feasible layout that

    leads      T(present) / T(target) - 1 exceeds the margin, now and on average over the last moments
    pays       T(present) - T(target) exceeds `safety` times what the switch costs, by its cheapest way
    may        the cool-down has passed, and it has not just been tried in vain
    fits       with the pages of all that runs, and every live request to its end

and likewise new owners in the same layout, where requests have left some ranks with more to do than others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from splash.core.decision import Decision
from splash.core.layout import KV, LAYOUTS, Layout
from splash.scheduler.cost_model import CostModel
from splash.scheduler.outlook import Forecaster, Outlook, skew_of
from splash.scheduler.owners import balance_owners
from splash.scheduler.policy import Limits, PolicyConfig, Restraint
from splash.scheduler.room import Room
from splash.scheduler.situation import Situation
from splash.scheduler.switch_cost import Method, rebalance_cost
from splash.scheduler.traffic import Arrivals, Outputs

REST_SHARE = 0.01  # of an outlook that passes before the next: what lasts long need not be looked at often
LEFT_S = 1.0  # an offer that does not pay or fit is not looked into again for so long
WAYS: tuple[Method, ...] = ("layerwise", "precopy", "blocking")  # of equally cheap ones the first


@dataclass(frozen=True)
class _Price:
    """The cheapest way to change: its method, the time that it costs, and the time until it takes effect, seconds."""

    method: Method
    seconds: float
    delay_s: float


class _Offer(NamedTuple):
    """Something that could be done: another layout, or with the same one other owners; and what the outlook takes."""

    name: str  # of the layout, or "rebalance"
    target: Layout
    rebalance: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.target} with owners dealt out anew" if self.rebalance else self.name


class _Facts(NamedTuple):
    """What every answer to one situation has in common."""

    layout: str  # its name
    outlook: Outlook
    seconds: float  # that it takes in the layout that serves
    margin: float
    predictions: dict[str, float | None]
    infeasible: dict[str, str]

    def decision(self, offer: _Offer | None, price: _Price | None, reason: str, go: bool = False) -> Decision:
        seconds = self.seconds
        return Decision(
            policy="cost",
            layout=self.layout,
            target=offer.target.name if offer and go else self.layout,
            reason=reason,
            rebalance=offer is not None and go and offer.rebalance,
            switches=go,
            method=price.method if price else "",
            predictions_ms=self.predictions,
            infeasible=self.infeasible,
            lead=seconds / offer.seconds - 1 if offer else None,
            margin=self.margin,
            gain_s=seconds - offer.seconds if offer else None,
            cost_s=price.seconds if price else None,
            horizon_s=seconds,
        )


class CostPolicy:
    """See the module.

    Args:
        config: its limits.
        model: predicts steps and switches.
        limits: of the engine.
    """

    def __init__(self, config: PolicyConfig, model: CostModel, limits: Limits) -> None:
        self.config = config
        self._model = model
        self._limits = limits
        self._room = Room(limits.geometry, model.layouts, limits.staging_bytes)
        self._forecaster = Forecaster(
            model, self._room, limits.max_num_seqs, limits.max_batched_tokens, config.horizon_s
        )
        self._restraint = Restraint(config)
        self._arrivals, self._outputs = Arrivals(), Outputs()
        self._refused = {
            name: f"{model.ranks} ranks do not divide {model.spec.num_heads} heads"
            for name, layout in LAYOUTS.items()
            if layout not in model.layouts
        }
        self._targets = [(name, layout) for name, layout in LAYOUTS.items() if layout in model.layouts]
        self._leads: dict[str, float] = {}  # by offer, averaged
        self._left: dict[str, tuple[float, str]] = {}  # by offer: until when it is not looked into again, and why
        self._decided_s = -math.inf

    @property
    def due_s(self) -> float:
        """See `Policy`."""
        return self._restraint.due_s

    def arrived(self, now: float, num_prompt_tokens: int) -> None:
        """See `Policy`."""
        self._arrivals.add(now, num_prompt_tokens)

    def finished(self, num_output_tokens: int, cut_off: bool = False) -> None:
        """See `Policy`."""
        self._outputs.add(num_output_tokens, cut_off)

    def took(self, now: float, seconds: float) -> None:
        """See `Policy`."""
        self._restraint.took(now, seconds)

    def switched(
        self, target: Layout, status: str, now: float, rebalance: bool = False, cost_s: float = math.inf
    ) -> None:
        """See `Policy`."""
        self._restraint.switched(target, status, now, rebalance, cost_s)
        if status == "committed":
            self._leads.clear()
            self._left.clear()

    def decide(self, situation: Situation) -> Decision | None:
        """See `Policy`."""
        if not (situation.running or situation.num_waiting):
            return None
        self._arrivals.found(situation.num_queried, situation.num_hit)
        self._arrivals.began(situation.num_begun, situation.rows_begun)
        outlook = self._forecaster.look(situation, self._arrivals, self._outputs)
        seconds = self._forecaster.seconds(situation.layout, outlook, outlook.skew)
        self._restraint.decides(situation.now, seconds * REST_SHARE)
        offers, infeasible = self._offers(situation, outlook)
        leads = self._average_leads(situation.now, seconds, offers)
        layout, step_ms = situation.layout, 1e3 / outlook.steps
        predictions: dict[str, float | None] = dict.fromkeys(LAYOUTS)
        name = layout.name
        predictions[name] = seconds * step_ms
        for offer in offers:
            if not offer.rebalance:
                predictions[offer.name] = offer.seconds * step_ms
        facts = _Facts(name, outlook, seconds, self.config.margin, predictions, infeasible)
        first: Decision | None = None
        for offer in offers:  # the fastest first
            decision = self._judge(situation, facts, offer, leads[offer.name])
            if decision.switches:
                return decision
            first = first or decision
            if offer.seconds >= seconds:
                break
        return first or facts.decision(None, None, f"{layout} stays, since no other layout can serve what is there")

    def _offers(self, situation: Situation, outlook: Outlook) -> tuple[list[_Offer], dict[str, str]]:
        """What could be done, the fastest first; and why not, by layout."""
        layout, wanted = situation.layout, situation.num_wanted_idle
        has_owners = layout.kv is KV.REQUEST
        offers, infeasible = [], dict(self._refused)
        for name, target in self._targets:
            if target == layout:
                continue
            if shortage := self._room.shortage(situation, target):
                infeasible[name] = shortage
                continue
            keeps_owners = has_owners and target.kv is KV.REQUEST
            seconds = self._forecaster.seconds(target, outlook, outlook.skew if keeps_owners else None)
            missing = wanted - self._room.for_idle(situation, target) if wanted else 0
            if missing > 0:  # of what is found now, there would be no room in `target` for so many pages
                seconds += self._forecaster.recompute_s(target, outlook, outlook.found_tokens * missing / wanted)
            offers.append(_Offer(name, target, False, seconds))
        # New requests even ranks out for nothing.
        if has_owners and not situation.num_waiting and len(situation.running) > 1:
            offers.append(_Offer("rebalance", layout, True, self._forecaster.seconds(layout, outlook, None)))
        return sorted(offers, key=lambda offer: offer.seconds), infeasible

    def _average_leads(self, now: float, seconds: float, offers: list[_Offer]) -> dict[str, float]:
        """By offer, its lead averaged over `settle_s`. What has just become possible begins with none.

        The very first leads count at once: what serves then was chosen without knowing the load.
        """
        settle_s, is_first = self.config.settle_s, math.isinf(self._decided_s)
        elapsed = min(now - self._decided_s, settle_s) if self._leads else 0.0
        weight = 1 - math.exp(-elapsed / settle_s) if settle_s and not is_first else 1.0
        averages = {}
        for offer in offers:
            before = self._leads.get(offer.name, 0.0)
            averages[offer.name] = before + weight * (seconds / offer.seconds - 1 - before)
        self._leads, self._decided_s = averages, now
        return averages

    def _judge(self, situation: Situation, facts: _Facts, offer: _Offer, average: float) -> Decision:
        """Whether to take an offer, and why or why not."""
        layout, config = facts.layout, self.config
        lead = facts.seconds / offer.seconds - 1
        if lead <= 0:
            return facts.decision(offer, None, f"{layout} stays, since it is predicted to be the fastest")
        leads = f"{layout} is predicted to take {lead:.1%} longer than {offer}"
        if lead <= config.margin:
            return facts.decision(offer, None, f"{layout} stays: {leads}, within the margin of {config.margin:.1%}")
        if average <= config.margin:
            return facts.decision(offer, None, f"{layout} stays for now: {leads}, but has not for long enough")
        if held_back := self._restraint.held_back(offer.target, situation.now, offer.rebalance):
            return facts.decision(offer, None, f"{layout} stays for now: {leads}, but {held_back}")
        until, why = self._left.get(offer.name, (-math.inf, ""))
        if situation.now < until:
            return facts.decision(offer, None, f"{layout} stays: {leads}, but {why}")
        offer, price = self._price(situation, facts, offer)
        gain = facts.seconds - offer.seconds
        kept = gain * max(0.0, 1 - price.delay_s / facts.seconds)
        sums = f"it gains {kept:.3f} s over the next {facts.seconds:.1f} s and costs {price.seconds:.3f} s"
        if kept <= config.safety * price.seconds:
            why = f"changing does not pay, since {sums}"
            self._left[offer.name] = situation.now + LEFT_S, why
            return facts.decision(offer, price, f"{layout} stays: {leads}, but {why}")
        obstacle = "" if offer.rebalance else self._obstacle(situation, offer.target)
        if obstacle:
            facts.infeasible[offer.target.name] = obstacle
            self._left[offer.name] = situation.now + LEFT_S, obstacle
            return facts.decision(offer, price, f"{layout} stays: {leads}, but {obstacle}")
        return facts.decision(offer, price, f"{leads}: {sums}", go=True)

    def _obstacle(self, situation: Situation, target: Layout) -> str:
        """Why `target` cannot take over though the pages of running requests fit, or an empty string."""
        pages = situation.largest_request()
        if not self._room.fits_alone(target, pages):
            return f"a live request may grow to {pages} pages, which {target} has no room for"
        fit = self._model.fits(target, situation.load, self._limits.geometry, self._limits.mem_fraction)
        # Pages are counted above, where owners may be dealt out anew and pages shared.
        needed = sum(fit.needed.values())
        return "" if needed <= fit.available else f"{fit.reason}"

    def _price(self, situation: Situation, facts: _Facts, offer: _Offer) -> tuple[_Offer, _Price]:
        """The way that leaves most of the gain; for other owners, with what they would really gain."""
        model, load, outlook = self._model, situation.load, facts.outlook
        owners = situation.owner_n
        if offer.rebalance:
            slots = self._room.slots_T[offer.target].tolist()
            owners = np.array(balance_owners(situation.pages_n.tolist(), slots), dtype=np.int64)
            skew = skew_of(owners, situation.length_n, situation.ranks)
            offer = offer._replace(seconds=self._forecaster.seconds(offer.target, outlook, skew))
        along, recompute_s = 0, 0.0
        if not offer.rebalance and situation.moves_idle(offer.target):
            along = self._room.taken_along(situation, offer.target)
            # What was released last is taken along, and is the likeliest to be found.
            lost = max(0, situation.num_wanted_idle - along) * situation.page_size
            recompute_s = self._forecaster.recompute_s(offer.target, outlook, lost)
        step_s = facts.seconds / outlook.steps
        prices = []
        for method in WAYS:
            if offer.rebalance:
                cost = rebalance_cost(model, offer.target, load, owners, method)
            else:
                cost = model.switch(situation.layout, offer.target, load, method, along)
            delay_s = 0.0
            if cost.background_s:
                received = max(kv + weights for kv, weights in zip(cost.kv_bytes, cost.weight_bytes, strict=True))
                delay_s = max(cost.background_s, received / self._limits.copy_bytes * step_s)
            prices.append(_Price(method, cost.seconds + recompute_s, delay_s))
        gain_s = max(0.0, facts.seconds - offer.seconds) / facts.seconds
        return offer, min(prices, key=lambda price: price.seconds + gain_s * price.delay_s)
