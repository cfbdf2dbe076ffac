"""What finds the peers behind one configured address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class PeerSource(Protocol):
    """Finds peers, which may come and go, and knows when to look."""

    def found(self) -> AsyncIterator[tuple[str, ...]]:
        """All peers, as soon as they are known and whenever they may have changed; nothing while nobody knows them."""


def peer_address(ip: str, port: int) -> str:
    """The address of a port at an IPv4 or IPv6 address."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
