"""A bounded table whose entries expire: what one router knows by itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LocalTable(Generic[_K, _V]):
    """Entries by key; the one longest untouched goes first when the table is full.

    Args:
        ttl_s: how long an entry lives after it was put.
        max_entries: most entries.
        clock: seconds, monotonic.
    """

    def __init__(self, ttl_s: float, max_entries: int, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[_K, tuple[float, _V]] = OrderedDict()  # the next to expire first

    def get(self, key: _K) -> _V | None:
        """The entry, if it is there and has not expired."""
        expires_at, value = self._entries.get(key, (0.0, None))
        return value if value is not None and self._clock() < expires_at else None

    def put(self, key: _K, value: _V) -> None:
        """Set an entry and begin its time anew."""
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._ttl_s, value)
        while len(self._entries) > self._max_entries or self._oldest_expired():
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)

    def _oldest_expired(self) -> bool:
        return next(iter(self._entries.values()))[0] <= self._clock()
