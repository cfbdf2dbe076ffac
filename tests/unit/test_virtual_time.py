"""The clock of simulations: time passes only while everything waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from treeserve_simulator.virtual_time import StalledError, run_virtual


async def _note(log: list[tuple[float, str]], name: str, *naps_s: float) -> None:
    for nap_s in naps_s:
        await asyncio.sleep(nap_s)
        log.append((asyncio.get_running_loop().time(), name))


def test_hours_pass_in_order_and_take_no_time() -> None:
    async def main() -> list[tuple[float, str]]:
        log: list[tuple[float, str]] = []
        await asyncio.gather(_note(log, "a", 3600.0, 2.5), _note(log, "b", 3601.0, 0.5))
        return log

    began = time.perf_counter()
    assert run_virtual(main()) == [(3600.0, "a"), (3601.0, "b"), (3601.5, "b"), (3602.5, "a")]
    assert time.perf_counter() - began < 5.0


def test_a_timeout_is_reached_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 7.0


def test_waiting_for_what_nothing_brings_about_is_an_error_and_no_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError):
        run_virtual(main())


def test_what_is_meant_for_a_thread_is_done_at_once() -> None:
    async def main() -> tuple[int, float]:
        total = await asyncio.to_thread(sum, (1, 2, 3))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return total, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (6, 0.0)
