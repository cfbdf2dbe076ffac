"""transformers' `generate` in bfloat16, plain and with prompt lookup, both on one loaded model."""

from __future__ import annotations

from importlib.metadata import version

from benchmarks.peers.peer import Settings
from benchmarks.peers.worker import WorkerPeer

PLAIN, LOOKUP = "hf", "hf_lookup"


class HuggingFace(WorkerPeer):
    """A process that holds the model; batches are static and padded on the left."""

    systems: tuple[str, ...] = (PLAIN, LOOKUP)
    stays_up = True

    def __init__(self, settings: Settings) -> None:
        arguments = (settings.folder, str(settings.threads))
        environ = {"OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1"}
        super().__init__("benchmarks.peers.hugging_face_worker", arguments, settings.threads, environ)

    def version(self) -> str:
        """Of transformers and torch."""
        return f"transformers {version('transformers')}, torch {version('torch')}"

    def unsupported(self, system: str, batch: int) -> str | None:
        """Prompt lookup takes one sequence at a time."""
        return "transformers' prompt lookup runs at batch size 1 only" if system == LOOKUP and batch > 1 else None
