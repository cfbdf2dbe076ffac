"""Leases of the verifiers that routers are connected to, which tell outsiders who serves at present."""

from __future__ import annotations

from collections.abc import Mapping

from redis.asyncio import Redis

LEASE_TTL_S = 30.0


async def renew_leases(redis: Redis, addresses: Mapping[str, str]) -> None:
    """Renew the leases of connected verifiers, and ask the server for a sign of life in any case.

    Args:
        addresses: by verifier id, where it listens.
    """
    async with redis.pipeline(transaction=False) as pipe:
        pipe.ping()
        for verifier_id, address in addresses.items():
            pipe.set(worker_key(verifier_id), address, px=round(LEASE_TTL_S * 1000))
        await pipe.execute()


def worker_key(verifier_id: str) -> str:
    """Key of a verifier's lease; all leases share a slot."""
    return f"treeserve:{{workers}}:{verifier_id}"
