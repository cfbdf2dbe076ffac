"""A cache under everything at once: shared prefixes, trees, cancels, pauses, leases, eviction to two tiers and back.

The model computes each row from the cache alone, so one stray number shows in its logits; and at each pass every block
that can be found is looked at.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from support.ledger_model import LedgerKv, LedgerModel, ledger, ledger_logits

from treeserve_core.prefix import prefix_hashes
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import ForwardBatch, SequenceRows
from treeserve_engine.kv_storage import TierBytes
from treeserve_engine.runner import ModelRunner

SIZE, BLOCKS = 2, 9
BLOCK_BYTES = 8 * SIZE
TENANTS = st.sampled_from(["", "", "a"])
LEASES = st.sampled_from([0.0, 0.0, 5.0])


class SharedCache(RuleBasedStateMachine):
    """Sequences of few different tokens, so that prefixes meet often, in a pool that is too small for them."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        model = LedgerModel(self.look_at_every_block)
        tiers = TierBytes(4 * BLOCK_BYTES, 5 * BLOCK_BYTES, Path(tempfile.gettempdir()))
        self.runner = ModelRunner(model, BLOCKS, SIZE, tiers=tiers, clock=lambda: self.now)
        self.blocks = self.runner.blocks
        self.tokens: dict[int, list[int]] = {}
        self.tenants: dict[int, str] = {}
        self.stepping: dict[int, TokenTree] = {}  # computed, neither committed nor rolled back
        self.known: dict[bytes, list[int]] = {}  # what each name stands for
        self.ids = 0

    def look_at_every_block(self, kv: LedgerKv, batch: ForwardBatch) -> None:
        for block, name in self.blocks._pool._name_of.items():
            assert kv.block(block).tolist() == ledger(self.known[name])[-SIZE:], "a block is not what its name says"
        named = set(self.blocks._pool._name_of)
        assert named.isdisjoint(int(slot) // SIZE for slot in batch.slot_mapping), "a step writes to a shared block"

    def learn_names(self, seq_id: int) -> None:
        tokens = self.tokens[seq_id]
        for i, name in enumerate(prefix_hashes(tokens, SIZE, self.tenants[seq_id])):
            self.known[name] = tokens[: (i + 1) * SIZE]

    @precondition(lambda self: len(self.tokens) < 4)
    @rule(target=sequences, data=st.data(), tenant=TENANTS)
    def begin(self, data, tenant):
        return self.add(data, tenant)

    def add(self, data, tenant):
        """A fresh prompt, or one that goes on where another sequence is or was."""
        self.ids += 1
        start = data.draw(st.sampled_from([[], *self.tokens.values(), *list(self.known.values())[-20:]]))
        more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        tokens = [*start[: data.draw(st.integers(0, len(start)))], *more]
        self.start(self.ids, tokens[:14], tenant, data)
        return self.ids

    def start(self, seq_id, tokens, tenant, data):
        self.tokens[seq_id], self.tenants[seq_id] = tokens, tenant
        self.learn_names(seq_id)
        compute_ms, compute_last = data.draw(st.sampled_from([(0.0, 1), (1e3, 1), (float("inf"), 1), (1e3, 4)]))
        cached = self.blocks.add(seq_id, tokens, tenant, compute_ms=compute_ms, compute_last=compute_last)
        assert cached == self.blocks.computed_len(seq_id) <= max(0, len(tokens) - compute_last)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data):
        self.forward(data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True)), data)

    def forward(self, seq_ids, data):
        """Chunks and trees of these sequences in one pass, as far as there is room."""
        rows, expected = [], []
        for seq_id in seq_ids:
            tree = self.next_tree(seq_id, data)
            if seq_id in self.stepping or not self.blocks.can_reserve(seq_id, len(tree)):
                continue
            self.blocks.reserve(seq_id, len(tree))
            self.stepping[seq_id] = tree
            rows.append(SequenceRows.from_tree(seq_id, tree))
            before = [*self.tokens[seq_id][: self.blocks.computed_len(seq_id)], tree.token_ids[0]]
            paths = [[tree.token_ids[n] for n in tree.path(node)] for node in range(len(tree))]
            expected.append(np.stack([ledger_logits([*before, *path]) for path in paths]))
        if rows:
            for logits, right in zip(self.runner.forward(rows), expected, strict=True):
                assert (logits == right).all(), "logits of a path are not those of its tokens"

    def next_tree(self, seq_id, data) -> TokenTree:
        rest = self.tokens[seq_id][self.blocks.computed_len(seq_id) :]
        if len(rest) > 1:
            return TokenTree.chain(rest[: data.draw(st.integers(1, len(rest)))])
        tokens, parents, drawn = [rest[0]], [-1], set()
        for _ in range(data.draw(st.integers(0, 7))):
            parent, token = data.draw(st.integers(0, len(tokens) - 1)), data.draw(st.integers(0, 1))
            if (parent, token) not in drawn:
                drawn.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        return TokenTree(tuple(tokens), tuple(parents))

    @rule(data=st.data(), tenant=TENANTS, lease_s=LEASES)
    def whole_turn(self, data, tenant, lease_s):
        """A sequence runs alone until it ends, its last moves still to be made: what fills the pool and the tiers."""
        seq_id = self.add(data, tenant)
        for _ in range(data.draw(st.integers(1, 4))):
            self.forward([seq_id], data)
            if seq_id not in self.stepping:
                break
            self.commit_one(seq_id, data)
        self.end_or_cancel(seq_id, lease_s)

    @precondition(lambda self: self.stepping)
    @rule(data=st.data())
    def commit(self, data):
        self.commit_one(data.draw(st.sampled_from(sorted(self.stepping))), data)

    def commit_one(self, seq_id, data):
        tree, tokens = self.stepping.pop(seq_id), self.tokens[seq_id]
        is_chunk = len(tokens) - self.blocks.computed_len(seq_id) > 1
        path = tuple(range(1, len(tree))) if is_chunk else tree.path(data.draw(st.integers(0, len(tree) - 1)))
        if not is_chunk:
            tokens += [tree.token_ids[node] for node in path]
        self.learn_names(seq_id)
        self.runner.commit(seq_id, (0, *path))
        if self.blocks.computed_len(seq_id) == len(tokens):
            tokens.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.stepping)
    @rule(data=st.data())
    def rollback(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.stepping)))
        del self.stepping[seq_id]
        self.runner.rollback(seq_id)

    @rule(seq_id=consumes(sequences), lease_s=LEASES)
    def end_or_cancel(self, seq_id, lease_s):
        self.blocks.free(seq_id, lease_s)
        del self.tokens[seq_id], self.tenants[seq_id]
        self.stepping.pop(seq_id, None)

    @rule(seq_id=sequences, data=st.data())
    def pause_and_resume(self, seq_id, data):
        self.stepping.pop(seq_id, None)
        self.blocks.free(seq_id)
        self.start(seq_id, self.tokens[seq_id], self.tenants[seq_id], data)

    @rule(seconds=st.sampled_from([1.0, 9.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def counts_agree(self):
        self.blocks.check_integrity()
        held = {block for seq_id in self.tokens for block in self.blocks.block_table(seq_id)}
        assert self.blocks.free_blocks == BLOCKS - len(held)

    def teardown(self):
        for seq_id in self.tokens:
            self.blocks.free(seq_id)
        self.blocks.check_integrity()
        assert self.blocks.free_blocks == BLOCKS


SharedCache.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestSharedCache = SharedCache.TestCase
