"""treeserve as `treeserve up` runs it: client, router, verifier and speculator are processes that speak gRPC."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.client import run_all
from benchmarks.peers.peer import PeerError, Reply, Settings
from benchmarks.peers.process import Program
from benchmarks.peers.tasks import FIRST, Request
from treeserve_client import AsyncClient, TreeserveClientError
from treeserve_verifier.config import default_threads

ON, OFF = "treeserve_on", "treeserve_off"
TENANT_HEADER = "x-treeserve-tenant"
# A request that names no tenant leaves nothing behind, in drafters or caches, that the next one could find.
FORGETFUL = f"router.tenant_header={TENANT_HEADER}"
# A class whose requests are made to wait when they come all at once, and not refused.
PATIENT = "router.default_service_class=interactive"


class Treeserve:
    """One cluster that serves with speculation and, asked so by a request, without.

    It forgets: the same prompts come with speculation and without, and the second would find prefix and answer known.

    Args:
        options: `NAME=VALUE` is an option of `treeserve up`, `ROLE.FIELD=VALUE` a setting of a service.
    """

    systems: tuple[str, ...] = (ON, OFF)
    stays_up = False

    def __init__(self, settings: Settings, dtype: str, options: Sequence[str] = ()) -> None:
        self._settings = settings
        self._options = (f"dtype={dtype}", FORGETFUL, PATIENT, *options)
        self.threads = int(verifier_setting(options, "threads", str(default_threads())))
        self.kv_dtype = verifier_setting(options, "kv_dtype", "auto")
        self.command = ""
        self.pid = 0
        self._program: Program | None = None
        self._runner: asyncio.Runner | None = None
        self._client: AsyncClient | None = None

    def missing(self) -> str | None:
        """It is the project itself."""
        return None

    def version(self) -> str:
        """The project's."""
        return f"treeserve {version('treeserve')}"

    def unsupported(self, system: str, batch: int) -> str | None:
        """Nothing is."""
        return None

    def start(self) -> float:
        """See `Peer.start`."""
        began = time.monotonic()
        arguments = up_arguments(self._settings.cache, self._settings.kv_tokens, self._options)
        self.command = " ".join(("treeserve", *arguments))
        self._program = Program((str(Path(sys.executable).with_name("treeserve")), *arguments), {}, piped=True)
        self.pid = self._program.pid
        address = self._program.read_line().split("grpc=")[1].split()[0]
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_connect(address))
        self.generate(OFF, [FIRST], 1)
        return time.monotonic() - began

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """See `Peer.generate`."""
        assert self._runner is not None and self._client is not None
        client, speculation = self._client, system == ON

        async def run_one(request: Request) -> Reply:
            began, first = time.monotonic(), 0.0
            stream = client.generate(
                token_ids=request.token_ids,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                ignore_eos=request.ignore_eos,
                speculation=speculation,
            )
            async with stream:
                async for _chunk in stream:
                    first = first or time.monotonic()
            ended, tokens = time.monotonic(), stream.result.token_ids
            return Reply(request.task, began, first, ended, len(tokens), tokens, stream.result.speculation.steps)

        try:
            return self._runner.run(run_all(requests, concurrency, run_one))
        except TreeserveClientError as error:
            raise PeerError(f"{system}: {error}") from error

    def stop(self) -> None:
        """See `Peer.stop`."""
        if self._client is not None and self._runner is not None:
            self._runner.run(self._client.close())
            self._runner.close()
        if self._program is not None:
            self._program.stop()
        self._program = self._client = self._runner = None


def up_arguments(cache: str, kv_tokens: int, options: Sequence[str]) -> list[str]:
    """Arguments of the `treeserve` command."""
    arguments = ["up", "--grpc-port=0", "--http-port=0", f"--cache-dir={cache}", f"--kv-tokens={kv_tokens}"]
    for option in options:
        name, _, value = option.partition("=")
        arguments.append(f"--settings={option}" if "." in name else f"--{name.replace('_', '-')}={value}")
    return arguments


def verifier_setting(options: Sequence[str], name: str, default: str) -> str:
    """A setting of the verifier under these options."""
    given = dict(option.split("=", 1) for option in options)
    return given.get(f"verifier.{name}", given.get(name, default))


async def _connect(address: str) -> AsyncClient:
    return AsyncClient(address)
