"""What the benchmark asks of a system under test, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.peers.tasks import Request


@dataclass(frozen=True)
class Settings:
    """What all systems are given.

    Attributes:
        gguf, folder: the same weights, as llama.cpp reads them and as the others do (dequantised).
        cache: where systems keep what they compile or convert.
        tools: holds the peers' virtual environments.
        threads: of the computation, for each system but treeserve.
        kv_tokens: room for keys and values, in tokens.
        max_batch: highest concurrency.
    """

    gguf: str
    folder: str
    cache: str
    tools: str
    threads: int
    kv_tokens: int
    max_batch: int


@dataclass(frozen=True)
class Reply:
    """One finished generation. Times are those of `time.monotonic`, which all processes of a machine share.

    Attributes:
        num_tokens: output tokens.
        token_ids: the tokens, where the system tells them.
        steps: forward passes that gave them, where the system tells it; 0 if not.
    """

    task: str
    began: float
    first_token: float
    ended: float
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    steps: int = 0


class PeerError(RuntimeError):
    """A system did not start, or did not do what was asked; the message says why."""


class Peer(Protocol):
    """One process tree that serves one or more systems (modes), among them those with speculation and without.

    Attributes:
        systems: names in the report.
        stays_up: dear to start: it is suspended between its turns instead of stopped.
        pid: root of its process tree while it is up.
        command: how it was started last, without the machine's paths.
        threads: of its computation.
    """

    systems: tuple[str, ...]
    stays_up: bool
    pid: int
    command: str
    threads: int

    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""

    def version(self) -> str:
        """Names and versions of what computes."""

    def unsupported(self, system: str, batch: int) -> str | None:
        """Why it cannot run a system at this batch size; None if it can."""

    def start(self) -> float:
        """Start it; returns the seconds from the command to the first token. Raises PeerError."""

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """Run requests, `concurrency` at a time, each to its full length. Raises PeerError."""

    def stop(self) -> None:
        """Stop it; harmless if it is not up."""
