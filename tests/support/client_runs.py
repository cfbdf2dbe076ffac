"""Generations run to their end, with either client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import treeserve_client as sdk

Run = Callable[..., tuple[list[sdk.Chunk], Any]]


def run_sync(address: str, **params: Any) -> tuple[list[sdk.Chunk], Any]:
    """Its chunks, and its stream."""
    with sdk.Client(address) as client:
        stream = client.generate(**params)
        return list(stream), stream


def run_async(address: str, **params: Any) -> tuple[list[sdk.Chunk], Any]:
    """The same through asyncio."""

    async def run() -> tuple[list[sdk.Chunk], Any]:
        async with sdk.AsyncClient(address) as client:
            stream = client.generate(**params)
            return [c async for c in stream], stream

    return asyncio.run(run())
