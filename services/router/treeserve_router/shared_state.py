"""What a router shares with others through Redis, built from its configuration and run together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from treeserve_router.affinity import AffinityBook
from treeserve_router.config import RouterConfig
from treeserve_router.journal import Journal
from treeserve_router.leases import renew_leases
from treeserve_router.pool import VerifierPool
from treeserve_router.prefix_locations import PrefixLocations
from treeserve_router.redis_link import RedisLink
from treeserve_router.sessions import Sessions


class SharedState:
    """The connection and what goes through it. Without a Redis URL, what the router remembers by itself.

    Args:
        observe_s: takes the seconds each call to Redis took.
        clock: seconds, monotonic.

    Attributes:
        link: None without a Redis URL.
    """

    def __init__(
        self, config: RouterConfig, pool: VerifierPool, observe_s: Callable[[float], None], clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self.link = RedisLink(config.redis_url, observe_s, config.redis_timeout_s) if config.redis_url else None
        self.book = AffinityBook(
            Sessions(self.link, config.session_ttl_s, clock),
            PrefixLocations(self.link, config.prefix_ttl_s, clock),
            self._block_sizes,
        )
        self.journal = Journal(self.link, config.model_name, config.journal_ttl_s, config.journal_bytes, clock)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run as long as the router does."""
        if self.link is None:
            return []
        return [self.link.run_heartbeat(lambda redis: renew_leases(redis, self._leases())), self.journal.run()]

    async def close(self) -> None:
        """Write what is left to be written, and disconnect."""
        if self.link is not None:
            await self.journal.flush()
            await self.link.close()

    def _leases(self) -> dict[str, str]:
        return {state.verifier_id: state.address for state in self._pool.states()}

    def _block_sizes(self) -> dict[str, int]:
        return {state.verifier_id: state.block_size for state in self._pool.states() if state.block_size}
