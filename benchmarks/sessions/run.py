"""`make bench-sessions`: the second turn of a conversation beside a cold one, with one router and with three.

    python -m benchmarks.sessions [--quick] [--treeserve-set NAME=VALUE] [--json FILE]

Two verifiers, so that a turn may come to the wrong one; one request at a time, so that nothing but the cache counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.local_cluster import running
from benchmarks.peers.peer import PeerError, Settings
from benchmarks.peers.process import ROOT
from benchmarks.peers.run import machine, make_settings
from benchmarks.peers.treeserve import PATIENT
from benchmarks.rendered_prompts import conversations
from benchmarks.result_file import origin, write_result
from benchmarks.sessions.conversations import TwoTurns, all_texts, make_conversations
from benchmarks.sessions.turns import Pair, figures, run_conversations, same_answers
from benchmarks.terminal import make_console
from benchmarks.treeserve_set import add_treeserve_set
from treeserve_client import AsyncClient, TreeserveClientError
from treeserve_text.tokenizer import Tokenizer

RESULTS = ROOT / "benchmarks" / "results" / "sessions.json"
SPECULATION = {"on": True, "off": False}
_TURN_DEADLINE_S = 60.0
_WARM_UP = "Say hello."


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        history_tokens: length of the first turn's prompt.
        routers: numbers of routers to try.
        seed: of what the conversations are made of.
    """

    conversations: int
    history_tokens: int
    verifiers: int = 2
    routers: tuple[int, ...] = (1, 3)
    seed: int = 0


FULL = Plan(conversations=12, history_tokens=1500)
QUICK = Plan(conversations=2, history_tokens=600)


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
    settings = make_settings(0, 1)
    tokenizer = Tokenizer.from_folder(ROOT / settings.folder)
    rng = random.Random(plan.seed)
    texts = all_texts(conversations())
    asked = make_conversations(texts, tokenizer, plan.conversations, plan.history_tokens, rng)
    ran: dict[str, dict[str, list[Pair]]] = {}
    for routers in plan.routers:
        cluster = (
            PATIENT,
            f"dtype={options.dtype}",
            f"routers={routers}",
            f"verifiers={plan.verifiers}",
            *options.treeserve_set,
        )
        for name, speculation in SPECULATION.items():
            try:
                pairs = run_setting(settings, cluster, asked, speculation)
            except (PeerError, TreeserveClientError) as error:
                console.print(f"stopped, {routers} routers, speculation {name}: {error}", highlight=False)
                return 1
            ran.setdefault(str(routers), {})[name] = pairs
            console.print(f"{routers} routers, speculation {name}: {figures(pairs)}", highlight=False)
    result = origin("benchmarks.sessions", argv, ran_on, settings, options.dtype) | {
        "plan": asdict(plan) | {"quick": options.quick},
        "settings": options.treeserve_set,
        "by_routers": {routers: {name: figures(pairs) for name, pairs in row.items()} for routers, row in ran.items()},
        "same_answers": same_answers({f"{r} {name}": pairs for r, row in ran.items() for name, pairs in row.items()}),
    }
    write_result(options.json, result)
    show(result, console)
    console.print(f"written: {options.json}", highlight=False)
    return 0


def run_setting(settings: Settings, options: Sequence[str], asked: Sequence[TwoTurns], speculation: bool) -> list[Pair]:
    """All conversations on a fresh cluster.

    Raises:
        PeerError: if it does not start, or something takes far too long.
        TreeserveClientError: if a turn fails.
    """

    async def converse(addresses: Sequence[str]) -> list[Pair]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(address)) for address in addresses]
            for client in clients:
                await client.complete(prompt=_WARM_UP, max_tokens=8, deadline_s=_TURN_DEADLINE_S)
            return await run_conversations(asked, clients, speculation=speculation, deadline_s=_TURN_DEADLINE_S)

    with running(settings, options) as cluster:
        return asyncio.run(converse(cluster.grpc_addresses))


def show(result: dict[str, Any], console: Console) -> None:
    """Print the medians."""
    table = Table(title=f"a second turn after {result['plan']['history_tokens']} tokens")
    for column in ("routers", "speculation", "cold TTFT ms", "second TTFT ms", "second/cold", "prefix hit rate"):
        table.add_column(column, justify="right")
    for routers, row in result["by_routers"].items():
        for name, found in row.items():
            table.add_row(
                routers,
                name,
                f"{found['cold_ttft_ms']:.0f}",
                f"{found['second_ttft_ms']:.0f}",
                f"{found['second_over_cold']:.3f}",
                f"{found['prefix_hit_rate']:.1%}",
            )
    console.print(table)


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line. Raises SystemExit for what cannot be read."""
    parser = argparse.ArgumentParser(prog="benchmarks.sessions", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="two short conversations: does everything run?")
    add("--dtype", default="int8", help="the target's (int8)")
    add_treeserve_set(parser)
    add("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    return Options(QUICK if args.quick else FULL, args.quick, args.dtype, tuple(args.treeserve_set), args.json)
