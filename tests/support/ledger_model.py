"""A model whose KV is one number per position: the hash of all tokens up to it. Anything wrong in the cache shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from treeserve_engine.batch import ForwardBatch

_MASK = (1 << 64) - 1
_LOGITS = 4


def _mixed(a: int, b: int) -> int:
    x = (a * 0x9E3779B97F4A7C15 + b + 1) & _MASK
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 29)


def ledger(tokens: Sequence[int]) -> list[int]:
    """The KV of each of these positions."""
    numbers = [0]
    for token in tokens:
        numbers.append(_mixed(numbers[-1], token))
    return numbers[1:]


def ledger_logits(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The logits after the last of these tokens: they depend on the KV of every position."""
    return _logits(ledger(tokens))


def _logits(numbers: Sequence[int]) -> npt.NDArray[np.float32]:
    seen = 0
    for number in numbers:
        seen = _mixed(seen, number)
    return np.array([(seen >> (16 * i)) & 0xFFFF for i in range(_LOGITS)], dtype=np.float32)


class LedgerKv:
    """What `interface.Kv` asks for."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.numbers = np.full(num_blocks * block_size, _MASK, dtype=np.uint64)
        self.block_size = block_size
        self.nbytes = self.numbers.nbytes
        self.block_nbytes = 8 * block_size

    def move(self, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]) -> None:
        for a, b in zip(src, dst, strict=True):
            self.numbers[b] = self.numbers[a]

    def save(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        data[:] = self.block(block).view(np.uint8)

    def load(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        self.block(block)[:] = data.view(np.uint64)

    def block(self, block: int) -> npt.NDArray[np.uint64]:
        return self.numbers[block * self.block_size : (block + 1) * self.block_size]


@dataclass
class LedgerModel:
    """Computes each row from what the cache holds, and nothing else.

    Attributes:
        before_forward: called with the cache and the batch when a pass begins.
    """

    before_forward: Callable[[LedgerKv, ForwardBatch], None] = lambda kv, batch: None
    passes: int = 0
    rows: int = 0
    config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(vocab_size=_LOGITS, max_position_embeddings=1 << 20)
    )

    def new_kv(self, num_blocks: int, block_size: int) -> LedgerKv:
        return LedgerKv(num_blocks, block_size)

    def forward(self, batch: ForwardBatch, kv: LedgerKv) -> npt.NDArray[np.float32]:
        self.before_forward(kv, batch)
        self.passes += 1
        self.rows += len(batch.input_ids)
        logits: dict[int, npt.NDArray[np.float32]] = {}
        for s, context_len in enumerate(batch.context_lens):
            slots = _slots(batch, s)
            context = [int(kv.numbers[slots(p)]) for p in range(context_len)]
            for row in range(batch.query_offsets[s], batch.query_offsets[s + 1]):
                node = int(batch.node_offsets[s]) + row - int(batch.query_offsets[s])
                ancestors = [n for n in range(node) if int(batch.ancestor_words[row, n // 64]) >> (n % 64) & 1]
                path = context + [int(kv.numbers[slots(context_len + n)]) for n in ancestors]
                number = _mixed(path[-1] if path else 0, int(batch.input_ids[row]))
                kv.numbers[batch.slot_mapping[row]] = number
                logits[row] = _logits([*path, number])
        wanted = [logits[int(row)] for row in batch.logits_indices]
        return np.stack(wanted) if wanted else np.empty((0, _LOGITS), np.float32)


def _slots(batch: ForwardBatch, s: int) -> Callable[[int], int]:
    table, size = batch.block_tables[s], batch.block_size
    return lambda position: int(table[position // size]) * size + position % size
