"""Send spans to OpenTelemetry collectors. Independent of requests and HTTP.

The OpenTelemetry packages are the extra `vllm[otel]`. They are imported when a tracer is created.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

_GRPC_PORT = 4317
_EXPORT_TIMEOUT_S = 5
CONTEXT_HEADERS = ("traceparent", "tracestate")

AttributeValue = str | int | float | bool


class Span:
    """A span that has begun; created by `Tracer.begin`."""

    def __init__(self, span: object) -> None:
        self._span = span

    def end(self, attributes: Mapping[str, AttributeValue], *, error: str | None = None) -> None:
        """End the span.

        Args:
            attributes: added to the attributes that it began with.
            error: error message, which marks the span as failed; None: it succeeded.
        """
        from opentelemetry.trace import Span as OtelSpan
        from opentelemetry.trace import StatusCode

        assert isinstance(self._span, OtelSpan)
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class Tracer:
    """Creates spans and sends them in batches from its own thread.

    If a collector does not answer, spans are lost, but requests are not affected.

    Args:
        endpoint: address of the collector; port 4317 uses gRPC, other ports HTTP with protobuf.
        service_name: name that trace viewers show.
        processor: receives the spans instead of the endpoint.

    Raises:
        ConfigError: the packages are not installed.
    """

    def __init__(
        self, endpoint: str, service_name: str = "vllm", processor: "SpanProcessor | None" = None
    ) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            processor = processor or BatchSpanProcessor(_make_exporter(endpoint))
        except ImportError as error:
            raise _not_installed(error) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("vllm")

    def begin(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, AttributeValue]
    ) -> Span:
        """Begin a span.

        Args:
            name: kind of the span; use only a few different names.
            headers: headers of the request, with lower-case names; a valid `traceparent` makes the
                span a part of the caller's trace.
            attributes: attributes that are known at the beginning.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: headers[key] for key in CONTEXT_HEADERS if key in headers}
        context = TraceContextTextMapPropagator().extract(carrier)
        return Span(
            self._tracer.start_span(
                name, context=context, kind=SpanKind.SERVER, attributes=dict(attributes)
            )
        )

    def shutdown(self) -> None:
        """Send all pending spans. This takes a few seconds if the collector does not answer."""
        self._provider.shutdown()


def check_endpoint(endpoint: str) -> None:
    """Check that a tracer can be created for the endpoint. Sends nothing.

    Raises:
        ConfigError: the packages are not installed, or the endpoint is not an address.
    """
    try:
        _make_exporter(endpoint).shutdown()
        import_module("opentelemetry.sdk.trace.export")
    except ImportError as error:
        raise _not_installed(error) from None
    except ValueError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r}: {error}. Give it as http://host:port."
        ) from None


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(f"traces need OpenTelemetry (pip install 'vllm[otel]'): {error}")


def _make_exporter(endpoint: str) -> "SpanExporter":
    if urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").port == _GRPC_PORT:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(
            endpoint, insecure=not endpoint.startswith("https"), timeout=_EXPORT_TIMEOUT_S
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)
