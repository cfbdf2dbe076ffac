"""Multi-step acceptance on the real model: pairs of tokens after drawn trees follow the model's own distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.batch import SequenceRows
from treeserve_engine.loading import load_model
from treeserve_engine.next_token import target_distribution
from treeserve_engine.processors import TokenContext
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.sources.growth import draw_children
from treeserve_text.tokenizer import Tokenizer

STEPS = 2000
# Everything is a fixed function of the seeds 0 .. STEPS - 1: no flakes.
PASS, REJECT = 1e-3, 1e-6
TOP_K = 8
TARGET = {"temperature": 1.0, "top_k": TOP_K}
Row = npt.NDArray[np.float32]
Draft = Callable[[Row, int, int, int], Draws]


@dataclass(frozen=True)
class Tables:
    """The model's logits after a prompt, and after each token that the filtered target can say next."""

    prompt: tuple[int, ...]
    vocab_size: int
    rows: dict[tuple[int, ...], Row]

    def p(self, path: tuple[int, ...]) -> npt.NDArray[np.float64]:
        return target_distribution(self.rows[path], SamplingParams(**TARGET), TokenContext())


@pytest.fixture(scope="module")
def tables(model_folder: Path) -> Tables:
    tokenizer = Tokenizer.from_folder(model_folder)
    prompt = tuple(tokenizer.encode("The best thing about a quiet morning in the mountains is"))
    model = load_model(model_folder, dtype="float32", device="cpu", threads=1)
    runner = ModelRunner(model, num_blocks=8, block_size=16)
    vocab_size = tokenizer.vocab_size

    def logits(tree: TokenTree) -> list[Row]:
        runner.blocks.reserve(0, len(tree))
        (rows,) = runner.forward([SequenceRows.from_tree(0, tree)])
        runner.blocks.rollback(0)
        return [np.array(row[:vocab_size]) for row in rows]

    runner.blocks.add(0)
    runner.blocks.reserve(0, len(prompt) - 1)
    runner.forward([SequenceRows.from_chain(0, prompt[:-1], [])])
    runner.commit(0, range(len(prompt) - 1))
    (root,) = logits(TokenTree.root_only(prompt[-1]))
    likely = np.flatnonzero(target_distribution(root, SamplingParams(**TARGET), TokenContext())).tolist()
    after = logits(TokenTree((prompt[-1], *likely), (-1, *[0] * TOP_K)))
    return Tables(prompt, vocab_size, {(): root, **{(t,): row for t, row in zip(likely, after[1:], strict=True)}})


def drafted(row: Row, seed: int, position: int, count: int) -> Draws:
    """What a drafter draws that is the model, but less sure of itself."""
    return draw_children(row, SamplingParams(temperature=1.6, seed=seed), position, count)


def top_k_claimed_as_drawn(row: Row, seed: int, position: int, count: int) -> Draws:
    draws = drafted(row, seed, position, count)
    best = np.argsort(-draws.probabilities)[:count]
    return Draws(tuple(draws.support[i] for i in best), draws.support, draws.weights)


def grown(tables: Tables, seed: int, draft: Draft) -> tuple[TokenTree, list[tuple[int, ...]]]:
    """Three draws below the root and two below each of their tokens; with the path to each node."""
    root = draft(tables.rows[()], seed, len(tables.prompt), 3)
    token_ids, parents = [tables.prompt[-1]], [-1]
    paths: list[tuple[int, ...]] = [()]
    for token_id in dict.fromkeys(root.token_ids):
        token_ids.append(token_id)
        parents.append(0)
        paths.append((token_id,))
    below: list[Draws | None] = [None] * (len(token_ids) - 1)
    for node in range(1, len(token_ids)):
        if paths[node] in tables.rows:
            drawn = below[node - 1] = draft(tables.rows[paths[node]], seed, len(tables.prompt) + 1, 2)
            for token_id in dict.fromkeys(drawn.token_ids):
                token_ids.append(token_id)
                parents.append(node)
                paths.append((*paths[node], token_id))
    all_draws = (root, *below, *[None] * (len(token_ids) - 1 - len(below)))
    return TokenTree(tuple(token_ids), tuple(parents), draws=all_draws), paths


def emitted(tables: Tables, seed: int, draft: Draft) -> tuple[tuple[int, int], int]:
    """The first two tokens of the output, and how many of them were drafted."""
    sampler = SequenceSampler(
        SamplingParams(**TARGET, seed=seed), StoppingCriteria(2), tables.prompt, eos_token_ids=(),
        vocab_size=tables.vocab_size,
    )  # fmt: skip
    rule = Acceptance(AcceptanceRule.MULTI_STEP)
    tree, paths = grown(tables, seed, draft)
    first = accept(tree, lambda node: tables.rows[paths[node]], sampler, None, rule)
    tokens = list(first.token_ids)
    if len(tokens) == 1:  # the next step, without a tree
        row = tables.rows[(tokens[0],)]
        tokens += accept(TokenTree.root_only(tokens[0]), lambda _: row, sampler, None, rule).token_ids
    return (tokens[0], tokens[1]), len(first.accepted_nodes)


def p_value(tables: Tables, draft: Draft) -> tuple[float, float]:
    """Of the chi-square test over pairs of tokens, rare ones together; and drafted tokens per step."""
    outcomes = [emitted(tables, seed, draft) for seed in range(STEPS)]
    first = tables.p(())
    expected: dict[tuple[int, int], float] = {}
    for a in np.flatnonzero(first).tolist():
        second = tables.p((a,))
        expected |= {(a, b): float(first[a] * second[b]) * STEPS for b in np.flatnonzero(second).tolist()}
    counts = dict.fromkeys(expected, 0)
    for pair, _ in outcomes:
        counts[pair] += 1  # KeyError: a token that the target cannot say
    common = [pair for pair, value in expected.items() if value >= 8]
    rare_expected = STEPS - sum(expected[pair] for pair in common)
    rare = STEPS - sum(counts[pair] for pair in common)
    observed = [*(counts[pair] for pair in common), rare]
    test = stats.chisquare(observed, [*(expected[pair] for pair in common), rare_expected])
    return float(test.pvalue), float(np.mean([accepted for _, accepted in outcomes]))


@pytest.mark.model
def test_pairs_of_tokens_follow_the_model(tables: Tables) -> None:
    p, accepted = p_value(tables, drafted)
    assert p > PASS
    assert accepted > 0.8, "the draws must matter for this to mean something"


@pytest.mark.model
def test_children_that_were_not_drawn_are_found_out(tables: Tables) -> None:
    assert p_value(tables, top_k_claimed_as_drawn)[0] < REJECT
