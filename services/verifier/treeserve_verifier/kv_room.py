"""Whether a sequence fits into the KV pool beside those that run, and the way in and out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from treeserve_core.prefix import PrefixHash, extend_hashes
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.sequence import Sequence


class KvRoom:
    """Sequences in and out of a block manager, which keeps the KV of those that left as long as it has room for it.

    Args:
        lease_s: how long the KV of a session is kept before that of others.
        token_ms: what computing a token of a prompt takes.
        compute_last: tokens at the end of a fresh sequence that are computed though their KV may be known.
    """

    def __init__(
        self,
        blocks: BlockManager,
        lease_s: float,
        token_ms: Callable[[], float] = lambda: math.inf,
        compute_last: Callable[[Sequence], int] = lambda sequence: 1,
    ) -> None:
        self._blocks = blocks
        self._lease_s = lease_s
        self._token_ms = token_ms
        self._compute_last = compute_last

    def fits(self, sequence: Sequence, running: Iterable[Sequence], without: Collection[Sequence] = ()) -> bool:
        """Whether there are blocks for its tokens beside those of the running sequences without some.

        Each of them may grow by a block: a fresh one is not preempted at once.
        """
        free, needed = self._blocks.free_blocks, self._to_take(sequence) + 1
        for other in running:
            if other in without:
                free += self._blocks.own_blocks(other.seq_id)
            else:
                needed += self._blocks_of(other) + 1 - len(self._blocks.block_table(other.seq_id))
        return needed <= free

    def enter(self, sequence: Sequence) -> None:
        """Give it the KV of the longest prefix that is known."""
        is_fresh = sequence.cached_tokens is None
        known = self._blocks.add(
            sequence.seq_id,
            sequence.tokens,
            _owner(sequence),
            names=self._names(sequence),
            compute_last=self._compute_last(sequence) if is_fresh else 1,
            compute_ms=self._token_ms(),
        )
        if is_fresh:
            sequence.cached_tokens = min(known, sequence.prompt_len)

    def pause(self, sequence: Sequence) -> None:
        """Let its blocks go. Until somebody needs their room they are there when it comes back."""
        self._blocks.free(sequence.seq_id)

    def leave(self, sequence: Sequence) -> None:
        """It ended while it ran."""
        self._blocks.free(sequence.seq_id, self._lease_s if sequence.submission.session_id else 0.0)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It ended, and holds no blocks: KV that it alone could find is of no use to anybody."""
        if not sequence.submission.tenant:
            self._blocks.forget(self._names(sequence))

    def _blocks_of(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._blocks.block_size)

    def _to_take(self, sequence: Sequence) -> int:
        """Free blocks that its tokens take: those that others hold cost nothing."""
        return self._blocks.blocks_to_take(self._names(sequence), len(sequence.tokens))

    def _names(self, sequence: Sequence) -> list[PrefixHash]:
        sequence.prefix_names = extend_hashes(
            sequence.prefix_names, sequence.tokens, self._blocks.block_size, _owner(sequence)
        )
        return sequence.prefix_names


def _owner(sequence: Sequence) -> str:
    """Whose prefixes it may find: its tenant's, or its own alone if nobody is known."""
    return sequence.submission.tenant or f"sequence {sequence.seq_id}"
