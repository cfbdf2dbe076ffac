"""Tiers below the pool: what goes where, what comes back and when that pays, bytes, bounds, and a disk that fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from support.ledger_model import LedgerKv, LedgerModel, ledger_logits

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.prefix import prefix_hashes
from treeserve_engine.batch import SequenceRows
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.kv_storage import TierBytes, TierStorage
from treeserve_engine.kv_tiers import POOL, BlockCopy, KvTiers, Place, TierSize
from treeserve_engine.runner import ModelRunner

SIZE = 4
BLOCK_BYTES = 8 * SIZE


def texts(count: int, blocks: int = 2) -> list[list[int]]:
    """Different texts of so many blocks and a token."""
    return [[100 * i + j for j in range(blocks * SIZE + 1)] for i in range(1, count + 1)]


def turn(runner: ModelRunner, seq_id: int, tokens: list[int], **options: float) -> int:
    """Compute what is not cached, look at the logits, end. Returns what was cached."""
    cached = runner.blocks.add(seq_id, tokens, **options)
    rest = tokens[cached:]
    runner.blocks.reserve(seq_id, len(rest))
    (logits,) = runner.forward([SequenceRows.from_chain(seq_id, rest, [len(rest) - 1])])
    assert (logits[0] == ledger_logits(tokens)).all()
    runner.commit(seq_id, range(len(rest)))
    runner.blocks.free(seq_id)
    runner.blocks.check_integrity()
    return cached


def make_runner(tmp_path: Path, host: int, disk: int, num_blocks: int = 3) -> ModelRunner:
    tiers = TierBytes(host * BLOCK_BYTES, disk * BLOCK_BYTES, tmp_path)
    return ModelRunner(LedgerModel(), num_blocks, SIZE, tiers=tiers)


def test_what_the_pool_has_no_room_for_comes_back_from_memory_and_then_from_disk(tmp_path: Path) -> None:
    many = texts(6)

    def filled() -> ModelRunner:
        runner = make_runner(tmp_path, host=4, disk=4)
        assert [turn(runner, i, tokens) for i, tokens in enumerate(many)] == [0] * 6
        return runner

    known = [turn(filled(), 10, tokens) for tokens in many]
    assert known == [0, 8, 8, 8, 8, 8], "pool, memory and disk together hold five texts"
    runner = filled()
    assert runner.blocks.tier_blocks == (4, 4)
    assert turn(runner, 10, many[1]) == 8, "from disk"
    assert turn(runner, 11, many[4]) == 8, "from memory"
    assert turn(runner, 12, many[0]) == 0


@pytest.mark.parametrize(("host", "disk", "held"), [(0, 0, 1), (2, 0, 2), (0, 2, 2), (4, 2, 4)])
def test_tiers_are_bounded_and_may_be_left_out(tmp_path: Path, host: int, disk: int, held: int) -> None:
    many, known = texts(8), []
    for wanted in many:
        runner = make_runner(tmp_path, host, disk)
        for i, tokens in enumerate(many):
            turn(runner, i, tokens)
        assert sum(runner.blocks.tier_blocks) <= host + disk
        known.append(turn(runner, 10, wanted) == 8)
    assert known == [False] * (8 - held) + [True] * held


def test_a_block_comes_back_only_if_that_takes_less_than_computing_it() -> None:
    for compute_ms, expected in ((1.0, 16), (0.5, 16), (0.3, 8), (0.1, 8), (0.0, 8)):
        tiers = KvTiers([TierSize(2, restore_ms=0.4 * SIZE), TierSize(8, restore_ms=0.6 * SIZE)])
        blocks = BlockManager(4, SIZE, tiers=tiers)
        blocks.add(1, [*range(16), 0])
        blocks.reserve(1, 16)
        blocks.commit(1, range(16), range(16))
        blocks.free(1)
        blocks.add(2)
        blocks.reserve(2, 2 * SIZE)  # evicts the end of the prefix
        blocks.free(2)
        assert tiers.blocks == (2, 0)
        cached = blocks.add(3, [*range(16), 0], compute_ms=compute_ms)
        assert cached == expected
        assert blocks.restored_blocks == (cached - 8) // SIZE
        blocks.check_integrity()


def test_an_expensive_block_comes_back_for_the_cheap_ones_behind_it() -> None:
    """Saved time counts over the whole prefix."""
    names = prefix_hashes([1, 2, 3], 1, "")
    for compute_ms, expected in ((1.0, 3), (0.7, 3), (0.6, 0)):
        tiers = KvTiers([TierSize(2, restore_ms=0.0), TierSize(1, restore_ms=2.0)])
        for block, name in enumerate(names):
            tiers.keep(name, block)  # the third pushes the first to the second tier
        assert BlockManager(3, 1, tiers=tiers).add(1, [1, 2, 3, 0], compute_ms=compute_ms) == expected


def test_what_is_forgotten_leaves_the_tiers_too(tmp_path: Path) -> None:
    runner, many = make_runner(tmp_path, host=2, disk=4), texts(4)
    for i, tokens in enumerate(many):
        turn(runner, i, tokens)
    for tokens in many[1:]:
        runner.blocks.forget(prefix_hashes(tokens, SIZE, ""))
    runner.blocks.check_integrity()
    assert (runner.blocks.tier_blocks, runner.blocks.cached_blocks) == ((0, 2), 0)
    assert [turn(runner, i, tokens) for i, tokens in enumerate(many, 10)] == [8, 0, 0, 0]


def test_restoring_never_evicts_its_own_prefix(tmp_path: Path) -> None:
    """All but one block of the pool are needed for the prefix itself, and memory holds nothing else."""
    runner, (long, other) = make_runner(tmp_path, host=4, disk=0, num_blocks=5), texts(2, blocks=4)
    turn(runner, 1, long)
    turn(runner, 2, other)
    assert turn(runner, 3, long) == 16


def test_a_prefix_comes_back_as_far_as_there_is_room(tmp_path: Path) -> None:
    runner, (long, other) = make_runner(tmp_path, host=8, disk=0, num_blocks=5), texts(2, blocks=4)
    turn(runner, 1, long)
    turn(runner, 2, other)
    runner.blocks.add(3)
    runner.blocks.reserve(3, 3 * SIZE)
    assert runner.blocks.add(4, long) == 8
    assert runner.blocks.free_blocks == 0
    runner.blocks.check_integrity()
    runner.blocks.free(3)
    runner.blocks.free(4)
    assert turn(runner, 5, long) == 16


def test_a_block_is_copied_out_once() -> None:
    """Going back and forth between two prefixes writes nothing new to the tier."""
    tiers = KvTiers([TierSize(8, 0.0)])
    blocks = BlockManager(2, 1, tiers=tiers)
    copies = []
    for seq_id, tokens in enumerate(([1, 2, 0], [3, 4, 0]) * 3):
        cached = blocks.add(seq_id, tokens)
        if cached < 2:
            blocks.reserve(seq_id, 2 - cached)
            blocks.commit(seq_id, range(2 - cached), tokens[cached:2])
        blocks.free(seq_id)
        copies.append([(copy.src.tier, copy.dst.tier) for copy in blocks.take_copies()])
    out, back = (POOL, 1), (1, POOL)
    assert copies == [[], [out, out], [out, back, out, back], [back, back], [back, back], [back, back]]


def test_the_file_has_no_name_and_its_full_size(tmp_path: Path) -> None:
    runner = make_runner(tmp_path / "new", host=0, disk=100)
    assert list((tmp_path / "new").iterdir()) == []
    file = runner._storage._tiers[0]._file
    assert os.fstat(file).st_size == 100 * BLOCK_BYTES and os.fstat(file).st_nlink == 0
    del runner
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_folder_that_cannot_hold_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="kv_disk_folder: cannot hold 320 bytes in"):
        make_runner(tmp_path / "file", host=0, disk=10)

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(InvalidArgumentError, match="No space left"):
        make_runner(tmp_path, host=0, disk=10)


def test_what_restoring_takes_is_measured(tmp_path: Path) -> None:
    sizes = TierStorage(LedgerKv(3, SIZE), TierBytes(10 * BLOCK_BYTES + 5, 20 * BLOCK_BYTES, tmp_path)).measure()
    assert [size.slots for size in sizes] == [10, 20]
    assert all(0 < size.restore_ms < 1000 for size in sizes)


def test_copies_carry_bytes_between_all_tiers(tmp_path: Path) -> None:
    kv = LedgerKv(4, SIZE)
    storage = TierStorage(kv, TierBytes(2 * BLOCK_BYTES, 2 * BLOCK_BYTES, tmp_path))
    for block in range(4):
        kv.block(block)[:] = block + 1
    pool, host, disk = (lambda slot, tier=tier: Place(tier, slot) for tier in (POOL, 1, 2))
    for src, dst in (
        (pool(3), host(1)),
        (host(1), disk(0)),
        (pool(2), disk(1)),
        (disk(0), pool(1)),
        (disk(1), pool(0)),
    ):
        storage.copy(BlockCopy(src, dst))
    storage.copy(BlockCopy(host(1), pool(2)))
    assert [int(kv.block(block)[0]) for block in range(4)] == [3, 4, 4, 4]
    assert np.unique(kv.numbers[4:]).tolist() == [4]


class BrokenDisk:
    """A disk tier that fails while it is told to."""

    def __init__(self, tier, fails_at: str) -> None:
        self._tier, self._fails_at = tier, fails_at
        self.broken = True

    def read(self, slot: int):
        self._fail("read")
        return self._tier.read(slot)

    def write(self, slot: int, block) -> None:
        self._fail("write")
        self._tier.write(slot, block)

    def _fail(self, what: str) -> None:
        if self.broken and what == self._fails_at:
            raise OSError(errno.EIO, "Input/output error")


def test_a_block_that_was_not_written_is_not_found(tmp_path: Path) -> None:
    runner, many = make_runner(tmp_path, host=0, disk=8), texts(4)
    disk = runner._storage._tiers[0] = BrokenDisk(runner._storage._tiers[0], "write")
    for i, tokens in enumerate(many):
        turn(runner, i, tokens)
    assert runner.blocks.tier_blocks == (0,)
    disk.broken = False
    assert [turn(runner, 10 + i, tokens) for i, tokens in enumerate(many[:3])] == [0, 0, 0]
    assert turn(runner, 20, many[0]) == 8, "and then all is well"


def test_a_block_that_cannot_be_read_fails_who_waits_for_it_and_nobody_later(tmp_path: Path) -> None:
    runner, many = make_runner(tmp_path, host=0, disk=8, num_blocks=6), texts(4)
    for i, tokens in enumerate(many):
        turn(runner, i, tokens)
    disk = runner._storage._tiers[0] = BrokenDisk(runner._storage._tiers[0], "read")
    assert runner.blocks.add(10, many[0]) == 8
    assert runner.blocks.add(11, many[0]) == 8, "shares what is on its way"
    assert turn(runner, 12, many[3]) == 8, "has nothing to do with it"
    for seq_id in (10, 11):
        runner.blocks.reserve(seq_id, 1)
        with pytest.raises(RuntimeError, match="was lost"):
            runner.forward([SequenceRows.from_chain(seq_id, many[0][8:], [0])])
        runner.rollback(seq_id)
        runner.blocks.free(seq_id)
    runner.blocks.check_integrity()
    assert runner.blocks.free_blocks == 6
    disk.broken = False
    assert turn(runner, 13, many[0]) == 8, "the disk still has it"
    assert turn(runner, 14, many[1]) == 8


def test_an_evicted_block_that_never_arrived_is_not_kept(tmp_path: Path) -> None:
    """It was found, did not come, and its room was needed before anybody noticed."""
    runner, many = make_runner(tmp_path, host=0, disk=4, num_blocks=3), texts(3)
    for i, tokens in enumerate(many):
        turn(runner, i, tokens)
    disk = runner._storage._tiers[0] = BrokenDisk(runner._storage._tiers[0], "read")
    assert runner.blocks.add(10, many[1]) == 8
    runner.blocks.free(10)
    turn(runner, 11, texts(9)[-1])
    disk.broken = False
    runner.blocks.check_integrity()
    for i, tokens in enumerate(many):
        turn(runner, 20 + i, tokens)  # looks at the logits


def test_check_integrity_sees_a_slot_used_twice() -> None:
    tiers = KvTiers([TierSize(3, 0.0)])
    for block, name in enumerate((b"a", b"b")):
        tiers.keep(name, block)
    tiers.check_integrity()
    tiers._slots[0][b"a"] = tiers._slots[0][b"b"]
    with pytest.raises(RuntimeError, match="2 blocks and 1 free slots"):
        tiers.check_integrity()
