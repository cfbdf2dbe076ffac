"""Runs the parts of the benchmark: each on a cluster of its own, which is gone when the part is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.local_cluster import running
from benchmarks.peers.client import HOST, free_port
from benchmarks.peers.peer import PeerError, Settings
from benchmarks.rendered_prompts import Prompts
from benchmarks.slo import starvation, tenants, urgent
from benchmarks.slo.calibration import LONGEST_S, calibrate
from benchmarks.slo.load import Record, run_trace
from benchmarks.slo.report import Level
from benchmarks.slo.steps import scrape
from benchmarks.slo.systems import FIFO, GATEWAY, Clients, System
from benchmarks.slo.targets import Multiple, Target, Targets, targets_from
from benchmarks.slo.trace import Arrival, make_trace, poisson_times
from treeserve_client import ServiceClass

_CONCURRENCY = 32  # of the calibration's crowd
_WARM_UP_S, _WARM_UP_LOAD = 3.0, 0.5
_STUCK_S = 60.0  # beyond its planned end a part is given up

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        loads: requests a second, as multiples of what saturates the plain system, rising.
        window_s: how long requests arrive at each load.
        alone, crowd: requests of the calibration that run one at a time, and as many at once as there is room for.
        probes: realtime requests on a full system.
        starvation_s, tenants_s: length of these parts.
        seed: of the traces and of the order in which systems take turns.
    """

    loads: tuple[float, ...]
    window_s: float
    alone: int
    crowd: int
    probes: int
    starvation_s: float
    tenants_s: float
    seed: int = 0


class Bench:
    """The parts, and what they share: targets and loads from the calibration, which comes first.

    Args:
        options: of every cluster, as `benchmarks.local_cluster` takes them.
        report: told in one line each how far the run is.

    Attributes:
        targets: of each class.
        levels: the loads.
        skipped: systems and parts that failed, with the reason.
    """

    def __init__(
        self,
        settings: Settings,
        options: Sequence[str],
        prompts: Prompts,
        plan: Plan,
        multiples: Mapping[ServiceClass, Multiple],
        report: Callable[[str], None],
    ) -> None:
        self.targets: Targets = {}
        self.levels: list[Level] = []
        self.skipped: dict[str, str] = {}
        self._settings = settings
        self._options = (*GATEWAY, *options)
        self._prompts = prompts
        self._plan = plan
        self._multiples = multiples
        self._report = report
        self._capacity = 0.0

    def calibrate(self, systems: Mapping[str, System]) -> dict[str, Any]:
        """Measure the plain system, and set targets and loads by it. Raises PeerError."""
        rng = random.Random(self._plan.seed)
        alone = make_trace([0.0] * self._plan.alone, self._prompts, rng)
        crowd = make_trace([0.0] * self._plan.crowd, self._prompts, rng)

        async def work(clients: Clients) -> tuple[Target, float]:
            return await calibrate(alone, crowd, _CONCURRENCY, clients.submitter(None))

        unloaded, self._capacity = self._on_cluster(systems[FIFO].options, work, 2 * LONGEST_S + _STUCK_S)
        self.targets = targets_from(unloaded, self._multiples)
        self.levels = [Level(load, load * self._capacity) for load in self._plan.loads]
        self._report(
            f"alone: TTFT {unloaded.ttft_ms:.0f} ms, TPOT {unloaded.tpot_ms:.1f} ms; "
            f"saturated at {self._capacity:.1f} requests/s"
        )
        return {
            "unloaded_ms": {"ttft": unloaded.ttft_ms, "tpot": unloaded.tpot_ms},
            "saturation_requests_per_s": self._capacity,
            "targets_ms": {name: {"ttft": t.ttft_ms, "tpot": t.tpot_ms} for name, t in self.targets.items()},
        }

    def run_levels(self, systems: Mapping[str, System]) -> dict[str, list[list[Record]]]:
        """[system][level]: the records. The systems take turns at each load, in random order.

        One that fails is left out.
        """
        order = random.Random(self._plan.seed)
        runs: dict[str, list[list[Record]]] = {name: [] for name in systems}
        for index, level in enumerate(self.levels):
            trace = self._trace(level.requests_per_s, self._plan.window_s, index)
            for name in order.sample(list(runs), len(runs)):
                with self._skipping(name):
                    records = self._run_trace(systems[name], trace)
                    met = sum(self.targets[r.arrival.service_class].is_met_by(r) for r in records)
                    self._report(f"  load {level.load:g}: {name:<10} {met} of {len(records)} met their targets")
                    runs[name].append(records)
            runs = {name: rows for name, rows in runs.items() if name not in self.skipped}
        return runs

    def urgent(self, system: System) -> dict[str, Any] | None:
        """Realtime requests on a full system; None if it failed."""
        plan = self._plan
        port = free_port()
        rng = random.Random(plan.seed)

        async def work(clients: Clients) -> dict[str, Any]:
            submit = clients.submitter(self.targets)
            return await urgent.measure(plan.probes, self._prompts, submit, lambda: scrape(port), rng)

        with self._skipping("urgent"):
            metrics = f"verifier.metrics_listen={HOST}:{port}"
            return self._on_cluster((*system.options, metrics), work, urgent.longest_s(plan.probes) + _STUCK_S)
        return None

    def starvation(self, system: System) -> dict[str, Any] | None:
        """Batch work beside more urgent work than can be served; None if it failed."""
        seconds = self._plan.starvation_s
        rng = random.Random(self._plan.seed)
        trace = starvation.make_overload(self._capacity, seconds, self._prompts, rng)

        async def work(clients: Clients) -> list[Record]:
            return await run_trace(trace, clients.submitter(self.targets), seconds)

        with self._skipping("starvation"):
            return starvation.report(self._on_cluster(system.options, work, seconds + _STUCK_S), seconds)
        return None

    def tenants(self, system: System) -> dict[str, Any] | None:
        """Two tenants of unequal demand; None if it failed."""
        seconds = self._plan.tenants_s
        rng = random.Random(self._plan.seed)

        async def work(clients: Clients) -> dict[str, Any]:
            return await tenants.measure(seconds, self._prompts, clients.submitter(self.targets), rng)

        with self._skipping("tenants"):
            places = f"verifier.max_sequences={tenants.SEQUENCES}"
            return self._on_cluster((*system.options, places), work, seconds + _STUCK_S)
        return None

    def _trace(self, requests_per_s: float, window_s: float, index: int) -> list[Arrival]:
        rng = random.Random(f"{self._plan.seed} {index}")
        return make_trace(poisson_times(requests_per_s, window_s, rng), self._prompts, rng)

    def _run_trace(self, system: System, trace: Sequence[Arrival]) -> list[Record]:
        """Its records on a fresh cluster, which some requests of nobody's tenant have warmed up."""
        warm_up = self._trace(_WARM_UP_LOAD * self._capacity, _WARM_UP_S, -1)
        nobodys = [replace(arrival, tenant="") for arrival in warm_up]
        promises = self.targets if system.promises else None
        # After this, whatever still runs has missed its targets.
        slack_s = max((_longest_s(arrival, self.targets) for arrival in trace), default=0.0)
        ends_s = self._plan.window_s + slack_s

        async def work(clients: Clients) -> list[Record]:
            submit = clients.submitter(promises)
            await run_trace(nobodys, submit, _WARM_UP_S + slack_s)
            return await run_trace(trace, submit, ends_s)

        return self._on_cluster(system.options, work, _WARM_UP_S + slack_s + ends_s + _STUCK_S)

    def _on_cluster(self, options: Sequence[str], work: Callable[[Clients], Awaitable[_T]], limit_s: float) -> _T:
        """Start a cluster, do the work, stop it. Raises PeerError."""

        async def serve(address: str) -> _T:
            async with asyncio.timeout(limit_s), Clients(address) as clients:
                return await work(clients)

        with running(self._settings, (*self._options, *options)) as cluster:
            try:
                return asyncio.run(serve(cluster.grpc_address))
            except TimeoutError:
                raise PeerError(f"not over after {limit_s:.0f} s") from None

    @contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """Go on without what fails."""
        try:
            yield
        except PeerError as error:
            self.skipped[name] = str(error)
            self._report(f"  {name} is skipped: {error}")


def _longest_s(arrival: Arrival, targets: Targets) -> float:
    """Seconds after which a request that still runs has missed a target."""
    target = targets[arrival.service_class]
    return (target.ttft_ms + target.tpot_ms * arrival.output_tokens) / 1e3
