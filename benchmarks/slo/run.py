"""`make bench-slo`: service levels of the whole system under rising load, beside two baselines, in one run.

    python -m benchmarks.slo [--quick] [--only load,urgent,starvation,tenants] [--treeserve-set NAME=VALUE]

Requests of mixed classes arrive by the clock, whatever the system does (open loop). Each system gets the same ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.peers.peer import PeerError
from benchmarks.peers.process import ROOT
from benchmarks.peers.run import machine, make_settings, rounded
from benchmarks.rendered_prompts import rendered_prompts
from benchmarks.result_file import origin, write_result
from benchmarks.slo import report
from benchmarks.slo.load import Record
from benchmarks.slo.measure import Bench, Plan
from benchmarks.slo.systems import FIXED_NODES, TREESERVE, make_systems
from benchmarks.slo.targets import MULTIPLES, Multiple, parse_multiple
from benchmarks.terminal import make_console
from benchmarks.treeserve_set import add_treeserve_set
from treeserve_client import ServiceClass
from treeserve_text.tokenizer import Tokenizer

PARTS = ("load", "urgent", "starvation", "tenants")
RESULTS = ROOT / "benchmarks" / "results" / "slo.json"
FULL = Plan(
    loads=(0.5, 0.8, 1.1, 1.5), window_s=30.0, alone=24, crowd=128, probes=60, starvation_s=60.0, tenants_s=30.0
)
QUICK = Plan(loads=(0.5, 1.5), window_s=5.0, alone=6, crowd=48, probes=6, starvation_s=10.0, tenants_s=10.0)


@dataclass(frozen=True)
class Options:
    """The command line."""

    plan: Plan
    quick: bool
    parts: tuple[str, ...]
    dtype: str
    fixed_nodes: int
    multiples: Mapping[ServiceClass, Multiple]
    treeserve_set: tuple[str, ...]
    requests: Path | None
    json: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the JSON; returns 1 if anything that was asked for could not be measured."""
    options, ran_on, console = parse_options(argv), machine(), make_console()
    settings = make_settings(0, 0)
    systems = make_systems(options.fixed_nodes)
    cluster_options = (f"dtype={options.dtype}", *options.treeserve_set)
    prompts = rendered_prompts(Tokenizer.from_folder(ROOT / settings.folder))

    def say(line: str) -> None:
        console.print(line, highlight=False)

    bench = Bench(settings, cluster_options, prompts, options.plan, options.multiples, say)
    try:
        calibrated = bench.calibrate(systems)
    except PeerError as error:
        say(f"nothing can be measured: {error}")
        return 1
    result = {
        **origin("benchmarks.slo", argv, ran_on, settings, options.dtype),
        "plan": asdict(options.plan) | {"quick": options.quick},
        "systems": {name: asdict(system) for name, system in systems.items()},
        "settings": cluster_options,
        **calibrated,
    }
    if "load" in options.parts and (runs := bench.run_levels(systems)):
        result |= report.summary(runs, bench.levels, bench.targets, options.plan.window_s)
        write_requests(options.requests or ROOT / settings.cache / "slo", runs)
        report.show(result, console)
    for part, measure in (("urgent", bench.urgent), ("starvation", bench.starvation), ("tenants", bench.tenants)):
        if part in options.parts:
            result[part] = measure(systems[TREESERVE])
            say(f"{part}: {json.dumps(rounded(result[part]))}")
    result["skipped"] = bench.skipped
    write_result(options.json, result)
    say(f"written: {options.json}")
    return 1 if bench.skipped else 0


def write_requests(folder: Path, runs: Mapping[str, Sequence[Sequence[Record]]]) -> None:
    """Write the requests of each system at each level into a file of their own, which `treeserve simulate` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for system, rows in runs.items():
        for level, records in enumerate(rows):
            lines = [json.dumps(rounded(record.line())) + "\n" for record in records]
            (folder / f"{system}-{level}.jsonl").write_text("".join(lines))


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line. Raises SystemExit for what cannot be read."""
    parser = argparse.ArgumentParser(prog="benchmarks.slo", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="two short levels and few probes: does everything run?")
    add("--only", default=",".join(PARTS), help="parts to run, comma-separated; by default all")
    add("--loads", help="requests a second as multiples of what saturates the plain system, rising")
    add("--window-s", type=float, help="how long requests arrive at each load")
    add("--starvation-s", type=float, help="length of that part")
    add("--seed", type=int, default=0, help="of the traces")
    add("--target", action="append", default=[], metavar="CLASS=TTFT:TPOT", help="multiples of the unloaded latencies")
    add("--fixed-nodes", type=int, default=FIXED_NODES, help=f"nodes of the fixed trees ({FIXED_NODES})")
    add("--dtype", default="int8", help="the target's (int8)")
    add_treeserve_set(parser, ", of all systems")
    add("--requests", type=Path, help="folder for each request's figures, as JSONL; by default slo in the cache")
    add("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    parts = tuple(args.only.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
    try:
        multiples = dict(MULTIPLES) | dict(map(parse_multiple, args.target))
        loads = tuple(map(float, args.loads.split(","))) if args.loads else None
    except ValueError as error:
        parser.error(str(error))
    if loads is not None and (list(loads) != sorted(loads) or loads[0] <= 0):
        parser.error("--loads must be positive and rise")
    given = {"loads": loads, "window_s": args.window_s, "starvation_s": args.starvation_s, "seed": args.seed}
    plan = replace(QUICK if args.quick else FULL, **{name: v for name, v in given.items() if v is not None})
    return Options(
        plan,
        args.quick,
        parts,
        args.dtype,
        args.fixed_nodes,
        multiples,
        tuple(args.treeserve_set),
        args.requests,
        args.json,
    )
