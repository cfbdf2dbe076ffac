"""Drafting with a model: right logits through commits and rollbacks, coupled draws, batches, and every limit."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.model import LlamaModel
from treeserve_engine.next_token import next_token
from treeserve_engine.processors import TokenContext
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.sequence import DraftPrices, DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.registry import build_sources
from treeserve_speculator.sources.ssm import SsmLimits, SsmSource
from treeserve_text.tokenizer import Tokenizer

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, seed=9)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LlamaModel:
    return LlamaModel.load(tiny_model, load_config(tiny_model), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def vocab_size(tiny_model: Path) -> int:
    return Tokenizer.from_folder(tiny_model).vocab_size


class Drafting:
    """A source over the tiny model and what tests ask of it."""

    def __init__(self, model: LlamaModel, vocab_size: int, blocks: int = 64, eos: int = -1, **limits: Any) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.runner = ModelRunner(model, num_blocks=blocks, block_size=4)
        defaults = {"max_position": 512, "depth": 4, "width": 3, "min_probability": 1e-4, "chunk_tokens": 8}
        self.source = SsmSource(self.runner, SsmLimits(vocab_size, **{**defaults, **limits}), frozenset({eos}))

    def open(self, tokens: list[int], sampling: SamplingParams = GREEDY) -> DraftSequence:
        state = DraftSequence(1, list(tokens), len(tokens), sampling, 6)
        self.source.open(state)
        return state

    def fresh(self, state: DraftSequence, budget: int = 6) -> TokenTree | None:
        """What a source that has never seen the sequence proposes."""
        other = Drafting(self.model, self.vocab_size, chunk_tokens=512)
        return other.source.propose(other.open(state.tokens, state.sampling), budget)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after a prefix, computed plainly."""
        runner = ModelRunner(self.model, num_blocks=256, block_size=4)
        runner.blocks.add(0)
        runner.blocks.reserve(0, len(tokens))
        (logits,) = runner.forward([SequenceRows.from_chain(0, tokens, logits_rows=[len(tokens) - 1])])
        return np.asarray(logits[0][: self.vocab_size])

    def drawn(self, tokens: list[int], sampling: SamplingParams) -> int:
        """What the target would commit next, if it were this model."""
        return next_token(self.logits(tokens), sampling, TokenContext(tokens), len(tokens))


@pytest.fixture
def drafting(model: LlamaModel, vocab_size: int) -> Drafting:
    return Drafting(model, vocab_size)


def _prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 250) for _ in range(length)]


def _advance(drafting: Drafting, state: DraftSequence, tokens: list[int]) -> None:
    state.tokens.extend(tokens)
    drafting.source.commit(state, tokens, [])


def _best_path(tree: TokenTree) -> list[int]:
    node, path = 0, []
    while tree.children[node]:
        node = max(tree.children[node], key=lambda i: tree.path_log_probs[i])
        path.append(tree.token_ids[node])
    return path


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30])
def test_the_best_path_is_what_the_model_itself_would_say(
    drafting: Drafting, sampling: SamplingParams, length: int
) -> None:
    state = drafting.open(_prompt(length), sampling)
    tree = drafting.source.propose(state, 6)
    assert tree is not None and tree.token_ids[0] == state.tokens[-1]
    tokens = list(state.tokens)
    for token in _best_path(tree)[:2]:
        assert token == drafting.drawn(tokens, sampling)
        tokens.append(token)


def test_estimates_are_the_softmax_of_each_path(drafting: Drafting) -> None:
    state = drafting.open(_prompt(11))
    tree = drafting.source.propose(state, 6)
    assert tree is not None and tree.log_probs is not None and max(tree.depths) >= 2
    for node in range(1, len(tree)):
        prefix = [tree.token_ids[i] for i in tree.path(tree.parents[node])]
        logits = drafting.logits(state.tokens + prefix).astype(np.float64)
        expected = logits[tree.token_ids[node]] - np.log(np.exp(logits).sum())
        assert tree.log_probs[node] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_long_life_proposes_the_same_as_a_fresh_start(drafting: Drafting, sampling: SamplingParams) -> None:
    rng = random.Random(5)
    state = drafting.open(_prompt(13), sampling)
    for step in range(16):
        tree = drafting.source.propose(state, 6)
        assert tree == drafting.fresh(state)
        assert tree is not None
        drafting.runner.blocks.check_integrity()
        node = rng.randrange(len(tree))  # any path, accepted in part or whole, then a bonus token
        accepted = [tree.token_ids[i] for i in tree.path(node)]
        bonus = [rng.randrange(2, 250)]
        _advance(drafting, state, accepted + bonus)
        if step % 5 == 0:
            _advance(drafting, state, _prompt(rng.randrange(1, 20), seed=step))
    drafting.source.close(state)
    assert drafting.runner.blocks.free_blocks == drafting.runner.blocks.total_blocks


def test_nodes_below_their_price_are_not_expanded(drafting: Drafting) -> None:
    state = drafting.open(_prompt(9))
    everything = drafting.source.propose(state, 12)
    assert everything is not None
    paths = sorted(everything.path_log_probs[i] for i in range(1, len(everything)) if everything.children[i])
    state.prices = DraftPrices(node=math.exp(sum(paths[-2:]) / 2))  # between the two that are likeliest
    tree = drafting.source.propose(state, 12)
    assert tree is not None
    assert [i for i in range(1, len(tree)) if tree.children[i]] == [tree.child(0, _best_path(everything)[0])]


def test_asking_twice_gives_the_same(drafting: Drafting) -> None:
    state = drafting.open(_prompt(9))
    assert drafting.source.propose(state, 6) == drafting.source.propose(state, 6)
    assert drafting.source.propose(state, 2) == drafting.fresh(state, 2)


def test_sequences_side_by_side_are_as_alone(drafting: Drafting) -> None:
    states = [drafting.open(_prompt(n, seed=n), SAMPLED if n % 2 else GREEDY) for n in (1, 5, 12, 20, 33)]
    for round_ in range(3):
        trees = drafting.source.propose_batch([(state, 6) for state in states])
        assert trees == [drafting.fresh(state) for state in states]
        for state, tree in zip(states, trees, strict=True):
            assert tree is not None
            _advance(drafting, state, [*_best_path(tree)[: round_ + 1], 7])


def test_accepted_nodes_are_not_computed_again(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    state = drafting.open(_prompt(20))
    tree = drafting.source.propose(state, 6)
    assert tree is not None
    passes: list[list[SequenceRows]] = []
    forward = drafting.runner.forward

    def counted(rows: list[SequenceRows]) -> Any:
        passes.append(list(rows))
        return forward(rows)

    monkeypatch.setattr(drafting.runner, "forward", counted)
    path = _best_path(tree)
    assert len(path) >= 2
    _advance(drafting, state, [*path, 7])
    drafting.source.propose(state, 6)
    computed = list(passes[0][0].token_ids)  # the bonus token, and the deepest node if it was not expanded
    assert computed in ([7], [path[-1], 7])


def test_padding_rows_are_never_proposed(model: LlamaModel) -> None:
    drafting = Drafting(model, vocab_size=20, width=8)
    tree = drafting.source.propose(drafting.open([1, 2, 3]), 30)
    assert tree is not None and len(tree) > 8 and max(tree.token_ids) < 20


def test_a_token_the_model_does_not_know_ends_drafting(model: LlamaModel) -> None:
    drafting = Drafting(model, vocab_size=20)
    state = drafting.open([1, 2, 3])
    assert drafting.source.propose(state, 4) is not None
    _advance(drafting, state, [25])
    assert drafting.source.propose(state, 4) is None
    assert drafting.runner.blocks.free_blocks == drafting.runner.blocks.total_blocks


def test_nothing_below_end_of_sequence(model: LlamaModel, vocab_size: int) -> None:
    plain = Drafting(model, vocab_size)
    tree = plain.source.propose(plain.open(_prompt(6)), 6)
    assert tree is not None
    inner = next(tree.token_ids[i] for i in range(1, len(tree)) if tree.children[i])
    drafting = Drafting(model, vocab_size, eos=inner)
    tree = drafting.source.propose(drafting.open(_prompt(6)), 6)
    assert tree is not None and inner in tree.token_ids
    assert all(not tree.children[i] for i in range(1, len(tree)) if tree.token_ids[i] == inner)


def test_beyond_the_window_there_are_no_trees(model: LlamaModel, vocab_size: int) -> None:
    drafting = Drafting(model, vocab_size, max_position=20)
    state = drafting.open(_prompt(17))
    for length in range(17, 24):
        tree = drafting.source.propose(state, 6)
        if length <= 20:
            assert tree is not None and max(tree.depths) <= 21 - length
        else:
            assert tree is None
        _advance(drafting, state, [7])
    assert drafting.runner.blocks.free_blocks == drafting.runner.blocks.total_blocks


def test_a_full_cache_costs_trees_only(model: LlamaModel, vocab_size: int) -> None:
    drafting = Drafting(model, vocab_size, blocks=16)  # 64 slots
    states = [drafting.open(_prompt(20, seed=n)) for n in range(4)]
    trees = drafting.source.propose_batch([(state, 6) for state in states])
    answered = [tree is not None for tree in trees]
    assert any(answered) and not all(answered)
    for state, tree in zip(states, trees, strict=True):
        assert tree is None or tree == drafting.fresh(state)
    drafting.runner.blocks.check_integrity()
    for state, has_tree in zip(states, answered, strict=True):
        if has_tree:
            drafting.source.close(state)
    left = states[answered.index(False)]
    assert drafting.source.propose(left, 6) == drafting.fresh(left)


def test_a_sequence_that_outgrows_the_cache_gives_its_room_back(model: LlamaModel, vocab_size: int) -> None:
    drafting = Drafting(model, vocab_size, blocks=12)
    state = drafting.open(_prompt(20))
    assert drafting.source.propose(state, 6) is not None
    _advance(drafting, state, _prompt(40))
    assert drafting.source.propose(state, 6) is None
    assert drafting.runner.blocks.free_blocks == 12


def test_a_long_prompt_is_caught_up_over_several_calls(model: LlamaModel, vocab_size: int) -> None:
    drafting = Drafting(model, vocab_size, chunk_tokens=8, chunks_per_call=2)
    state = drafting.open(_prompt(50))
    answers = [drafting.source.propose(state, 6) for _ in range(4)]
    assert answers[:2] == [None, None]
    assert answers[-1] == drafting.fresh(state)


def test_a_failed_pass_leaves_nothing_half_computed(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    state, other = drafting.open(_prompt(30)), drafting.open(_prompt(5))
    drafting.source.propose(other, 6)
    forward = drafting.runner.forward
    for failing in (0, 2, 3, 5):  # in chunks and levels
        calls = iter(range(100))

        def fails(rows: list[SequenceRows], calls: Iterator[int] = calls, failing: int = failing) -> Any:
            logits = forward(rows)
            if next(calls) == failing:
                raise RuntimeError("device lost")
            return logits

        monkeypatch.setattr(drafting.runner, "forward", fails)
        drafting.source.close(state)
        drafting.source.open(state)
        with contextlib.suppress(RuntimeError):
            drafting.source.propose_batch([(state, 6), (other, 6)])
        monkeypatch.setattr(drafting.runner, "forward", forward)
        drafting.runner.blocks.check_integrity()
        assert drafting.source.propose(state, 6) == drafting.fresh(state)
        assert drafting.source.propose(other, 6) == drafting.fresh(other)


def _settings(folder: Path, ssm_folder: Path, tokenizer_hash: str, **changes: Any) -> SourceSettings:
    changes = {"ssm_kv_tokens": 256, "ssm_dtype": "float32", **changes}
    config = SpeculatorConfig(folder, "tiny", sources=(), ssm_folder=ssm_folder, threads=1, **changes)
    return SourceSettings(config, Tokenizer.from_folder(folder).vocab_size, tokenizer_hash, frozenset())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_built_from_a_folder(tiny_model: Path, dtype: str) -> None:
    settings = _settings(tiny_model, tiny_model, Tokenizer.from_folder(tiny_model).hash, ssm_dtype=dtype)
    (source,) = build_sources(settings)
    state = DraftSequence(1, _prompt(5), 5, GREEDY, 4)
    source.open(state)
    assert source.name == "ssm" and source.propose(state, 4) is not None


def test_a_cache_that_does_not_fit_is_refused_at_once(tiny_model: Path) -> None:
    tokenizer_hash = Tokenizer.from_folder(tiny_model).hash
    with pytest.raises(InvalidArgumentError, match=r"ssm_kv_tokens: needs .* lower ssm_kv_tokens to at most \d+"):
        build_sources(_settings(tiny_model, tiny_model, tokenizer_hash, ssm_kv_tokens=10**12))


def test_another_tokenizer_is_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        build_sources(_settings(tiny_model, tiny_model, "another"))
