"""Waiting for what has no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for a condition of this process. Raises TimeoutError if it does not come about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.002)
