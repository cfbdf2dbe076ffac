"""Looks at the load every second, and swaps notes with other routers, so that hints for autoscalers are at hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from treeserve_router.autoscaling import Autoscaler, Demand
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.pool import VerifierPool
from treeserve_router.queue import RequestQueue
from treeserve_router.shared_demand import LEASE_S, SharedDemand

_INTERVAL_S = 1.0
_LOOKS_PER_SWAP = 5


class LoadWatch:
    """Feeds an autoscaler.

    Args:
        clock: seconds, monotonic.
        shared: None if routers share nothing.
    """

    def __init__(
        self,
        autoscaler: Autoscaler,
        pool: VerifierPool,
        dispatcher: Dispatcher,
        queue: RequestQueue,
        clock: Callable[[], float],
        shared: SharedDemand | None = None,
    ) -> None:
        self._autoscaler = autoscaler
        self._pool = pool
        self._dispatcher = dispatcher
        self._queue = queue
        self._clock = clock
        self._shared = shared
        self._heard_at = float("-inf")

    async def run(self) -> None:
        """Look until cancelled."""
        looks = 0
        while True:
            dispatcher = self._dispatcher
            self._autoscaler.observe(self._pool.states(), dispatcher.offered, dispatcher.begun, len(self._queue))
            if self._shared is not None and looks % _LOOKS_PER_SWAP == 0:
                await self._swap(self._shared)
            looks += 1
            await asyncio.sleep(_INTERVAL_S)

    async def _swap(self, shared: SharedDemand) -> None:
        """Where Redis does not answer, the others' last notes hold for as long as their lease."""
        others = await shared.swap(self._autoscaler.demand)
        if others is not None:
            self._heard_at = self._clock()
        elif self._clock() - self._heard_at <= LEASE_S:
            return
        self._autoscaler.heard(others or Demand())
