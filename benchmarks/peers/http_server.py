"""A peer that serves HTTP: started, warmed with one token, and asked through `HttpClient`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.client import HttpClient, free_port, wait_for_health
from benchmarks.peers.peer import PeerError, Reply, Settings
from benchmarks.peers.process import Program
from benchmarks.peers.tasks import FIRST, Request


class HttpServer:
    """What llama.cpp's and vLLM's adapters share; they say how to start it, what to send and what comes back."""

    stays_up = False
    path = ""

    def __init__(self, settings: Settings, system: str) -> None:
        self.settings = settings
        self.systems: tuple[str, ...] = (system,)
        self.threads = settings.threads
        self.command = ""
        self.pid = 0
        self._program: Program | None = None
        self._client: HttpClient | None = None

    def arguments(self, port: int) -> list[str]:
        """Program and arguments."""
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        """Variables it needs."""
        return {}

    def body_of(self, request: Request) -> dict[str, Any]:
        """The JSON body of a request."""
        raise NotImplementedError

    def tokens_of(self, event: Mapping[str, Any]) -> int:
        """Output tokens as the last event tells them."""
        raise NotImplementedError

    def unsupported(self, system: str, batch: int) -> str | None:
        """Nothing is."""
        return None

    def start(self) -> float:
        """See `Peer.start`."""
        port, began = free_port(), time.monotonic()
        variables = "".join(f"{name}={value} " for name, value in self.environ().items())
        self.command = variables + " ".join(self.arguments(port)).replace(str(port), "PORT")
        self._program = Program(self.arguments(port), self.environ())
        self.pid = self._program.pid
        wait_for_health(self._program, port)
        self._client = HttpClient(port, self.path, self.body_of, self.tokens_of)
        self.generate(self.systems[0], [FIRST], 1)
        return time.monotonic() - began

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """See `Peer.generate`."""
        assert self._client is not None and self._program is not None
        try:
            return self._client.generate(requests, concurrency)
        except PeerError:
            self._program.check_alive()  # whose end explains more than a broken connection
            raise

    def stop(self) -> None:
        """See `Peer.stop`."""
        if self._client is not None:
            self._client.close()
        if self._program is not None:
            self._program.stop()
        self._client = self._program = None
