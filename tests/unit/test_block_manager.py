"""The block manager: reservations, commits, misuse, and a state machine against a model that forgets nothing."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from treeserve_engine.block_manager import BlockManager, OutOfBlocksError


def _manager(num_blocks: int = 8, block_size: int = 4, committed: int = 0) -> BlockManager:
    blocks = BlockManager(num_blocks, block_size)
    blocks.add(1)
    if committed:
        blocks.reserve(1, committed)
        blocks.commit(1, range(committed))
    return blocks


def test_reserve_takes_what_is_missing_only():
    blocks = _manager(committed=5)
    assert (blocks.free_blocks, len(blocks.block_table(1))) == (6, 2)
    blocks.reserve(1, 3)
    assert blocks.free_blocks == 6
    blocks.rollback(1)
    blocks.reserve(1, 4)
    assert blocks.free_blocks == 5


def test_slots_follow_the_block_table():
    blocks = _manager(committed=6)
    table = blocks.block_table(1)
    expected = [table[p // 4] * 4 + p % 4 for p in range(6)]
    assert blocks.slots(1, 0, 6).tolist() == expected
    assert blocks.slots(1, 2, 5).tolist() == expected[2:5]
    assert blocks.slots(1, 0, 6).dtype == np.int64


def test_commit_moves_kept_nodes_together():
    blocks = _manager(committed=3)
    blocks.reserve(1, 10)
    slots = blocks.slots(1, 0, 13).tolist()
    moves = blocks.commit(1, [0, 2, 7])
    assert moves.src.tolist() == [slots[3 + 2], slots[3 + 7]]
    assert moves.dst.tolist() == [slots[3 + 1], slots[3 + 2]]
    assert blocks.computed_len(1) == 6
    assert blocks.free_blocks == 6
    blocks.check_integrity()


def test_commit_of_a_prefix_moves_nothing():
    blocks = _manager()
    blocks.reserve(1, 9)
    moves = blocks.commit(1, range(7))
    assert len(moves.src) == len(moves.dst) == 0
    assert blocks.computed_len(1) == 7


def test_commit_of_nothing_equals_rollback():
    blocks = _manager(committed=4)
    blocks.reserve(1, 9)
    blocks.commit(1, [])
    assert (blocks.computed_len(1), blocks.free_blocks) == (4, 7)


@pytest.mark.parametrize("committed", [3, 4, 5])
def test_rollback_at_block_edges_frees_what_was_reserved(committed):
    blocks = _manager(committed=committed)
    before = blocks.block_table(1), blocks.free_blocks
    for n in (1, 3, 4, 5, 12):
        blocks.reserve(1, n)
        blocks.rollback(1)
        assert (blocks.block_table(1), blocks.free_blocks) == before


def test_a_refused_reservation_changes_nothing():
    blocks = _manager(num_blocks=3, committed=5)
    assert blocks.can_reserve(1, 7) and not blocks.can_reserve(1, 8)
    before = blocks.block_table(1), blocks.free_blocks
    with pytest.raises(OutOfBlocksError, match="2 blocks are needed and 1 are free"):
        blocks.reserve(1, 8)
    assert (blocks.block_table(1), blocks.free_blocks) == before
    blocks.reserve(1, 7)


def test_free_gives_back_a_reservation_too():
    blocks = _manager(committed=5)
    blocks.reserve(1, 9)
    blocks.free(1)
    assert blocks.free_blocks == blocks.total_blocks == 8
    blocks.check_integrity()


def test_misuse_is_refused():
    blocks = _manager(committed=2)
    for call in (blocks.free, blocks.computed_len, blocks.block_table, blocks.rollback):
        with pytest.raises(KeyError):
            call(2)
    for call in (blocks.reserve, blocks.can_reserve):
        with pytest.raises(KeyError):
            call(2, 1)
    with pytest.raises(KeyError):
        blocks.commit(2, [0])
    with pytest.raises(RuntimeError, match="exists already"):
        blocks.add(1)
    with pytest.raises(RuntimeError, match="no reservation"):
        blocks.commit(1, [0])
    with pytest.raises(RuntimeError, match="no reservation"):
        blocks.rollback(1)
    with pytest.raises(ValueError, match="reservation of 0"):
        blocks.reserve(1, 0)
    blocks.reserve(1, 2)
    with pytest.raises(RuntimeError, match="reservation already"):
        blocks.reserve(1, 2)
    for kept in ([1, 0], [0, 0], [2], [-1]):
        with pytest.raises(ValueError, match="do not ascend within"):
            blocks.commit(1, kept)
    with pytest.raises(RuntimeError, match="are not within its 4"):
        blocks.slots(1, 0, 5)
    with pytest.raises(ValueError, match="no cache"):
        BlockManager(0, 4)
    assert blocks.computed_len(1) == 2
    blocks.commit(1, [0, 1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b._pool._free.append(b.block_table(1)[0]),
        lambda b: b._pool._free.pop(),
        lambda b: b._pool._free.append(99),
        lambda b: b._sequences[1].table.append(b._pool._free.pop()),
        lambda b: b._sequences[1].table.pop(),
    ],
    ids=["shared", "lost", "unknown", "too-long", "too-short"],
)
def test_check_integrity_sees_damage(damage):
    blocks = _manager(committed=5)
    blocks.check_integrity()
    damage(blocks)
    with pytest.raises(RuntimeError):
        blocks.check_integrity()


class PagedCache(RuleBasedStateMachine):
    """Sequences come, step and go. A cache of one number per slot must always hold each sequence's own tokens.

    Every slot that is written in a step gets a number that no other write uses: a write to a foreign block, a wrong
    move or a block given away while it is held shows as a wrong number in some sequence.
    """

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(num_blocks=12, block_size=3)
        self.cache = np.full(36, -1)
        self.committed: dict[int, list[int]] = {}
        self.reserved: dict[int, list[int]] = {}
        self.ids = 0
        self.numbers = 0

    @rule(target=sequences)
    def add(self):
        self.ids += 1
        self.blocks.add(self.ids)
        self.committed[self.ids] = []
        return self.ids

    @rule(seq_id=sequences, n=st.integers(1, 20))
    def reserve(self, seq_id, n):
        if seq_id in self.reserved:
            with pytest.raises(RuntimeError):
                self.blocks.reserve(seq_id, n)
            return
        if not self.blocks.can_reserve(seq_id, n):
            with pytest.raises(OutOfBlocksError):
                self.blocks.reserve(seq_id, n)
            return
        self.blocks.reserve(seq_id, n)
        start = len(self.committed[seq_id])
        written = list(range(self.numbers, self.numbers + n))
        self.numbers += n
        self.cache[self.blocks.slots(seq_id, start, start + n)] = written
        self.reserved[seq_id] = written

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.reserved)))
        written = self.reserved.pop(seq_id)
        kept = [i for i in range(len(written)) if data.draw(st.booleans())]
        moves = self.blocks.commit(seq_id, kept)
        for src, dst in zip(moves.src, moves.dst, strict=True):
            self.cache[dst] = self.cache[src]
        self.committed[seq_id] += [written[i] for i in kept]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def rollback(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.reserved)))
        self.blocks.rollback(seq_id)
        del self.reserved[seq_id]

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id):
        self.blocks.free(seq_id)
        del self.committed[seq_id]
        self.reserved.pop(seq_id, None)

    @invariant()
    def every_sequence_finds_its_own_numbers(self):
        self.blocks.check_integrity()
        for seq_id, committed in self.committed.items():
            assert self.blocks.computed_len(seq_id) == len(committed)
            everything = committed + self.reserved.get(seq_id, [])
            assert self.cache[self.blocks.slots(seq_id, 0, len(everything))].tolist() == everything


PagedCache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagedCache = PagedCache.TestCase


class TestReservingAhead:
    def test_takes_whole_blocks_for_all(self) -> None:
        blocks = BlockManager(10, 4)
        for seq_id in (1, 2):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({1: 1, 2: 9}) == 4
        assert [len(blocks.block_table(seq_id)) for seq_id in (1, 2)] == [1, 3]
        blocks.check_integrity()
        blocks.commit(1, range(4))
        blocks.commit(2, range(5))
        assert [len(blocks.block_table(seq_id)) for seq_id in (1, 2)] == [1, 2]
        blocks.check_integrity()

    def test_gives_a_block_to_each_before_more_to_the_first(self) -> None:
        blocks = BlockManager(4, 4)
        for seq_id in (1, 2, 3):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({1: 100, 2: 100, 3: 100}) == 4
        assert [len(blocks.block_table(seq_id)) for seq_id in (1, 2, 3)] == [2, 1, 1]

    def test_changes_nothing_where_not_all_get_a_block(self) -> None:
        blocks = BlockManager(2, 4)
        for seq_id in (1, 2, 3):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({1: 1, 2: 1, 3: 1}) is None
        assert blocks.free_blocks == 2
        blocks.reserve(1, 1)
        with pytest.raises(RuntimeError):
            blocks.reserve_ahead({2: 1, 1: 1})
        assert blocks.free_blocks == 1
        blocks.check_integrity()

    def test_needs_no_block_where_there_is_room_in_the_last(self) -> None:
        blocks = BlockManager(1, 4)
        blocks.add(1)
        blocks.reserve(1, 2)
        blocks.commit(1, range(2))
        assert blocks.reserve_ahead({1: 50}) == 0
        blocks.commit(1, range(2))
        assert blocks.reserve_ahead({1: 1}) is None

    def test_takes_no_leased_block_for_more_than_the_next_position(self) -> None:
        blocks = BlockManager(4, 4)
        blocks.add(1, list(range(12)), "tenant")
        blocks.reserve(1, 12)
        blocks.commit(1, range(12), list(range(12)))
        blocks.free(1, lease_s=100.0)
        for seq_id in (2, 3):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({2: 100}) == 1
        assert blocks.cached_blocks == 3
        assert blocks.reserve_ahead({3: 100}) == 1
        assert blocks.cached_blocks == 2

    def test_gives_all_what_they_need_before_more_to_the_first(self) -> None:
        blocks = BlockManager(7, 4)
        for seq_id in (1, 2, 3):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({1: 100, 2: 100, 3: 100}, {3: 9, 2: 1}) == 7
        assert [len(blocks.block_table(seq_id)) for seq_id in (1, 2, 3)] == [3, 1, 3]
        blocks.check_integrity()

    @pytest.mark.parametrize(("needed", "taken"), [(4, 2), (5, 3), (8, 3), (9, None)])
    def test_changes_nothing_where_not_all_get_what_they_need(self, needed: int, taken: int | None) -> None:
        blocks = BlockManager(3, 4)
        for seq_id in (1, 2):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({1: 1, 2: needed}, {2: needed}) == taken
        assert blocks.free_blocks == 3 - (taken or 0)
        if taken is None:
            blocks.reserve(1, 1)
            blocks.reserve(2, 1)
        blocks.check_integrity()

    def test_counts_the_room_in_the_last_block_for_what_is_needed(self) -> None:
        blocks = BlockManager(2, 4)
        blocks.add(1)
        blocks.reserve(1, 2)
        blocks.commit(1, range(2))
        assert blocks.reserve_ahead({1: 6}, {1: 6}) == 1
        blocks.commit(1, range(6))
        assert blocks.reserve_ahead({1: 1}, {1: 1}) is None

    def test_takes_leased_blocks_for_what_is_needed_and_none_for_more(self) -> None:
        blocks = BlockManager(6, 4)
        blocks.add(1, list(range(20)), "tenant")
        blocks.reserve(1, 20)
        blocks.commit(1, range(20), list(range(20)))
        blocks.free(1, lease_s=100.0)
        for seq_id in (2, 3):
            blocks.add(seq_id)
        assert blocks.reserve_ahead({2: 100, 3: 100}, {3: 9}) == 4
        assert [len(blocks.block_table(seq_id)) for seq_id in (2, 3)] == [1, 3]
        assert blocks.cached_blocks == 2
