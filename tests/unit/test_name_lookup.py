"""Names are looked up in spite of a resolver that hangs, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from treeserve_wire import name_lookup
from treeserve_wire.name_lookup import NameLookup


class Resolver:
    """Answers question number i with 10.0.0.i, at once or, where that one hangs, when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.hanging: dict[int, threading.Event] = {}

    def hang(self, *questions: int) -> None:
        """Let these hang."""
        self.hanging = {number: threading.Event() for number in questions}

    def getaddrinfo(self, _host: str, port: int, **_: Any) -> list[Any]:
        """As socket's."""
        number = self.asked
        self.asked += 1
        if number in self.hanging:
            self.hanging[number].wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{number}", port))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(name_lookup, "_PATIENCE_S", 0.05)
    yield made
    for event in made.hanging.values():
        event.set()


async def test_a_question_that_hangs_holds_up_no_later_one(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver.hang(0)
    lookup = NameLookup("verifiers", 1)
    with pytest.raises(OSError, match="does not answer"):
        await lookup.ips()
    monkeypatch.setattr(name_lookup, "_PATIENCE_S", 30.0)
    assert await lookup.ips() == ["10.0.0.1"]
    resolver.hanging[0].set()  # its answer is older than the one that is known
    await asyncio.sleep(0.05)
    assert await lookup.ips() == ["10.0.0.2"]


async def test_a_late_answer_counts_where_no_newer_is_known(resolver: Resolver) -> None:
    resolver.hang(0, 1, 2, 3)
    lookup = NameLookup("verifiers", 1)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await lookup.ips()
    resolver.hanging[1].set()
    async with asyncio.timeout(20):
        while True:  # it has come by the third call, or the fourth on a busy machine
            with contextlib.suppress(TimeoutError):
                assert await lookup.ips() == ["10.0.0.1"]
                break


async def test_no_more_than_four_questions_hang(resolver: Resolver) -> None:
    resolver.hang(*range(9))
    lookup = NameLookup("verifiers", 1)
    for _ in range(8):
        with pytest.raises(TimeoutError):
            await lookup.ips()
    assert resolver.asked == 4


def test_an_event_loop_that_ends_does_not_wait_for_the_resolver(resolver: Resolver) -> None:
    resolver.hang(0)

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await NameLookup("verifiers", 1).ips()

    began = time.monotonic()
    asyncio.run(ask())
    assert time.monotonic() - began < 15.0  # the resolver hangs for 30 s
