"""transformers' `generate` in bfloat16, plain and with prompt lookup, both on one loaded model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version

from benchmarks.peers.peer import Reply, Settings
from benchmarks.peers.tasks import Request
from benchmarks.peers.worker import Worker, first_token_s

PLAIN, LOOKUP = "hf", "hf_lookup"


class HuggingFace:
    """A process that holds the model; batches are static and padded on the left."""

    systems: tuple[str, ...] = (PLAIN, LOOKUP)
    stays_up = True

    def __init__(self, settings: Settings) -> None:
        self.threads = settings.threads
        self.pid = 0
        self.command = ""
        self._settings = settings
        self._worker: Worker | None = None

    def missing(self) -> str | None:
        """It is among the project's own packages."""
        return None

    def version(self) -> str:
        """Of transformers and torch."""
        return f"transformers {version('transformers')}, torch {version('torch')}"

    def unsupported(self, system: str, batch: int) -> str | None:
        """Prompt lookup takes one sequence at a time."""
        return "transformers' prompt lookup runs at batch size 1 only" if system == LOOKUP and batch > 1 else None

    def start(self) -> float:
        """See `Peer.start`."""
        began = time.monotonic()
        arguments = (self._settings.folder, str(self.threads))
        environ = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        self._worker = Worker("benchmarks.peers.hugging_face_worker", arguments, environ)
        self.pid, self.command = self._worker.pid, self._worker.shown
        return first_token_s(self._worker, PLAIN, began)

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        """See `Peer.generate`."""
        assert self._worker is not None
        return self._worker.generate(system, requests, concurrency)

    def stop(self) -> None:
        """See `Peer.stop`."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None
