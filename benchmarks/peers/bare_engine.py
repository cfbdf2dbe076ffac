"""The engine without services: one sequence, forward and `next_token` in a loop. What the gRPC system is held against.

python -m benchmarks.peers.bare_engine FOLDER CACHE DTYPE KV_DTYPE THREADS
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.peer import Reply, Settings
from benchmarks.peers.tasks import Request
from benchmarks.peers.worker import WorkerPeer, serve
from treeserve_core.sampling import SamplingParams
from treeserve_engine.batch import SequenceRows
from treeserve_engine.loading import load_model
from treeserve_engine.next_token import next_token
from treeserve_engine.processors import TokenContext
from treeserve_engine.runner import ModelRunner

SYSTEM = "bare_engine"
_BLOCK_SIZE = 16
_SEQUENCE = 0


class BareEngine(WorkerPeer):
    """The loop as a peer of the benchmark, in a process of its own."""

    systems: tuple[str, ...] = (SYSTEM,)
    stays_up = False

    def __init__(self, settings: Settings, dtype: str, kv_dtype: str, threads: int) -> None:
        arguments = (settings.folder, settings.cache, dtype, kv_dtype, str(threads))
        super().__init__("benchmarks.peers.bare_engine", arguments, threads, {})

    def version(self) -> str:
        """The project's."""
        return f"treeserve {version('treeserve')}"

    def unsupported(self, system: str, batch: int) -> str | None:
        """It runs one sequence."""
        return "runs one sequence" if batch > 1 else None


class _Loop:
    def __init__(self, runner: ModelRunner, prefill_rows: int) -> None:
        self._runner = runner
        self._prefill_rows = prefill_rows

    def generate(self, _system: str, requests: list[Request], _concurrency: int) -> list[Reply]:
        return [self._generate(request) for request in requests]

    def _generate(self, request: Request) -> Reply:
        began, first = time.monotonic(), 0.0
        params, context = SamplingParams(), TokenContext(request.token_ids)
        output: list[int] = []
        self._runner.blocks.add(_SEQUENCE)
        pending = list(request.token_ids)
        while len(output) < request.max_tokens:
            chunk, pending = pending[: self._prefill_rows], pending[self._prefill_rows :]
            rows = SequenceRows.from_chain(_SEQUENCE, chunk, () if pending else (len(chunk) - 1,))
            self._runner.blocks.reserve(_SEQUENCE, len(chunk))
            (logits,) = self._runner.forward([rows])
            self._runner.commit(_SEQUENCE, range(len(chunk)))
            if not pending:
                position = len(request.token_ids) + len(output)
                output.append(next_token(logits[0], params, context, position))
                context.push(output[-1])
                pending = output[-1:]
                first = first or time.monotonic()
        self._runner.blocks.free(_SEQUENCE)
        ended = time.monotonic()
        return Reply(request.task, began, first, ended, len(output), tuple(output), len(output))


def _main(folder: str, cache: str, dtype: str, kv_dtype: str, threads: str) -> None:
    model = load_model(
        Path(folder), dtype=dtype, device="cpu", threads=int(threads), kv_dtype=kv_dtype, cache_dir=Path(cache)
    )
    serve(_Loop(ModelRunner(model, 4096 // _BLOCK_SIZE, _BLOCK_SIZE), prefill_rows=256).generate)


if __name__ == "__main__":
    _main(*sys.argv[1:])
