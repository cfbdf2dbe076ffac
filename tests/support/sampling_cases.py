"""Batches of trees with every kind of sampling parameter, and what the engine's `next_token` makes of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SamplerState
from treeserve_engine.next_token import NonFiniteLogitsError, next_token
from treeserve_engine.processors import TokenContext
from treeserve_engine.sampling_rows import sampling_rows
from treeserve_kernels.next_token import NO_TOKEN, SamplingRows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One sequence at the root of its tree."""

    tree: TokenTree
    params: SamplingParams
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    blocked_ids: tuple[int, ...] = ()
    min_tokens_left: int = 0

    @property
    def state(self) -> SamplerState:
        position = len(self.prompt) + len(self.output)
        context = TokenContext(self.prompt, self.output)
        return SamplerState(self.params, context, position, self.blocked_ids, position + self.min_tokens_left)

    def expected(self, node: int, logits: np.ndarray) -> int:
        """The engine's choice after the path to a node."""
        depth = self.tree.depths[node]
        context = TokenContext(self.prompt, [*self.output, *(self.tree.token_ids[n] for n in self.tree.path(node))])
        blocked = self.blocked_ids if depth < self.min_tokens_left else ()
        try:
            return next_token(logits, self.params, context, self.state.position + depth, blocked)
        except NonFiniteLogitsError:
            return NO_TOKEN


@dataclass
class Choices:
    """Draws sampling parameters: each named one from its list, the others stay at their defaults."""

    vocab: int
    params: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    nodes: Sequence[int] = (1, 2, 5)
    min_tokens_left: Sequence[int] = (0,)

    def case(self, rng: random.Random) -> Case:
        params = {name: rng.choice(values) for name, values in self.params.items()}
        # A small part of the vocabulary, so that contexts and trees meet.
        ids = [rng.randrange(self.vocab) for _ in range(12)]
        prompt, output = rng.choices(ids, k=rng.choice([1, 200])), rng.choices(ids, k=rng.choice([0, 9]))
        blocked = tuple(sorted(rng.sample(range(self.vocab), min(3, self.vocab - 1))))
        return Case(
            tree_of(rng.choice(self.nodes), ids, rng),
            SamplingParams(seed=rng.getrandbits(64), **params),
            prompt,
            output,
            blocked,
            rng.choice(self.min_tokens_left),
        )


def tree_of(num_nodes: int, ids: Sequence[int], rng: random.Random) -> TokenTree:
    """A random tree of at most `num_nodes` nodes that carry `ids`."""
    tokens, parents = [rng.choice(ids)], [-1]
    for _ in range(num_nodes - 1):
        edge = (rng.randrange(len(tokens)), rng.choice(ids))
        if edge not in set(zip(parents, tokens, strict=True)):
            parents.append(edge[0])
            tokens.append(edge[1])
    return TokenTree(tuple(tokens), tuple(parents))


def rows_of(cases: Sequence[Case], vocab: int, device: torch.device = CPU) -> SamplingRows:
    return sampling_rows([(case.tree, case.state) for case in cases], vocab, device)


def expected_tokens(cases: Sequence[Case], logits: torch.Tensor, vocab: int) -> list[int]:
    """What the engine chooses for each row."""
    nodes = [(case, node) for case in cases for node in range(len(case.tree))]
    return [case.expected(node, row[:vocab].numpy()) for (case, node), row in zip(nodes, logits.cpu(), strict=True)]


def random_logits(rows: int, columns: int, rng: random.Random) -> torch.Tensor:
    """Flat, peaked or full of ties."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(rows, columns, generator=generator) * rng.choice([0.01, 1.0, 5.0])
    return (logits * 2).round() / 2 if rng.random() < 0.4 else logits
