"""Peers from fixed addresses and from names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.discovery import PeerWatch


async def test_fixed_addresses_are_taken_as_they_are_and_once() -> None:
    updates: list[tuple[str, ...]] = []
    await PeerWatch(["127.0.0.1:1", "unix:/tmp/x", "127.0.0.1:1"]).run(updates.append)
    assert updates == [("127.0.0.1:1", "unix:/tmp/x")]


async def test_a_name_is_followed_and_survives_a_failing_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | OSError] = [["10.0.0.1"], OSError("down"), ["10.0.0.2", "fd00::1"]]

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("verifiers", 50052)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in answer]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    updates: list[tuple[str, ...]] = []
    done = asyncio.Event()

    def update(peers: tuple[str, ...]) -> None:
        updates.append(peers)
        if len(updates) == 2:
            done.set()

    task = asyncio.create_task(PeerWatch(["dns://verifiers:50052"], interval_s=0.001).run(update))
    await asyncio.wait_for(done.wait(), 5)
    task.cancel()
    assert updates == [("10.0.0.1:50052",), ("10.0.0.2:50052", "[fd00::1]:50052")]


@pytest.mark.parametrize("address", ["dns://verifiers", "dns://verifiers:", "dns://verifiers:grpc"])
def test_a_name_needs_a_port(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="no port"):
        PeerWatch([address])
