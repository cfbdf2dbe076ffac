"""The benchmark of service levels as a whole, its clusters replaced by servers of known speed on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_streams import FakeServer, arrival

from benchmarks.peers.peer import PeerError, Settings
from benchmarks.slo import measure, systems
from benchmarks.slo.load import Submit
from benchmarks.slo.measure import Bench, Plan
from benchmarks.slo.systems import FIFO, FIXED, TREESERVE, Clients, make_systems
from benchmarks.slo.targets import MULTIPLES, Target
from benchmarks.slo.trace import Arrival
from treeserve_simulator.virtual_time import run_virtual

PROMPTS = {kind: [(k, i) for i in range(30)] for k, kind in enumerate(("chat", "code"))}
PLAN = Plan(loads=(0.5, 1.0), window_s=4.0, alone=4, crowd=96, probes=3, starvation_s=20.0, tenants_s=8.0)
SETTINGS = Settings("m.gguf", "m", "cache", "tools", 1, 4096, 8)


@dataclass(eq=False)
class Clusters:
    """Stands for what is started: which options, which requests came, and with what promises."""

    broken: str = "nothing is"
    started: list[tuple[str, ...]] = field(default_factory=list)
    stopped: int = 0
    promised: list[Any] = field(default_factory=list)
    traces: list[list[Arrival]] = field(default_factory=list)

    @contextmanager
    def running(self, _settings: Settings, options: Sequence[str]) -> Iterator[SimpleNamespace]:
        self.started.append(tuple(options))
        if any(self.broken in option for option in options):
            raise PeerError("a log's last lines")
        self.traces.append([])
        try:
            yield SimpleNamespace(grpc_address="nowhere")
        finally:
            self.stopped += 1

    def clients(self, _address: str) -> FakeClients:
        return FakeClients(self)


@dataclass(eq=False)
class FakeClients:
    clusters: Clusters

    async def __aenter__(self) -> FakeClients:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        pass

    def submitter(self, targets: Any) -> Submit:
        self.clusters.promised.append(targets)
        server = FakeServer(gap_s=0.02)

        def submit(request: Arrival) -> Any:
            self.clusters.traces[-1].append(request)
            return server.submit(request)

        return submit


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    made = Clusters()
    monkeypatch.setattr(measure, "running", made.running)
    monkeypatch.setattr(measure, "Clients", made.clients)
    monkeypatch.setattr(measure, "scrape", lambda port: {1.0: float(port), float("inf"): float(port)})
    monkeypatch.setattr(asyncio, "run", run_virtual)
    return made


def bench() -> Bench:
    return Bench(SETTINGS, ("dtype=int8",), PROMPTS, PLAN, MULTIPLES, lambda line: None)


def test_targets_and_loads_follow_from_the_plain_system(clusters: Clusters) -> None:
    ours = bench()
    found = ours.calibrate(make_systems())
    assert "speculators=0" in clusters.started[0] and clusters.promised == [None]
    assert found["unloaded_ms"] == {"ttft": pytest.approx(20), "tpot": pytest.approx(20)}
    assert ours.targets["realtime"].ttft_ms == pytest.approx(20 * MULTIPLES["realtime"].ttft)
    capacity = found["saturation_requests_per_s"]
    assert 32 / (128 * 0.02) < capacity < 32 / (16 * 0.02)
    assert [level.requests_per_s for level in ours.levels] == pytest.approx([0.5 * capacity, capacity])


def test_all_systems_get_the_same_requests_and_only_treeserve_is_told_the_targets(clusters: Clusters) -> None:
    ours = bench()
    ours.calibrate(make_systems())
    runs = ours.run_levels(make_systems())
    assert set(runs) == {TREESERVE, FIFO, FIXED} and not ours.skipped
    assert all(len(rows) == 2 for rows in runs.values())
    for level in (0, 1):
        asked = [[r.arrival for r in rows[level]] for rows in runs.values()]
        assert asked[0] == asked[1] == asked[2] and len(asked[0]) > 10
    assert len(runs[FIFO][1]) > len(runs[FIFO][0])
    assert clusters.stopped == len(clusters.started) == 7
    for options, promised in zip(clusters.started, clusters.promised, strict=True):
        is_treeserve = not any("queue_policy=fifo" in option for option in options)
        assert promised == (ours.targets if is_treeserve else None)
        assert "dtype=int8" in options and "router.trust_clients=true" in options
    # What warms a cluster up is nobody's, so that it teaches nothing; the trace has tenants.
    assert {a.tenant == "" for a in clusters.traces[1][:3]} == {True}
    assert "" not in {r.arrival.tenant for r in runs[FIFO][0]}


def test_a_system_that_does_not_start_is_left_out_and_named(clusters: Clusters) -> None:
    ours = bench()
    ours.calibrate(make_systems())
    clusters.broken = "draft_always"
    runs = ours.run_levels(make_systems())
    assert set(runs) == {TREESERVE, FIFO}
    assert ours.skipped == {FIXED: "a log's last lines"}
    assert sum("verifier.draft_always=true" in options for options in clusters.started) == 1


def test_the_other_parts_run_on_clusters_of_their_own(clusters: Clusters) -> None:
    ours, system = bench(), make_systems()[TREESERVE]
    ours.calibrate(make_systems())
    urgent, starvation, tenants = ours.urgent(system), ours.starvation(system), ours.tenants(system)
    assert urgent is not None and urgent["probes"] == 3
    assert starvation is not None and len(starvation["tokens_per_window"]) == 2
    assert tenants is not None and tenants["served_tokens"]["heavy"] > tenants["served_tokens"]["light"] > 0
    assert any("verifier.metrics_listen=" in option for option in clusters.started[1])
    assert "verifier.max_sequences=8" in clusters.started[3]
    clusters.broken = "dtype"
    assert ours.urgent(system) is None and set(ours.skipped) == {"urgent"}


def test_a_part_that_hangs_is_given_up(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, system = bench(), make_systems()[TREESERVE]
    ours.calibrate(make_systems())

    async def stuck(*_args: Any) -> None:
        await asyncio.sleep(1e6)

    monkeypatch.setattr(measure, "run_trace", stuck)
    assert ours.starvation(system) is None
    assert "not over after 80 s" in ours.skipped["starvation"]
    assert clusters.stopped == len(clusters.started)


def test_requests_carry_their_tenant_and_what_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []

    class NotingClient:
        def __init__(self, _address: str, *, metadata: Any) -> None:
            self._metadata = metadata

        def generate(self, **params: Any) -> None:
            made.append((self._metadata, params))

    monkeypatch.setattr(systems, "AsyncClient", NotingClient)
    clients = Clients("nowhere")
    targets = {"realtime": Target(100.0, 10.0)}
    clients.submitter(targets)(arrival(service_class="realtime", tenant="acme"))  # type: ignore[arg-type]
    clients.submitter(None)(arrival(service_class="realtime", tenant=""))
    (named, told), (nobody, untold) = made
    assert named == (("x-treeserve-tenant", "acme"),) and nobody == ()
    assert (told["service_class"], told["ttft_ms"], told["tpot_ms"]) == ("realtime", 100.0, 10.0)
    assert not {"service_class", "ttft_ms", "tpot_ms"} & untold.keys()
    assert (told["max_tokens"], told["ignore_eos"], told["token_ids"]) == (4, True, tuple(range(10)))


def test_the_order_of_systems_is_drawn_anew_at_each_level(clusters: Clusters) -> None:
    plan = replace(PLAN, loads=tuple(0.1 * i for i in range(1, 9)), window_s=0.5)
    ours = Bench(SETTINGS, (), PROMPTS, plan, MULTIPLES, lambda line: None)
    ours.calibrate(make_systems())
    ours.run_levels(make_systems())
    places = [i % 3 for i, options in enumerate(clusters.started[1:]) if "speculators=0" in options]
    assert len(places) == 8 and len(set(places)) > 1
