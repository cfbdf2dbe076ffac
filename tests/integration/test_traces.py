"""One trace per request, with spans of all three services, as an OpenTelemetry collector receives it."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from treeserve_cli.cluster import LocalCluster
from treeserve_cli.layout import ClusterConfig
from treeserve_client import Client


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the names of spans by trace and service."""

    def __init__(self) -> None:
        self.spans: dict[bytes, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans[span.trace_id][attributes["service.name"]].add(span.name)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[_Collector, str]]:
    collector = _Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_a_request_is_one_trace_through_all_services(
    collector: tuple[_Collector, str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, endpoint = collector
    monkeypatch.setitem(os.environ, "OTEL_BSP_SCHEDULE_DELAY", "100")
    config = ClusterConfig(
        model=tiny_model,
        run_dir=tmp_path / "run",
        settings=(
            "verifier.max_context_tokens=256",
            "verifier.draft_always=true",  # else whether a speculator is asked depends on what trees cost here
            "verifier.colocated_sources=",
            *(f"{role}.otlp_endpoint={endpoint}" for role in ("router", "verifier", "speculator")),
        ),
        kv_tokens=2048,
        grpc_port=0,
        http_port=0,
    )
    with LocalCluster(config) as cluster, Client(cluster.grpc_address) as client:
        for _ in range(2):
            client.complete(prompt="the quick brown fox jumps over the lazy dog the quick brown", max_tokens=16)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if sum(len(services) == 3 for services in received.spans.values()) == 2:
                break
            time.sleep(0.1)
    traces = [services for services in received.spans.values() if "treeserve-router" in services]
    assert len(traces) == 2, "one trace for each request"
    for services in traces:
        assert services["treeserve-router"] == {"treeserve.generate"}
        assert services["treeserve-verifier"] == {"treeserve.verify"}
        assert services["treeserve-speculator"] == {"treeserve.draft"}
