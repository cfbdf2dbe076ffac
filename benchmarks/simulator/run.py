"""`make simulate-check`: how far the simulator's predictions are from a real run, and what it says of a large cluster.

    python -m benchmarks.simulator [--quick] [--only check,scale] [--json FILE]

check: measures forward passes of the engine, then requests one and four at a time (the model is fitted to those) and a
load (which is predicted), without and with speculation. scale: bursts of 10,000 requests on 64 simulated verifiers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.peers.peer import PeerError
from benchmarks.peers.process import ROOT
from benchmarks.peers.run import machine, make_settings
from benchmarks.result_file import origin, write_result
from benchmarks.simulator.check import check
from benchmarks.simulator.real import Plan
from benchmarks.simulator.scale import Scale, study
from treeserve_simulator.costs import DEFAULT_MACHINE, MachineModel

PARTS = ("check", "scale")
RESULTS = ROOT / "benchmarks" / "results" / "simulator.json"
FULL, FULL_SCALE = Plan(rounds=3, alone=12, together=12, rate=2.5, window_s=20.0), Scale(64, 10_000, 0.7)
QUICK, QUICK_SCALE = Plan(rounds=1, alone=12, together=8, rate=2.0, window_s=10.0), Scale(4, 400, 0.7)


@dataclass(frozen=True)
class Options:
    """The command line."""

    plan: Plan
    scale: Scale
    quick: bool
    parts: tuple[str, ...]
    json: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict, print, and write the JSON; returns 1 if a prediction is off by more than a fifth."""
    options, ran_on, console = parse_options(argv), machine(), Console()
    settings = make_settings(0, 0)

    def say(line: str) -> None:
        console.print(line, highlight=False)

    result = origin("benchmarks.simulator", argv, ran_on, settings, "int8") | {"quick": options.quick}
    model, within = MachineModel.read(DEFAULT_MACHINE), True
    if "check" in options.parts:
        try:
            model, result["check"] = check(settings, options.plan, say)
        except PeerError as error:
            say(f"nothing can be measured: {error}")
            return 1
        within = all(found["within"] for found in result["check"]["systems"].values())
    if "scale" in options.parts:
        result["scale"] = study(options.scale, model, say)
    write_result(options.json, result)
    say(f"written: {options.json}")
    return 0 if within else 1


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line. Raises SystemExit for what cannot be read."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulator", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="few requests and a small cluster: does everything run?")
    add("--only", default=",".join(PARTS), help="parts to run, comma-separated; by default both")
    add("--rate", type=float, help="requests a second of the load that is predicted")
    add("--load", type=float, help="of the large cluster, as a multiple of what saturates it")
    add("--seed", type=int, default=0, help="of the real traces")
    add("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    parts = tuple(args.only.split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
    plan, scale = (QUICK, QUICK_SCALE) if args.quick else (FULL, FULL_SCALE)
    plan = replace(plan, seed=args.seed, rate=plan.rate if args.rate is None else args.rate)
    return Options(plan, scale if args.load is None else replace(scale, load=args.load), args.quick, parts, args.json)
