"""Logs are one JSON line an event, trace context survives the hop, and metrics are served."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.telemetry import context_from, setup_logging, setup_tracing, start_metrics, traceparent_of

_LOGGING_PROGRAM = """
import logging
import structlog
from treeserve_wire.telemetry import setup_logging
setup_logging("verifier", "info")
structlog.get_logger().info("step done", request_id="r1", tokens=3)
structlog.get_logger().debug("not shown")
logging.getLogger("grpc").warning("from %s", "a library")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("failed")
"""


def test_logs_are_json_lines_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", _LOGGING_PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    ours, library, failed = (json.loads(line) for line in done.stderr.splitlines())
    assert (ours["event"], ours["request_id"], ours["tokens"]) == ("step done", "r1", 3)
    assert (library["event"], library["level"]) == ("from a library", "warning")
    assert "ZeroDivisionError" in failed["exception"]
    assert {line["service"] for line in (ours, library, failed)} == {"verifier"}
    assert ours["timestamp"].endswith("Z")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="loud"):
        setup_logging("verifier", "loud")


def test_a_traceparent_makes_the_peers_spans_children() -> None:
    exporter = InMemorySpanExporter()
    tracer = setup_tracing("router", None, exporter)
    with tracer.start_as_current_span("request") as parent:
        traceparent = traceparent_of(parent)
    with tracer.start_as_current_span("step", context=context_from(traceparent)):
        pass
    request, step = exporter.get_finished_spans()
    assert step.parent is not None
    assert step.parent.span_id == request.context.span_id
    assert step.context.trace_id == request.context.trace_id
    assert request.resource.attributes["service.name"] == "router"


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-00"])
def test_bad_trace_context_means_no_parent(traceparent: str) -> None:
    assert trace.get_current_span(context_from(traceparent)) is trace.INVALID_SPAN
    assert traceparent_of(trace.INVALID_SPAN) == ""


def test_metrics_are_served_and_can_be_off() -> None:
    address = start_metrics("127.0.0.1:0")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        assert b"python_info" in response.read()
    assert start_metrics("") == ""
