"""`treeserve explain`: what routers decided about a request, as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Column, Table
from rich.text import Text

from treeserve_cli.access import Access
from treeserve_client import Client, Decision, Explanation, NotFound, PlacementCost, TreeserveClientError


def explanations(addresses: str, request_id: str, access: Access, tell: Callable[[str], None]) -> list[Explanation]:
    """What each router knows of a request.

    Args:
        addresses: of routers, separated by commas.
        access: how to get in at each of them.
        tell: takes lines about routers that cannot be asked, if others know the request.

    Raises:
        TreeserveClientError: if none of them knows it; NotFound only if all could be asked.
    """
    known: list[Explanation] = []
    errors: dict[str, TreeserveClientError] = {}
    for address in addresses.split(","):
        with Client(address, **access) as client:
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


def explanation_table(explanation: Explanation) -> Table:
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
