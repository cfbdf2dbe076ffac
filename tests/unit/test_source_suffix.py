"""Suffix tries count substrings exactly; suffix decoding follows the most frequent continuations."""

from __future__ import annotations

import math
import random
import time
from collections import Counter

from treeserve_core.sampling import SamplingParams
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.suffix import SuffixSource
from treeserve_speculator.sources.suffix_trie import SuffixTrie, TrieNode


def _counts(node: TrieNode, path: tuple[int, ...] = ()) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for token, child in (node.children or {}).items():
        counts[(*path, token)] = child.count
        counts.update(_counts(child, (*path, token)))
    return counts


def _substrings(sequences: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(tokens[start:end])
        for tokens in sequences
        for start in range(len(tokens))
        for end in range(start + 1, min(start + depth, len(tokens)) + 1)
    )


def _opened(source: SuffixSource, tokens: list[int], prompt_len: int | None = None, tenant: str = "a") -> DraftSequence:
    length = len(tokens) if prompt_len is None else prompt_len
    state = DraftSequence(1, list(tokens), length, SamplingParams(), 8, tenant=tenant)
    source.open(state)
    return state


def test_trie_counts_every_substring() -> None:
    rng = random.Random(1)
    sequences = [[rng.randrange(3) for _ in range(rng.randrange(20))] for _ in range(6)]
    trie = SuffixTrie(depth=4)
    for tokens in sequences:
        trie.add(tokens)
    expected = _substrings(sequences, 4)
    assert _counts(trie.root) == expected
    assert trie.size == len(expected)


def test_trie_removal_undoes_addition() -> None:
    rng = random.Random(2)
    sequences = [[rng.randrange(3) for _ in range(rng.randrange(1, 20))] for _ in range(8)]
    trie = SuffixTrie(depth=5)
    for tokens in sequences:
        trie.add(tokens)
    for removed in range(len(sequences)):
        trie.remove(sequences[removed])
        expected = _substrings(sequences[removed + 1 :], 5)
        assert _counts(trie.root) == expected
        assert trie.size == len(expected)


def test_follows_the_most_frequent_continuation() -> None:
    source = SuffixSource()
    state = _opened(source, [1, 2, 9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8, 1, 2])
    tree = source.propose(state, 1)
    assert tree is not None and tree.token_ids == (2, 3)


def test_the_context_with_the_best_expectation_wins() -> None:
    source = SuffixSource()
    state = _opened(source, [8, 1, 40, 7, 1, 50, 6, 1, 50, 8, 1])  # after 1 mostly 50, after 8 1 always 40
    tree = source.propose(state, 1)
    assert tree is not None and tree.token_ids == (1, 40)


def test_branches_where_both_are_likely() -> None:
    source = SuffixSource()
    state = _opened(source, [20, 1, 2, 3, 21, 1, 2, 4, 22, 1, 2, 3, 23, 1, 2, 4, 24, 1, 2])
    tree = source.propose(state, 8)
    assert tree is not None and tree.log_probs is not None
    assert {tree.token_ids[i] for i in tree.children[0]} == {3, 4}
    assert all(math.exp(lp) >= 0.1 - 1e-12 for lp in tree.path_log_probs)


def test_sequence_counts_grow_with_commits() -> None:
    tokens = [random.Random(3).randrange(4) for _ in range(60)]
    source = SuffixSource()
    state = _opened(source, tokens[:5], prompt_len=5)
    for position in range(5, len(tokens), 5):
        new = tokens[position : position + 5]
        state.tokens.extend(new)
        source.commit(state, new, [])
        fresh = SuffixSource()
        assert source.propose(state, 8) == fresh.propose(_opened(fresh, state.tokens, prompt_len=5), 8)


def test_finished_responses_help_later_sequences() -> None:
    source = SuffixSource()
    first = _opened(source, [50, 10, 11, 12, 13, 14], prompt_len=1)
    fresh = _opened(source, [60, 10, 11], prompt_len=1)
    assert source.propose(fresh, 4) is None
    source.close(first)
    tree = source.propose(fresh, 4)
    assert tree is not None and tree.token_ids == (11, 12, 13, 14)


def test_no_tenant_gets_what_another_left() -> None:
    source = SuffixSource()
    for tenant in ("a", ""):
        source.close(_opened(source, [50, 10, 11, 12, 13, 14], prompt_len=1, tenant=tenant))
    for tenant in ("b", ""):
        assert source.propose(_opened(source, [60, 10, 11], prompt_len=1, tenant=tenant), 4) is None
    assert source.propose(_opened(source, [60, 10, 11], prompt_len=1, tenant="a"), 4) is not None


def test_what_another_tenant_leaves_changes_no_draft() -> None:
    rng = random.Random(6)
    alone, beside = SuffixSource(), SuffixSource()
    for _ in range(30):
        tokens = [rng.randrange(5) for _ in range(20)]
        beside.close(_opened(beside, [rng.randrange(5) for _ in range(20)], prompt_len=0, tenant="b"))
        for source in (alone, beside):
            source.close(_opened(source, tokens, prompt_len=0))
        question = [rng.randrange(5) for _ in range(4)]
        assert alone.propose(_opened(alone, question), 8) == beside.propose(_opened(beside, question), 8)


def test_tenants_share_one_bound_and_the_one_heard_of_longest_ago_forgets_first() -> None:
    source = SuffixSource(depth=4, max_shared_nodes=100)
    for tenant in ("a", "b"):
        source.close(_opened(source, [1, *range(10, 22)], prompt_len=1, tenant=tenant))
    source.propose(_opened(source, [1, 10], tenant="a"), 2)
    for i in range(20):
        source.close(_opened(source, [1, *range(100 * i, 100 * i + 10)], prompt_len=1, tenant="c"))
        assert source._finished.size <= 100
        if i == 0:
            assert source._finished.find("b") is None, "its turn was longest ago"
            assert source.propose(_opened(source, [2, 10, 11], tenant="a"), 2) is not None
    assert len(source._finished) == 1


def test_prompts_are_not_shared() -> None:
    source = SuffixSource()
    source.close(_opened(source, [10, 11, 12, 13], prompt_len=4))
    assert source.propose(_opened(source, [60, 10, 11]), 4) is None


def test_oldest_finished_response_is_forgotten() -> None:
    source = SuffixSource(depth=4, max_shared_nodes=60)
    for base in range(0, 500, 100):
        source.close(_opened(source, [1, *range(base + 10, base + 20)], prompt_len=1))
    assert source.propose(_opened(source, [2, 10, 11]), 2) is None
    tree = source.propose(_opened(source, [2, 410, 411]), 2)
    assert tree is not None and tree.token_ids == (411, 412, 413)


def test_a_response_that_comes_again_and_again_is_kept_a_bounded_number_of_times() -> None:
    source = SuffixSource(depth=4, max_shared_nodes=60)
    for _ in range(1000):
        source.close(_opened(source, [1, *range(10, 20)], prompt_len=1))
        source.close(_opened(source, [1], prompt_len=1))
    finished = source._finished.find("a")
    assert finished is not None and source._finished.size == finished.size == 60
    assert sum(map(len, finished._responses)) == 60 and len(finished._responses) == 6
    tree = source.propose(_opened(source, [2, 10, 11]), 2)
    assert tree is not None and tree.token_ids == (11, 12, 13)


def test_budget_is_kept() -> None:
    source = SuffixSource()
    state = _opened(source, [random.Random(4).randrange(3) for _ in range(300)])
    for budget in (1, 2, 5, 20):
        tree = source.propose(state, budget)
        assert tree is not None and 1 <= len(tree) - 1 <= budget


def test_no_context_no_tree() -> None:
    source = SuffixSource()
    assert source.propose(_opened(source, [1, 2, 3]), 4) is None


def test_cost_per_token_is_small() -> None:
    rng = random.Random(5)
    source = SuffixSource()
    state = _opened(source, [rng.randrange(200) for _ in range(500)], prompt_len=500)
    started = time.process_time()
    for _ in range(500):
        state.tokens.append(rng.randrange(200))
        source.commit(state, state.tokens[-1:], [])
        source.propose(state, 8)
    assert (time.process_time() - started) / 500 < 1e-3  # tens of microseconds when the machine is idle
