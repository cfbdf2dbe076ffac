"""What sequences leave behind for later ones: each tenant's for itself, all of it bounded together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

_Item = TypeVar("_Item", contravariant=True)
_M = TypeVar("_M", bound="Memory[Any]")


class Memory(Protocol[_Item]):
    """What is known of one tenant."""

    @property
    def size(self) -> int:
        """How much that is; 0 if nothing."""

    def add(self, item: _Item) -> None:
        """Remember something."""

    def forget_oldest(self) -> None:
        """Forget what was added longest ago. Only called if there is something."""


class TenantMemories(Generic[_M]):
    """A memory for each tenant. No call can reach another tenant's, and none is kept for a tenant without a label.

    Args:
        make: an empty memory.
        max_size: bound of all sizes together: beyond it, the tenant that was heard of longest ago forgets first.
    """

    def __init__(self, make: Callable[[], _M], max_size: int) -> None:
        self._make = make
        self._max_size = max_size
        self._memories: OrderedDict[str, _M] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Of all memories together."""
        return self._size

    def __len__(self) -> int:
        return len(self._memories)

    def find(self, tenant: str) -> _M | None:
        """The tenant's memory; None if it has none."""
        memory = self._memories.get(tenant)
        if memory is not None:
            self._memories.move_to_end(tenant)
        return memory

    def add(self, tenant: str, item: Any) -> None:
        """Add to the tenant's memory, and forget elsewhere what it takes."""
        if not tenant:
            return
        memory = self.find(tenant)
        if memory is None:
            memory = self._memories[tenant] = self._make()
        self._size -= memory.size
        memory.add(item)
        self._size += memory.size
        while self._size > self._max_size:
            self._forget()

    def _forget(self) -> None:
        tenant, memory = next(iter(self._memories.items()))
        self._size -= memory.size
        memory.forget_oldest()
        self._size += memory.size
        if memory.size == 0:
            del self._memories[tenant]
