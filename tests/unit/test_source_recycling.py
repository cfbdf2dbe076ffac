"""Token recycling: rows are learnt under the preceding token, newest wins, trees grow by rank."""

from __future__ import annotations

from collections.abc import Sequence

from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.recycling import RecyclingSource


def _state(tokens: list[int], tenant: str = "a") -> DraftSequence:
    return DraftSequence(1, tokens, 1, SamplingParams(), 8, tenant=tenant)


def _learn(source: RecyclingSource, preceding: int, top: Sequence[int]) -> None:
    source.commit(_state([0, preceding, top[0]]), top[:1], [top])


def _propose(source: RecyclingSource, token: int, budget: int) -> TokenTree | None:
    return source.propose(_state([0, token]), budget)


def test_row_belongs_to_the_preceding_token() -> None:
    source = RecyclingSource(100)
    state = _state([5, 6, 7])
    source.commit(state, [6, 7], [[60, 61], [70, 71]])
    after_5, after_6 = _propose(source, 5, 1), _propose(source, 6, 1)
    assert after_5 is not None and after_5.token_ids == (5, 60)
    assert after_6 is not None and after_6.token_ids == (6, 70)
    assert _propose(source, 7, 1) is None


def test_newest_row_wins() -> None:
    source = RecyclingSource(100)
    _learn(source, 5, [60, 61, 62])
    _learn(source, 5, [70])
    tree = _propose(source, 5, 8)
    assert tree is not None and tree.token_ids == (5, 70)


def test_nothing_learnt_no_tree() -> None:
    source = RecyclingSource(100)
    assert _propose(source, 5, 4) is None
    source.commit(_state([5, 6]), [6], [])
    source.commit(_state([5, 6]), [6], [[]])
    assert _propose(source, 5, 4) is None


def test_grows_best_first() -> None:
    source = RecyclingSource(100)
    _learn(source, 1, [2, 3])
    _learn(source, 2, [4, 5])
    tree = _propose(source, 1, 4)
    # 0.45 for 2, 0.45 * 0.45 for 2-4, 0.15 for 3, 0.45 * 0.15 for 2-5
    assert tree is not None
    assert (tree.token_ids, tree.parents) == ((1, 2, 4, 3, 5), (-1, 0, 1, 0, 1))
    assert list(tree.path_log_probs) == sorted(tree.path_log_probs, reverse=True)


def test_tree_is_the_best_of_all_nodes() -> None:
    source = RecyclingSource(10)
    for token in range(10):
        _learn(source, token, [(token + 1 + rank) % 10 for rank in range(8)])
    everything = _propose(source, 0, 400)
    assert everything is not None and len(everything) == 401
    small = _propose(source, 0, 12)
    assert small == everything.pruned(12)


def test_cycles_end_at_the_depth_limit() -> None:
    source = RecyclingSource(10, max_depth=3)
    _learn(source, 1, [1])
    tree = _propose(source, 1, 50)
    assert tree is not None and tree.token_ids == (1, 1, 1, 1)


def test_padding_ids_and_repeats_are_left_out() -> None:
    source = RecyclingSource(10)
    _learn(source, 1, [2, 2, 10, 3])
    tree = _propose(source, 1, 3)
    assert tree is not None and tree.token_ids[1:] == (2, 3)


def test_learns_from_one_sequence_for_another() -> None:
    source = RecyclingSource(10)
    first, second = _state([1, 2]), DraftSequence(9, [8, 1], 2, SamplingParams(), 4, tenant="a")
    source.commit(first, [2], [[2]])
    source.close(first)
    tree = source.propose(second, 1)
    assert tree is not None and tree.token_ids == (1, 2)


def test_no_tenant_learns_from_another() -> None:
    source = RecyclingSource(10)
    states = {tenant: _state([1, 2], tenant) for tenant in ("a", "b", "")}
    stranger = _state([1, 2], "")
    for state in (*states.values(), stranger):
        source.open(state)
    for rank, state in enumerate(states.values()):
        source.commit(state, [2], [[2 + rank]])
        state.tokens.append(1)
    trees = {tenant: source.propose(state, 1) for tenant, state in states.items()}
    assert {tenant: tree and tree.token_ids for tenant, tree in trees.items()} == {"a": (1, 2), "b": (1, 3), "": (1, 4)}
    stranger.tokens.append(1)
    assert source.propose(stranger, 1) is None, "two sequences of nobody share nothing"
    assert source.propose(_state([1], "c"), 1) is None


def test_tenants_share_one_bound_and_the_oldest_rows_go_first() -> None:
    source = RecyclingSource(100, max_shared_rows=10)
    for token in range(8):
        source.commit(_state([token, 50], "a"), [50], [[50]])
    for token in range(6):
        source.commit(_state([token, 60], "b"), [60], [[60]])
    assert source._shared.size == 10
    assert [source.propose(_state([token], "a"), 1) is not None for token in range(8)] == [False] * 4 + [True] * 4
    assert all(source.propose(_state([token], "b"), 1) is not None for token in range(6))
    for token in range(20):
        source.commit(_state([token, 70], "b"), [70], [[70]])
        assert source._shared.size == 10
    assert source.propose(_state([7], "a"), 1) is None and len(source._shared) == 1
