"""How a generation ends before its time: closed, cancelled, or past its deadline, with either client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.client_runs import Run
from support.fake_router import TOKENS, FakeRouter, chunk, finished

import treeserve_client as sdk


def hang(router: FakeRouter) -> Callable[[Any], None]:
    return lambda _context: None if router.cancelled.wait(20) else pytest.fail("never cancelled")


def test_close_cancels_on_the_server(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    with sdk.Client(address) as client:
        with client.generate(prompt="p") as stream:
            assert next(stream).token_ids == (1,)
            with pytest.raises(RuntimeError, match="not finished"):
                _ = stream.result
        assert router.cancelled.wait(5)
        assert list(stream) == []


def test_close_from_another_thread_ends_the_iteration(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    with sdk.Client(address) as client:
        stream = client.generate(prompt="p")
        timer = threading.Timer(0.1, stream.close)
        timer.start()
        assert [c.token_ids for c in stream] == [(1,)]
        timer.join()
    assert router.cancelled.wait(5)


async def test_async_close_cancels_on_the_server(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    async with sdk.AsyncClient(address) as client:
        async with client.generate(prompt="p") as stream:
            assert (await anext(stream)).token_ids == (1,)
        assert await asyncio.to_thread(router.cancelled.wait, 5)
        assert [c async for c in stream] == []


async def test_async_close_from_another_task_ends_the_iteration(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    async with sdk.AsyncClient(address) as client:
        stream = client.generate(prompt="p")
        asyncio.get_running_loop().call_later(0.1, stream.close)
        assert [c.token_ids async for c in stream] == [(1,)]


async def test_closing_the_client_ends_its_streams_and_cancels_no_task(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    client = sdk.AsyncClient(address)
    stream = client.generate(prompt="p")
    assert (await anext(stream)).token_ids == (1,)
    closing = asyncio.create_task(client.close())
    with pytest.raises(sdk.Cancelled):
        await anext(stream)
    await closing


async def test_cancelling_the_reading_task_cancels_on_the_server(router: FakeRouter, address: str) -> None:
    router.play(chunk(0, [1]), hang(router))
    reached = asyncio.Event()

    async def read(stream: AsyncIterator[sdk.Chunk]) -> None:
        async for _chunk in stream:
            reached.set()

    async with sdk.AsyncClient(address) as client:
        task = asyncio.create_task(read(client.generate(prompt="p")))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancelled.wait, 5)


@pytest.mark.parametrize("deadline_s", [1e12, float("inf")])
def test_a_deadline_beyond_all_time_is_none(router: FakeRouter, run: Run, deadline_s: float) -> None:
    router.play(chunk(0, TOKENS), finished())
    _, stream = run(prompt="p", deadline_s=deadline_s)
    assert stream.result.token_ids == tuple(TOKENS)


def test_the_deadline_ends_a_hanging_stream(router: FakeRouter, run: Run) -> None:
    router.play(chunk(0, [1]), hang(router))
    with pytest.raises(sdk.DeadlineExceeded):
        run(prompt="p", deadline_s=0.3)
    assert router.cancelled.wait(5)
