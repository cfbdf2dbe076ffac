"""Compares a model under tree attention with itself under its own attention, before anything is served.

Two sequences of different lengths are prefilled side by side and in chunks, a tree that branches is verified, part of
it is kept and moved, and the sequence goes on from there. Every logit is compared with that of a plain pass over the
tokens before it. A model that mixes rows, keeps a state, reads positions from elsewhere or has a mask of its own
disagrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.runner import ModelRunner

_FIRST, _SECOND = 0, 1
_PROMPT_LENGTHS = (13, 6)
_CHUNK = 8
_PARENTS = (-1, 0, 0, 1, 2, 2, 4)
_KEPT = (0, 2, 4, 6)  # a path that compaction must move
_NUM_LAST = 5
_BLOCK_SIZE = 16
# How far a row's logits may be off on average, in units of their spread.
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ExpectedLogits:
    """What the model's own attention gives.

    Attributes:
        prompts: token ids of both sequences.
        tree: verified after the first prompt; its root is the token after it.
        last: tokens after the kept path.
        of_prompts: float32[prompt length, vocab] each.
        of_nodes: float32[nodes, vocab].
        of_last: float32[len(last), vocab], after the first prompt and the kept path.
    """

    prompts: tuple[list[int], list[int]]
    tree: TokenTree
    last: list[int]
    of_prompts: tuple[Logits, Logits]
    of_nodes: Logits
    of_last: Logits

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        return int(self.of_nodes.shape[1])


def expected_logits(model: Any) -> ExpectedLogits:
    """Run a transformers model as it was loaded, over whole sequences."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = ((7919 * i * i + 104729 * i + 3) % vocab for i in itertools.count())
    first, second = (list(itertools.islice(ids, n)) for n in _PROMPT_LENGTHS)
    tree = TokenTree(_distinct_siblings(list(itertools.islice(ids, len(_PARENTS))), vocab), _PARENTS)
    last = list(itertools.islice(ids, _NUM_LAST))
    of_nodes = [_plain(model, [*first, *_tokens(tree, (0, *tree.path(node)))])[-1] for node in range(len(tree))]
    of_last = _plain(model, [*first, *_tokens(tree, _KEPT), *last])[-len(last) :]
    prompts = (_plain(model, first), _plain(model, second))
    return ExpectedLogits((first, second), tree, last, prompts, np.stack(of_nodes), of_last)


def check_against_own_attention(model: Model, expected: ExpectedLogits, *, rounds: bool) -> None:
    """Run the same tokens in chunks, side by side and as a tree.

    Args:
        rounds: the model computes with fewer bits than float32 has.

    Raises:
        InvalidArgumentError: if the logits differ by more than rounding.
    """
    try:
        parts = _differences(model, expected)
    except InvalidArgumentError:
        raise
    except Exception as error:  # any model code may run here
        raise InvalidArgumentError("model", f"it does not run in a ragged batch: {error!r}") from error
    # Rounding to fewer bits sends the odd token to another expert, which is no fault: there, half the rows count.
    difference = float(np.max([np.median(part) if rounds else part.max() for part in parts]))
    if not difference <= (_LOW_PRECISION_TOLERANCE if rounds else _TOLERANCE):  # NaN does not pass
        raise InvalidArgumentError(
            "model", f"under tree attention it computes something else (logits are off by {difference:.2g} spreads)"
        )


def _differences(model: Model, expected: ExpectedLogits) -> list[Logits]:
    """How far each row's logits are off on average, in units of their spread, for each part of the probe."""
    runner = ModelRunner(model, num_blocks=8, block_size=_BLOCK_SIZE)
    for seq_id in (_FIRST, _SECOND):
        runner.blocks.add(seq_id)
    first, second = expected.prompts
    (chunk,) = _step(runner, [_chain(_FIRST, first[:_CHUNK])])
    rest, other = _step(runner, [_chain(_FIRST, first[_CHUNK:]), _chain(_SECOND, second)])
    (nodes,) = _step(runner, [SequenceRows.from_tree(_FIRST, expected.tree)], kept=_KEPT)
    (last,) = _step(runner, [_chain(_FIRST, expected.last)])
    of_first, of_second = expected.of_prompts
    wanted = (of_first[:_CHUNK], of_first[_CHUNK:], of_second, expected.of_nodes, expected.of_last)
    return [_off(got, own) for got, own in zip((chunk, rest, other, nodes, last), wanted, strict=True)]


def _off(actual: Logits, wanted: Logits) -> Logits:
    spread = wanted.std(axis=1) + np.finfo(np.float32).tiny
    off: Logits = np.abs(actual - wanted).mean(axis=1) / spread
    return off


def _chain(seq_id: int, tokens: Sequence[int]) -> SequenceRows:
    return SequenceRows.from_chain(seq_id, tokens, range(len(tokens)))


def _step(runner: ModelRunner, rows: Sequence[SequenceRows], kept: Sequence[int] | None = None) -> list[Logits]:
    """One pass; keeps the rows' KV, or that of the rows `kept`."""
    for r in rows:
        runner.blocks.reserve(r.seq_id, len(r.token_ids))
    logits = runner.forward(rows)
    for r in rows:
        runner.commit(r.seq_id, range(len(r.token_ids)) if kept is None else kept)
    return logits


def _plain(model: Any, token_ids: Sequence[int]) -> Logits:
    ids = torch.tensor([list(token_ids)], device=model.device)
    logits: Logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
    return logits


def _tokens(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    return [tree.token_ids[node] for node in nodes]


def _distinct_siblings(token_ids: list[int], vocab: int) -> tuple[int, ...]:
    """Tokens for the nodes of the tree, moved on where two siblings would carry the same."""
    for node, parent in enumerate(_PARENTS):
        siblings = {token_ids[i] for i in range(node) if _PARENTS[i] == parent}
        while token_ids[node] in siblings:
            token_ids[node] = (token_ids[node] + 1) % vocab
    return tuple(token_ids)
