"""`treeserve explain`: what routers decided about a request, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from treeserve_cli.access import DEFAULT_ADDRESS, Access, Address, ApiKey, CaFile, CertFile, KeyFile, access
from treeserve_cli.messages import failed_call, tell
from treeserve_client import Client, Decision, Explanation, NotFound, PlacementCost, TreeserveClientError


def explain(
    request_id: Annotated[str, typer.Argument(help="As `generate --json`, `Started` or an HTTP answer named it.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each router that knows it.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
) -> None:
    """Tell why a request waited and where it ran. Each router knows its own part: --address takes several."""
    try:
        known = _explanations(address, request_id, access(api_key, ca_file, cert_file, key_file))
    except TreeserveClientError as error:
        raise failed_call(error, address) from None
    for explanation in known:
        if as_json:
            print(json.dumps(asdict(explanation)))
        else:
            Console().print(_table(explanation))


def _explanations(addresses: str, request_id: str, credentials: Access) -> list[Explanation]:
    """What each router knows of a request. Those that cannot be asked are told, if others know it.

    Args:
        addresses: of routers, separated by commas.
        credentials: how to get in at each of them.

    Raises:
        TreeserveClientError: if none of them knows it; NotFound only if all could be asked.
    """
    known: list[Explanation] = []
    errors: dict[str, TreeserveClientError] = {}
    for address in addresses.split(","):
        with Client(address, **credentials) as client:
            try:
                known.append(client.explain(request_id))
            except TreeserveClientError as error:
                errors[address] = error
    if not known:
        raise min(errors.values(), key=lambda failure: isinstance(failure, NotFound))
    for address, failure in errors.items():
        if not isinstance(failure, NotFound):
            tell(f"{address}: {failure}")
    return known


def _table(explanation: Explanation) -> Table:
    """One row for each decision; times are seconds after the first."""
    table = Table(
        Column("after", justify="right", no_wrap=True),
        Column("what", no_wrap=True),
        Column("verifier", overflow="fold"),
        Column("why", overflow="fold"),
        title=f"{explanation.request_id} ({explanation.service_class}) at {explanation.router_id}, "
        f"{explanation.age_s:.1f} s ago",
        title_justify="left",
    )
    if explanation.dropped:
        table.add_row("", f"{explanation.dropped} earlier", "", "forgotten")
    for decision in explanation.decisions:
        table.add_row(f"{decision.at_s:.3f} s", _what(decision), decision.verifier_id, Text(_why(decision)))
    return table


def _what(decision: Decision) -> str:
    name = decision.kind.replace("_", " ")
    return f"{name} x{decision.repeats + 1}" if decision.repeats else name


def _why(decision: Decision) -> str:
    return "\n".join(part for part in (decision.reason, _costs(decision.cost)) if part)


def _costs(cost: PlacementCost | None) -> str:
    """The parts of a placement's cost that are not zero, and their sum."""
    if cost is None:
        return ""
    parts = {
        "wait": cost.wait_s,
        "prefill": cost.prefill_s,
        "load": cost.load_s,
        "slow": cost.slow_s,
        "session": cost.affinity_s,
    }
    shown = " ".join(f"{name} {seconds:+.3f}" for name, seconds in parts.items() if round(seconds, 3))
    return f"cost {sum(parts.values()):.3f} s: {shown}"
