"""Mixing what sources draft: the tree's shape, and probabilities that come true as often as they say."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeserve_core.tree import TokenTree
from treeserve_speculator.mixture import MixBounds, MixedSequence, Mixture

EOS = 2
ROOT = 7
WIDE = MixBounds(64, 16)
A, B = 0b01, 0b10
Path = tuple[int, ...]


def _tree(mask: int, paths: dict[Path, float]) -> TokenTree:
    """A tree of these paths, each with its conditional probability; parents come first."""
    index = {(): 0}
    token_ids, parents, log_probs = [ROOT], [-1], [0.0]
    for path, probability in paths.items():
        index[path] = len(token_ids)
        token_ids.append(path[-1])
        parents.append(index[path[:-1]])
        log_probs.append(math.log(probability))
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs), (0,) + (mask,) * len(paths))


def _path(tree: TokenTree, node: int) -> Path:
    return tuple(tree.token_ids[i] for i in tree.path(node))


def _probabilities(tree: TokenTree) -> dict[Path, float]:
    """Conditional probability of each node."""
    assert tree.log_probs is not None
    return {_path(tree, i): math.exp(tree.log_probs[i]) for i in range(1, len(tree))}


def _mix(
    *trees: TokenTree,
    mixture: Mixture | None = None,
    sequence: MixedSequence | None = None,
    bounds: MixBounds = WIDE,
    is_greedy: bool = True,
) -> TokenTree:
    mixture = mixture or Mixture(frozenset({EOS}))
    tree = mixture.mix(sequence or MixedSequence(), trees, bounds, is_greedy=is_greedy)
    assert TokenTree(tree.token_ids, tree.parents, tree.log_probs, tree.source_masks) == tree
    return tree


@st.composite
def source_trees(draw: st.DrawFn, mask: int) -> TokenTree:
    paths: dict[Path, float] = {}
    for _ in range(draw(st.integers(1, 8))):
        path = (*draw(st.sampled_from([(), *paths])), draw(st.integers(3, 6)))
        paths.setdefault(path, draw(st.sampled_from([0.9, 0.5, 0.2, 0.01])))
    return _tree(mask, paths)


class TestShape:
    @given(source_trees(A), source_trees(B), st.integers(1, 10), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.4]))
    def test_it_is_the_best_of_the_union(
        self, a: TokenTree, b: TokenTree, nodes: int, depth: int, least: float
    ) -> None:
        everything = _mix(a, b, bounds=MixBounds(64, depth))
        tree = _mix(a, b, bounds=MixBounds(nodes, depth, least))
        union = {_path(t, i) for t in (a, b) for i in range(1, len(t)) if t.depths[i] <= depth}
        assert {_path(everything, i) for i in range(1, len(everything))} == union
        worth = [math.exp(p) for p, _ in everything.ranking if math.exp(p) >= least]
        assert [math.exp(p) for p in tree.path_log_probs[1:]] == pytest.approx(worth[:nodes])
        for i, mask in enumerate(tree.source_masks or ()):
            proposers = sum(m for m, t in ((A, a), (B, b)) if _path(tree, i) in {_path(t, j) for j in range(len(t))})
            assert i == 0 or mask == proposers
        for node in range(len(tree)):
            assert sum(math.exp((tree.log_probs or ())[c]) for c in tree.children[node]) <= 1.0 + 1e-9

    def test_the_order_of_the_sources_does_not_matter(self) -> None:
        a, b = _tree(A, {(10,): 0.6, (10, 11): 0.5}), _tree(B, {(10,): 0.3, (20,): 0.2})
        assert _mix(a, b) == _mix(b, a)

    def test_nothing_grows_below_the_end(self) -> None:
        assert set(_probabilities(_mix(_tree(A, {(EOS,): 0.9, (EOS, 5): 0.9})))) == {(EOS,)}

    def test_a_lone_root_has_no_opinion(self) -> None:
        assert _mix(TokenTree.root_only(ROOT), _tree(A, {(10,): 0.5})).token_ids == (ROOT, 10)


class TestPrior:
    def test_agreement_counts_for_more_and_silence_for_less(self) -> None:
        a = _tree(A, {(10,): 0.6})
        alone = _probabilities(_mix(a))[10,]
        agreed = _probabilities(_mix(a, _tree(B, {(10,): 0.6})))[10,]
        against = _probabilities(_mix(a, _tree(B, {(20,): 0.6})))[10,]
        assert against < alone < agreed
        assert _probabilities(_mix(a, _tree(B, {(20,): 0.6, (20, 21): 0.5})))[10,] == against

    def test_who_does_not_expand_a_node_says_nothing_of_its_children(self) -> None:
        deep = {(10,): 0.6, (10, 11): 0.6}
        alone = _probabilities(_mix(_tree(A, deep)))[10, 11]
        assert _probabilities(_mix(_tree(A, deep), _tree(B, {(10,): 0.5, (30,): 0.5})))[10, 11] == alone


def _taught(
    rounds: int, truth: dict[int, float], *trees: TokenTree, mixture: Mixture, greedy: bool = True, seed: int = 1
) -> MixedSequence:
    """Show the same trees again and again; the next token is drawn from `truth`, or is nobody's."""
    rng, sequence = random.Random(seed), MixedSequence()
    for _ in range(rounds):
        mixture.mix(sequence, trees, WIDE, is_greedy=greedy)
        (token,) = rng.choices([*truth, 99], [*truth.values(), 1.0 - sum(truth.values())])
        mixture.lesson(sequence, [token])()
    return sequence


class TestLearning:
    @pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
    @pytest.mark.parametrize("claim", [0.1, 0.9])
    def test_claims_become_rates(self, claim: float, rate: float) -> None:
        mixture, tree = Mixture(frozenset()), _tree(A, {(10,): claim})
        sequence = _taught(300, {10: rate}, tree, mixture=mixture)
        assert _probabilities(_mix(tree, mixture=mixture, sequence=sequence))[10,] == pytest.approx(rate, abs=0.12)

    def test_a_boaster_gives_way_to_an_honest_source(self) -> None:
        mixture = Mixture(frozenset())
        honest, boaster = _tree(A, {(10,): 0.4, (11,): 0.2}), _tree(B, {(20,): 0.95})
        assert _mix(honest, boaster, mixture=mixture).token_ids[1] == 20
        sequence = _taught(60, {10: 0.45, 11: 0.25, 20: 0.05}, honest, boaster, mixture=mixture)
        learned = _mix(honest, boaster, mixture=mixture, sequence=sequence)
        assert learned.token_ids == (ROOT, 10, 11, 20)
        assert learned.path_log_probs[1] > math.log(0.3)

    def test_a_source_is_trusted_where_it_was_right(self) -> None:
        mixture, tree = Mixture(frozenset()), _tree(A, {(10,): 0.5})
        for seed in range(5):
            good = _taught(10, {10: 0.95}, tree, mixture=mixture, seed=seed)
            bad = _taught(10, {10: 0.05}, tree, mixture=mixture, seed=seed)
        in_good, in_bad, fresh = (
            _probabilities(_mix(tree, mixture=mixture, sequence=s))[10,] for s in (good, bad, MixedSequence())
        )
        assert in_bad < 0.3 < fresh < 0.7 < in_good

    def test_what_sampling_teaches_is_not_taken_for_greedy_sequences(self) -> None:
        mixture, tree = Mixture(frozenset()), _tree(A, {(10,): 0.7})
        before = _probabilities(_mix(tree, mixture=mixture))
        _taught(50, {10: 0.1}, tree, mixture=mixture, greedy=False)
        assert _probabilities(_mix(tree, mixture=mixture)) == before
        assert _probabilities(_mix(tree, mixture=mixture, is_greedy=False))[10,] < 0.5

    def test_every_committed_token_of_a_tree_is_learned_from_once(self) -> None:
        def deeper(commits: Sequence[Sequence[int]]) -> float:
            """The second level's probability after such commits."""
            mixture, sequence = Mixture(frozenset()), MixedSequence()
            tree = _tree(A, {(10,): 0.5, (10, 11): 0.5})
            for _ in range(20):
                mixture.mix(sequence, [tree], WIDE, is_greedy=True)
                for tokens in commits:
                    mixture.lesson(sequence, tokens)()
            return _probabilities(_mix(tree, mixture=mixture, sequence=sequence))[10, 11]

        at_once = deeper([[10, 11]])
        assert at_once > deeper([[10]]) > deeper([[10, 30]]), "what came after its leaves or was not seen says nothing"
        assert deeper([[10], [11]]) == at_once
        assert deeper([[10, 11, 30]]) == deeper([[10, 11], [30], [30]]) == at_once
        assert deeper([[10, 30], [11]]) == deeper([[10, 30]]), "once it was left, the tree is done with"

    def test_probabilities_hold_over_a_mixed_stream(self) -> None:
        """Two sources whose claims are wrong in different ways, in all combinations: what is said comes true."""
        rng, mixture, sequence = random.Random(3), Mixture(frozenset()), MixedSequence()
        said: list[tuple[float, float, bool]] = []  # claimed by the bolder, mixed, came true
        for n in range(1500):
            p = rng.random()
            a = {(10,): min(0.99, 0.5 + 0.5 * p)} if rng.random() < 0.8 else {(30,): 0.3}  # boasts
            b = {(10,): max(0.01, p * p), (20,): 0.2}  # too modest; its second guess is wrong
            trees = [_tree(A, a), _tree(B, b)][: 1 + (rng.random() < 0.7)]
            tree = mixture.mix(sequence, trees, WIDE, is_greedy=True)
            token = 10 if rng.random() < p else 99
            if n >= 500:
                for (token_id,), mixed in _probabilities(tree).items():
                    claims = [t.get((token_id,), 0.0) for t in (a, b)[: len(trees)]]
                    said.append((max(claims), mixed, token_id == token))
            mixture.lesson(sequence, [token])()
        assert _calibration_error([(mixed, came) for _, mixed, came in said]) < 0.04
        assert _calibration_error([(claimed, came) for claimed, _, came in said]) > 0.1


def _calibration_error(said: Sequence[tuple[float, bool]]) -> float:
    """Expected calibration error over ten buckets."""
    error = 0.0
    for bucket in range(10):
        inside = [(p, came) for p, came in said if int(min(p, 0.999) * 10) == bucket]
        error += abs(sum(p - came for p, came in inside))
    return error / len(said)
