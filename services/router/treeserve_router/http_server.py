"""Serves an ASGI application inside the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette


class HttpServer:
    """Uvicorn inside the caller's event loop; signals stay with the caller.

    Args:
        address: "host:port"; port 0 picks one.
        drain_s: time running requests get to end once it stops.
        tls: speaks HTTPS by this; None for HTTP.
    """

    def __init__(self, app: Starlette, address: str, drain_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        config.load()
        config.ssl = tls
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and serve; returns the bound address. Raises OSError if it cannot be bound."""
        host, _, port = self._address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return f"{host}:{listener.getsockname()[1]}"

    async def drain(self) -> None:
        """Refuse new requests, let running ones end, and stop."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield
