"""Shared prefixes: what is found, what never is, who goes first when room is needed, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
from support.clock import Clock

from treeserve_core.prefix import prefix_hashes
from treeserve_engine.block_manager import BlockManager, OutOfBlocksError

SIZE = 4
PROMPT = tuple(range(100, 114))  # three full blocks and two tokens


def manager(num_blocks: int = 16, clock: Clock | None = None) -> BlockManager:
    return BlockManager(num_blocks, SIZE, clock=clock or Clock())


def compute(blocks: BlockManager, seq_id: int, tokens: tuple[int, ...]) -> None:
    """Commit all of these tokens that are not committed yet, as a prefill does."""
    rest = tokens[blocks.computed_len(seq_id) :]
    if not rest:
        return
    blocks.reserve(seq_id, len(rest))
    blocks.commit(seq_id, range(len(rest)), rest)


def run(blocks: BlockManager, seq_id: int, tokens: tuple[int, ...], lease_s: float = 0.0, tenant: str = "") -> int:
    """A sequence from its beginning to its end. Returns what it found."""
    cached = blocks.add(seq_id, (*tokens, 0), tenant)
    compute(blocks, seq_id, tokens)
    blocks.free(seq_id, lease_s)
    blocks.check_integrity()
    return cached


def found(blocks: BlockManager, tokens: Iterable[int]) -> int:
    """How much of these tokens a sequence finds; it uses what it finds."""
    cached = blocks.add(10_000, (*tokens, 0))
    blocks.free(10_000)
    return cached


def test_a_prefix_is_found_while_it_is_held_and_after() -> None:
    blocks = manager()
    assert blocks.add(1, PROMPT) == 0
    compute(blocks, 1, PROMPT)
    assert blocks.add(2, PROMPT) == blocks.computed_len(2) == 12
    assert blocks.block_table(2) == blocks.block_table(1)[:3]
    assert blocks.free_blocks == 16 - 4, "shared blocks are held once"
    blocks.free(1)
    blocks.check_integrity()
    assert (blocks.free_blocks, blocks.cached_blocks) == (16 - 3, 0)
    blocks.free(2)
    assert (blocks.free_blocks, blocks.cached_blocks) == (16, 3)
    assert blocks.add(3, PROMPT) == 12
    blocks.check_integrity()


def test_only_equal_prefixes_of_the_same_tenant_are_found() -> None:
    blocks = manager()
    run(blocks, 1, PROMPT, tenant="a")
    changed_early, changed_late = (0, *PROMPT[1:]), (*PROMPT[:9], 0, *PROMPT[10:])
    assert blocks.add(2, PROMPT, "b") == 0
    assert blocks.add(3, changed_early, "a") == 0
    assert blocks.add(4, changed_late, "a") == 8
    assert blocks.add(5, PROMPT[4:], "a") == 0, "the same tokens at other positions are another prefix"
    blocks.check_integrity()


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0), (0, 0)])
def test_the_last_token_is_never_found(length: int, cached: int) -> None:
    blocks = manager()
    run(blocks, 1, PROMPT)
    assert blocks.add(2, PROMPT[:length]) == cached


def test_more_tokens_at_the_end_can_be_left_to_compute() -> None:
    blocks = manager()
    run(blocks, 1, PROMPT)
    assert [blocks.add(i, PROMPT, compute_last=n) for i, n in enumerate((1, 2, 3, 6, 7, 99), 2)] == [12, 12, 8, 8, 4, 0]
    with pytest.raises(ValueError, match="always computed"):
        blocks.add(99, PROMPT, compute_last=0)


def test_what_may_be_written_is_never_shared() -> None:
    blocks = manager()
    blocks.add(1, (*PROMPT, 0))
    compute(blocks, 1, PROMPT)
    blocks.add(2, (*PROMPT, 0))
    compute(blocks, 2, PROMPT)
    for seq_id, other in ((1, 2), (2, 1)):
        blocks.reserve(seq_id, 9)
        written = {slot // SIZE for slot in blocks.slots(seq_id, blocks.computed_len(seq_id), 14 + 9).tolist()}
        assert written.isdisjoint(blocks.block_table(other))
    moves = blocks.commit(1, [0, 4, 7], [7, 8, 9])
    assert {slot // SIZE for slot in moves.dst.tolist()}.isdisjoint(blocks.block_table(2))
    blocks.check_integrity()


def test_draft_nodes_that_were_not_kept_name_nothing() -> None:
    blocks = manager()
    blocks.add(1, (1, 2, 3))
    blocks.reserve(1, 12)
    blocks.commit(1, [0, 1, 2, 6, 9], [1, 2, 3, 4, 5])
    assert blocks.add(2, (1, 2, 3, 4, 5, 6)) == 4
    assert blocks.add(3, (1, 2, 3, 9, 9, 9)) == 0


def test_a_prefix_computed_twice_is_kept_once() -> None:
    blocks = manager()
    for seq_id in (1, 2):
        assert blocks.add(seq_id, PROMPT) == 0
    for seq_id in (1, 2):
        compute(blocks, seq_id, PROMPT)
    assert blocks.block_table(1)[:3] == blocks.block_table(2)[:3]
    assert blocks.block_table(1)[3] != blocks.block_table(2)[3]
    assert blocks.free_blocks == 16 - 5
    blocks.check_integrity()


def test_a_sequence_without_tokens_shares_nothing() -> None:
    blocks = manager()
    blocks.add(1)
    blocks.reserve(1, 8)
    blocks.commit(1, range(8))
    assert not blocks.shares(1)
    blocks.free(1)
    assert blocks.cached_blocks == 0
    run(blocks, 2, PROMPT)
    blocks.add(3)
    assert blocks.computed_len(3) == 0


def test_a_commit_that_hides_its_tokens_is_refused() -> None:
    blocks = manager()
    blocks.add(1, PROMPT)
    blocks.reserve(1, 3)
    for tokens in ((), (1, 2), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match="of a sequence that shares"):
            blocks.commit(1, range(3), tokens)
    blocks.commit(1, range(3), PROMPT[:3])


def test_a_prefix_of_unknown_blocks_is_found_up_to_the_first_gap() -> None:
    blocks = manager(num_blocks=6)
    run(blocks, 1, PROMPT[:12])
    blocks.add(2)
    blocks.reserve(2, 4 * SIZE)  # takes three free ones and the end of the prefix
    assert found(blocks, PROMPT) == 8


def test_room_is_taken_from_the_least_recently_used_and_from_ends_first() -> None:
    a, b = tuple(range(8)), tuple(range(50, 58))
    left = []
    for taken in range(1, 7):
        blocks = manager(num_blocks=6)
        run(blocks, 1, a)
        run(blocks, 2, b)
        assert run(blocks, 3, a) == 8  # used again
        blocks.add(4)
        for _ in range(taken):
            blocks.reserve(4, SIZE)
            blocks.commit(4, range(SIZE))
        left.append((found(blocks, a), found(blocks, b)))
        blocks.check_integrity()
    assert left == [(8, 8), (8, 8), (8, 4), (8, 0), (4, 0), (0, 0)]
    with pytest.raises(OutOfBlocksError):
        blocks.reserve(4, 1)


def test_leased_prefixes_go_last_while_the_lease_lasts() -> None:
    for waited, expected in ((29.0, (8, 0)), (31.0, (0, 8))):
        clock = Clock()
        blocks, (session, other) = manager(4, clock), (tuple(range(8)), tuple(range(50, 58)))
        run(blocks, 1, session, lease_s=30.0)
        run(blocks, 2, other)
        clock.now += waited
        blocks.add(3)
        blocks.reserve(3, 2 * SIZE)
        assert tuple(found(blocks, tokens) for tokens in (session, other)) == expected
        blocks.check_integrity()


def test_a_forgotten_prefix_gives_its_room_first_and_what_is_held_stays() -> None:
    blocks, (mine, other) = manager(4), (tuple(range(8)), tuple(range(50, 58)))
    run(blocks, 1, other)
    run(blocks, 2, mine, lease_s=1e9)
    blocks.add(3, (*mine[:4], 0))
    blocks.forget(prefix_hashes(mine, SIZE, ""))
    blocks.check_integrity()
    assert (blocks.free_blocks, blocks.cached_blocks) == (3, 2)
    assert found(blocks, mine) == 4, "the block that is held"
    blocks.add(4)
    blocks.reserve(4, SIZE)
    assert found(blocks, other) == 8
    blocks.free(3)
    blocks.forget([*prefix_hashes(mine, SIZE, ""), b"never seen"])
    blocks.check_integrity()
    assert found(blocks, mine) == 0


@pytest.mark.parametrize("known", range(4))
def test_names_that_the_caller_has_change_nothing(known: int) -> None:
    blocks, names = manager(), prefix_hashes(PROMPT, SIZE, "a")
    run(blocks, 1, PROMPT, tenant="a")
    assert blocks.add(2, PROMPT, "a", names=names[:known]) == 12
    assert blocks.add(3, PROMPT, "a", names=names[:known], compute_last=7) == 4
    assert blocks.add(4, PROMPT[:8], "a", names=names[:known]) == 4
    compute(blocks, 3, PROMPT)
    assert blocks.block_table(3)[:3] == blocks.block_table(2)
    blocks.check_integrity()


def test_a_lease_only_orders_and_refuses_nobody() -> None:
    blocks = manager(4)
    run(blocks, 1, tuple(range(16)), lease_s=1e9)
    blocks.add(2)
    assert blocks.can_reserve(2, 4 * SIZE)
    blocks.reserve(2, 4 * SIZE)
    assert blocks.cached_blocks == 0


def test_a_lease_outlives_a_guest() -> None:
    """A request without a session uses what a session left: the session's lease goes on."""
    clock = Clock()
    blocks, session = manager(4, clock), tuple(range(8))
    run(blocks, 1, session, lease_s=30.0)
    assert run(blocks, 2, session) == 8
    run(blocks, 3, tuple(range(50, 58)))
    blocks.add(4)
    blocks.reserve(4, 2 * SIZE)
    assert found(blocks, session) == 8


def test_a_lease_ends_with_what_it_was_for() -> None:
    clock = Clock()
    blocks = manager(2, clock)
    run(blocks, 1, tuple(range(4)), lease_s=100.0)
    blocks.add(2)
    blocks.reserve(2, 2 * SIZE)  # nothing else is free: the leased block goes after all
    blocks.rollback(2)
    blocks.free(2)
    run(blocks, 3, tuple(range(20, 24)))
    run(blocks, 4, tuple(range(30, 34)), lease_s=100.0)
    blocks.add(5)
    blocks.reserve(5, SIZE)
    assert found(blocks, range(30, 34)) == 4


def test_blocks_to_take_counts_what_admission_needs() -> None:
    blocks = manager()
    names = prefix_hashes(PROMPT, SIZE, "")
    assert blocks.blocks_to_take(names, len(PROMPT)) == 4
    blocks.add(1, PROMPT)
    compute(blocks, 1, PROMPT)
    assert blocks.blocks_to_take(names, len(PROMPT)) == 1, "three are held already"
    assert blocks.blocks_to_take(names[:3], 12) == 1, "the last token is computed: its block is another one"
    blocks.free(1)
    assert blocks.blocks_to_take(names, len(PROMPT)) == 4, "reusable blocks are free ones"
    before = blocks.free_blocks
    blocks.add(2, PROMPT)
    blocks.reserve(2, len(PROMPT) - blocks.computed_len(2))
    assert before - blocks.free_blocks == 4


def test_own_blocks_are_what_a_pause_would_give() -> None:
    blocks = manager()
    for seq_id, tokens in ((1, PROMPT), (2, (*PROMPT[:8], 1, 2, 3, 4, 5))):
        blocks.add(seq_id, tokens)
        compute(blocks, seq_id, tokens)
    assert (blocks.own_blocks(1), blocks.own_blocks(2)) == (2, 2)
    free = blocks.free_blocks
    blocks.free(1)
    assert blocks.free_blocks == free + 2
    assert blocks.own_blocks(2) == 4


def test_a_paused_sequence_finds_its_own_blocks_again() -> None:
    blocks, tokens = manager(), PROMPT
    blocks.add(1, tokens)
    compute(blocks, 1, tokens)
    blocks.reserve(1, 6)
    blocks.free(1)  # in the middle of a step
    assert blocks.add(1, (*tokens, 5)) == 12
    blocks.check_integrity()
    assert blocks.free_blocks == 16 - 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b._pool._holders.__setitem__(b.block_table(1)[0], 1),
        lambda b: b._pool._holders.__setitem__(b.block_table(1)[3], 2),
        lambda b: b._pool._name_of.pop(b.block_table(1)[1]),
        lambda b: b._pool._block_of.popitem(),
        lambda b: b._pool.name(b.block_table(1)[3], b"another prefix"),
        lambda b: b._sequences[2].table.__setitem__(1, b.block_table(2)[0]),
        lambda b: b._pool._idle.update({b.block_table(1)[0]: None}),
    ],
    ids=["too-few", "too-many", "nameless", "names-differ", "writable-and-named", "twice-in-a-table", "held-and-idle"],
)
def test_check_integrity_counts_references_and_names(damage) -> None:
    blocks = manager()
    for seq_id in (1, 2):
        blocks.add(seq_id, PROMPT)
        compute(blocks, seq_id, PROMPT)
    blocks.check_integrity()
    damage(blocks)
    with pytest.raises(RuntimeError):
        blocks.check_integrity()


def test_threads_that_come_and_go_lose_no_block() -> None:
    """The event loop frees sequences while the engine's thread commits others."""
    blocks = BlockManager(64, SIZE)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for i in range(400):
                run_one(worker * 1000 + i)
        except BaseException as error:
            failures.append(error)

    def run_one(seq_id: int) -> None:
        tokens = tuple(range(seq_id % 3, seq_id % 3 + 10))
        blocks.add(seq_id, (*tokens, 0))
        compute(blocks, seq_id, tokens)
        blocks.free(seq_id, seq_id % 2)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    blocks.check_integrity()
    assert blocks.free_blocks == 64
