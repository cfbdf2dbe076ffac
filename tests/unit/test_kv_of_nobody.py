"""Prefixes are found within a tenant; a sequence of nobody's finds its own again and no other's."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from support.sequences import make_config, make_sequence

from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_engine.block_manager import BlockManager
from treeserve_verifier.kv_room import KvRoom
from treeserve_verifier.scheduler import Scheduler
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


def test_a_prompt_is_hashed_once_on_its_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    blake2b = hashlib.blake2b

    def counted(data: bytes, **options: Any) -> Any:
        hashed.append(data)
        return blake2b(data, **options)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    room, sequence = KvRoom(BlockManager(64, BLOCK_SIZE), lease_s=0.0), make_sequence(PROMPT, tenant="acme")
    for _ in range(3):
        assert room.fits(sequence, [])
    room.enter(sequence)
    assert len(hashed) == 1 + len(PROMPT) // BLOCK_SIZE, "the tenant and each block"


@pytest.mark.parametrize("session_id", ["", "chat"])
@pytest.mark.parametrize("is_paused", [False, True])
def test_what_nobody_can_find_any_more_pushes_nothing_out(session_id: str, is_paused: bool) -> None:
    blocks = BlockManager(12, BLOCK_SIZE)
    config = make_config(max_sequences=1, reserved_sequences=0, session_lease_s=60.0)
    scheduler = Scheduler(config, blocks, lambda sequence: None, lambda: 0.0)
    known, later = (make_sequence(PROMPT, tenant="acme") for _ in range(2))
    nobodys = make_sequence(PROMPT, limits=SequenceLimits(ServiceClass.BATCH, preemptible=True), session_id=session_id)
    urgent = make_sequence((1,), limits=SequenceLimits(ServiceClass.REALTIME))
    for sequence in (known, nobodys):
        scheduler.submit(sequence)
        scheduler.admit()
        compute(blocks, sequence)
        if sequence is known:
            scheduler.cancel(known)
    if is_paused:
        scheduler.submit(urgent)
        assert scheduler.admit() == [urgent] and scheduler.waiting == (nobodys,)
    scheduler.cancel(nobodys)
    assert blocks.cached_blocks == len(PROMPT) // BLOCK_SIZE, "those of the known tenant alone"
    blocks.add(99)
    blocks.reserve(99, 6 * BLOCK_SIZE)
    KvRoom(blocks, lease_s=0.0).enter(later)
    assert later.cached_tokens == 20
