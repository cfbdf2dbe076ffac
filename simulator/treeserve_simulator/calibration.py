"""Measures a machine model's cost table on a real engine, in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treeserve_engine.batch import SequenceRows
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_engine.runner import ModelRunner
from treeserve_simulator.costs import MachineModel, StepCosts
from treeserve_simulator.quiet import warnings_only
from treeserve_verifier.config import VerifierConfig, default_threads
from treeserve_verifier.main import load_engine
from treeserve_verifier.timing import add_filled

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
CONTEXTS = (0, 256, 1024)
_SEQUENCES = 8
_TIMES = 5


def calibrate(
    model: Path, cache_dir: Path, threads: int | None = None, tell: Callable[[str], None] = lambda line: None
) -> MachineModel:
    """A machine model of this machine, with the engine that a verifier would run. Overheads are the stated ones.

    Args:
        model: Hugging Face folder or .gguf file.
        threads: of the forward pass; by default half the cores, but two.
        tell: takes lines about what is going on.

    Raises:
        TreeserveError: if the model cannot be served.
    """
    folder = prepare_checkpoint(model, cache_dir, tell)
    config = VerifierConfig(folder, model.stem, cache_dir=cache_dir, threads=threads or default_threads())
    with warnings_only():
        engine = load_engine(config)
    try:
        # A single thread's own time knows nothing of what else the machine does; several have none together.
        clock_s = time.thread_time if config.threads == 1 else time.perf_counter
        costs = measure_costs(engine.runner, engine.thread, clock_s)
    finally:
        engine.thread.shutdown()
    origin = f"measured: {config.model_name}, {engine.precision.dtype}, threads {config.threads}"
    return MachineModel(origin, costs)


def measure_costs(
    runner: ModelRunner,
    thread: ThreadPoolExecutor,
    clock_s: Callable[[], float] = time.perf_counter,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
) -> StepCosts:
    """Time forward passes of a loaded engine that serves nobody: the fastest of a few for each size.

    Args:
        thread: the one that the model was loaded in.
    """
    bench = _Bench(runner, thread, clock_s)
    longest = max(contexts)
    single = {context: bench.passes([context], rows) for context in contexts}
    logits = bench.passes([min(contexts)], rows, all_logits=True)
    base = single[min(contexts)]
    near, far = (bench.spread(context) for context in (min(contexts), longest))
    per_sequence, per_position = max(0.0, near), 0.0
    if longest > min(contexts):
        per_position = max(0.0, far - near) / (longest - min(contexts))
    return StepCosts(
        tuple(rows),
        tuple(contexts),
        tuple(tuple(round(single[context][n], 3) for context in contexts) for n in rows),
        _rising([logits[n] - base[n] if n > 1 else 0.0 for n in rows]),
        round(per_sequence, 4),
        round(per_position, 7),
    )


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """More logits never take less: what is less was disturbed less."""
    most = 0.0
    return tuple(most := max(most, round(value, 3)) for value in values)


class _Bench:
    """Timed passes over throwaway sequences."""

    def __init__(self, runner: ModelRunner, thread: ThreadPoolExecutor, clock_s: Callable[[], float]) -> None:
        self._runner = runner
        self._thread = thread
        self._clock_s = clock_s

    def passes(self, contexts: Sequence[int], rows: Sequence[int], *, all_logits: bool = False) -> dict[int, float]:
        """Milliseconds of passes over `rows` rows of each of the sequences that have these contexts."""
        blocks = self._runner.blocks
        seq_ids = range(-len(contexts), 0)
        for seq_id, context in zip(seq_ids, contexts, strict=True):
            add_filled(blocks, seq_id, context)
        fastest = dict.fromkeys(rows, math.inf)
        for _ in range(_TIMES):  # all sizes in each round: a disturbance spoils a round, not a size
            for n in rows:
                fastest[n] = min(fastest[n], self._time_ms(seq_ids, contexts, n, all_logits))
        for seq_id in seq_ids:
            blocks.free(seq_id)
        return fastest

    def spread(self, context: int) -> float:
        """What each sequence after the first adds: several of one row, beside one of as many."""
        apart = self.passes([context] * _SEQUENCES, [1])[1]
        together = self.passes([context], [_SEQUENCES], all_logits=True)[_SEQUENCES]
        return (apart - together) / (_SEQUENCES - 1)

    def _time_ms(self, seq_ids: Sequence[int], contexts: Sequence[int], rows: int, all_logits: bool) -> float:
        for seq_id in seq_ids:
            self._runner.blocks.reserve(seq_id, rows)
        wanted = range(rows) if all_logits else (rows - 1,)
        batch = [SequenceRows.from_chain(seq_id, [1] * rows, wanted) for seq_id in seq_ids]
        elapsed_ms = self._forward(batch)
        for seq_id in seq_ids:
            self._runner.rollback(seq_id)
        return elapsed_ms

    def _forward(self, batch: Sequence[SequenceRows]) -> float:
        def run() -> float:
            began = self._clock_s()
            self._runner.forward(batch)
            return 1e3 * (self._clock_s() - began)

        return self._thread.submit(run).result()
