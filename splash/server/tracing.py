"""Traces with OpenTelemetry: a span for each request, with its queue, prefill and decode below it, sent over OTLP.

Spans are written once a request has ended, from the times that the engine took anyway. The packages are those of the
extra `otlp`; nothing of them is imported where nobody asks for traces. Names of attributes are those of the semantic
conventions for generative AI where they have one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splash.core.errors import ConfigError, SplashError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

    from splash.engine.history import SwitchEvent
    from splash.engine.outputs import GenerationRequest, RequestOutput
    from splash.engine.stream import Stream

HEADERS = ("traceparent", "tracestate")
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_S = 5.0  # for what is not yet sent when the server stops


@dataclass(frozen=True)
class Telemetry:
    """Options of traces.

    Attributes:
        otlp_endpoint: where traces go over OTLP and HTTP, without /v1/traces; None asks the standard variables of the
            environment, and without them there are no traces.
    """

    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError("telemetry.otlp_endpoint", f"must begin with http:// or https://: {self.otlp_endpoint!r}")


def make_tracing(
    options: Telemetry, environ: Mapping[str, str], model: str, version: str, say: Callable[[str], None]
) -> Tracing | None:
    """Traces as the options or the environment ask for them, None where neither does.

    Raises:
        ConfigError: an option asks for traces, and the packages are not installed. Where only the environment does,
            which others may have set, it is `say` that is told.
    """
    named = next((name for name in VARIABLES if environ.get(name)), None)
    if (options.otlp_endpoint is None and named is None) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        missing = f"traces need packages that are not installed ({error}): pip install 'splash-serve[otlp]'"
        if options.otlp_endpoint is not None:
            raise ConfigError("telemetry.otlp_endpoint", missing) from None
        say(f"warning: {named} is set, but {missing}")
        return None
    base = options.otlp_endpoint
    exporter = OTLPSpanExporter(endpoint=None if base is None else f"{base.rstrip('/')}/v1/traces")
    return Tracing(BatchSpanProcessor(exporter), model, version, environ.get("OTEL_SERVICE_NAME") or "splash")


class Tracing:
    """Writes the spans of requests.

    Args:
        processor: takes spans that have ended.
        model: under which name clients know it.
        version: of SPLASH.
        service: what the spans are said to come from.
    """

    def __init__(self, processor: SpanProcessor, model: str, version: str, service: str = "splash") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": service, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("splash", version)
        self._model = model

    @contextlib.contextmanager
    def watching(
        self, requests: Sequence[GenerationRequest], stream: Stream, switches: Callable[[], Sequence[SwitchEvent]]
    ) -> Iterator[None]:
        """Write the spans of requests once they have ended: by themselves, with an error, or as their client left.

        Args:
            requests: what the engine was asked.
            stream: what it brings for them.
            switches: the last changes of layout.
        """
        failure: SplashError | None = None
        try:
            yield
        except SplashError as error:
            failure = error
            raise
        finally:
            clock = _Clock()
            for number, request in enumerate(requests):
                self._write(request, stream.ends.get(number), failure, switches(), clock)

    def _write(
        self,
        request: GenerationRequest,
        end: RequestOutput | None,
        failure: SplashError | None,
        switches: Sequence[SwitchEvent],
        clock: _Clock,
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        params, arrived = request.params, request.arrived
        times = None if end is None else end.times
        ended = clock.now_s if times is None or times.first is None else times.last
        span = self._tracer.start_span(
            "llm_request",
            _context(request.trace),
            SpanKind.SERVER,
            {
                "gen_ai.request.model": self._model,
                "gen_ai.request.id": request.id,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.input_tokens": len(request.prompt),
            },
            start_time=clock.wall_ns(arrived),
        )
        for switch in switches:
            if arrived <= switch.time_s <= ended:
                changed = {"from": switch.source, "to": switch.target, "method": switch.method, "status": switch.status}
                span.add_event("layout_switch", changed, clock.wall_ns(switch.time_s))
        if end is not None:
            span.set_attribute("gen_ai.usage.output_tokens", end.num_output_tokens)
            span.set_attribute("splash.cached_tokens", end.num_cached_tokens)
        if failure is not None and end is None:
            span.set_attribute("error.type", type(failure).__name__)
            span.set_status(Status(StatusCode.ERROR, str(failure)))
        else:
            reason = "abort" if end is None or end.finish_reason is None else end.finish_reason
            span.set_attribute("gen_ai.response.finish_reasons", (reason,))
            if reason == "error":
                span.set_status(Status(StatusCode.ERROR, "the output cannot be kept to its grammar"))
        if times is not None and times.started is not None and times.first is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", times.started - arrived)
            span.set_attribute("gen_ai.latency.time_to_first_token", times.first - arrived)
            span.set_attribute("gen_ai.latency.e2e", ended - arrived)
            inside = set_span_in_context(span)
            stages = (("queue", arrived), ("prefill", times.started), ("decode", times.first), ("", ended))
            for (name, begun_s), (_, done_s) in itertools.pairwise(stages):
                stage = self._tracer.start_span(name, inside, start_time=clock.wall_ns(begun_s))
                stage.end(clock.wall_ns(done_s))
        span.end(clock.wall_ns(ended))

    def close(self) -> None:
        """Send what is not yet sent, as far as that is possible in a few seconds. Idempotent."""
        # A collector that does not answer must not keep the server: the exporter tries again for longer.
        flushing = threading.Thread(target=self._provider.shutdown, name="splash-tracing", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)


class _Clock:
    """Now, and the wall's time for times of the monotonic clock."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()
        self._ahead_ns = time.time_ns() - int(self.now_s * 1e9)

    def wall_ns(self, time_s: float) -> int:
        return int(time_s * 1e9) + self._ahead_ns


def _context(headers: Mapping[str, str]) -> Context:
    """What a request's headers say of the trace that it belongs to; what cannot be read is passed over."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
