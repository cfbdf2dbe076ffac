"""A peer that is a Python program of this package and speaks JSON lines over its standard input and output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.peer import Reply
from benchmarks.peers.process import Program
from benchmarks.peers.tasks import Request

Generate = Callable[[str, list[Request], int], list[Reply]]


class Worker:
    """The parent's side: starts the module and passes requests on.

    Args:
        module: run with ``python -m``; it calls `serve`.
        arguments: of the module.
        environ: added to the environment.
    """

    def __init__(self, module: str, arguments: Sequence[str], environ: dict[str, str]) -> None:
        self.shown = " ".join(("python", "-m", module, *arguments))
        self._program = Program((sys.executable, "-m", module, *arguments), environ, piped=True)
        self.pid = self._program.pid

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """Run requests there. Raises PeerError if it ended."""
        job = {"system": system, "requests": [asdict(r) for r in requests], "concurrency": concurrency}
        self._program.check_alive()
        print(json.dumps(job), file=self._program.stdin, flush=True)
        return [Reply(**reply) for reply in json.loads(self._program.read_line())]

    def stop(self) -> None:
        """End it."""
        self._program.stop()


def serve(generate: Generate) -> None:
    """The child's side: answer jobs until the input ends. Whatever else prints goes to standard error."""
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        requests = [Request(r["task"], tuple(r["token_ids"]), r["max_tokens"]) for r in job["requests"]]
        done = generate(job["system"], requests, job["concurrency"])
        print(json.dumps([asdict(reply) for reply in done]), file=replies, flush=True)


def first_token_s(worker: Worker, system: str, began: float) -> float:
    """Generate one token; returns the seconds since `began`, when the worker was started."""
    worker.generate(system, [Request("first", (1, 2, 3, 4), 1)], 1)
    return time.monotonic() - began
