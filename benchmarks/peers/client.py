"""The client side of the servers: keeps `concurrency` requests running, and reads token streams over HTTP cheaply."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from benchmarks.peers.peer import PeerError, Reply
from benchmarks.peers.process import Program
from benchmarks.peers.tasks import Request

HOST = "127.0.0.1"
_POLL_S = 0.02
_START_TIMEOUT_S = 600.0


async def run_all(
    requests: Sequence[Request], concurrency: int, run_one: Callable[[Request], Awaitable[Reply]]
) -> list[Reply]:
    """Run requests in order, the next one as soon as one of the `concurrency` running ones ends."""
    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for i, request in waiting:
            replies[i] = await run_one(request)

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
    return [replies[i] for i in range(len(requests))]


class HttpClient:
    """Streams completions from an HTTP server that sends server-sent events.

    Only the last event is parsed, so that the client takes little of the cores that it shares with the server.

    Args:
        path: of the completion endpoint.
        body_of: the JSON body of a request.
        tokens_of: the number of output tokens, from the last event.
    """

    def __init__(
        self,
        port: int,
        path: str,
        body_of: Callable[[Request], dict[str, Any]],
        tokens_of: Callable[[Mapping[str, Any]], int],
    ) -> None:
        self._url = f"http://{HOST}:{port}{path}"
        self._body_of = body_of
        self._tokens_of = tokens_of
        self._runner = asyncio.Runner()
        # A connection for each request: one kept for the next may be closed by the server at that moment.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    def generate(self, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """Run requests. Raises PeerError."""
        try:
            return self._runner.run(run_all(requests, concurrency, self._run_one))
        except httpx.HTTPError as error:
            raise PeerError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def _run_one(self, request: Request) -> Reply:
        began = time.monotonic()
        first = 0.0
        received = b""
        async with self._client.stream("POST", self._url, json=self._body_of(request)) as response:
            async for part in response.aiter_raw():
                first = first or time.monotonic()
                received += part
        ended = time.monotonic()
        if response.status_code != httpx.codes.OK:
            raise PeerError(f"status {response.status_code}: {received[:500].decode(errors='replace')}")
        return Reply(request.task, began, first, ended, self._tokens_of(last_event(received)))


def last_event(stream: bytes) -> dict[str, Any]:
    """The last JSON event of a stream of server-sent events. Raises PeerError if there is none."""
    for line in reversed(stream.splitlines()):
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return event
    raise PeerError(f"no event in {stream[:500]!r}")


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for_health(program: Program, port: int) -> None:
    """Wait until GET /health says 200. Raises PeerError if the program ends or takes too long."""
    until = time.monotonic() + _START_TIMEOUT_S
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < until:
            program.check_alive()
            try:
                if client.get(f"http://{HOST}:{port}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
    raise PeerError(f"not healthy after {_START_TIMEOUT_S:g} s")
