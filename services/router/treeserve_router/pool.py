"""The verifiers this router keeps links to, and what they can serve together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treeserve_core.identity import ModelIdentity
from treeserve_router.placement import VerifierState
from treeserve_router.verifier_link import VerifierLink


@dataclass(frozen=True)
class ServedModel:
    """The model as its connected verifiers serve it.

    Attributes:
        max_context_tokens: longest prompt plus output of any verifier.
        verifiers: verifiers that serve it now.
        speculators: those of the verifier that has the fewest.
        dtype: element type of the weights.
    """

    identity: ModelIdentity
    max_context_tokens: int
    verifiers: int
    dtype: str
    speculators: int


class VerifierPool:
    """Links by address.

    Args:
        make_link: builds a link to an address; its second argument is to be called when the link changes.
    """

    def __init__(self, make_link: Callable[[str, Callable[[], None]], VerifierLink]) -> None:
        self._make_link = make_link
        self._links: dict[str, VerifierLink] = {}
        self._retiring: dict[str, VerifierLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._connected = asyncio.Event()
        self._max_context_tokens = 0

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever a verifier comes, goes, or reports another load."""
        self._listeners.append(on_change)

    def update(self, addresses: Iterable[str]) -> None:
        """Keep links to exactly these addresses. A link that is no longer wanted ends with its last sequence."""
        wanted = set(addresses)
        for address in sorted(wanted - self._links.keys()):
            retiring = self._retiring.pop(address, None)
            self._links[address] = self._start(address) if retiring is None else retiring
        for address in self._links.keys() - wanted:
            self._retiring[address] = self._links.pop(address)
        self._changed()

    def states(self) -> list[VerifierState]:
        """The verifiers that are connected and wanted."""
        return [state for link in self._links.values() if (state := link.state) is not None]

    def link(self, address: str) -> VerifierLink:
        """The link to a wanted address. Raises KeyError for another."""
        return self._links[address]

    @property
    def is_serving(self) -> bool:
        """Whether any verifier can take work, now or once it has room."""
        return self._connected.is_set()

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output of any connected verifier, or of the last ones; 0 before the first."""
        return self._max_context_tokens

    async def wait_serving(self) -> None:
        """Wait until any verifier can take work."""
        await self._connected.wait()

    def served_model(self) -> ServedModel | None:
        """The model, or None while no verifier serves it."""
        offers = [link.offer for link in self._links.values() if link.offer is not None]
        if not offers:
            return None
        return ServedModel(
            identity=offers[0].model,
            max_context_tokens=max(offer.max_context_tokens for offer in offers),
            verifiers=len(offers),
            dtype=offers[0].dtype,
            speculators=min(state.speculators for state in self.states()),
        )

    async def close(self) -> None:
        """Break all links."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, address: str) -> VerifierLink:
        link = self._make_link(address, self._changed)
        self._tasks[address] = asyncio.create_task(link.run(), name=f"verifier {address}")
        return link

    def _changed(self) -> None:
        for address in [address for address, link in self._retiring.items() if link.is_idle]:
            del self._retiring[address]
            self._tasks.pop(address).cancel()
        states = [state for state in self.states() if not state.draining]
        if states:
            self._max_context_tokens = max(state.max_context_tokens for state in states)
            self._connected.set()
        else:
            self._connected.clear()
        for listener in self._listeners:
            listener()
