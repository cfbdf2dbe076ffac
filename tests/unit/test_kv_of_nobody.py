"""Prefixes are found within a tenant; a sequence of nobody's finds its own again and no other's."""

from __future__ import annotations

import pytest
from support.sequences import make_sequence

from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.kv_room import KvRoom
from treeserve_verifier.sequence import Sequence

PROMPT = tuple(range(10, 34))
BLOCK_SIZE = 4


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    """Give all its tokens their KV."""
    start = blocks.computed_len(sequence.seq_id)
    missing = sequence.tokens[start:]
    blocks.reserve(sequence.seq_id, len(missing))
    blocks.commit(sequence.seq_id, range(len(missing)), missing)


@pytest.mark.parametrize(
    ("first", "second", "cached"), [("acme", "acme", 20), ("acme", "other", 0), ("", "acme", 0), ("", "", 0)]
)
def test_a_prefix_is_found_by_the_same_known_tenant_alone(first: str, second: str, cached: int) -> None:
    blocks = BlockManager(64, BLOCK_SIZE)
    room = KvRoom(blocks, lease_s=60.0)
    earlier, later = (make_sequence(PROMPT, tenant=tenant) for tenant in (first, second))
    room.enter(earlier)
    compute(blocks, earlier)
    assert room.fits(later, [earlier])
    room.leave(earlier)
    room.enter(later)
    assert (earlier.cached_tokens, later.cached_tokens) == (0, cached)
    assert blocks.computed_len(later.seq_id) == cached


def test_a_paused_sequence_of_nobody_finds_its_own_kv() -> None:
    blocks = BlockManager(64, BLOCK_SIZE)
    room = KvRoom(blocks, lease_s=60.0)
    sequence = make_sequence(PROMPT, tenant="")
    room.enter(sequence)
    compute(blocks, sequence)
    room.pause(sequence)
    room.enter(sequence)
    assert blocks.computed_len(sequence.seq_id) == 20
    assert sequence.cached_tokens == 0  # it was its own
