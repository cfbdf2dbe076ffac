"""`make bench-never-slower`: throughput with speculation over without, at each concurrency and kind of task.

    python -m benchmarks.never_slower [--quick] [--dtype int8] [--treeserve-set verifier.threads=2] [--json FILE]

Each request says whether it wants speculation, so both run on one cluster, one right after the other. Requests are for
no tenant and so leave nothing behind: the second of a pair does not find the first one's prefix and answer remembered.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.never_slower.cells import LEAST, Pair, Plan, run_round, summary
from benchmarks.peers.peer import PeerError
from benchmarks.peers.process import ROOT
from benchmarks.peers.run import machine, make_settings
from benchmarks.peers.tasks import Request
from benchmarks.peers.treeserve import OFF, ON, Treeserve
from benchmarks.rendered_prompts import rendered_prompts
from benchmarks.result_file import origin, write_result
from benchmarks.terminal import make_console
from benchmarks.treeserve_set import add_treeserve_set
from treeserve_text.tokenizer import Tokenizer

RESULTS = ROOT / "benchmarks" / "results" / "never_slower.json"
FULL = Plan(concurrencies=(1, 2, 4, 8, 16, 32), rounds=5, least_requests=4, max_tokens=64)
QUICK = Plan(concurrencies=(1, 8, 32), rounds=1, least_requests=2, max_tokens=16)


@dataclass(frozen=True)
class Options:
    """The command line."""

    plan: Plan
    quick: bool
    dtype: str
    treeserve_set: tuple[str, ...]
    json: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the JSON; returns 1 if it could not be measured."""
    options, ran_on, console = parse_options(argv), machine(), make_console()
    plan = options.plan
    settings = make_settings(0, max(plan.concurrencies))
    prompts = rendered_prompts(Tokenizer.from_folder(ROOT / settings.folder))
    cluster = Treeserve(settings, options.dtype, options.treeserve_set)
    order = random.Random(plan.seed)
    pairs: list[Pair] = []
    began = time.monotonic()
    try:
        for index in range(plan.rounds):
            cluster.start()
            try:
                warm_up(cluster, max(plan.concurrencies))
                pairs += run_round(plan, index, prompts, cluster.generate, order)
            finally:
                cluster.stop()
            console.print(f"round {index + 1} of {plan.rounds}: {time.monotonic() - began:.0f} s", highlight=False)
    except PeerError as error:
        console.print(f"stopped: {error}", highlight=False)
        return 1
    result = {
        **origin("benchmarks.never_slower", argv, ran_on, settings, options.dtype),
        "plan": asdict(plan) | {"quick": options.quick},
        "cluster": cluster.command,
        **summary(pairs),
    }
    write_result(options.json, result)
    show(result, console)
    console.print(f"written: {options.json}", highlight=False)
    return 0


def warm_up(cluster: Treeserve, concurrency: int) -> None:
    """Requests of no task at full concurrency, so that what is set up or learnt at first use is there already."""
    requests = [Request("warm-up", tuple(range(1000 + i, 1024 + i)), 16) for i in range(concurrency)]
    for system in (ON, OFF):
        cluster.generate(system, requests, concurrency)


def show(result: dict[str, Any], console: Console) -> None:
    """Print the ratios."""
    ratios = result["on_over_off"]
    tasks = list(dict.fromkeys(task for row in ratios.values() for task in row))
    table = Table(title="throughput with speculation over without, median")
    table.add_column("at once", justify="right")
    for task in tasks:
        table.add_column(task, justify="right")
    for concurrency, row in ratios.items():
        table.add_row(concurrency, *(f"{row[task]:.2f}" if task in row else "-" for task in tasks))
    console.print(table)
    cells = sum(map(len, ratios.values()))
    console.print(f"under {LEAST}: {len(result['slower'])} of {cells}; worst: {result['worst']}", highlight=False)


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line. Raises SystemExit for what cannot be read."""
    parser = argparse.ArgumentParser(prog="benchmarks.never_slower", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one short round: does everything run?")
    add("--rounds", type=int, help="pairs of each cell")
    add("--dtype", default="int8", help="the target's (int8)")
    add_treeserve_set(parser)
    add("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    plan = QUICK if args.quick else FULL
    if args.rounds is not None:
        if args.rounds < 1:
            parser.error("--rounds must be at least 1")
        plan = replace(plan, rounds=args.rounds)
    return Options(plan, args.quick, args.dtype, tuple(args.treeserve_set), args.json)
