"""Running things side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Run all side by side until one of them ends, and cancel the others. Raises what the one that ended raised."""
    tasks = [asyncio.create_task(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
