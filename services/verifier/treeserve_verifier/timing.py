"""Times forward passes at start-up, for the cost model."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

from treeserve_engine.batch import SequenceRows
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.runner import ModelRunner


def add_filled(blocks: BlockManager, seq_id: int, context: int) -> None:
    """A sequence to time passes of, with so many KV positions. Whatever lies there: it takes no longer for that."""
    blocks.add(seq_id)
    if context:
        blocks.reserve(seq_id, context)
        blocks.commit(seq_id, range(context))


def forward_ms(runner: ModelRunner, rows: int) -> float:
    """Duration of a forward pass over a fresh chain of `rows` tokens with logits for all of them, milliseconds."""
    return _time_ms(runner, rows, 0, range(rows))


def prefill_ms(runner: ModelRunner, rows: int, context: int) -> float:
    """Duration of a forward pass over `rows` tokens after `context` others, without logits, milliseconds."""
    return _time_ms(runner, rows, context, ())


def _time_ms(runner: ModelRunner, rows: int, context: int, logits_rows: SequenceOf[int]) -> float:
    blocks, seq_id = runner.blocks, -1
    add_filled(blocks, seq_id, context)
    blocks.reserve(seq_id, rows)
    start = time.perf_counter()
    runner.forward([SequenceRows.from_chain(seq_id, [0] * rows, logits_rows)])
    elapsed = time.perf_counter() - start
    blocks.rollback(seq_id)
    blocks.free(seq_id)
    return elapsed * 1e3
