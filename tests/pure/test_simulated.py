"""The simulator: what comes out for a known workload, always the same, however fast it goes."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splash.core.errors import CapacityError, ConfigError
from splash.core.hardware import Hardware
from splash.core.layout import LAYOUTS, TP, parse_layout
from splash.core.spec import ModelSpec
from splash.engine.recorder import MAX_ROWS
from splash.engine.simulated import Simulation, SimulationConfig, SimulationResult, simulate
from splash.plan import ModelChoice
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad
from splash.scheduler.policy import Kind, PolicyConfig
from splash.settings import build, compose
from splash.workload import Requests, load


def hardware(name: str) -> Hardware:
    return build(Hardware, compose("plan", [f"+hardware={name}"])["hardware"])


def spec(name: str) -> ModelSpec:
    return build(ModelChoice, compose("plan", [f"model={name}"])["model"]).spec()


B200, DEEPSEEK = hardware("b200"), spec("deepseek_v3")


def config(**options: Any) -> SimulationConfig:
    return SimulationConfig(**{"spec": DEEPSEEK, "hardware": B200, "ranks": 8, "dtype": "fp8", **options})


def workload(kind: str, **options: object) -> Requests:
    return load(kind, [f"workload.{key}={value}" for key, value in options.items()]).requests()


def plain(result: SimulationResult) -> dict[str, Any]:
    """Everything in a result, comparable."""
    values = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        values[field.name] = value.tobytes() if isinstance(value, np.ndarray) else msgspec.to_builtins(value)
    return values


def run(simulation: Simulation, switches: dict[float, str]) -> None:
    """To the end, asking for layouts at given times."""
    due = sorted(switches.items())
    while simulation.step(due[0][0] if due else np.inf):
        if due and simulation.clock.now >= due[0][0]:
            _, target = due.pop(0)
            simulation.loop.switcher.request(parse_layout(target), "auto", False, lambda record: None)


def test_one_request_takes_what_its_steps_cost() -> None:
    requests = workload("fixed", num_requests=1, input=3000, output=5, concurrency="null")
    model = CostModel(DEEPSEEK, B200, 8, "fp8")
    result = simulate(config(max_batched_tokens=2048), requests)
    steps = [StepLoad.of_arrays([0], [2048], [0], 8, 0), StepLoad.of_arrays([0], [952], [2048], 8)]
    steps += [StepLoad.of_arrays([0], [1], [3000 + at], 8) for at in range(4)]
    seconds = [model.step(TP, step).seconds for step in steps]
    assert result.seconds == pytest.approx(sum(seconds), rel=1e-12)
    assert result.first_token_s[0] == pytest.approx(sum(seconds[:2]), rel=1e-12)
    assert (result.arrival_s[0], result.admitted_s[0], result.finish_s[0]) == (0.0, 0.0, result.seconds)
    assert (result.steps, result.request_steps, result.peak_running) == (6, 6, 1)
    assert (result.num_prompt.tolist(), result.num_output.tolist()) == ([3000], [5])
    assert result.layout_seconds == {"tp": pytest.approx(result.seconds)}
    assert result.total_tokens_per_s == pytest.approx(3005 / result.seconds)


def test_time_passes_where_nobody_is_there() -> None:
    """The second of two requests that come one after the other is served as the first."""
    requests = dataclasses.replace(
        workload("fixed", num_requests=2, input=64, output=10, concurrency="null"), time_s=np.array([0.0, 50.0])
    )
    result = simulate(config(prefix_cache=False), requests)
    assert result.admitted_s.tolist() == [0.0, 50.0]
    assert result.finish_s[1] - 50 == pytest.approx(result.finish_s[0])
    assert result.seconds == result.finish_s[1]


def test_a_turn_finds_the_turn_before_in_the_cache() -> None:
    requests = workload("agentic", num_sessions=3, num_systems=1)
    result = simulate(config(), requests)
    later = requests.after >= 0
    assert np.all(result.num_cached <= requests.shared_len)
    # The last token of a turn is returned, not computed on, so a page that ends with it is not there.
    assert np.array_equal(result.num_cached[later], (requests.shared_len[later] - 1) // 64 * 64)
    assert np.all(result.arrival_s[later] >= result.finish_s[requests.after[later]])
    assert not simulate(config(prefix_cache=False), requests).num_cached.any()


WEIGHTS_GIB = CostModel(DEEPSEEK, B200, 8, "fp8").geometry.num_weight_slots * 64 * 656 * 61 / 2**30

busy = st.one_of(
    st.builds(
        lambda seed, rate, prefix: workload(
            "poisson", num_requests=25, seed=seed, rate=rate, shared_prefix=prefix, prefix_groups=3
        ),
        seed=st.integers(0, 99),
        rate=st.sampled_from([2, 20, 1000]),
        prefix=st.sampled_from([0, 300]),
    ),
    st.builds(lambda seed: workload("agentic", num_sessions=4, seed=seed, rate=2), seed=st.integers(0, 99)),
    st.builds(
        lambda seed: workload("rl_rollout", num_prompts=4, samples=5, seed=seed, output=150), seed=st.integers(0, 99)
    ),
)


@settings(max_examples=12)
@example(  # runs end before steps in which pages have been begun, and somebody more important waits
    requests=workload("poisson", num_requests=60, seed=1, rate=60, shared_prefix=300, prefix_groups=3),
    layout="tp",
    room_gib=40.0,
    max_num_seqs=24,
    max_batched_tokens=2048,
    prefix_cache=False,
    kind="static",
    switches={},
    num_priorities=3,
)
@given(
    requests=busy,
    layout=st.sampled_from(sorted(LAYOUTS)),
    room_gib=st.sampled_from([0.3, 0.6, 40.0]),
    max_num_seqs=st.sampled_from([3, 256]),
    max_batched_tokens=st.sampled_from([256, 2048]),
    prefix_cache=st.booleans(),
    kind=st.sampled_from(["static", "static", "threshold", "cost"]),
    switches=st.dictionaries(st.floats(0.1, 10), st.sampled_from(sorted(LAYOUTS)), max_size=2),
    num_priorities=st.integers(1, 3),
)
def test_steps_without_plans_change_nothing(
    requests: Requests,
    layout: str,
    room_gib: float,
    max_num_seqs: int,
    max_batched_tokens: int,
    prefix_cache: bool,
    kind: Kind,
    switches: dict[float, str],
    num_priorities: int,
) -> None:
    """Times, cache, preemptions and switches, to the last digit, with all pages free in the end."""
    requests = dataclasses.replace(requests, priority=np.arange(len(requests)) % num_priorities)
    chosen = config(
        layout=layout,
        policy=PolicyConfig(kind=kind, cooldown_s=0.5, margin=0.0, few_requests=8),
        kv_cache_gib=WEIGHTS_GIB + room_gib,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        prefix_cache=prefix_cache,
    )
    fast = Simulation(chosen, requests)
    run(fast, switches)
    slow = Simulation(chosen, requests, every_step=True)
    run(slow, switches)
    assert plain(fast.result()) == plain(slow.result())
    assert fast.loop.num_steps == slow.loop.num_steps == fast.result().steps
    pool = fast.loop.scheduler.pool
    assert pool.num_free == pool.num_total


def test_a_policy_chooses_on_the_virtual_clock() -> None:
    """With the threshold policy a burst is served in dp, and what comes before and after it in tp."""
    requests = workload("bursts", num_requests=200, rate_on=40, rate_off=0.5)
    result = simulate(config(policy=PolicyConfig(kind="threshold")), requests)
    assert {"tp", "dp"} <= result.layout_seconds.keys()
    assert result.switches[0].target == "dp" and result.switches[0].status == "committed"
    decision = result.switches[0].decision
    assert decision is not None and (decision.layout, decision.target) == ("tp", "dp")
    busiest = max(result.timeline, key=lambda row: row.running)
    assert busiest.layout == "dp" and result.timeline[0].layout == "tp"


def test_the_same_workload_gives_the_same_result() -> None:
    requests = workload("bursts", num_requests=60)
    assert plain(simulate(config(layout="dp"), requests)) == plain(simulate(config(layout="dp"), requests))


def test_what_cannot_be_served_is_refused_and_the_rest_is_not() -> None:
    requests = workload("fixed", num_requests=3, input=2000, output=10, concurrency=1)
    requests = dataclasses.replace(requests, segment_len=np.where(np.arange(3) == 1, 9000, requests.segment_len))
    result = simulate(config(max_model_len=4096), requests)
    assert list(result.refused) == [1] and "9000 tokens" in result.refused[1]
    assert np.isnan(result.finish_s).tolist() == [False, True, False]
    assert result.num_output.tolist() == [10, 0, 10]


def test_a_simulation_can_end_early() -> None:
    requests = workload("fixed", num_requests=4, input=100, output=1000, concurrency="null")
    whole = simulate(config(), requests)
    part = simulate(config(), requests, max_seconds=whole.seconds / 2)
    assert whole.seconds / 2 <= part.seconds < whole.seconds * 0.51
    assert np.isnan(part.finish_s).all() and 400 < part.num_output[0] < 600


def test_the_time_line_is_bounded_and_progress_is_told() -> None:
    requests = workload("poisson", num_requests=300, rate=1)
    told: list[tuple[int, float]] = []
    result = simulate(config(), requests, progress=lambda finished, now: told.append((finished, now)))
    times = [row.t_s for row in result.timeline]
    assert MAX_ROWS / 4 < len(times) <= MAX_ROWS and times == sorted(times)
    assert max(row.running for row in result.timeline) > 1 and max(row.kv_used_T[0] for row in result.timeline) > 0
    assert [finished for finished, _ in told] == sorted(finished for finished, _ in told) and told[-1][0] > 250


@pytest.mark.parametrize("method", ["blocking", "layerwise", "precopy"])
def test_a_switch_costs_what_its_bytes_cost(method: str) -> None:
    """Weights of 7 head groups of 8 arrive on every rank, pages go to their owners; copies ahead are not exposed."""
    requests = workload("fixed", num_requests=8, input=1000, output=400, concurrency="null")
    simulation = Simulation(config(layout="dcp"), requests)
    while simulation.loop.num_steps < 40:
        simulation.step(limit_s=0.0)
    record = simulation.loop.switcher.request(parse_layout("dp"), method, False, lambda record: None)
    while simulation.step(limit_s=0.0) and record.status not in ("committed", "refused"):
        pass
    assert (record.status, record.method) == ("committed", method), record.reason
    costs, geometry = B200.costs, simulation.loop.switcher._geometry
    assert costs is not None
    assert record.weight_bytes_received == [geometry.attention_bytes // 8 * 7 * 61] * 8
    weights_s = record.weight_bytes_received[0] / costs.pull_gb_s / 1e9
    pages_s = max(record.kv_bytes_received) / costs.page_pull_gb_s / 1e9
    whole_s, layer_s = weights_s + pages_s + 61 * costs.pull_us / 1e6, (weights_s + pages_s) / 61
    added_s = (record.added_ms * 1e3 - costs.switch_us) / 1e6
    if method != "precopy":  # a recorded step waits for all layers
        assert whole_s * 0.99 < added_s < whole_s * 1.1
    else:
        assert added_s < layer_s and record.background_steps > 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"layout": "ep"}, "layout"),
        ({"layout": "tp", "ranks": 7}, "layout"),
        ({"page_size": 48}, "page_size"),
        ({"mem_fraction": 0.0}, "mem_fraction"),
        ({"max_model_len": 1 << 30}, "max_model_len"),
        ({"switch_copy_mib": 0.0}, "switch_copy_mib"),
    ],
)
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert caught.value.field == field


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CapacityError):
        simulate(config(dtype="bfloat16", ranks=2), workload("fixed", num_requests=1))
    small = dataclasses.replace(B200, costs=None)
    with pytest.raises(ConfigError, match="costs"):
        simulate(config(hardware=small), workload("fixed", num_requests=1))


def test_hidden_lengths_change_nothing_that_was_not_told() -> None:
    """Outputs end where they do, whatever the requests allow; an allowance below cuts them."""
    requests = workload("poisson", num_requests=30, rate=20)
    told, hidden = simulate(config(), requests), simulate(config(max_output_len=4096), requests)
    assert plain(hidden) == plain(told)
    cut = simulate(config(max_output_len=40), requests)
    assert cut.num_output.tolist() == np.minimum(requests.output_len, 40).tolist()
    every_step = Simulation(config(max_output_len=4096), requests, every_step=True)
    run(every_step, {})
    assert plain(every_step.result()) == plain(hidden)
