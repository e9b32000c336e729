"""Spans say what happened to a request, and belong to the trace that its client says."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from splash.core.errors import ConfigError
from splash.engine.history import SwitchEvent
from splash.server.tracing import Telemetry, Tracing, make_tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "hello", "max_tokens": 4, "temperature": 0.5}


class Exporter(InMemorySpanExporter):
    """Says when a request's span is there: it comes last of all that belong to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Semaphore(0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        for span in spans:
            if span.name == "llm_request":
                self.written.release()
        return result

    def wait(self, requests: int = 1) -> list[ReadableSpan]:
        """The spans of so many requests, those of the requests themselves."""
        for _ in range(requests):
            assert self.written.acquire(timeout=20), "no span is written"
        return [span for span in self.get_finished_spans() if span.name == "llm_request"]


@pytest.fixture
def exporter() -> Exporter:
    return Exporter()


@pytest.fixture
def served(serve: Callable[..., Any], exporter: Exporter) -> Any:
    return serve(tracing=tracing(exporter))


def tracing(exporter: SpanExporter) -> Tracing:
    return Tracing(SimpleSpanProcessor(exporter), "scripted", "1.2.3")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_has_its_stages_in_the_trace_of_its_client(
    served: Any, exporter: Exporter, path: str, stream: bool
) -> None:
    body = {**BODY, "stream": stream}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    served.http.post(path, json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}).raise_for_status()
    (span,) = exporter.wait()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert (span.kind, span.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    (asked,) = served.engine.requests
    found = dict(span.attributes)
    latencies = [found.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")]
    took_s = (span.end_time - span.start_time) / 1e9
    assert 0 <= latencies[0] <= latencies[1] <= latencies[2] == pytest.approx(took_s, abs=1e-7), "times are whole ns"
    assert found == {
        "gen_ai.request.model": "scripted",
        "gen_ai.request.id": asked.id,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": len(asked.prompt),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "splash.cached_tokens": 0,
    }
    stages = [stage for stage in exporter.get_finished_spans() if stage is not span]
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
    assert all(stage.parent.span_id == span.context.span_id for stage in stages)
    borders = [span.start_time, *[stage.end_time for stage in stages]]
    assert [stage.start_time for stage in stages] == borders[:-1] and borders[-1] == span.end_time
    assert abs(span.end_time - time.time_ns()) < 60e9
    assert span.resource.attributes["service.version"] == "1.2.3"


@pytest.mark.parametrize("header", [None, "", "nonsense", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_request_without_a_trace_begins_one(served: Any, exporter: Exporter, header: str | None) -> None:
    headers = {} if header is None else {"traceparent": header, "tracestate": "=,;"}
    served.http.post("/v1/completions", json={**BODY, "n": 2}, headers=headers).raise_for_status()
    spans = exporter.wait(2)
    assert [span.parent for span in spans] == [None, None]
    assert len({span.context.trace_id for span in spans}) == 2


def test_a_trace_that_is_not_sampled_stays_so(served: Any, exporter: Exporter) -> None:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    served.http.post("/v1/completions", json=BODY, headers=header).raise_for_status()
    served.http.post("/v1/completions", json=BODY).raise_for_status()
    (span,) = exporter.wait()
    assert f"{span.context.trace_id:032x}" != TRACE


def test_layouts_that_changed_meanwhile_are_events(served: Any, exporter: Exporter) -> None:
    def event(id: int, time_s: float) -> SwitchEvent:
        return SwitchEvent(
            time_s=time_s,
            id=id,
            source="tp",
            target="dp",
            method="precopy",
            status="committed",
            reason="",
            by_policy=False,
            bytes_received=0,
            added_ms=0.0,
        )

    served.engine.events.append(event(1, time.monotonic()))
    body = {**BODY, "prompt": "<|hang|>", "stream": True, "echo": True}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # the connection is closed when nobody holds it
        assert next(lines).startswith("data: ")
        served.engine.events.append(event(2, time.monotonic()))
    (span,) = exporter.wait()
    (switch,) = span.events
    assert switch.name == "layout_switch"
    assert switch.attributes == {"from": "tp", "to": "dp", "method": "precopy", "status": "committed"}
    assert span.start_time <= switch.timestamp <= span.end_time
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",), "its client has left"


@pytest.mark.parametrize(
    ("token", "attributes", "says"),
    [
        ("<|die|>", {"error.type": "WorkerError"}, "rank 1 died"),
        ("<|fail|>", {"gen_ai.response.finish_reasons": ("error",)}, "the output cannot be kept to its grammar"),
    ],
)
def test_what_fails_is_an_error(
    served: Any, exporter: Exporter, token: str, attributes: dict[str, Any], says: str
) -> None:
    assert served.http.post("/v1/completions", json={**BODY, "prompt": token}).status_code >= 400
    (span,) = exporter.wait()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, says)
    assert span.attributes.items() >= attributes.items()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Takes what is sent over OTLP."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", received
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("by_environment", [False, True])
def test_spans_arrive_over_otlp(
    serve: Callable[..., Any],
    collector: tuple[str, list[ExportTraceServiceRequest]],
    monkeypatch: pytest.MonkeyPatch,
    by_environment: bool,
) -> None:
    url, received = collector
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SERVICE_NAME": "mine"} if by_environment else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    options = Telemetry() if by_environment else Telemetry(url + "/")
    made = make_tracing(options, environ, "scripted", "1.2.3", print)
    assert made is not None
    served = serve(tracing=made)
    served.http.post("/v1/completions", json=BODY).raise_for_status()
    served.stop()
    made.close()
    (resource,) = [spans for request in received for spans in request.resource_spans]
    names = sorted(span.name for scope in resource.scope_spans for span in scope.spans)
    assert names == ["decode", "llm_request", "prefill", "queue"]
    (service,) = [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"]
    assert service == ("mine" if by_environment else "splash")


def test_nobody_traces_unasked() -> None:
    assert make_tracing(Telemetry(), {}, "m", "1", print) is None
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert make_tracing(Telemetry("http://127.0.0.1:1"), off, "m", "1", print) is None
    with pytest.raises(ConfigError, match=r"telemetry.otlp_endpoint: must begin with http://"):
        Telemetry("127.0.0.1:4317")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"telemetry.otlp_endpoint: .*pip install 'splash-serve\[otlp\]'"):
        make_tracing(Telemetry("http://127.0.0.1:1"), {}, "m", "1", print)
    said: list[str] = []
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}
    assert make_tracing(Telemetry(), environ, "m", "1", said.append) is None
    assert said and said[0].startswith("warning: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, but traces need packages")
