"""A draft source for losslessness tests: it knows the truth and draws it in the shape that the request names.

Configured by its dotted name, as any source of a user's own. The request names the shape by a logit bias of zero on the
token id that is the shape's index; the truth is a JSON file, {"seed:temperature": [token ids]}, in an environment
variable.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support.tree_shapes import SHAPES
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings

TRUTH_VARIABLE = "TREESERVE_TEST_TRUTH"


def truth_key(seed: int, temperature: float) -> str:
    """Name of a request's tokens in the truth file."""
    return f"{seed}:{temperature:.2f}"


def shape_of(sampling: SamplingParams) -> str | None:
    """The shape a request asks for."""
    for token_id, bias in sampling.logit_bias.items():
        if bias == 0.0:
            return list(SHAPES)[token_id]
    return None


class ShapedSource:
    """Draws the true continuation, disguised."""

    name = "shaped"
    wants_top_tokens = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rng = random.Random(11)

    def open(self, state: DraftSequence) -> None:
        """Look up the truth."""
        path = os.environ.get(TRUTH_VARIABLE)
        truth = json.loads(Path(path).read_text()) if path and Path(path).exists() else {}
        state.source_state[self.name] = truth.get(truth_key(state.sampling.seed, state.sampling.temperature))

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing to learn."""

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """A tree of the shape asked for."""
        truth, shape = state.source_state[self.name], shape_of(state.sampling)
        if truth is None or shape is None:
            return None
        rest = truth[len(state.tokens) - state.prompt_len :]
        tree = SHAPES[shape](state.tokens[-1], rest, min(budget, 12), self._vocab_size, self._rng)
        return replace(tree, log_probs=(0.0,) * len(tree))

    def close(self, state: DraftSequence) -> None:
        """Forget the truth."""
        state.source_state.pop(self.name, None)


def build(settings: SourceSettings) -> ShapedSource:
    """The factory that the configuration names."""
    return ShapedSource(settings.vocab_size)
