"""The drafter in C++ beside the one in Python: both are told the same, and what they draft is compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_speculator.colocated import ColocatedDrafter
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.native.library import SOURCES
from treeserve_speculator.native_drafter import NativeDrafter
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import DraftSource
from treeserve_speculator.sources.ngram import NgramSource
from treeserve_speculator.sources.ngram_table import NgramTableSource
from treeserve_speculator.sources.ngram_table_file import (
    EMPTY_CONTEXT,
    Calibration,
    NgramTable,
    TableEntries,
    TableIdentity,
    longer_context,
    write_table,
)
from treeserve_speculator.sources.recycling import RecyclingSource
from treeserve_speculator.sources.suffix import SuffixSource

LIMITS = TreeLimits(max_nodes=24, max_depth=10)
CALIBRATION = Calibration(exponent=0.8, again=2.5, noise=0.7, rest=1.3, rest_noise=0.4)
COUNTED = ("trees", "empty_trees")
COUNTED_BY_SOURCE = ("nodes", "visits", "right")


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` are the few that occur in texts, the end-of-sequence token among them."""

    size: int
    tokens: tuple[int, ...]

    @property
    def eos(self) -> int:
        return self.tokens[0]

    @classmethod
    def spread(cls, size: int, count: int = 14) -> Vocabulary:
        """From the first id to the last."""
        return cls(size, tuple(np.linspace(0, size - 1, count, dtype=int).tolist()))


def make_table(folder: Path, vocabulary: Vocabulary, seed: int = 0, max_order: int = 3) -> NgramTable:
    """What follows most contexts of the vocabulary's tokens: up to six of them."""
    rng = random.Random(seed)
    hashes, ends, token_ids, probabilities = [EMPTY_CONTEXT], [0], [], []
    level = [EMPTY_CONTEXT]
    for known in (1.0, 0.7, 0.3)[:max_order]:
        level = [longer_context(h, t) for h in level for t in vocabulary.tokens if rng.random() < known]
        hashes += level
    for _ in hashes:
        found = rng.sample(vocabulary.tokens, rng.randint(0, min(6, len(vocabulary.tokens))))
        token_ids += found
        shares = sorted((rng.random() ** 2 for _ in found), reverse=True)
        probabilities += [share / (sum(shares) + rng.random()) for share in shares]
        ends.append(len(token_ids))
    entries = TableEntries(np.array(hashes, np.uint64), np.array(ends[1:]), np.array(token_ids), np.log(probabilities))
    identity = TableIdentity("tokenizer", vocabulary.size)
    write_table(folder / "table.bin", identity, max_order, entries, CALIBRATION)
    return NgramTable.open(folder / "table.bin", identity, folder)


def sampled(rule: AcceptanceRule, temperature: float, seed: int = 0) -> tuple[SamplingParams, SequenceLimits]:
    """How a request samples and accepts."""
    return SamplingParams(temperature=temperature, seed=seed), SequenceLimits(acceptance=Acceptance(rule))


@dataclass(eq=False)
class _Sequence:
    tokens: list[int]
    tenant: str


@dataclass(frozen=True)
class _Told:
    handle: int
    known: tuple[int, ...]  # tokens up to those that it is about
    token_ids: tuple[int, ...]
    top: tuple[Sequence[int], ...]


@dataclass(eq=False)
class Twins:
    """Both drafters. The one in Python learns from top tokens when the one in C++ does, which is later.

    Args:
        python_sources: of the one in Python, if others.
    """

    vocabulary: Vocabulary
    sources: Sequence[str] = SOURCES
    table: NgramTable | None = None
    limits: TreeLimits = LIMITS
    max_shared_nodes: int = 500_000
    max_shared_rows: int = 200_000
    python_sources: Sequence[str] = ()
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    told: list[_Told] = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registries = CollectorRegistry(), CollectorRegistry()
        of_python, of_native = map(SpeculatorMetrics, self.registries)
        vocab_size, eos = self.vocabulary.size, self.vocabulary.eos
        self.by_name: dict[str, DraftSource] = {
            "ngram": NgramSource(),
            "suffix": SuffixSource(max_shared_nodes=self.max_shared_nodes),
            "recycling": RecyclingSource(vocab_size, max_shared_rows=self.max_shared_rows),
        }
        if self.table is not None:
            depth = min(8, self.limits.max_depth)
            self.by_name["ngram_table"] = NgramTableSource(self.table, frozenset({eos}), max_depth=depth)
        sources = [self.by_name[name] for name in self.python_sources or self.sources]
        drafter = Drafter(
            sources, vocab_size=vocab_size, eos_token_ids=frozenset({eos}), limits=self.limits, metrics=of_python
        )
        self.python = ColocatedDrafter(drafter, self.limits, of_python)
        self.native = NativeDrafter(
            self.sources,
            self.table,
            vocab_size=vocab_size,
            eos_token_ids=(eos,),
            limits=self.limits,
            metrics=of_native,
            max_shared_nodes=self.max_shared_nodes,
            max_shared_rows=self.max_shared_rows,
        )

    def assign(
        self,
        handle: int,
        tokens: Sequence[int],
        prompt_len: int | None = None,
        how: tuple[SamplingParams, SequenceLimits] = sampled(AcceptanceRule.REPLAY, 0.0),
        tenant: str = "a",
        budget: int = 8,
    ) -> None:
        self.sequences[handle] = _Sequence(list(tokens), tenant)
        for drafter in (self.python, self.native):
            drafter.assign(handle, tokens, prompt_len or len(tokens), *how, tenant, budget)

    def commit(self, handle: int, new: Sequence[int], budget: int = 8, top: Sequence[Sequence[int]] = ()) -> None:
        sequence = self.sequences[handle]
        base, token_ids = len(sequence.tokens), tuple(new)
        self.python.commit(handle, base, token_ids, budget, ())
        self.native.commit(handle, base, token_ids, budget, tuple(top))
        sequence.tokens += token_ids
        self.told.append(_Told(handle, tuple(sequence.tokens), token_ids, tuple(top)))

    def release(self, handle: int) -> None:
        self.python.release(handle)
        self.native.release(handle)

    def draft(self, node: float = 0.0) -> list[TokenTree]:
        """The trees of both, if they are the same."""
        expected, found = self.python.draft(0.0, node), self.native.draft(0.0, node)
        assert [handle for handle, _ in found] == [handle for handle, _ in expected]
        for (handle, python), (_, native) in zip(expected, found, strict=True):
            where = f"sequence {handle} after {self.sequences[handle].tokens}"
            assert native.base_committed_len == python.base_committed_len, where
            assert_same(native.tree, python.tree, where)
            self.trees.append(native.tree)
        return [proposal.tree for _, proposal in found]

    def learn(self) -> None:
        due = self.native.is_due
        self.python.learn()
        self.native.learn()
        if not due:
            self._remember()

    def assert_same_counts(self) -> None:
        python, native = map(self.counts, self.registries)
        assert native == python

    def counts(self, registry: CollectorRegistry) -> dict[str, float | None]:
        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"treeserve_speculator_{name}", labels)

        by_source = [(name, source) for name in COUNTED_BY_SOURCE for source in self.python_sources or self.sources]
        return {
            "sequences": value("sequences"),
            **{name: value(f"{name}_total") for name in COUNTED},
            **{f"{name} of {source}": value(f"{name}_total", source=source) for name, source in by_source},
        }

    def _remember(self) -> None:
        all_told, self.told = self.told, []
        if "recycling" not in (self.python_sources or self.sources):
            return
        for told in all_told:
            tenant = self.sequences[told.handle].tenant
            state = DraftSequence(told.handle, list(told.known), 1, SamplingParams(), 1, tenant=tenant)
            if not tenant:
                drafted_for = self.python._session._sequences.get(told.handle)
                if drafted_for is None:  # it has ended, and its table with it
                    continue
                state.source_state = drafted_for.source_state
            self.by_name["recycling"].commit(state, told.token_ids, told.top)


def assert_same(native: TokenTree, python: TokenTree, where: str = "") -> None:
    assert (native.token_ids, native.parents) == (python.token_ids, python.parents), where
    assert native.source_masks == (python.source_masks or (0,)), where
    assert native.log_probs == (python.log_probs or (0.0,)), where
    assert TokenTree(native.token_ids, native.parents, native.log_probs, native.source_masks) == native, where


class Stream:
    """Random requests for both drafters, several at once, over texts that repeat themselves and each other.

    Args:
        hows: of a request's sampling, one is drawn.
        learns: chance that the drafters learn between two rounds of trees.
    """

    def __init__(
        self,
        twins: Twins,
        seed: int,
        *,
        hows: Sequence[tuple[AcceptanceRule, float]],
        tenants: Sequence[str] = ("", "a", "b"),
        learns: float = 0.9,
        at_once: int = 4,
    ) -> None:
        self.twins = twins
        self.rng = random.Random(seed)
        self.hows = hows
        self.tenants = tenants
        self.learns = learns
        self.at_once = at_once
        self.texts: dict[int, list[int]] = {}
        self.latest: dict[int, TokenTree] = {}
        self.handles = 0
        tokens = twins.vocabulary.tokens
        self.phrases = [self.rng.choices(tokens, k=self.rng.randint(2, 9)) for _ in range(10)]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            while len(self.texts) < self.at_once:
                self._begin()
            for handle in list(self.texts):
                self._go_on(handle)
            self._draft()
            if self.rng.random() < self.learns:
                self.twins.learn()
                self.twins.assert_same_counts()
        for handle in list(self.texts):
            self._end(handle)
        for _ in range(2):
            self._draft()
            self.twins.learn()
        self.twins.assert_same_counts()

    def _begin(self) -> None:
        rng, handle = self.rng, self.handles
        self.handles += 1
        text = [token for _ in range(rng.randint(3, 20)) for token in rng.choice(self.phrases)]
        text = [rng.choice(self.twins.vocabulary.tokens) if rng.random() < 0.07 else token for token in text]
        known = rng.randint(1, len(text) - 2)
        how = sampled(*rng.choice(self.hows), seed=rng.choice([0, 2**64 - 1, rng.getrandbits(64)]))
        prompt_len = rng.randint(1, known)  # less: it came back from another place
        self.twins.assign(handle, text[:known], prompt_len, how, rng.choice(self.tenants), self._budget())
        self.texts[handle] = text

    def _go_on(self, handle: int) -> None:
        rng, text = self.rng, self.texts[handle]
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            known = len(self.twins.sequences[handle].tokens)
            if known >= len(text):
                self._end(handle)
                return
            new = text[known : known + rng.choice([self._accepted(handle), rng.randint(0, 5)])]
            self.twins.commit(handle, new, self._budget(), self._top(len(new)))

    def _accepted(self, handle: int) -> int:
        """As many tokens as the latest tree has foreseen, and the one after them."""
        text, known = self.texts[handle], len(self.twins.sequences[handle].tokens)
        tree, node, count = self.latest.get(handle), 0, 1
        while tree is not None and known + count <= len(text):
            child = tree.child(node, text[known + count - 1])
            if child is None:
                break
            node, count = child, count + 1
        return count

    def _top(self, count: int) -> list[list[int]]:
        """Of some tokens nothing, and of some ids beyond the vocabulary, which are padding, and twice the same."""
        ids = (*self.twins.vocabulary.tokens, self.twins.vocabulary.size, self.twins.vocabulary.size + 5)
        count += self.rng.choice([0, 0, 0, 1, -count])
        return [self.rng.choices(ids, k=self.rng.choice([0, 1, 5, 12])) for _ in range(max(0, count))]

    def _budget(self) -> int:
        return self.rng.choice([0, 1, 3, 8, 8, 16, 40])

    def _draft(self) -> None:
        self.latest.clear()
        handles = [handle for handle, budget in self.twins.native._due.items() if budget > 0]
        trees = self.twins.draft(self.rng.choice([0.0, 0.0, 0.01, 0.05, 0.2]))
        self.latest.update(zip(handles, trees, strict=True))

    def _end(self, handle: int) -> None:
        self.twins.release(handle)
        del self.texts[handle]
