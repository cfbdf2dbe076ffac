"""A dispatcher on a clock of the test's own, with verifiers that only keep books."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.clock import Clock
from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.identity import ModelIdentity
from treeserve_router.ledger import Load, VerifierLedger, VerifierOffer
from treeserve_router.placement import VerifierState
from treeserve_router.queue import Ticket


class BookedVerifier:
    """The way to a verifier that runs nothing: the test says what comes back.

    Attributes:
        ledger: the router's books of it.
        submitted: what it was given, in order, with how long each had waited.
    """

    def __init__(self, name: str, clock: Clock, changed: Callable[[], None], **offer: Any) -> None:
        defaults: dict[str, Any] = {
            "max_context_tokens": 4096,
            "max_sequences": 4,
            "dtype": "int8",
            "acceptance_rules": frozenset({AcceptanceRule.REPLAY}),
            "block_size": 16,
        }
        model = ModelIdentity("m", "0" * 64, 10, 10, (1,))
        self.ledger = VerifierLedger(f"host:{name}", VerifierOffer(name, model, **(defaults | offer)), clock)
        self.submitted: dict[Ticket, float] = {}
        self.cancelled: list[Ticket] = []
        self._changed = changed

    @property
    def state(self) -> VerifierState:
        """What placement may know."""
        return self.ledger.state

    def submit(self, ticket: Ticket, waited_s: float = 0.0) -> None:
        """Take a sequence."""
        self.submitted[ticket] = waited_s
        self.ledger.sent(ticket, waited_s)

    def cancel(self, ticket: Ticket) -> None:
        """Drop a sequence."""
        self.cancelled.append(ticket)

    def suspect(self) -> bool:
        """Be avoided."""
        self.ledger.avoid(True)
        return True

    def report(self, **load: Any) -> None:
        """Report a load; all KV blocks are free unless told otherwise."""
        self.ledger.reported(Load(**({"free_blocks": 1000, "total_blocks": 1000} | load)))
        self._changed()

    def start(self, *tickets: Ticket) -> None:
        """First tokens came."""
        for each in tickets:
            self.ledger.tokens(each, 1)

    def end(self, *tickets: Ticket) -> None:
        """Sequences ended."""
        for each in tickets:
            self.ledger.gone(each)


class BookedPool:
    """Verifiers named a, b, c ... on one clock."""

    def __init__(self, clock: Clock, count: int = 1, **offer: Any) -> None:
        self._listeners: list[Callable[[], None]] = []
        names = [chr(ord("a") + i) if count <= 26 else f"v{i:03}" for i in range(count)]
        self.verifiers = [BookedVerifier(name, clock, self._changed, **offer) for name in names]
        self._links = {verifier.state.address: verifier for verifier in self.verifiers}

    def states(self) -> Sequence[VerifierState]:
        """Of all."""
        return [verifier.state for verifier in self.verifiers]

    def link(self, address: str) -> BookedVerifier:
        """One of them."""
        return self._links[address]

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Remember a listener."""
        self._listeners.append(on_change)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
