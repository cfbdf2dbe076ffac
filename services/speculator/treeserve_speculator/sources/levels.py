"""Drafts with a model that has its own KV cache: all sequences and all nodes of a level in one forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.tree import BITS_PER_WORD, TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.growth import (
    GrowthLimits,
    TreeGrowth,
    Vocabulary,
    children_of_level,
    draw_children,
)


@dataclass(frozen=True)
class LevelLimits:
    """Bounds of drafting with a model.

    Attributes:
        vocab_size: ids that both models know; no other is read or proposed.
        max_position: tokens the draft model's context window holds.
        depth: levels grown.
        width: nodes expanded per level, and children of each.
        min_probability: least path probability of an expanded node.
        chunk_tokens: tokens of one catch-up pass and sequence.
        chunks_per_call: catch-up passes before a sequence gives way to the others' trees until next time.
    """

    vocab_size: int
    max_position: int
    depth: int = 6
    width: int = 6
    min_probability: float = 0.03
    chunk_tokens: int = 128
    chunks_per_call: int = 8


@dataclass(eq=False)
class Draft:
    """A tree whose KV rows are reserved: a chain of committed tokens that ends with the root, then expanded nodes.

    Attributes:
        base_len: committed length it was drawn for.
        chain: committed tokens the model had not seen, the root last.
        rows: row of each expanded node.
        level: nodes expanded by the next forward pass.
    """

    growth: TreeGrowth
    base_len: int
    chain: Sequence[int]
    rows: dict[int, int]
    level: list[int]

    @classmethod
    def begin(cls, growth: TreeGrowth, base_len: int, chain: Sequence[int]) -> Draft:
        """A tree of its root alone."""
        return cls(growth, base_len, chain, {0: len(chain) - 1}, growth.next_level())

    def first_rows(self, seq_id: int) -> SequenceRows:
        """The first pass: what the model missed, then the root."""
        return SequenceRows.from_chain(seq_id, self.chain, logits_rows=[len(self.chain) - 1])

    def next_rows(self, seq_id: int) -> SequenceRows | None:
        """The pass over the next level; None if the tree is grown."""
        self.level = self.growth.next_level()
        if not self.level:
            return None
        offset = len(self.chain) + len(self.rows) - 1
        self.rows.update((node, offset + i) for i, node in enumerate(self.level))
        return SequenceRows(
            seq_id,
            token_ids=[self.growth.token_ids[node] for node in self.level],
            depths=[len(self.chain) - 1 + self.growth.depths[node] for node in self.level],
            ancestor_words=_words([self._visible_rows(node) for node in self.level], offset + len(self.level)),
            logits_rows=range(len(self.level)),
            node_offset=offset,
        )

    def _visible_rows(self, node: int) -> int:
        """Bit mask of the rows an expanded node sees: the chain, its ancestors, itself."""
        mask = (1 << len(self.chain)) - 1
        while node > 0:
            mask |= 1 << self.rows[node]
            node = self.growth.parents[node]
        return mask

    def rows_along(self, token_ids: Sequence[int]) -> list[int]:
        """Rows of the chain, and of the expanded nodes that the tokens committed since follow."""
        rows = list(range(len(self.chain)))
        node = 0
        for token_id in token_ids:
            child = self.growth.child(node, token_id)
            if child is None or child not in self.rows:
                break
            rows.append(self.rows[child])
            node = child
        return rows


@dataclass(eq=False)
class Cached:
    """A sequence in the draft model's cache. While `draft` is set, its rows are reserved.

    Attributes:
        cut: tokens at its beginning that are left out.
    """

    seq_id: int
    cut: int
    draft: Draft | None = None


@dataclass(frozen=True)
class Job:
    """One sequence of a `propose_batch`."""

    state: DraftSequence
    cached: Cached
    limits: GrowthLimits

    @property
    def tree_rows(self) -> int:
        """Most rows below the root: the deepest level is not expanded."""
        return self.limits.width * (self.limits.max_depth - 1)


class LevelSource:
    """Drafts with a model. What is drafted stays reserved until the target has decided.

    A sequence that finds no room in the cache, or leaves the model's window or vocabulary, gets no trees. What the
    model reads of a sequence is for a subclass to say.
    """

    wants_top_tokens = False

    def __init__(
        self,
        runner: ModelRunner,
        limits: LevelLimits,
        eos_token_ids: frozenset[int],
        *,
        vocabulary: Vocabulary | None = None,
        name: str,
    ) -> None:
        """Draft with the model of `runner`.

        Args:
            vocabulary: int64[N], ascending: the target's id of each output; None where they are the same.
        """
        self.name = name
        self._runner = runner
        self._limits = limits
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._seq_ids = itertools.count()

    def _cut(self, state: DraftSequence) -> int:
        """Tokens at a new sequence's beginning that the model is not to see."""
        return 0

    def _compute(self, rows: Mapping[Job, SequenceRows]) -> Sequence[npt.NDArray[np.float32]]:
        """A forward pass: for each job, in order, the logits of its `logits_rows`."""
        raise NotImplementedError

    def _rows_to_keep(self, draft: Draft, committed: Sequence[int]) -> Sequence[int]:
        """Rows of a draft that are as good as newly computed ones, now that these tokens were committed."""
        raise NotImplementedError

    def open(self, state: DraftSequence) -> None:
        """Note the sequence; it is computed when a tree is wanted."""
        cached = state.source_state[self.name] = Cached(next(self._seq_ids), self._cut(state))
        self._runner.blocks.add(cached.seq_id)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing to do yet: the next proposal keeps the accepted rows and catches up."""

    def close(self, state: DraftSequence) -> None:
        """Free the sequence's blocks."""
        cached: Cached | None = state.source_state.pop(self.name, None)
        if cached is not None:
            self._runner.blocks.free(cached.seq_id)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """A tree for one sequence."""
        return self.propose_batch([(state, budget)])[0]

    def propose_batch(self, wanted: Sequence[tuple[DraftSequence, int]]) -> list[TokenTree | None]:
        """A tree for each sequence, all grown side by side."""
        jobs = [self._job(state, budget) for state, budget in wanted]
        running = [job for job in jobs if job is not None]
        try:
            drafts = self._grow(self._caught_up(running))
        except BaseException:
            for job in running:  # rows may be half computed: keep none
                self._forget(job.cached)
            raise
        return [drafts[job].growth.tree() if job in drafts else None for job in jobs]

    def _job(self, state: DraftSequence, budget: int) -> Job | None:
        cached: Cached = state.source_state[self.name]
        self._keep_accepted(state, cached)
        depth = min(self._limits.depth, self._limits.max_position - (len(state.tokens) - cached.cut) + 1)
        missing = self._unseen(state, cached)
        width, least_mass = min(budget, self._limits.width), 0.0
        if (shape := state.shapes.get(self.name)) is not None:
            depth, width, least_mass = min(depth, shape.depth), min(width, shape.width), shape.least_mass
        # What hangs below a node is less probable still: none of it would be worth its price either.
        min_probability = max(self._limits.min_probability, state.prices.node)
        job = Job(state, cached, GrowthLimits(budget, depth, width, min_probability, least_mass))
        fits = depth >= 1 and max(missing) < self._limits.vocab_size
        if not fits or not self._runner.blocks.can_reserve(cached.seq_id, len(missing) + job.tree_rows):
            self._forget(cached)
            return None
        return job

    def _keep_accepted(self, state: DraftSequence, cached: Cached) -> None:
        """Keep the rows of tokens that were committed, but the last one's: its logits are needed again."""
        if cached.draft is None:
            return
        rows = self._rows_to_keep(cached.draft, state.tokens[cached.draft.base_len :])
        self._runner.commit(cached.seq_id, rows[: len(self._unseen(state, cached)) - 1])
        cached.draft = None

    def _forget(self, cached: Cached) -> None:
        """Give up all blocks of a sequence; it may be computed anew later."""
        self._runner.blocks.free(cached.seq_id)
        self._runner.blocks.add(cached.seq_id)
        cached.draft = None

    def _unseen(self, state: DraftSequence, cached: Cached) -> list[int]:
        """Committed tokens the model has not seen, the root among them."""
        return state.tokens[cached.cut + self._runner.blocks.computed_len(cached.seq_id) :]

    def _caught_up(self, jobs: Sequence[Job]) -> list[Job]:
        """Prefill in chunks; the jobs for which at most a chunk is left, to go with the root."""
        chunk_tokens = self._limits.chunk_tokens
        for _ in range(self._limits.chunks_per_call):
            behind = [job for job in jobs if len(self._unseen(job.state, job.cached)) > chunk_tokens]
            behind = [job for job in behind if self._reserve(job, chunk_tokens)]
            if not behind:
                break
            chunks = {job: self._unseen(job.state, job.cached)[:chunk_tokens] for job in behind}
            self._compute(
                {
                    job: SequenceRows.from_chain(job.cached.seq_id, chunk, logits_rows=[])
                    for job, chunk in chunks.items()
                }
            )
            for job, chunk in chunks.items():
                self._runner.commit(job.cached.seq_id, range(len(chunk)))
        return [job for job in jobs if len(self._unseen(job.state, job.cached)) <= chunk_tokens]

    def _grow(self, jobs: Sequence[Job]) -> dict[Job | None, Draft]:
        """Grow a tree for every job that finds room."""
        drafts: dict[Job | None, Draft] = {}
        rows: dict[Job, SequenceRows] = {}
        for job in jobs:
            chain = self._unseen(job.state, job.cached)
            if self._reserve(job, len(chain) + job.tree_rows):
                growth = TreeGrowth(chain[-1], job.limits, self._eos_token_ids)
                drafts[job] = job.cached.draft = Draft.begin(growth, len(job.state.tokens), chain)
                rows[job] = drafts[job].first_rows(job.cached.seq_id)
        while rows:
            for job, logits in zip(rows, self._compute(rows), strict=True):
                self._expand(job, drafts[job], logits)
            levels = {job: drafts[job].next_rows(job.cached.seq_id) for job in rows}
            rows = {job: level for job, level in levels.items() if level is not None}
        return drafts

    def _expand(self, job: Job, draft: Draft, logits: npt.NDArray[np.float32]) -> None:
        """Give every node of the level its children. logits: float32[nodes of the level, padded outputs]."""
        sampling, rule, growth = job.state.sampling, job.state.acceptance, draft.growth
        if rule is AcceptanceRule.TYPICAL:  # probable tokens pass, whatever the noise would have drawn
            sampling = replace(sampling, temperature=0.0)
        logits, position = logits[:, : self._limits.vocab_size], draft.base_len + growth.depths[draft.level[0]]
        if rule is AcceptanceRule.MULTI_STEP and not sampling.is_greedy:
            for node, row in zip(draft.level, logits, strict=True):
                count = growth.num_draws(node, job.limits.width)
                growth.expand_by(node, draw_children(row, sampling, position, count, self._vocabulary))
            return
        found = children_of_level(logits, sampling, position, job.limits.width, self._vocabulary)
        for node, (token_ids, log_probs) in zip(draft.level, found, strict=True):
            growth.expand(node, token_ids, log_probs)

    def _reserve(self, job: Job, rows: int) -> bool:
        """Reserve rows; false, and the sequence forgotten, if others have taken the room meanwhile."""
        if not self._runner.blocks.can_reserve(job.cached.seq_id, rows):
            self._forget(job.cached)
            return False
        self._runner.blocks.reserve(job.cached.seq_id, rows)
        return True


def _words(masks: Sequence[int], num_bits: int) -> npt.NDArray[np.uint64]:
    """Bit masks as uint64[len(masks), ceil(num_bits / 64)]."""
    num_words = -(-num_bits // BITS_PER_WORD)
    packed = b"".join(mask.to_bytes(num_words * 8, "little") for mask in masks)
    return np.frombuffer(packed, dtype="<u8").reshape(len(masks), num_words).astype(np.uint64)
