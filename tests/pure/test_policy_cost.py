"""The cost policy: it follows the load, does not flap, never asks for what cannot be, and explains itself."""

from __future__ import annotations

import dataclasses
import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.decision import Decision
from splash.core.layout import DCP, DOP, DP, KV, LAYOUTS, TP, Layout
from splash.core.memory import ArenaGeometry
from splash.scheduler.cost_model import CostModel
from splash.scheduler.cost_policy import CostPolicy
from splash.scheduler.crowd import Crowd
from splash.scheduler.outlook import Forecaster, Outlook
from splash.scheduler.owners import balance_owners
from splash.scheduler.policy import PolicyConfig
from splash.scheduler.request import Request
from splash.scheduler.room import Fill, Room
from splash.scheduler.traffic import Arrivals, Outputs
from tests.policy_loads import decoding, limits, request, situation
from tests.pure.test_cost_model import H200, shipped

GEOMETRY = H200.planned_geometry(0.85)
STEP_S = 0.05
CROSSOVER = 80  # requests of 4,096 tokens at which tp and dp take equally long on H200


def cost_policy(geometry: ArenaGeometry = GEOMETRY, model: CostModel = H200, **options: float) -> CostPolicy:
    return CostPolicy(PolicyConfig("cost", **{"interval_ms": 0, **options}), model, limits(geometry))  # type: ignore[arg-type]


class Drive:
    """A policy whose switches are carried out at once."""

    def __init__(self, policy: CostPolicy, layout: Layout, status: str = "committed") -> None:
        self.policy, self.layout, self.status, self.now = policy, layout, status, 0.0
        self.last: Decision | None = None
        self.switches: list[tuple[float, Decision]] = []

    def step(self, running: list[Request], waiting: list[Request] | None = None) -> Decision:
        if self.now < self.policy.due_s:
            assert self.last is not None
            decision = msgspec.structs.replace(self.last, switches=False)
        else:
            made = self.policy.decide(situation(self.now, self.layout, running, waiting or []))
            assert made is not None
            decision = made
        self.last = decision
        if decision.switches:
            self.switches.append((self.now, decision))
            if self.status == "committed":
                self.layout = LAYOUTS[decision.target]
            self.policy.switched(LAYOUTS[decision.target], self.status, self.now)
        self.now += STEP_S
        return decision

    def settle(self, running: list[Request], waiting: list[Request] | None = None, steps: int = 100) -> Decision:
        """Many steps with the same load. Returns the last decision."""
        return [self.step(running, waiting) for _ in range(steps)][-1]


def fastest(decision: Decision) -> str:
    return min((ms, name) for name, ms in decision.predictions_ms.items() if ms is not None)[1]


# --- it follows the load ---


@pytest.mark.parametrize(("count", "tokens", "best"), [(1, 1024, "tp"), (8, 4096, "tp"), (256, 6000, "dp")])
@pytest.mark.parametrize("start", ["tp", "dp", "cp", "dop", "dcp"])
def test_it_settles_on_the_layout_that_is_predicted_to_be_fastest(
    start: str, count: int, tokens: int, best: str
) -> None:
    drive = Drive(cost_policy(), LAYOUTS[start])
    last = drive.settle(decoding(count, tokens))
    assert fastest(last) == best and drive.layout.name == best
    assert len(drive.switches) == (start != best)


def test_a_real_change_is_followed_within_a_bounded_time_and_only_once() -> None:
    drive = Drive(cost_policy(), TP)
    few, many = decoding(4, 6000), decoding(256, 6000)
    for load, best in ((few, "tp"), (many, "dp"), (few, "tp"), (many, "dp")):
        changed = drive.now
        assert drive.settle(load).target == best
        assert all(now - changed <= 3 for now, _ in drive.switches[-1:])  # a pause of 2 s, then a second at most
    assert [decision.target for _, decision in drive.switches] == ["dp", "tp", "dp"]


def test_the_first_lead_counts_at_once_and_later_ones_when_they_have_lasted() -> None:
    """A layout to begin with is chosen without knowing the load; later changes of the load may pass."""
    few, many = decoding(4, 6000), decoding(256, 6000)
    assert Drive(cost_policy(), DP).step(few).target == "tp"
    drive = Drive(cost_policy(), DP)
    drive.settle(many)
    assert "has not for long enough" in drive.step(few).reason
    drive.settle(many)
    assert not drive.switches


def test_one_chunk_of_a_prefill_changes_nothing() -> None:
    """Every tenth step carries a chunk of 2,000 rows: alone it would favour another layout."""
    drive = Drive(cost_policy(), DP)
    running = decoding(256, 6000)
    for step in range(100):
        newcomer = [request(1000 + step, step % 8, 2000, 0, left=2000)] if step % 10 == 0 else []
        drive.step(running + newcomer)
    assert not drive.switches


@settings(max_examples=10, deadline=None)
@given(
    noise=st.lists(st.floats(-0.35, 0.35), min_size=150, max_size=150),
    start=st.sampled_from([TP, DP]),
)
def test_it_never_flaps_at_a_crossover(noise: list[float], start: Layout) -> None:
    drive = Drive(cost_policy(), start)
    for error in noise:
        drive.step(decoding(round(CROSSOVER * (1 + error)), 4096))
    assert len(drive.switches) <= 1


@settings(max_examples=6, deadline=None)
@given(counts=st.lists(st.sampled_from([1, 4, 256]), min_size=150, max_size=150))
def test_wild_loads_switch_at_most_once_a_pause(counts: list[int]) -> None:
    drive = Drive(cost_policy(cooldown_s=1), TP)
    for count in counts:
        drive.step(decoding(count, 6000))
    times = [now for now, _ in drive.switches]
    assert all(later - before >= 1 for before, later in itertools.pairwise(times))


# --- it never asks for what cannot be ---


@st.composite
def mixed(draw: st.DrawFn) -> tuple[Layout, list[Request], list[Request]]:
    layout = draw(st.sampled_from(list(LAYOUTS.values())))
    lengths = draw(st.lists(st.integers(2, 200_000), min_size=1, max_size=30))
    owners = draw(st.lists(st.integers(0, 7), min_size=len(lengths), max_size=len(lengths)))
    left = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=len(lengths), max_size=len(lengths)))
    running = [
        request(index, owner, length - 1, 1, 4000, left=min(rows, length))
        for index, (owner, length, rows) in enumerate(zip(owners, lengths, left, strict=True))
    ]
    waiting = [request(100 + i, None, draw(st.integers(1, 300_000)), 0) for i in range(draw(st.integers(0, 5)))]
    return layout, running, waiting


TIGHT = dataclasses.replace(GEOMETRY, num_slots=GEOMETRY.num_weight_slots + 3000)


@settings(max_examples=60, deadline=None)
@given(load=mixed())
def test_it_never_asks_for_a_layout_that_cannot_hold_what_is_there(
    load: tuple[Layout, list[Request], list[Request]],
) -> None:
    layout, running, waiting = load
    policy = cost_policy(TIGHT, settle_s=0, margin=0, safety=1)
    decision = policy.decide(situation(0.0, layout, running, waiting))
    assert decision is not None
    assert set(decision.predictions_ms) == set(LAYOUTS)
    unable = {name for name, ms in decision.predictions_ms.items() if ms is None}
    assert layout.name not in unable and unable <= set(decision.infeasible)
    if not decision.switches:
        return
    target = LAYOUTS[decision.target]
    assert target.name not in decision.infeasible
    pages = [-(-len(each.tokens) // 64) for each in running]
    slots = [TIGHT.page_slots(target, rank).size for rank in range(8)]
    owners = [each.held.owner for each in running if each.held is not None]
    if layout.kv is not KV.REQUEST or decision.rebalance:
        owners = balance_owners(pages, slots)
    if target.kv is KV.REQUEST:
        held = np.bincount(owners, pages, 8)
    elif target.kv is KV.POSITION:
        held = np.array([sum((count + 7 - rank) // 8 for count in pages) for rank in range(8)])
    else:
        held = np.full(8, sum(pages))
    assert (held <= slots).all()
    longest = max(-(-each.max_positions // 64) for each in [*running, *waiting])
    alone = {KV.REPLICATED: longest, KV.REQUEST: longest, KV.POSITION: -(-longest // 8)}[target.kv]
    assert alone <= max(slots)


def test_a_request_that_may_outgrow_the_target_holds_a_switch_back() -> None:
    drive = Drive(cost_policy(TIGHT), DP)
    waiting = [request(99, None, 10, 0, max_tokens=64 * TIGHT.num_slots + 64)]
    last = drive.settle(decoding(2, 1000), waiting)
    assert not drive.switches and "may grow to" in last.infeasible.get("tp", last.reason)


def test_heads_that_cannot_be_shared_leave_two_layouts() -> None:
    model = shipped("glm_4_7_flash", "h200")
    decision = Drive(cost_policy(model.planned_geometry(0.85), model), DP).step(decoding(2, 1000))
    assert [name for name, ms in decision.predictions_ms.items() if ms is not None] == ["dp", "cp"]
    assert decision.infeasible["tp"] == "8 ranks do not divide 20 heads"


# --- what it weighs ---


def test_where_memory_limits_admission_it_prefers_the_layout_that_admits_more() -> None:
    """With the same batch dp is faster; with most of its pages taken by weights, dop runs more at once."""
    waiting = [request(100 + i, None, 1000, 0, max_tokens=20_000) for i in range(200)]
    few_slots = dataclasses.replace(GEOMETRY, num_slots=GEOMETRY.num_weight_slots + 350)
    running = decoding(24, 9000, output=8000, max_tokens=20_000)
    roomy, tight = Drive(cost_policy(), DP), Drive(cost_policy(few_slots), DP)
    assert roomy.settle(running, waiting).target == "dp" and not roomy.switches
    tight.settle(running, waiting)
    assert tight.layout is not DP and GEOMETRY.page_slots(tight.layout, 0).size > GEOMETRY.page_slots(DP, 0).size


def forecaster_with(pages: int, model: CostModel = H200) -> Forecaster:
    """Of arenas with room for so many pages a rank beside whole weights."""
    geometry = dataclasses.replace(GEOMETRY, num_slots=GEOMETRY.num_weight_slots + pages)
    return Forecaster(model, Room(geometry, model.layouts, 1 << 40), 512, 8192, horizon_s=30.0)


def test_requests_that_outgrow_a_layout_are_computed_again_there() -> None:
    """All that run fit in both now, and nobody waits; within the horizon they need more pages than dp has."""
    load = situation(0.0, DP, decoding(256, 9000, output=8000, max_tokens=20_000))
    held, outputs, seconds = -(-9000 // 64) * 256 // 8, Outputs(), {}
    for _ in range(100):
        outputs.add(19_000)
    for pages in (held + 40, 3 * held):
        forecaster = forecaster_with(pages)
        outlook = forecaster.look(load, Arrivals(), outputs)
        seconds[pages] = [forecaster.seconds(layout, outlook, None) for layout in (DP, DOP)]
    (full_dp, full_dop), (roomy_dp, roomy_dop) = seconds.values()
    assert full_dp > 1.1 * roomy_dp and full_dop == roomy_dop
    assert roomy_dp < roomy_dop and full_dp > full_dop


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 500),
    tokens=st.integers(200, 20_000),
    queue=st.integers(0, 300),
    pages=st.lists(st.integers(10, 20_000), min_size=2, max_size=4),
)
def test_more_room_never_makes_a_layout_slower(count: int, tokens: int, queue: int, pages: list[int]) -> None:
    waiting = [request(1000 + i, None, 1000, 0, max_tokens=20_000) for i in range(queue)]
    load = situation(0.0, TP, decoding(count, tokens, max_tokens=20_000), waiting)
    held = load.num_pages
    before: dict[Layout, float] = {}
    outlook = forecaster_with(held).look(load, Arrivals(), Outputs())
    for more in sorted(pages):
        forecaster = forecaster_with(more)
        seconds = {
            layout: forecaster.seconds(layout, dataclasses.replace(outlook, known={}), None) for layout in H200.layouts
        }
        # Batches are put on a grid of a tenth.
        assert all(seconds[layout] <= before.get(layout, math.inf) * 1.1 for layout in seconds)
        before = seconds


@given(begin=st.floats(0, 3), end=st.floats(0, 3))
def test_memory_is_full_from_when_what_is_wanted_exceeds_it(begin: float, end: float) -> None:
    wanted = np.linspace(begin, end, 2001)
    assert Fill(begin, end).full_share == pytest.approx(np.mean(wanted > 1), abs=1e-3)


def test_what_preempted_requests_generated_is_not_found_in_the_cache() -> None:
    """Others have computed their prompts, nobody what came after."""
    arrivals = Arrivals()
    arrivals.found(10_000, 9000)
    for outputs in (0, 2000):
        load = situation(0.0, DP, [], [request(i, None, 1000, outputs) for i in range(8)])
        backlog = Crowd.of(load, arrivals, Outputs(), 512).backlog()
        assert backlog.rows == pytest.approx(8 * (100 + outputs)) and backlog.found == pytest.approx(8 * 900)
        assert backlog.position == pytest.approx((900 + 1000 + outputs) / 2)


def test_prompts_of_many_owners_are_predicted_as_they_are_planned() -> None:
    """One after another where every rank takes part, one of each owner at once where they are computed by owner."""
    forecaster = Forecaster(H200, Room(GEOMETRY, H200.layouts, 1 << 40), 512, 8192, horizon_s=1e4)
    for count, owners in ((32, 8), (3, 3)):
        waiting = [request(100 + i, None, 100_000, 0) for i in range(count)]
        load = situation(0.0, DP, decoding(8, 1000), waiting)
        outlook = forecaster.look(load, Arrivals(), Outputs())
        (shared,), (owned,) = outlook.shared[:1], outlook.owned[:1]
        assert (shared.chunks, owned.chunks) == (1, owners) and owned.top_rows == owned.rows
        for prefill in (shared, owned):
            assert prefill.steps * prefill.chunks * prefill.rows == pytest.approx(100_000 * count)
            assert prefill.chunks * prefill.rows == pytest.approx(8192, rel=0.25)
    short = [request(100 + i, None, 100, 0) for i in range(10)]
    (owned,) = forecaster.look(situation(0.0, DP, decoding(8, 1000), short), Arrivals(), Outputs()).owned[:1]
    assert owned.chunks == pytest.approx(10, rel=0.25), "short ones all begin in one step"


def outlook_of(
    layout: Layout, rate: float, tokens: int, queue: int = 0, running: int = 64, before_s: float = 0.0
) -> tuple[Forecaster, Outlook]:
    """An outlook on 30 s, where prompts of so many tokens have come for 100 s, the last one so long before."""
    forecaster = Forecaster(H200, Room(GEOMETRY, H200.layouts, 1 << 40), 512, 8192, horizon_s=30.0)
    arrivals, outputs = Arrivals(), Outputs()
    for tick in range(round(100 * rate)):
        arrivals.add(tick / rate, tokens)
    for _ in range(1000):
        outputs.add(400)
    queued = [request(index, None, tokens, 0) for index in range(1000, 1000 + queue)]
    there = situation(100.0 + before_s, layout, decoding(running, 4000), queued)
    return forecaster, forecaster.look(there, arrivals, outputs)


@given(
    rate=st.sampled_from([0.5, 2, 8, 20, 50]),
    tokens=st.sampled_from([100, 1000, 4000, 9000, 30_000]),
    layout=st.sampled_from(H200.layouts),
)
@settings(max_examples=50, deadline=None)
def test_an_outlook_has_the_prompts_that_come_in_the_time_that_it_takes(
    rate: float, tokens: int, layout: Layout
) -> None:
    """Steps that carry chunks are longer, and more prompts come the longer all takes, but no more than are computed."""
    forecaster, outlook = outlook_of(layout, rate, tokens)
    seconds = forecaster.seconds(layout, outlook, outlook.skew)
    as_at_first = dataclasses.replace(
        outlook, last=outlook.first, wanted=outlook.wanted[:1] * 2, pages=outlook.pages[:1] * 2, known={}
    )
    assert forecaster.seconds(layout, as_at_first, outlook.skew) <= 30 * 1.15
    (stream,) = outlook.prefills(layout.kv is KV.REQUEST)
    rows = stream.steps * stream.chunks * stream.rows
    assert stream.steps <= outlook.decode_steps * 1.001
    if stream.steps < outlook.decode_steps * 0.98:
        places = 512 - 64 + outlook.decode_steps * 64 / 400
        assert rows == pytest.approx(min(places, rate * seconds) * tokens, rel=0.35)


@given(queue=st.integers(0, 20), layout=st.sampled_from(H200.layouts))
@settings(max_examples=30, deadline=None)
def test_one_more_that_waits_changes_little(queue: int, layout: Layout) -> None:
    seconds = []
    for waits in (queue, queue + 1):
        forecaster, outlook = outlook_of(layout, 20, 300, waits, running=512)
        seconds.append(forecaster.seconds(layout, outlook, outlook.skew) / outlook.decode_steps)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.15)


@pytest.mark.parametrize("before_s", [0.5, 5.0, 30.0])
def test_those_that_wait_begin_however_long_ago_the_last_one_came(before_s: float) -> None:
    forecaster, outlook = outlook_of(TP, 20, 300, queue=1400, running=512, before_s=before_s)
    assert forecaster.seconds(TP, outlook, None) == pytest.approx(30, rel=0.2)
    stream = outlook.shared[-1]
    # 512 requests of 400 tokens, of which 100 are there
    ended = 512 * (1 - math.exp(-outlook.decode_steps / 300))
    assert stream.steps * stream.chunks * stream.rows == pytest.approx(300 * ended, rel=0.25)


def test_a_switch_that_the_rest_of_the_work_does_not_pay_for_is_left() -> None:
    costs = dataclasses.replace(H200.stages.costs, switch_us=1e6)
    slow = CostModel(H200.spec, dataclasses.replace(H200.hardware, costs=costs), 8, "fp8")
    drive = Drive(cost_policy(model=slow), DP)
    last = drive.settle(decoding(2, 1000))
    drive.now += 1  # for a while it is not reckoned again
    last = drive.step(decoding(2, 1000))
    assert not drive.switches and "changing does not pay" in last.reason
    assert last.gain_s is not None and last.cost_s is not None and 0 < last.gain_s < 2 * last.cost_s
    ended = Drive(cost_policy(), DP)
    last = ended.settle([request(i, i, 1000, 500, max_tokens=501) for i in range(2)])
    assert last.horizon_s is not None and last.horizon_s < 0.1


def test_losing_what_the_prefix_cache_would_have_found_counts_as_cost() -> None:
    """From dcp to tp idle pages are dropped; from tp to dp they stay."""

    def cost(start: Layout, running: list[Request], idle_pages: int) -> float:
        policy = cost_policy(settle_s=0, margin=0)
        for tick in range(4):
            policy.arrived(tick / 2, 4000)
        load = situation(2.0, start, running, idle_pages=idle_pages, num_queried=100_000, num_hit=80_000)
        decision = policy.decide(load)
        assert decision is not None and decision.cost_s is not None
        return decision.cost_s

    few, many = decoding(4, 4000), decoding(300, 2000)
    assert cost(DCP, few, 5000) > 2 * cost(DCP, few, 0)
    assert cost(TP, many, 5000) == cost(TP, many, 0)


def test_a_pause_follows_a_switch_and_longer_ones_follow_vain_tries() -> None:
    drive = Drive(cost_policy(backoff_s=1, cooldown_s=0), DP, status="refused")
    last = drive.settle(decoding(4, 6000), steps=200)
    times = [now for now, _ in drive.switches]
    gaps = np.diff(times)
    assert len(times) == 4 and gaps == pytest.approx([1, 2, 4], abs=0.3)
    assert "the last try came to nothing" in last.reason


def test_uneven_owners_are_evened_out_once_nobody_comes_to_do_it() -> None:
    uneven = decoding(24, 30_000, owners=[index % 2 for index in range(24)], max_tokens=8000)
    drive = Drive(cost_policy(), DP)
    decision = drive.settle(uneven, steps=30)
    assert drive.switches[0][1].rebalance and drive.switches[0][1].target == "dp" and decision.layout == "dp"
    waiting = [request(100 + i, None, 1000, 0) for i in range(8)]
    busy = Drive(cost_policy(), DP)
    busy.settle(uneven, waiting, steps=30)
    even = Drive(cost_policy(), DP)
    even.settle(decoding(24, 30_000, max_tokens=8000), steps=30)
    assert not any(decision.rebalance for _, decision in busy.switches + even.switches)


# --- it explains itself ---


def test_a_decision_says_all_that_it_compared_and_goes_out_as_json() -> None:
    drive = Drive(cost_policy(), DP)
    drive.settle(decoding(256, 6000), steps=10)
    first = drive.step(decoding(4, 6000))
    assert not first.switches and "but has not for long enough" in first.reason
    drive.settle(decoding(4, 6000))
    ((_, made),) = drive.switches
    assert made.layout == "dp" and made.target == "tp" and made.method in ("layerwise", "precopy", "blocking")
    assert all(ms is not None and ms > 0 for ms in made.predictions_ms.values())
    ratio = made.predictions_ms["dp"] / made.predictions_ms["tp"]  # type: ignore[operator]
    assert made.lead == pytest.approx(ratio - 1) and made.lead > made.margin  # type: ignore[operator]
    assert made.gain_s > 2 * made.cost_s > 0  # type: ignore[operator]
    assert "dp is predicted to take" in made.reason and "longer than tp" in made.reason
    assert msgspec.json.decode(msgspec.json.encode(made), type=Decision) == made


def test_it_decides_no_more_often_than_it_is_told() -> None:
    policy = cost_policy(interval_ms=100)
    made = policy.decide(situation(0.0, TP, decoding(1, 100)))
    assert made is not None and made.horizon_s is not None and made.horizon_s < 10
    assert policy.due_s == pytest.approx(0.1)
    policy.took(0.0, 0.016)
    assert policy.due_s == pytest.approx(0.2), "an eighth of 16 ms is a hundredth of 200 ms"
    long = cost_policy(interval_ms=100)
    first = long.decide(situation(0.0, DP, decoding(256, 2000, output=1900, max_tokens=9000)))
    assert first is not None and first.horizon_s is not None and first.horizon_s > 15
    assert long.due_s == pytest.approx(first.horizon_s / 100)
    assert policy.decide(situation(9.0, DOP, [])) is None
