"""Exact laws of random code on tiny vocabularies: every branch is run once, with its probability. No sampling."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine import multi_step
from treeserve_engine.accept import SequenceSampler, accept

ROOT = 0
Law = dict[tuple[int, ...], float]
WeightedTrees = Sequence[tuple[float, TokenTree]]
MULTI_STEP = Acceptance(AcceptanceRule.MULTI_STEP)


class Script:
    """Takes the branches it is told, then the first that is possible; remembers what else there was."""

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self._prefix = prefix
        self.taken: list[int] = []
        self.weight = 1.0
        self.others: list[tuple[int, ...]] = []

    def branch(self, weights: Sequence[float]) -> int:
        """The index of the branch to take; each has its probability."""
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        if len(self.taken) < len(self._prefix):
            choice = self._prefix[len(self.taken)]
        else:
            choice = possible[0]
            self.others += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= weights[choice]
        return choice


class Coin(float):
    """A uniform that is not drawn: a comparison goes both ways, each with its probability.

    `grid` m makes it one of 0, 1/m, .. (m - 1)/m with equal probability; without, it is uniform in (0, 1).
    """

    script: Script
    grid: int | None

    @classmethod
    def of(cls, script: Script, grid: int | None = None) -> Coin:
        coin = cls(0.5)
        coin.script, coin.grid = script, grid
        return coin

    def __lt__(self, bound: float) -> bool:  # type: ignore[override]
        return self._below(float(bound) if self.grid is None else np.ceil(bound * self.grid - 1e-9) / self.grid)

    def __le__(self, bound: float) -> bool:  # type: ignore[override]
        return self._below(float(bound) if self.grid is None else np.floor(bound * self.grid + 1 + 1e-9) / self.grid)

    def _below(self, probability: float) -> bool:
        below = min(1.0, max(0.0, probability))
        return self.script.branch([below, 1.0 - below]) == 0


class Tables:
    """Random next-token distributions by context: the target's (as float32 logits) and the drafter's."""

    def __init__(self, seed: int, vocab: int = 3) -> None:
        self.vocab = vocab
        self._rng = np.random.default_rng(seed)
        self._logits: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}
        self._q: dict[tuple[int, ...], npt.NDArray[np.float64]] = {}

    def logits(self, context: tuple[int, ...]) -> npt.NDArray[np.float32]:
        if context not in self._logits:
            self._logits[context] = self._rng.normal(0, 1.5, self.vocab).astype(np.float32)
        return self._logits[context]

    def set(self, context: tuple[int, ...], p: Sequence[float], q: Sequence[float]) -> None:
        with np.errstate(divide="ignore"):
            self._logits[context] = np.maximum(np.log(np.array(p)), -1e30).astype(np.float32)
        self._q[context] = np.array(q)

    def p(self, context: tuple[int, ...], temperature: float = 1.0) -> npt.NDArray[np.float64]:
        z = np.exp(self.logits(context).astype(np.float64) / temperature)
        return np.asarray(z / z.sum())

    def q(self, context: tuple[int, ...]) -> npt.NDArray[np.float64]:
        if context not in self._q:
            q = self._rng.random(self.vocab) ** 2 + 0.02
            self._q[context] = q / q.sum()
        return self._q[context]

    def under(self, token_id: int) -> Tables:
        """Tables whose root is here the context of this token."""
        tables = Tables(0, self.vocab)
        tables._logits[()], tables._q[()] = self.logits((token_id,)), self.q((token_id,))
        return tables

    def draws(self, context: tuple[int, ...], tokens: Sequence[int]) -> Draws:
        q = self.q(context)
        support = tuple(int(i) for i in np.flatnonzero(q))
        return Draws(tuple(tokens), support, tuple(float(q[i]) for i in support))


Subtree = tuple[tuple[int, ...], dict[int, "Subtree"]]


def drawn_trees(tables: Tables, counts: Sequence[int]) -> WeightedTrees:
    """Every tree with counts[d] independent draws below each node of depth d, with its probability."""
    return [(weight, flatten(tables, shape)) for weight, shape in _shapes(tables, (), tuple(counts))]


def _shapes(tables: Tables, context: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[tuple[float, Subtree]]:
    if not counts:
        yield 1.0, ((), {})
        return
    q = tables.q(context)
    for tokens in itertools.product(np.flatnonzero(q).tolist(), repeat=counts[0]):
        weight = float(np.prod([q[t] for t in tokens]))
        distinct = list(dict.fromkeys(tokens))
        for combination in itertools.product(*(list(_shapes(tables, (*context, t), counts[1:])) for t in distinct)):
            below = {t: shape for t, (_, shape) in zip(distinct, combination, strict=True)}
            yield weight * float(np.prod([w for w, _ in combination])), (tokens, below)


def flatten(tables: Tables, shape: Subtree) -> TokenTree:
    """The tree of nested draws, level by level."""
    token_ids, parents, draws = [ROOT], [-1], []
    queue: list[tuple[tuple[int, ...], Subtree]] = [((), shape)]
    for node, (context, (tokens, below)) in enumerate(queue):  # grows while it is walked
        draws.append(tables.draws(context, tokens) if tokens else None)
        for token_id, sub in below.items():
            token_ids.append(token_id)
            parents.append(node)
            queue.append(((*context, token_id), sub))
    log_probs = (0.0,) + (-1.0,) * (len(token_ids) - 1)
    return TokenTree(tuple(token_ids), tuple(parents), log_probs, draws=tuple(draws))


def emitted_law(
    tables: Tables,
    trees: WeightedTrees,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams = SamplingParams(temperature=1.0),  # noqa: B008
    grid: int | None = None,
) -> Law:
    """Law of the first `length` tokens: a step over the tree, then the target itself."""
    law: Law = defaultdict(float)
    assert sum(weight for weight, _ in trees) == pytest.approx(1.0, abs=1e-12)
    for weight, tree in trees:
        for probability, tokens in _outcomes(tables, tree, monkeypatch, params, grid):
            for continued, more in _continuations(tables, tokens[:length], length, params.temperature):
                law[continued] += weight * probability * more
    return law


def target_law(tables: Tables, length: int, temperature: float = 1.0) -> Law:
    """Law of the first `length` tokens of plain decoding."""
    return dict(_continuations(tables, (), length, temperature))


def total_variation(law: Law, other: Law) -> float:
    return 0.5 * sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())


def _continuations(
    tables: Tables, tokens: tuple[int, ...], length: int, temperature: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(tokens) == length:
        yield tokens, 1.0
        return
    for token_id, probability in enumerate(tables.p(tokens, temperature)):
        for continued, more in _continuations(tables, (*tokens, token_id), length, temperature):
            yield continued, float(probability) * more


def _outcomes(
    tables: Tables, tree: TokenTree, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, grid: int | None
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """What a step emits, each with its probability: the real code, every way through it."""
    contexts = [tuple(tree.token_ids[i] for i in tree.path(node)) for node in range(len(tree))]
    stopping = StoppingCriteria(max_tokens=100)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        script = Script(pending.pop())
        sampler = SequenceSampler(params, stopping, (ROOT,), eos_token_ids=(), vocab_size=tables.vocab)
        with monkeypatch.context() as patched:
            coins: Callable[[object, int], list[Coin]] = lambda _, n: [Coin.of(script, grid)] * n  # noqa: B023, E731
            patched.setattr(SequenceSampler, "uniforms", coins)
            patched.setattr(multi_step, "sample", lambda p, _: script.branch(p))  # noqa: B023
            outcome = accept(tree, lambda node: tables.logits(contexts[node]), sampler, None, MULTI_STEP)
        yield script.weight, outcome.token_ids
        pending += script.others
