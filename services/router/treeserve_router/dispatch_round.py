"""One pass over the queue: which verifiers are open to which class, and which tickets are within reach of any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.sampling import ServiceClass
from treeserve_router.batcher import Batcher
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket

Reach = Mapping[tuple[AcceptanceRule, bool], int]
"""By acceptance rule and whether there is a grammar, the longest context of any verifier that can do both."""


def reach_of(verifiers: Iterable[VerifierState]) -> Reach:
    """What some verifier could serve, sooner or later."""
    reach: dict[tuple[AcceptanceRule, bool], int] = {}
    for verifier in verifiers:
        if not verifier.draining:
            for able in product(verifier.acceptance_rules, {False, verifier.grammars}):
                reach[able] = max(reach.get(able, 0), verifier.max_context_tokens)
    return reach


def covers(reach: Reach, ticket: Ticket) -> bool:
    """Whether a ticket is within reach: exactly if some verifier can serve it."""
    request = ticket.request
    return request.max_total_tokens <= reach.get((request.limits.acceptance.rule, request.has_grammar), 0)


class DispatchRound:
    """Which verifiers are open to which class, in one pass over the queue."""

    def __init__(self, batcher: Batcher, verifiers: Iterable[VerifierState]) -> None:
        self._batcher = batcher
        states = {verifier.address: verifier for verifier in verifiers if not verifier.draining}
        self._open = {c: dict(states) for c in ServiceClass}
        self._reach = dict.fromkeys(ServiceClass, reach_of(states.values()))

    def is_over_for(self, service_class: ServiceClass) -> bool:
        """Whether no ticket of a class can be placed any more."""
        return not self._open[service_class]

    def open_to(self, ticket: Ticket) -> list[VerifierState]:
        """The verifiers that can serve a ticket and at which nobody waits whom it may not pass."""
        service_class = ticket.request.limits.service_class
        if not covers(self._reach[service_class], ticket):
            return []
        return [verifier for verifier in self._open[service_class].values() if verifier.can_serve(ticket)]

    def block(self, ticket: Ticket, verifiers: Iterable[VerifierState]) -> None:
        """A ticket waits for room at these verifiers: they are closed to all that may not pass it."""
        addresses = [verifier.address for verifier in verifiers]
        for service_class, states in self._open.items():
            if not self._batcher.passes(service_class, ticket.request.limits.service_class):
                for address in addresses:
                    states.pop(address, None)
                self._reach[service_class] = reach_of(states.values())

    def changed(self, address: str, state: VerifierState | None) -> None:
        """A verifier's state is another now; None if it is not connected any more."""
        for states in self._open.values():
            if address in states:
                if state is None:
                    del states[address]
                else:
                    states[address] = state
