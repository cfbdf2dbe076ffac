"""Logs, traces and metrics as every treeserve process sets them up."""

from __future__ import annotations

import logging
import sys

import prometheus_client
import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from treeserve_core.errors import InvalidArgumentError

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"


def setup_logging(service: str, level: str) -> None:
    """Log JSON, one line an event, to stderr: structlog's loggers and the standard library's alike.

    Args:
        service: put on every line.
        level: a name of the logging module, any case.

    Raises:
        InvalidArgumentError: if the level is unknown.
    """
    if level.upper() not in logging.getLevelNamesMapping():
        raise InvalidArgumentError("log_level", f"{level!r} is unknown")

    def add_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        structlog.processors.format_exc_info,
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def setup_tracing(service: str, endpoint: str | None, exporter: SpanExporter | None = None) -> trace.Tracer:
    """A tracer whose spans go to the OTLP endpoint in batches (the rest at exit), or nowhere without one.

    Args:
        endpoint: "host:port" of a plaintext OTLP/gRPC collector, "http://" in front allowed; None or "" for none.
        exporter: takes the endpoint's place and gets each span as it ends, for tests.
    """
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    elif endpoint:
        # Imported here: it takes longer than all else of telemetry, and most processes export nothing.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
    return provider.get_tracer("treeserve")


def traceparent_of(span: trace.Span) -> str:
    """The W3C traceparent that makes a peer's spans children of `span`; empty for an invalid span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(_TRACEPARENT, "")


def context_from(traceparent: str) -> Context:
    """The context to start spans in; empty or malformed input gives one without a parent."""
    return _PROPAGATOR.extract({_TRACEPARENT: traceparent}, Context())


def start_metrics(address: str) -> str:
    """Serve the process's Prometheus metrics on "host:port" from a thread; returns the bound address.

    An empty address is off.
    """
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    server, _ = prometheus_client.start_http_server(int(port), addr=host)
    return f"{host}:{server.server_port}"
