"""What is counted is what happened, in Prometheus's own reading of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from splash.engine.metrics import EngineMetrics, Histogram, RequestTimes
from splash.switch.orders import SwitchRecord

BOUNDS = (0.5, 1.0, 2.5)


@given(st.lists(st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0, 2.5, 2.6, 100.0])))
def test_a_histogram_counts_as_the_official_one(values: list[float]) -> None:
    registry = CollectorRegistry()
    ours, theirs = Histogram(BOUNDS), TheirHistogram("x", "x", buckets=BOUNDS, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    assert ours.cumulative() == [
        (bound, registry.get_sample_value("x_bucket", {"le": bound})) for bound in ("0.5", "1.0", "2.5", "+Inf")
    ]
    assert ours.total == registry.get_sample_value("x_sum")


def test_times_of_a_request_add_up() -> None:
    metrics, times = EngineMetrics(), RequestTimes(10.0)
    metrics.start(times, 7, 12.0)
    metrics.start(times, 7, 99.0)  # told again to ranks that were started anew
    for now in (15.0, 15.5, 18.0):
        metrics.token(times, now)
    metrics.finish(times, "length", 7, 3, 18.0)
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.finished) == (7, 3, {"length": 1})
    assert metrics.queue.total == 2.0
    assert metrics.time_to_first_token.total == 5.0
    assert metrics.prefill.total == 3.0
    assert metrics.inter_token.total == metrics.decode.total == 3.0
    assert metrics.end_to_end.total == 8.0
    assert dict(metrics.inter_token.cumulative())["0.5"] == 1


def test_a_request_that_never_ran_has_no_times_of_running() -> None:
    metrics = EngineMetrics()
    metrics.finish(RequestTimes(1.0), "abort", 7, 0, 4.0)
    assert (metrics.end_to_end.total, metrics.decode.cumulative()[-1][1]) == (3.0, 0)


def test_only_committed_switches_have_moved_anything() -> None:
    metrics = EngineMetrics()
    record = SwitchRecord(id=1, source="tp", target="dp", asked="auto", method="precopy", status="committed")
    record.kv_bytes_received, record.weight_bytes_received, record.added_ms = [3, 4], [5, 0], 250.0
    metrics.switched(record, 2.0)
    record.status = "failed"
    metrics.switched(record, 2.0)
    assert metrics.switches == {("tp", "dp", "precopy", "committed"): 1, ("tp", "dp", "precopy", "failed"): 1}
    assert metrics.switch_bytes == {("tp", "dp", "kv"): 7, ("tp", "dp", "weights"): 5}
    assert (metrics.switch_exposed_s["tp", "dp"], metrics.switch_hidden_s["tp", "dp"]) == (0.25, 1.75)
