"""OpenTelemetry traces: one span a request, with the decision in it, followed into the worker.

Off unless an endpoint is set; the packages (extra ``otel``) are imported only then. Without it a
client's ``traceparent`` passes through to the worker like any other header.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from prefixfleet.router.errors import Refusal
from prefixfleet.store.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

SETTING = "PREFIXFLEET_ROUTER_OTLP_ENDPOINT"
EXPORT_TIMEOUT_S = 5
Terms = Mapping[str, str | int | float]


class RequestSpan(Protocol):
    """The span of one request."""

    def decided(self, terms: Terms) -> None:
        """A worker was chosen, and why; again for each further one that is tried."""
        ...

    def first_byte(self, status: int) -> None:
        """The worker began to answer."""
        ...

    def carry(self, headers: MutableMapping[str, str]) -> None:
        """Make the worker's own spans children of this one."""
        ...


class _NoSpan:
    def decided(self, terms: Terms) -> None:
        """Nobody wants to know."""

    def first_byte(self, status: int) -> None:
        """Nobody wants to know."""

    def carry(self, headers: MutableMapping[str, str]) -> None:
        """The client's own header stays."""


NO_SPAN: RequestSpan = _NoSpan()


class _OpenSpan:
    def __init__(self, span: "Span") -> None:
        self._span = span

    def decided(self, terms: Terms) -> None:
        named: dict[str, Any] = {f"prefixfleet.{name}": value for name, value in terms.items()}
        self._span.set_attributes(named)
        self._span.add_event("decided", named)

    def first_byte(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        self._span.add_event("first byte")

    def carry(self, headers: MutableMapping[str, str]) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        fields: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(fields, set_span_in_context(self._span))
        headers.update(fields)


class Tracing:
    """Owned by the router. ``endpoint`` is a collector's URL for traces; empty: off.

    Raises:
        ConfigError: the packages are absent.
    """

    def __init__(self, endpoint: str) -> None:
        self._tracer: Tracer | None = None
        self._provider: Any = None
        if endpoint:
            self._start(endpoint)

    def _start(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"{SETTING} is set: install prefixfleet[otel] ({error})") from error
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": "prefixfleet-router"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("prefixfleet.router")

    @property
    def on(self) -> bool:
        """Whether there is anybody to tell."""
        return self._tracer is not None

    def close(self) -> None:
        """Send what waits, for a bounded time. Blocks: call it in a thread."""
        if self._provider is not None:
            self._provider.force_flush(EXPORT_TIMEOUT_S * 1_000)
            self._provider.shutdown()

    @contextmanager
    def request(self, route: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """The span of a request while the block runs; a child of the client's, if it names one."""
        if self._tracer is None:
            yield NO_SPAN
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"POST {route}",
            context=TraceContextTextMapPropagator().extract(given),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": route},
        )
        try:
            yield _OpenSpan(span)
        except BaseException as error:
            kind = error.code if isinstance(error, Refusal) else type(error).__name__
            span.set_attribute("error.type", kind)
            if isinstance(error, Refusal):
                span.set_attribute("http.response.status_code", error.status)
            span.set_status(Status(StatusCode.ERROR, kind))
            raise
        finally:
            span.end()
