"""Measures on this machine whether a token's logits depend on what is computed with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.runner import ModelRunner

_PROMPT_LEN = 18
_PARENTS = (-1, 0, 0, 1, 1, 2, 4, 6)
_DEPTHS = (0, 1, 1, 2, 2, 2, 3, 4)
_SEQ_ID = 0


def measure_divergence(model: Model) -> float:
    """Largest difference of a logit between a token in a prefill chunk or a tree and the same token by itself.

    Takes about forty forward passes of few rows.

    Returns:
        0.0 if every bit agrees. Anything else means that output may change with speculation, batching or replay; NaN
        means that the model's logits are no numbers.
    """
    tokens = [(7919 * i * i + 1) % model.config.vocab_size for i in range(_PROMPT_LEN + len(_PARENTS))]
    prompt, nodes = tokens[:_PROMPT_LEN], tokens[_PROMPT_LEN:]
    together, alone = _runner(model), _runner(model)
    differences = [_commit(together, prompt) - np.concatenate([_commit(alone, [token]) for token in prompt])]
    together.blocks.reserve(_SEQ_ID, len(nodes))
    (logits,) = together.forward([SequenceRows(_SEQ_ID, nodes, _DEPTHS, _words(), range(len(nodes)))])
    for node in range(len(nodes)):
        differences.append(logits[node] - _path(alone, [nodes[i] for i in _path_to(node)]))
    return float(np.max([np.abs(d).max() for d in differences]))


def _runner(model: Model) -> ModelRunner:
    runner = ModelRunner(model, num_blocks=8, block_size=4)
    runner.blocks.add(_SEQ_ID)
    return runner


def _commit(runner: ModelRunner, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits of consecutive tokens in one pass; keeps them."""
    n = len(token_ids)
    runner.blocks.reserve(_SEQ_ID, n)
    (logits,) = runner.forward([SequenceRows.from_chain(_SEQ_ID, token_ids, range(n))])
    runner.commit(_SEQ_ID, range(n))
    return logits


def _path(runner: ModelRunner, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits after a path, one token per pass; keeps nothing."""
    words = SequenceRows.from_chain(_SEQ_ID, token_ids, ()).ancestor_words
    runner.blocks.reserve(_SEQ_ID, len(token_ids))
    for i, token_id in enumerate(token_ids):
        row = SequenceRows(_SEQ_ID, [token_id], [i], words[i : i + 1], [0], node_offset=i)
        logits = runner.forward([row])[0]
    runner.rollback(_SEQ_ID)
    last: npt.NDArray[np.float32] = logits[0]
    return last


def _path_to(node: int) -> list[int]:
    path = [node]
    while path[-1] > 0:
        path.append(_PARENTS[path[-1]])
    return path[::-1]


def _words() -> npt.NDArray[np.uint64]:
    return np.array([[sum(1 << i for i in _path_to(node))] for node in range(len(_PARENTS))], dtype=np.uint64)
