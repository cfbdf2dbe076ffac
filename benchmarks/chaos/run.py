"""`make chaos`: runs requests while processes die, drain and pause, and writes benchmarks/results/chaos.json.

python -m benchmarks.chaos [--quick] [--requests 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.disturbances import FULL, SHORT, Disturbance, disturb, until_whole
from benchmarks.chaos.probe import Holdings, RouterCounters, holdings, verifier_sockets
from benchmarks.chaos.traffic import Trace, Traffic
from benchmarks.chaos.verdict import Verdict, judge, recovery_ms
from benchmarks.chaos.workload import Case, cases
from benchmarks.peers.process import ROOT
from benchmarks.peers.run import machine, make_settings
from benchmarks.result_file import origin, write_result
from treeserve_cli.cluster import LocalCluster
from treeserve_cli.layout import ClusterConfig
from treeserve_client import AsyncClient, Completion

RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
_EMPTY_TIMEOUT_S = 15.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        max_tokens: shortest and longest limit of an output.
        concurrency: streams at once.
        disturbances: one after the other, each amid its share of the requests.
    """

    requests: int
    max_tokens: tuple[int, int]
    concurrency: int
    disturbances: tuple[Disturbance, ...]


FULL_PLAN = Plan(requests=300, max_tokens=(32, 160), concurrency=8, disturbances=FULL)
QUICK_PLAN = Plan(requests=48, max_tokens=(24, 96), concurrency=8, disturbances=SHORT)


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        recovery_ms: by kind of disturbance.
        held: what each verifier holds after the last request.
        counters: of the routers.
    """

    verdict: Verdict
    recovery_ms: dict[str, dict[str, Any]]
    held: tuple[Holdings, ...]
    counters: Mapping[str, int]

    @property
    def is_clean(self) -> bool:
        """Every output was whole, and nothing is held."""
        return self.verdict.is_clean and not any(held.blocks or held.sequences for held in self.held)


def reference_config(base: ClusterConfig) -> ClusterConfig:
    """A cluster that nothing disturbs: one verifier, no speculator, no Valkey."""
    return replace(base, verifiers=1, speculators=0, routers=1, no_redis=True)


def chaos_config(base: ClusterConfig) -> ClusterConfig:
    """The cluster that is disturbed: two of each role, and Valkey."""
    return replace(base, verifiers=2, speculators=2, routers=2, drain_s=3.0)


async def undisturbed(cluster: LocalCluster, pending: Sequence[Case], concurrency: int) -> dict[int, Completion]:
    """Each request decoded plainly, by seed. Raises RuntimeError if one fails."""
    async with AsyncClient(cluster.grpc_address) as client:
        traffic = Traffic([client], concurrency, speculation=False)
        await traffic.run(pending)
    completions = {trace.case.seed: trace.completion for trace in traffic.traces}
    if any(completion is None for completion in completions.values()):
        errors = {trace.error or "hung" for trace in traffic.traces if trace.completion is None}
        raise RuntimeError(f"the undisturbed cluster fails: {', '.join(errors)}")
    return {seed: completion for seed, completion in completions.items() if completion is not None}


async def disturbed(cluster: LocalCluster, plan: Plan, expected: Mapping[int, Completion], tell: Tell) -> Outcome:
    """Run the plan's requests amid its disturbances. Raises TimeoutError if the cluster does not get whole again."""
    first, second = cluster.grpc_addresses
    counters = RouterCounters(cluster.http_addresses)
    moments: list[tuple[str, float]] = []
    traces: list[Trace] = []
    watching = asyncio.create_task(counters.watch())
    try:
        for disturbance, share in zip(plan.disturbances, _shares(plan), strict=True):
            began = time.monotonic()
            async with AsyncClient(f"{first},{second}") as one, AsyncClient(f"{second},{first}") as other:
                traffic = Traffic([one, other], plan.concurrency)
                running = asyncio.create_task(traffic.run(share))
                await traffic.under_way()
                moments.append((disturbance.kind, await disturb(cluster, disturbance)))
                await running
            await until_whole(cluster)
            traces += traffic.traces
            verdict = judge(traffic.traces, expected)
            spent_s = time.monotonic() - began
            tell(f"{disturbance.kind:<17} {len(share):3} requests {spent_s:5.1f} s  {_in_words(verdict)}")
        held = await _held_at_the_end(cluster)
        await counters.read()
    finally:
        watching.cancel()
    return Outcome(judge(traces, expected), recovery_ms(traces, moments), held, dict(counters.totals))


def _shares(plan: Plan) -> list[list[Case]]:
    """The requests, dealt out to the disturbances."""
    every = len(plan.disturbances)
    dealt = cases(plan.requests, plan.max_tokens)
    return [dealt[i::every] for i in range(every)]


async def _held_at_the_end(cluster: LocalCluster) -> tuple[Holdings, ...]:
    """What verifiers hold once nothing runs any more; they may take a moment to notice."""
    until = time.monotonic() + _EMPTY_TIMEOUT_S
    while True:
        held = tuple([await holdings(socket) for socket in verifier_sockets(cluster)])
        if time.monotonic() > until or not any(each.blocks or each.sequences for each in held):
            return held
        await asyncio.sleep(0.2)


def _in_words(verdict: Verdict) -> str:
    if verdict.is_clean:
        return "as if nothing had happened"
    counts = {name: count for name, count in asdict(verdict).items() if name != "requests" and count}
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def result_of(outcome: Outcome) -> dict[str, Any]:
    """The figures of the JSON file."""
    recovery = outcome.recovery_ms
    return asdict(outcome.verdict) | {
        "blocks_not_free": sum(held.blocks for held in outcome.held),
        "sequences_held": sum(held.sequences for held in outcome.held),
        "recovery_ms": {
            "max": max(kind["max"] for kind in recovery.values()),
            "by_kind": recovery,
        },
        "routers": outcome.counters,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns 1 unless every output was whole and everything is free at the end."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests and disturbances, under a minute")
    parser.add_argument("--requests", type=int, help="how many; 300, or 48 with --quick")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    plan = QUICK_PLAN if args.quick else FULL_PLAN
    plan = replace(plan, requests=args.requests or plan.requests)
    ran_on, began = machine(), time.monotonic()
    settings = make_settings(threads=1, max_batch=plan.concurrency)
    base = ClusterConfig(
        model=ROOT / settings.folder,
        cache_dir=ROOT / settings.cache,
        threads=1,
        kv_tokens=8192,
        grpc_port=0,
        http_port=0,
    )
    outcome = asyncio.run(_run(base, plan))
    result = origin("benchmarks.chaos", argv, ran_on, settings, "int8")
    result |= {"plan": _plan_json(plan), "seconds": time.monotonic() - began, **result_of(outcome)}
    write_result(args.json, result)
    print_table(result)
    print(f"written: {args.json}")
    return 0 if outcome.is_clean else 1


async def _run(base: ClusterConfig, plan: Plan) -> Outcome:
    def tell(line: str) -> None:
        print(line, flush=True)

    tell(f"{plan.requests} requests, undisturbed and decoded plainly")
    with LocalCluster(reference_config(base)) as cluster:
        expected = await undisturbed(cluster, cases(plan.requests, plan.max_tokens), 2 * plan.concurrency)
    with LocalCluster(chaos_config(base)) as cluster:
        return await disturbed(cluster, plan, expected, tell)


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "requests": plan.requests,
        "max_tokens": plan.max_tokens,
        "concurrency": plan.concurrency,
        "disturbances": [each.kind for each in plan.disturbances],
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Counts, and how long streams stood still after each kind of disturbance."""
    names = ("requests", "wrong", "lost", "duplicated", "hung", "failed", "blocks_not_free", "sequences_held")
    print(", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in names))
    print(f"{'streams stood still, ms':<28}{'times':>6}{'streams':>9}{'p50':>8}{'max':>8}")
    for kind, row in result["recovery_ms"]["by_kind"].items():
        print(f"{kind:<28}{row['times']:6}{row['streams']:9}{row['p50']:8.0f}{row['max']:8.0f}")
