"""The cost model: stages by hand, the properties that any prediction must have, and bytes that equal the diff's."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splash.core.capacity import page_loads
from splash.core.diff import diff
from splash.core.errors import ConfigError
from splash.core.hardware import Collective, Costs, Hardware
from splash.core.layout import CP, DCP, DOP, DP, LAYOUTS, TP, Layout
from splash.core.ownership import State
from splash.core.spec import IndexerSpec, ModelSpec, MoeSpec, RopeSpec
from splash.plan import ModelChoice
from splash.scheduler.cost_model import STAGES, CostModel
from splash.scheduler.decode_times import DecodeTimes
from splash.scheduler.footprint import Footprint
from splash.scheduler.load import StepLoad, chunk_pairs, striped
from splash.scheduler.stages import Chunk
from splash.scheduler.switch_cost import SWITCH_METHODS
from splash.settings import build, compose, options

FREE = Collective(0.0, 1e12)
IDEAL = Costs(
    gemm=1, memory=1, movement=1, absorbed=1, expanded=1, decode=1, decode_memory=1, indexer=1,
    all_reduce=FREE, all_gather=FREE, reduce_scatter=FREE, all_to_all=FREE,
    overlap=0, expert_skew=1, op_us=0, launch_us=0, step_us=0, request_us=0, attention_us=0, expert_us=0,
    pull_gb_s=1, page_pull_gb_s=1, pull_us=0, pull_slowdown=1, trickle=0.5, trickle_slowdown=1.25, switch_us=0,
)  # fmt: skip
# 2 layers, D 8, 4 heads of 6 + 2, C 16, V 4, Q 4: every product can be done by hand.
TINY = ModelSpec("tiny", 2, 8, 32, 4, 4, 16, 6, 2, 4, 24, 2, 1 << 20, 1e-6, RopeSpec())


def hardware(costs: Costs = IDEAL, tflops: float = 1e-12, memory_gb_s: float = 1e12) -> Hardware:
    """One operation a second, and memory that costs nothing, unless told otherwise."""
    return Hardware("test", "cuda", 2, 1e6, 0, tflops, None, memory_gb_s, 1, fp32_tflops=tflops, costs=costs)


def tiny_model(ranks: int = 2, spec: ModelSpec = TINY, **options: object) -> CostModel:
    costs = dataclasses.replace(IDEAL, **{k: v for k, v in options.items() if k in vars(IDEAL)})  # type: ignore[arg-type]
    rates = {k: options[k] for k in ("tflops", "memory_gb_s") if k in options}
    rest = {k: v for k, v in options.items() if k not in vars(IDEAL) and k not in rates}
    return CostModel(spec, hardware(costs, **rates), ranks, "float32", page_size=4, **rest)  # type: ignore[arg-type]


def shipped(model: str, device: str, ranks: int = 8, dtype: str = "fp8") -> CostModel:
    config = compose("plan", [f"model={model}", f"hardware={device}"])
    return CostModel(build(ModelChoice, config["model"]).spec(), build(Hardware, config["hardware"]), ranks, dtype)


H200 = shipped("deepseek_v3", "h200")
H200_SPARSE = shipped("deepseek_v3_2", "h200")
CPU = shipped("scribe", "cpu", ranks=2, dtype="float32")  # launches show
FEW_GRAPHS = CostModel(H200.spec, H200.hardware, 8, "fp8", graph_rows=4)


@st.composite
def loads(draw: st.DrawFn, ranks: int = 8) -> StepLoad:
    count = draw(st.integers(1, 12))
    column = lambda low, high: draw(st.lists(st.integers(low, high), min_size=count, max_size=count))  # noqa: E731
    rows = [draw(st.sampled_from([1, 1, 1, n])) for n in column(2, 3000)]
    return StepLoad.of_arrays(column(0, ranks - 1), rows, column(0, 100_000), ranks)


# --- loads ---


def test_a_load_counts_rows_keys_and_pairs() -> None:
    load = StepLoad.of_arrays([0, 1, 1, 0], [1, 3, 1, 1], [9, 4, 0, 5], ranks=2)
    assert load.num_rows == 6 and load.num_singles == 3 and load.num_chunks == 1
    assert load.rows_T == [2, 4] and load.singles_T == [2, 1]
    assert load.single_keys_T == [10 + 6, 1] and load.single_pairs_T(7) == [7 + 6, 1]
    assert load.chunks == ((1, 3, 4),) and chunk_pairs(3, 4) == 5 + 6 + 7


@given(rows=st.integers(1, 50), start=st.integers(0, 50), top_k=st.integers(1, 80))
def test_pairs_of_a_chunk_are_counted_row_by_row(rows: int, start: int, top_k: int) -> None:
    seen = [start + row + 1 for row in range(rows)]
    assert chunk_pairs(rows, start) == sum(seen)
    assert chunk_pairs(rows, start, top_k) == sum(min(keys, top_k) for keys in seen)


@given(
    lengths=st.lists(st.integers(0, 200), max_size=5), page_size=st.sampled_from([1, 4, 16]), ranks=st.integers(1, 5)
)
def test_stripes_are_counted_position_by_position(lengths: list[int], page_size: int, ranks: int) -> None:
    expected = np.zeros(ranks, dtype=int)
    for length in lengths:
        expected += np.bincount(np.arange(length) // page_size % ranks, minlength=ranks)
    assert striped(np.array(lengths, dtype=np.int64), page_size, ranks).tolist() == expected.tolist()


# --- exact small cases ---


def test_arithmetic_of_a_decode_by_hand() -> None:
    """One request sees 10 keys on 2 ranks; an operation takes a second and everything else nothing."""
    load = StepLoad.decode(1, 10, 2)
    pair = 2 * 18 + 2 * 16
    down, up, absorb, values, out = 2 * 8 * (4 + 18), 2 * 4 * 8, 2 * 6 * 16, 2 * 16 * 4, 2 * 4 * 8
    costs = tiny_model().steps(load)
    per_head = up + absorb + values + out
    for layout, heads, pairs in ((TP, 2, 2 * 10), (DP, 4, 4 * 10), (DOP, 2, 4 * 10)):
        assert costs[layout].stages["projections"] == pytest.approx(2 * (down + heads * per_head))
        assert costs[layout].stages["attention"] == pytest.approx(2 * pairs * pair)
    # Pages of 4: positions 0-3 and 8-9 are on rank 0, which has 6 of the 10.
    for layout, heads in ((DCP, 2), (CP, 4)):
        assert costs[layout].stages["attention"] == pytest.approx(2 * 4 * 6 * pair)
        assert costs[layout].stages["projections"] == pytest.approx(2 * (down + heads * per_head))
    assert all(cost.stages["dense"] == pytest.approx(2 * 6 * 8 * 12) for cost in costs.values())
    assert all(cost.stages["head"] == pytest.approx(2 * 16 * 8) for cost in costs.values())


def test_bytes_of_a_decode_by_hand() -> None:
    """Memory of 1e9 bytes a second and free arithmetic: weights and keys are read once."""
    model = tiny_model(tflops=1e12, memory_gb_s=1.0)
    stages = model.stages
    assert stages.attend_singles(10, 10, 1, heads=4) == pytest.approx(10 * 18 * 4 / 1e9)
    assert stages.up(1, 2) == pytest.approx((4 * 16 + 4 + 16) * 4 / 1e9)
    assert stages.lm_head(1) == pytest.approx((16 * 8 * 4 + 32 * 8) / 1e9)


def test_collectives_are_those_of_the_layers() -> None:
    """Latency alone: how many collectives a step has in each layout."""
    counted = {
        TP: {"all_reduce": 2 * 2 + 1, "all_gather": 1},
        DP: {"all_gather": 2 + 2, "reduce_scatter": 2 + 1},
        DOP: {"all_reduce": 2 * 2 + 1, "all_to_all": 2 * 2, "all_gather": 1},
        DCP: {"all_reduce": 2 * 2 + 1, "all_gather": 2 * 2 + 1, "reduce_scatter": 2},
        CP: {"all_gather": 2 * 2 + 2 + 2, "reduce_scatter": 2 + 2 + 1},
    }
    load = StepLoad.decode(3, 10, 2)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        model = tiny_model(tflops=1e12, **{name: Collective(1e6, 1e12)})
        for layout, cost in model.steps(load).items():
            assert cost.seconds == pytest.approx(counted[layout].get(name, 0), abs=1e-3), (layout, name)


def test_bytes_of_collectives_by_hand() -> None:
    """6 decodes, 3 a rank, at 1 byte a second for one primitive at a time; float32."""
    load, row = StepLoad.decode(6, 10, 2), 8 * 4
    all_reduce = tiny_model(tflops=1e12, all_reduce=Collective(0, 1e-9)).step(TP, load)
    assert all_reduce.stages["reduction"] == pytest.approx(5 * 2 * 6 * row / 2)
    all_to_all = tiny_model(tflops=1e12, all_to_all=Collective(0, 1e-9)).step(DOP, load)
    assert all_to_all.stages["exchange"] == pytest.approx(2 * 3 * 2 * (18 + 16) * 4)
    gather = tiny_model(tflops=1e12, all_gather=Collective(0, 1e-9))
    assert gather.step(DP, load).stages["reduction"] == pytest.approx(2 * 3 * row)
    lse = 2 * 6 * 4 * 4 / 2
    assert gather.step(DCP, load).stages["exchange"] == pytest.approx(2 * (6 * 4 * 18 * 4 / 2 + lse))
    assert gather.step(CP, load).stages["exchange"] == pytest.approx(2 * (6 * (4 + 18) * 4 / 2 + lse))
    scatter = tiny_model(tflops=1e12, reduce_scatter=Collective(0, 1e-9))
    assert scatter.step(DCP, load).stages["exchange"] == pytest.approx(2 * 6 * 4 * 16 * 4 / 2)


def test_an_uneven_exchange_waits_for_the_owner_of_most_rows() -> None:
    model = tiny_model(tflops=1e12, all_to_all=Collective(0, 1e-9))
    even = model.step(DOP, StepLoad.of_arrays([0, 0, 1, 1], [1] * 4, [9] * 4, 2)).stages["exchange"]
    uneven = model.step(DOP, StepLoad.of_arrays([0] * 4, [1] * 4, [9] * 4, 2)).stages["exchange"]
    assert uneven == pytest.approx(2 * even)


def test_the_form_of_a_chunk_is_the_cheaper_or_by_rule() -> None:
    stages = tiny_model().stages
    long, short = Chunk(0, 64, 0), Chunk(0, 2, 600)
    both = {chunk: (stages.attend_absorbed(chunk, 4), stages.attend_expanded(chunk, 4)) for chunk in (long, short)}
    in_latent = stages.into_latent(64, 4) + stages.out_of_latent(64, 4)
    assert both[long][0] + in_latent > both[long][1] and both[short][0] < both[short][1]
    for chunk, is_expanded in ((long, True), (short, False)):
        load = StepLoad.of_arrays([0], [chunk.rows], [chunk.start], 2)
        for model in (tiny_model(), tiny_model(cheapest_forms=True)):
            assert model.step(DP, load).stages["attention"] == pytest.approx(2 * both[chunk][is_expanded])
    load = StepLoad.prefill(1, 64, 0, 2)
    for model in (tiny_model(), tiny_model(cheapest_forms=True)):
        assert model.step(DOP, load).stages["attention"] == pytest.approx(2 * stages.attend_expanded(long, 2))
    few = StepLoad.of_arrays([0], [short.rows], [short.start], 2)
    assert tiny_model().step(DOP, few).stages["attention"] == pytest.approx(2 * stages.attend_absorbed(short, 4))


def test_cp_sends_the_queries_of_a_short_chunk_after_a_long_history() -> None:
    """With slow gathers, two rows are cheaper to send than a history of 4,000; by the plain rule histories go."""
    slow = {"all_gather": Collective(0, 1e-9), "tflops": 1e12}
    load = StepLoad.prefill(1, 2, 4000, 2)
    chosen, plain = tiny_model(cheapest_forms=True, **slow), tiny_model(**slow)
    assert chosen.step(CP, load).stages["exchange"] < plain.step(CP, load).stages["exchange"]
    assert plain.step(CP, load).stages["exchange"] == pytest.approx(2 * 4004 * 18 * 4 / 2)


def test_experts_touched_follow_from_uniform_routing() -> None:
    moe = MoeSpec(8, 2, 6, num_shared_experts=1)
    spec = dataclasses.replace(TINY, moe=moe, first_dense_layers=1)
    stages = tiny_model(ranks=1, spec=spec).stages
    assert stages.busiest_experts(0) == (0, 0) and stages.busiest_experts(1) == pytest.approx((2, 2))
    assert stages.busiest_experts(3)[1] == pytest.approx(8 * (1 - 0.75**3))
    rows, distinct = tiny_model(ranks=2, spec=spec).stages.busiest_experts(1000)
    assert 1000 < rows < 1000 + 2 * math.sqrt(1000) and distinct == pytest.approx(4)
    cost = tiny_model(ranks=1, spec=spec).step(DP, StepLoad.decode(1, 1, 1))
    assert cost.stages["experts"] == pytest.approx(2 * 2 * 3 * 8 * 6 + 2 * 8 * 8)


def test_sparse_attention_is_bounded_and_pays_for_its_indexer() -> None:
    spec = dataclasses.replace(TINY, indexer=IndexerSpec(num_heads=2, head_dim=4, top_k=8))
    model = tiny_model(spec=spec)
    pair, score = 2 * 18 + 2 * 16, 2 * 2 * 4
    cost = model.step(TP, StepLoad.decode(1, 100, 2)).stages["attention"]
    assert cost == pytest.approx(2 * (2 * 8 * pair + 100 * score))
    growth = [model.step(DP, StepLoad.decode(1, context, 2)).stages["attention"] for context in (100, 200)]
    assert growth[1] - growth[0] == pytest.approx(2 * 100 * score)


def test_launches_hide_behind_the_device_or_show() -> None:
    load = StepLoad.prefill(1, 300, 0, 2)
    model = tiny_model(launch_us=1e6, tflops=1e12)
    assert model.step(TP, load).stages["launch"] == pytest.approx(model.operations(TP, load), abs=1e-3)
    assert tiny_model(launch_us=1e6).step(TP, load).stages["launch"] == 0
    assert model.step(TP, StepLoad.decode(1, 8, 2)).stages["launch"] == 0, "decode runs as a graph"
    assert tiny_model(launch_us=1e6, tflops=1e12, graph_rows=0).step(TP, StepLoad.decode(1, 8, 2)).stages["launch"] > 1


def test_short_prompts_run_as_the_rows_of_a_graph() -> None:
    """They need no launches, and every row reads its history for itself; long ones, and long histories, do not."""
    model, chunk = tiny_model(launch_us=1e6, tflops=1e12, memory_gb_s=1e-9), StepLoad.prefill(1, 3, 5, 2)
    rows = StepLoad.of_arrays([0] * 3, [1] * 3, [5, 6, 7], 2, 0)
    assert model.step(TP, chunk).seconds == model.step(TP, rows).seconds
    assert model.step(TP, chunk).stages["launch"] == 0
    unrecorded = tiny_model(tflops=1e12, memory_gb_s=1e-9)
    assert unrecorded.step(TP, chunk).stages["attention"] < model.step(TP, chunk).stages["attention"]
    for load in (StepLoad.prefill(1, 300, 5, 2), StepLoad.prefill(1, 100, 20_000, 2)):
        quick = tiny_model(launch_us=1e6, tflops=1e12)
        assert load.num_chunks and not quick.runs_as_graph(TP, load) and quick.step(TP, load).stages["launch"] > 0


@given(load=loads())
def test_single_rows_are_the_same_rows(load: StepLoad) -> None:
    rows = load.in_single_rows
    assert rows.num_rows == load.num_rows == rows.num_singles and not rows.num_chunks
    assert rows.rows_T == load.rows_T and rows.num_sampled == load.num_sampled
    assert rows.num_queries == load.num_queries and rows.seen_keys == load.seen_keys == sum(rows.context_q)


# --- what every prediction must be like ---


@pytest.mark.parametrize("model", [H200, H200_SPARSE], ids=["dense", "sparse"])
@given(load=loads())
def test_totals_are_the_sum_of_their_stages(model: CostModel, load: StepLoad) -> None:
    for layout, cost in model.steps(load).items():
        assert set(cost.stages) == set(STAGES) and cost == model.step(layout, load)
        assert cost.seconds == pytest.approx(sum(cost.stages.values()))
        assert all(math.isfinite(seconds) for seconds in cost.stages.values())
        assert all(seconds >= 0 for stage, seconds in cost.stages.items() if stage != "overlap")
        hidden = model.stages.costs.overlap * cost.stages["attention"]
        assert 0 <= -cost.stages["overlap"] <= hidden + 1e-12


@pytest.mark.parametrize("model", [H200, H200_SPARSE], ids=["dense", "sparse"])
@given(load=loads(), more=st.integers(1, 4000))
@example(load=StepLoad.of_arrays([0] * 4, [1, 2, 2, 7], [0] * 4, 8), more=1)  # cp's forms differ in launches
def test_longer_contexts_and_more_requests_never_cost_less(model: CostModel, load: StepLoad, more: int) -> None:
    before = model.steps(load)
    longer = StepLoad.of_arrays(load.owner_q, load.rows_q, load.start_q + more * 512, 8, load.num_sampled)
    owners, rows, starts = np.append(load.owner_q, 0), np.append(load.rows_q, 1), np.append(load.start_q, more)
    further = StepLoad.of_arrays(owners, rows, starts, 8, load.num_sampled)
    # Chunks that become too much for a graph are no longer taken apart, which may be quicker where launches are cheap.
    for layout, cost in before.items():
        graphs = [model.runs_as_graph(layout, each) for each in (load, longer, further)]
        # What a sparse indexer chooses of a longer context may lie more evenly.
        assert graphs[1] != graphs[0] or model.step(layout, longer).seconds >= cost.seconds * (1 - 1e-6)
        assert graphs[2] != graphs[0] or model.step(layout, further).seconds >= cost.seconds * (1 - 1e-9)


@settings(max_examples=60)
@given(
    model=st.sampled_from([H200, H200_SPARSE, CPU, FEW_GRAPHS]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    requests=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1 << 17) | st.integers(0, 300)), min_size=1),
    steps=st.integers(1, 70),
)
def test_a_run_of_decodes_takes_what_its_steps_take(
    model: CostModel, layout: str, requests: list[tuple[int, int]], steps: int
) -> None:
    """To the last digit, though a run predicts anew only what changes."""
    owners, starts = zip(*requests, strict=True)
    owners = [owner % model.ranks for owner in owners]
    ones = [1] * len(owners)
    chosen = LAYOUTS[layout]
    load = StepLoad.of_arrays(owners, ones, starts, model.ranks)
    stages = dict(model.step(chosen, load).stages)
    times = DecodeTimes(model, chosen, load)
    for step in range(steps):
        alone = StepLoad.of_arrays(owners, ones, [start + step for start in starts], model.ranks)
        assert times.next() == model.step(chosen, alone).seconds
    assert model.step(chosen, load).stages == stages


def test_cp_and_dcp_divide_attention_by_the_ranks() -> None:
    stages = [H200.step(layout, StepLoad.decode(1, 1 << 19, 8)).stages["attention"] for layout in (DP, CP, DCP)]
    assert stages[1] == stages[2] == pytest.approx(stages[0] / 8, rel=1e-3)
    # Of a chunk, every rank expands the history and attends with its share of the rows.
    model, load = tiny_model(ranks=4), StepLoad.prefill(1, 16, 4000, 4)
    pairs = 2 * model.stages.expanded_pairs(Chunk(0, 16, 4000), heads=4)
    saved = model.step(DP, load).stages["attention"] - model.step(CP, load).stages["attention"]
    assert saved == pytest.approx(pairs * 3 / 4)
    chunk = StepLoad.prefill(1, 8192, 1 << 17, 8)
    assert H200.step(CP, chunk).stages["attention"] < H200.step(DP, chunk).stages["attention"] / 4


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_regimes_that_need_no_measurement(device: str) -> None:
    """Few short requests want sharded everything; many independent ones want no exchange of partial sums."""
    model = shipped("deepseek_v3", device)

    def best(load: StepLoad) -> Layout:
        costs = model.steps(load)
        return min(costs, key=lambda layout: costs[layout].seconds)

    assert best(StepLoad.decode(1, 1024, 8)) is TP
    assert best(StepLoad.decode(512, 4096, 8)) is DP


def test_the_slowest_rank_decides() -> None:
    even = StepLoad.of_arrays(range(8), [1] * 8, [50_000] * 8, 8)
    skewed = StepLoad.of_arrays([0] * 8, [1] * 8, [50_000] * 8, 8)
    for layout in (DP, DOP):
        ratio = H200.step(layout, skewed).stages["attention"] / H200.step(layout, even).stages["attention"]
        assert ratio == pytest.approx(8)
    for layout in (TP, DCP, CP):
        assert H200.step(layout, skewed).stages["attention"] == H200.step(layout, even).stages["attention"]


def test_an_empty_step_costs_what_every_step_does() -> None:
    for cost in H200.steps(StepLoad.of_arrays([], [], [], 8)).values():
        assert cost.seconds == pytest.approx(H200.stages.costs.step_us * 1e-6)


def test_one_rank_has_nothing_to_exchange() -> None:
    model = shipped("deepseek_v3", "h200", ranks=1)
    for load in (StepLoad.decode(4, 1000, 1), StepLoad.prefill(2, 4096, 1000, 1)):
        for cost in model.steps(load).values():
            assert cost.stages["exchange"] == cost.stages["reduction"] == 0


def test_ranks_that_do_not_divide_the_heads_leave_what_they_can_serve() -> None:
    assert shipped("glm_4_7_flash", "h200").layouts == (DP, CP)


@pytest.mark.parametrize("device", options("hardware"))
def test_every_description_predicts(device: str) -> None:
    dtype = "float32" if device == "cpu" else "bfloat16"
    costs = shipped("youtu", device, ranks=4, dtype=dtype).steps(StepLoad.decode(4, 100, 4))
    assert all(cost.seconds > 0 for cost in costs.values())


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.fp32_tflops: is not known for dcu"):
        shipped("youtu", "dcu", dtype="float32")
    with pytest.raises(ConfigError, match=r"hardware\.costs"):
        CostModel(TINY, dataclasses.replace(hardware(), costs=None), 2, "float32")
    with pytest.raises(ConfigError, match="dtype: must be one of"):
        CostModel(TINY, hardware(), 2, "int4")
    with pytest.raises(ConfigError, match=r"hardware\.costs\.gemm: must be above 0 and at most 1, not 2"):
        dataclasses.replace(IDEAL, gemm=2)


# --- switches and memory ---

PAIRS = list(itertools.permutations(LAYOUTS.values(), 2))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
@settings(max_examples=20)
@given(load=loads(ranks=4))
def test_a_switch_moves_what_the_difference_says(source: Layout, target: Layout, load: StepLoad) -> None:
    model = tiny_model(ranks=4)
    pages_q = -(-load.context_q // 4)
    owners = np.repeat(load.owner_q, pages_q)
    numbers = np.concatenate([np.arange(pages) for pages in pages_q.tolist()])
    moved = diff(State(source, 4, numbers, owners), State(target, 4, numbers, owners))
    geometry = model.geometry
    cost = model.switch(source, target, load, "blocking")
    assert cost.kv_bytes == tuple((moved.pages.received * geometry.slot_bytes * 2).tolist())
    assert cost.weight_bytes == tuple((moved.weights.received * geometry.attention_bytes // 4 * 2).tolist())
    footprint = Footprint.of(load, 4)
    assert footprint.held(target).tolist() == State(target, 4, numbers, owners).page_holders.sum(axis=0).tolist()
    assert footprint.sent(source, target).sum() == moved.pages.sent.sum()


def test_discards_are_free_and_gathers_cost_in_every_way() -> None:
    load = StepLoad.decode(16, 4096, 8)
    constant = H200.stages.costs.switch_us * 1e-6
    for method in SWITCH_METHODS:
        for source, target in ((TP, DOP), (TP, DCP), (DP, DOP), (CP, DCP)):
            free = H200.switch(source, target, load, method)
            assert free.seconds == pytest.approx(constant) and not any(free.kv_bytes + free.weight_bytes)
    blocking, layerwise, precopy = (H200.switch(DOP, TP, load, method) for method in SWITCH_METHODS)
    assert blocking.exposed_s > precopy.exposed_s > constant
    assert layerwise.exposed_s == blocking.exposed_s, "a recorded step waits for all layers"
    chunks = StepLoad.prefill(8, 2048, 4096, 8)
    behind = H200.switch(DOP, TP, chunks, "layerwise").exposed_s
    assert H200.switch(DOP, TP, chunks, "blocking").exposed_s > behind > constant
    assert blocking.background_steps == 0 and precopy.background_steps > 0 and precopy.slowdown > 1
    assert blocking.kv_bytes == layerwise.kv_bytes == precopy.kv_bytes


def test_exposed_time_by_hand() -> None:
    """2 layers; a page takes a second, and so does a layer's compute or nothing."""
    page_gb_s = 4 * 18 * 4 / 1e9
    load = StepLoad.decode(2, 8, 2)  # 2 pages a request, 1 moves each way between owners and stripes
    assert Footprint.of(load, 4).received(DOP, DCP).tolist() == [1, 1]
    idle = tiny_model(tflops=1e12, page_pull_gb_s=page_gb_s)
    assert idle.switch(DOP, DCP, load, "blocking").exposed_s == pytest.approx(2)
    assert idle.switch(DOP, DCP, load, "layerwise").exposed_s == pytest.approx(2)
    busy = tiny_model(page_pull_gb_s=page_gb_s, pull_slowdown=1.5)  # compute of a layer takes many seconds
    assert busy.switch(DOP, DCP, load, "layerwise").exposed_s == pytest.approx(1 + 0.5)
    ahead = busy.switch(DOP, DCP, load, "precopy")
    assert ahead.background_s == pytest.approx(2 / 0.5) and ahead.exposed_s == pytest.approx(2)
    assert ahead.seconds == pytest.approx(2 + 4 * 0.2)


@settings(max_examples=20)
@given(load=loads())
def test_held_pages_are_those_of_the_capacity(load: StepLoad) -> None:
    balanced = StepLoad.of_arrays(np.arange(16) % 8, [1] * 16, [int(load.context_q[0])] * 16, 8)
    pages = -(-(int(load.context_q[0]) + 1) // 64)
    for layout in LAYOUTS.values():
        expected = page_loads(layout, 8, pages, np.full(8, 2))
        assert Footprint.of(balanced, 64).held(layout).tolist() == expected.tolist()


def test_dop_holds_less_than_dp_and_fits_longer() -> None:
    geometry = H200.planned_geometry(0.85)
    short, long = StepLoad.decode(16, 32_000, 8), StepLoad.decode(16, 480_000, 8)
    fits = {layout: H200.fits(layout, short, geometry, 0.85) for layout in H200.layouts}
    assert all(fit.ok and not fit.reason for fit in fits.values())
    assert fits[DOP].needed["projections"] == fits[DP].needed["projections"] // 8
    assert fits[DOP].needed["kv"] == fits[DP].needed["kv"] == fits[TP].needed["kv"] // 8
    assert sum(fits[DOP].needed.values()) < sum(fits[DP].needed.values()) <= fits[DP].available
    tight = H200.fits(TP, long, geometry, 0.85)
    assert not tight.ok and f"needs {tight.pages} pages and has {tight.page_slots}" in tight.reason
    assert H200.fits(DOP, long, geometry, 0.85).page_slots > H200.fits(DP, long, geometry, 0.85).page_slots
