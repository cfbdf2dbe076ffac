"""Texts in place of a model's: deterministic, and foreseen as well as their kind says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from treeserve_core.tree import TokenTree
from treeserve_simulator.text import KINDS, VOCAB_SIZE, Text, TextKind

_LENGTH = 6000


def _accepted(text: Text, tree: TokenTree, base: int) -> list[int]:
    """Nodes of the tree along the text."""
    path: list[int] = []
    node = tree.child(0, text.token_ids[base])
    while node is not None:
        path.append(node)
        node = tree.child(node, text.token_ids[base + len(path)])
    return path


def test_a_longer_text_begins_with_the_shorter() -> None:
    short, long = Text(9, KINDS["chat"], 50, 10), Text(9, KINDS["chat"], 500, 80)
    assert long.token_ids[:50] == short.token_ids[:50]
    assert Text(10, KINDS["chat"], 50, 10).token_ids[:50] != short.token_ids[:50]
    assert min(long.token_ids) > 0 and max(long.token_ids) < VOCAB_SIZE


def test_trees_grow_from_the_last_token_within_their_limits() -> None:
    text = Text(3, KINDS["rewrite"], 200, 20)
    for base in range(20, 60):
        tree = text.tree(base, 12, 4)
        assert tree == TokenTree(tree.token_ids, tree.parents, tree.log_probs)  # every invariant holds
        assert tree.token_ids[0] == text.token_ids[base - 1]
        assert len(tree) == 13
        assert max(tree.depths) <= 4
    assert len(text.tree(20, 0, 4)) == 1


@pytest.mark.parametrize("hit", [0.3, 0.8])
def test_first_choices_hit_as_often_as_the_kind_says_and_others_follow_geometrically(hit: float) -> None:
    kind = TextKind(easy_share=0.0, easy_hit=hit, hard_hit=hit, next_hit=0.25)
    text = Text(1, kind, _LENGTH, 1)
    wide = [text.tree(base, 8, 1) for base in range(1, _LENGTH)]
    ranks = [_accepted(text, tree, base) for base, tree in enumerate(wide, start=1)]
    found = [(path[0] if path else 0) for path in ranks]
    assert found.count(1) / len(found) == pytest.approx(hit, abs=0.02)
    assert found.count(2) / (len(found) - found.count(1)) == pytest.approx(0.25, abs=0.03)


def test_kinds_that_can_be_foreseen_have_longer_paths() -> None:
    def mean_path(kind: str) -> float:
        text = Text(1, KINDS[kind], 2000, 1)
        return float(np.mean([len(_accepted(text, text.tree(base, 12, 12), base)) for base in range(1, 2000)]))

    assert mean_path("rewrite") > mean_path("summary") > mean_path("story") > 0.5


def test_hits_come_in_runs() -> None:
    text = Text(1, KINDS["code"], _LENGTH, 1)
    hits = np.array([bool(_accepted(text, text.tree(base, 1, 1), base)) for base in range(1, _LENGTH)])
    assert hits[1:][hits[:-1]].mean() > hits.mean() + 0.05


def test_claims_lean_on_the_truth_but_are_too_sure() -> None:
    text = Text(1, KINDS["chat"], _LENGTH, 1)
    claimed, came_true = [], []
    for base in range(1, _LENGTH):
        tree = text.tree(base, 1, 1)
        claimed.append(math.exp(tree.path_log_probs[1]))
        came_true.append(bool(_accepted(text, tree, base)))
    sure = np.array(claimed) > 0.9
    truth = np.array(came_true)
    assert truth[sure].mean() > truth[~sure].mean() + 0.1
    assert truth[sure].mean() < np.array(claimed)[sure].mean() - 0.05


def test_shifting_makes_a_kind_easier_or_harder() -> None:
    kind = KINDS["chat"]
    assert kind.shifted(1.0).hard_hit > kind.hard_hit > kind.shifted(-1.0).hard_hit
    assert kind.shifted(0.0).easy_hit == pytest.approx(kind.easy_hit)
