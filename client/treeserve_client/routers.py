"""The routers a client knows, and which of them to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from treeserve_client.errors import InvalidArgument

_Channel = TypeVar("_Channel")
_Stub = TypeVar("_Stub")


class Routers(Generic[_Channel, _Stub]):
    """Connections to one or more routers, any of which can go on with what another began.

    Calls go to one until it is found unavailable, then to the next, and so on round. Threads may share it.

    Args:
        addresses: one or more, separated by commas.

    Raises:
        InvalidArgument: if there is none.
    """

    def __init__(
        self, addresses: str, connect: Callable[[str], _Channel], make_stub: Callable[[_Channel], _Stub]
    ) -> None:
        names = [name for part in addresses.split(",") if (name := part.strip())]
        if not names:
            raise InvalidArgument.of("address", "names no router")
        self.channels = tuple(connect(name) for name in names)
        self._stubs = tuple(make_stub(channel) for channel in self.channels)
        self._current = 0

    def __len__(self) -> int:
        return len(self._stubs)

    @property
    def stub(self) -> _Stub:
        """Of the router to call now."""
        return self._stubs[self._current]

    def turn_away(self, stub: _Stub) -> None:
        """The router of this stub is unavailable: the next one is to be called, unless somebody turned away already."""
        if self._stubs[self._current] is stub:
            self._current = (self._current + 1) % len(self._stubs)
