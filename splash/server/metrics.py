"""GET /metrics for Prometheus: vLLM's metrics where it has them, under the prefix `splash:`, and what layouts add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from splash.core.layout import LAYOUTS
from splash.engine.metrics import Histogram
from splash.server.errors import ERRORS
from splash.server.requests import Service

Samples = Iterable[tuple[Sequence[str], float]]


class ServerCollector(Collector):
    """Reads a service's counts at each scrape; nothing is kept twice."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """All metrics, those of the engine once it serves."""
        intake = self._service.intake
        yield self._gauge(
            "requests_live", "Requests that are being served, answers not yet sent included.", intake.live
        )
        yield self._counter(
            "requests_refused", "Answers 429, because there were too many requests.", intake.num_refused
        )
        if self._service.loaded():
            yield from self._engine()

    def _engine(self) -> Iterator[Metric]:
        engine = self._service.engine
        stats, metrics = engine.stats(), engine.metrics
        usage = [
            ([str(rank)], 1 - free / total if total else 0.0)
            for rank, (free, total) in enumerate(zip(stats.free_pages, stats.total_pages, strict=True))
        ]
        layouts = [([name], float(name == stats.layout)) for name in LAYOUTS]
        yield self._gauge("num_requests_running", "Requests that hold KV pages.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for KV pages or rows.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of a rank's KV pages in use; 1 is all.", usage, "rank")
        yield self._gauge("layout", "1 for the layout that steps run in.", layouts, "layout")
        yield self._gauge("restarting", "1 while ranks are being started anew.", engine.restarting)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", stats.prefix_queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
            ("num_preemptions", "Requests that lost their KV pages and were computed again.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens of requests that were computed.", metrics.prompt_tokens),
            ("generation_tokens", "Tokens generated.", metrics.output_tokens),
            ("rank_restarts", "Times that the ranks were started anew.", stats.restarts),
            ("forward_seconds", "Time that rank 0's device computed forwards of steps.", metrics.forward_s),
        ):
            yield self._counter(name, text, value)
        finished = [([reason], count) for reason, count in list(metrics.finished.items())]
        yield self._counter("request_success", "Requests that have ended, by reason.", finished, "finished_reason")
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", metrics.time_to_first_token),
            ("inter_token_latency_seconds", "From one token of a request to the next.", metrics.inter_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", metrics.end_to_end),
            ("request_queue_time_seconds", "From arrival to the first step.", metrics.queue),
            ("request_prefill_time_seconds", "From the first step to the first token.", metrics.prefill),
            ("request_decode_time_seconds", "From the first token to the last.", metrics.decode),
            ("request_prompt_tokens", "Prompt tokens of requests that have ended.", metrics.prompt_lengths),
            ("request_generation_tokens", "Tokens generated for requests that have ended.", metrics.output_lengths),
            ("iteration_tokens_total", "Rows of a step.", metrics.step_rows),
        ):
            yield self._histogram(name, text, [([], histogram)])
        steps = [([layout], histogram) for layout, histogram in list(metrics.steps.items())]
        yield self._histogram("step_seconds", "From the order of a step to its output.", steps, "layout")
        decision = engine.decision
        predicted = {} if decision is None else decision.predictions_ms
        predictions = [([layout], ms / 1e3) for layout, ms in predicted.items() if ms is not None]
        text = "What the policy expects of a step in each layout that can serve, over its outlook."
        yield self._gauge("step_predicted_seconds", text, predictions, "layout")
        switches = [(key, count) for key, count in list(metrics.switches.items())]
        yield self._counter("switches", "Switches that have ended.", switches, "from", "to", "method", "status")
        moved = [(key, count) for key, count in list(metrics.switch_bytes.items())]
        yield self._counter("switch_bytes", "Bytes that ranks received in switches.", moved, "from", "to", "kind")
        for name, text, totals in (
            ("switch_exposed_seconds", "Time that steps waited for committed switches.", metrics.switch_exposed_s),
            ("switch_hidden_seconds", "Time of committed switches beside steps.", metrics.switch_hidden_s),
        ):
            yield self._counter(name, text, list(totals.items()), "from", "to")

    def _gauge(self, name: str, text: str, values: float | Samples, *labels: str) -> Metric:
        return self._add(GaugeMetricFamily(f"splash:{name}", text, labels=("model_name", *labels)), values)

    def _counter(self, name: str, text: str, values: float | Samples, *labels: str) -> Metric:
        return self._add(CounterMetricFamily(f"splash:{name}", text, labels=("model_name", *labels)), values)

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Samples) -> Metric:
        for labels, value in [((), values)] if isinstance(values, int | float) else values:
            family.add_metric([self._service.settings.model, *labels], float(value))
        return family

    def _histogram(
        self, name: str, text: str, histograms: Iterable[tuple[Sequence[str], Histogram]], *labels: str
    ) -> Metric:
        family = HistogramMetricFamily(f"splash:{name}", text, labels=("model_name", *labels))
        for values, histogram in histograms:
            total = histogram.total
            family.add_metric([self._service.settings.model, *values], histogram.cumulative(), total)
        return family


def metrics_router(service: Service) -> APIRouter:
    """The route, over a service."""
    router = APIRouter(responses=ERRORS)
    registry = CollectorRegistry()
    registry.register(ServerCollector(service))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts and times in Prometheus's text format."""
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router
