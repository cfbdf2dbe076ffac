"""Peers that are Python programs of this package and speak JSON lines over their standard input and output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.peer import Reply
from benchmarks.peers.process import Program
from benchmarks.peers.tasks import FIRST, Request

Generate = Callable[[str, list[Request], int], list[Reply]]


class WorkerPeer:
    """The parent's side: starts a module and passes requests on. Of a `Peer` it lacks what systems there are.

    Args:
        module: run with ``python -m``; it calls `serve`.
        arguments: of the module.
        threads: of its computation.
        environ: added to the environment.
    """

    systems: tuple[str, ...] = ()

    def __init__(self, module: str, arguments: Sequence[str], threads: int, environ: Mapping[str, str]) -> None:
        self.threads = threads
        self.pid = 0
        self.command = ""
        self._arguments = ("-m", module, *arguments)
        self._environ = environ
        self._program: Program | None = None

    def missing(self) -> str | None:
        """It is the project itself, or among its own packages."""
        return None

    def start(self) -> float:
        """See `Peer.start`."""
        began = time.monotonic()
        self._program = Program((sys.executable, *self._arguments), self._environ, piped=True)
        self.pid, self.command = self._program.pid, " ".join(("python", *self._arguments))
        self.generate(self.systems[0], [FIRST], 1)
        return time.monotonic() - began

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """See `Peer.generate`."""
        assert self._program is not None
        job = {"system": system, "requests": [asdict(r) for r in requests], "concurrency": concurrency}
        self._program.check_alive()
        print(json.dumps(job), file=self._program.stdin, flush=True)
        return [Reply(**reply) for reply in json.loads(self._program.read_line())]

    def stop(self) -> None:
        """See `Peer.stop`."""
        if self._program is not None:
            self._program.stop()
        self._program = None


def serve(generate: Generate) -> None:
    """The child's side: answer jobs until the input ends. Whatever else prints goes to standard error."""
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        requests = [Request(r["task"], tuple(r["token_ids"]), r["max_tokens"]) for r in job["requests"]]
        done = generate(job["system"], requests, job["concurrency"])
        print(json.dumps([asdict(reply) for reply in done]), file=replies, flush=True)
