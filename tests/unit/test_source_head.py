"""The head source: what its trees are made of, that only features it has count, and that training means the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.acceptance.configurations import MERGED, find_configurations
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureRows, FeatureShape
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.config import load_config
from treeserve_kernels.cpu import library
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.head_file import HeadFile
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import FeatureDraftSource, SourceSettings
from treeserve_speculator.sources.growth import TreeGrowth
from treeserve_speculator.sources.head import HeadSource
from treeserve_speculator.sources.registry import build_sources
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.head_export import export_head
from treeserve_training.head_model import HeadBatch, HeadModel
from treeserve_training.packed_batch import PackedBatch, TrainingSequence
from treeserve_training.ssm_export import drafter_target

pytestmark = pytest.mark.skipif(not library.is_built(), reason="the native decoder is not built")

GREEDY = SamplingParams()
BUDGET = 12


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> HeadModel:
    known = Tokenizer.from_folder(tiny_model).vocab_size
    vocabulary = DraftVocabulary(np.arange(1, known, 2), load_config(tiny_model).vocab_size)
    shape = FeatureShape((1, 2), load_config(tiny_model).hidden_size)
    made = HeadModel.from_target(tiny_model, shape, vocabulary, passes=3)
    for weight in (made.from_features, made.from_hidden):  # so that all that enters matters
        weight.data += 0.3 * torch.randn(weight.shape)
    made.norm.data *= 5.0
    return made


@pytest.fixture(scope="module")
def vocabulary(model: HeadModel, tiny_model: Path) -> DraftVocabulary:
    known = Tokenizer.from_folder(tiny_model).vocab_size
    return DraftVocabulary(np.arange(1, known, 2), load_config(tiny_model).vocab_size)


@pytest.fixture(scope="module")
def drafters(
    tiny_model: Path, model: HeadModel, vocabulary: DraftVocabulary, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    target = drafter_target(tiny_model, "tiny")
    export_head(model, vocabulary, folder=folder, target=target, licence="Apache-2.0", recipe={})
    return folder


@pytest.fixture(scope="module")
def build(tiny_model: Path, drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = tmp_path_factory.mktemp("cache")

    def build(**changes: Any) -> HeadSource:
        fields = {
            "drafter_folder": drafters,
            "cache_dir": cache,
            "ssm_kv_tokens": 1024,
            "ssm_depth": 4,
            "ssm_width": 2,
            **changes,
        }
        config = SpeculatorConfig(tiny_model, "tiny", sources=("head",), **fields)
        tokenizer = Tokenizer.from_folder(tiny_model)
        (source,) = build_sources(SourceSettings(config, tokenizer.vocab_size, tokenizer.hash, frozenset()))
        assert isinstance(source, HeadSource) and isinstance(source, FeatureDraftSource)
        return source

    return build


@pytest.fixture(scope="module")
def source(build: Any) -> HeadSource:
    made: HeadSource = build()
    return made


def features_of(tokens: list[int], first: int = 1) -> FeatureRows:
    """What this "target" computed: numbers that depend on all tokens before."""
    rows = [np.random.default_rng(tokens[:i]).standard_normal((2, 48)) for i in range(first, len(tokens))]
    return FeatureRows(first, np.array(rows).astype(np.float16).reshape(-1, 2, 48))


def opened(source: HeadSource, tokens: list[int], first: int = 1, sampling: SamplingParams = GREEDY) -> DraftSequence:
    state = DraftSequence(1, list(tokens), len(tokens), sampling, BUDGET)
    source.open(state)
    state.take_features((features_of(tokens, first),))
    return state


def committed(source: HeadSource, state: DraftSequence, new: list[int]) -> None:
    first = len(state.tokens)
    state.advance(first, new, BUDGET)
    state.take_features((features_of(state.tokens, first),))
    source.commit(state, new, ())


def fresh(source: HeadSource, tokens: list[int], first: int = 1, sampling: SamplingParams = GREEDY) -> TokenTree:
    state = opened(source, tokens, first, sampling)
    tree = source.propose(state, BUDGET)
    source.close(state)
    assert tree is not None
    return tree


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 250, length).tolist()


def training_logits(
    model: HeadModel, vocabulary: DraftVocabulary, tokens: list[int], first: int, drafted: int
) -> np.ndarray:
    """What training computes after the last of the tokens, of which the last `drafted` have no features."""
    ids = np.array(tokens, dtype=np.int32)[first:]
    none = np.zeros((1, 8), dtype=np.int32)
    row = TrainingSequence(ids, np.array([len(ids) - 1], np.int32), none, none.astype(np.float16), none[:, 0])
    packed = PackedBatch.of([row], 0.0)
    batch = HeadBatch(**vars(packed), features=torch.from_numpy(features_of(tokens, first).values))
    with torch.no_grad():
        logits: np.ndarray = (model.hidden(batch)[drafted] @ model.head.to(torch.bfloat16).t()).float().numpy()[0]
    return logits


@pytest.mark.parametrize("first", [1, 9])
def test_a_tree_is_what_training_computes(source, model, vocabulary, first, monkeypatch):
    """Committed rows, the first and the second drafted level; int8 and bfloat16 are alike, other passes are not."""
    tokens, seen = prompt(30), {}
    expand = source._expand

    def spy(job, draft, logits):
        seen.update((tuple(path_to(draft.growth, node)), row) for node, row in zip(draft.level, logits, strict=True))
        expand(job, draft, logits)

    monkeypatch.setattr(source, "_expand", spy)
    fresh(source, tokens, first)
    assert {len(path) for path in seen} >= {0, 1, 2}
    for path, logits in seen.items():
        for drafted in range(3):
            expected = training_logits(model, vocabulary, [*tokens, *path], first, drafted)
            alike = np.corrcoef(expected, logits)[0, 1]
            is_its_pass = drafted == len(path)
            assert (alike > 0.8) == is_its_pass, (path, drafted, alike)


def path_to(growth: TreeGrowth, node: int) -> list[int]:
    tokens = []
    while node > 0:
        tokens.insert(0, growth.token_ids[node])
        node = growth.parents[node]
    return tokens


def test_features_embeddings_and_hidden_states_all_matter(source, model, vocabulary):
    tokens = prompt(30)
    reference = training_logits(model, vocabulary, [*tokens, 5], 1, 1)
    for other in (
        training_logits(model, vocabulary, [*tokens, 7], 1, 1),
        training_logits(model, vocabulary, [*tokens, 5], 1, 0),
        training_logits(model, vocabulary, [*tokens[:10], 3, *tokens[11:], 5], 1, 1),
    ):
        assert np.abs(other - reference).max() > 0.5


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9, seed=4)])
def test_along_a_run_each_tree_is_that_of_a_fresh_sequence(source, sampling):
    """Rows that were drafted and accepted are computed anew from features."""
    state = opened(source, prompt(20), sampling=sampling)
    for i in range(8):
        tree = source.propose(state, BUDGET)
        assert tree == fresh(source, state.tokens, sampling=sampling)
        path = [tree.token_ids[n] for n in tree.path(len(tree) - 1)][: i % 4]
        committed(source, state, [*path, 30 + i])
    source.close(state)


def test_side_by_side_as_alone(source):
    states = [opened(source, prompt(n)) for n in (5, 40, 90, 17)]
    for state, tree in zip(states, source.propose_batch([(s, BUDGET) for s in states]), strict=True):
        assert tree == fresh(source, state.tokens)
        source.close(state)


def test_without_the_latest_features_there_is_no_tree(source):
    state = opened(source, prompt(20))
    assert source.propose(state, BUDGET) is not None
    state.advance(20, [5, 6], BUDGET)
    source.commit(state, [5, 6], ())
    assert source.propose(state, BUDGET) is None, "those of the new tokens did not come"
    state.take_features((features_of(state.tokens, 21),))
    assert source.propose(state, BUDGET) == fresh(source, state.tokens, 21), "20's are lost: it begins behind them"
    state.take_features(None)
    assert source.propose(state, BUDGET) is None
    source.close(state)
    nothing = DraftSequence(2, prompt(9), 9, GREEDY, BUDGET)
    source.open(nothing)
    assert source.propose(nothing, BUDGET) is None
    source.close(nothing)


def test_at_the_end_of_its_window_it_begins_again(build):
    source = build(ssm_kv_tokens=4096)
    state = opened(source, prompt(120))
    for i in range(14):
        assert source.propose(state, BUDGET) is not None
        committed(source, state, prompt(30 + i))
    assert len(state.tokens) > 512
    assert state.source_state["head"].cut > 1, "512 positions are over"
    source.close(state)


def test_no_block_is_lost(source):
    blocks = source._runner.blocks
    states = [opened(source, prompt(n)) for n in (5, 90)]
    source.propose_batch([(s, BUDGET) for s in states])
    for state in states:
        source.close(state)
    assert blocks.free_blocks == blocks.total_blocks and not source._hidden


def test_a_head_file_that_does_not_fit_is_refused(drafters, tmp_path):
    file = HeadFile.read(drafters / "head.int8", tmp_path)
    file.check(300)
    assert file.shape.layers == (1, 2)
    for wrong in (
        replace(file, token_ids=file.token_ids[::-1]),
        replace(file, token_ids=file.token_ids[:-1]),
        replace(file, from_hidden=file.from_features),
        replace(file, shape=FeatureShape((1,), 48)),
    ):
        with pytest.raises(InvalidArgumentError, match="drafter_folder"):
            wrong.check(300)
    with pytest.raises(InvalidArgumentError, match="vocabulary"):
        file.check(200)
    (drafters / "other").write_bytes(b"no head at all" * 10)
    with pytest.raises(InvalidArgumentError, match="cannot be used"):
        HeadFile.read(drafters / "other", tmp_path)


def test_the_benchmark_measures_a_head_of_another_folder_alone(
    tiny_model: Path, drafters: Path, tmp_path: Path
) -> None:
    found = find_configurations(tiny_model, {"cache_dir": tmp_path}, {}, {}, head={"drafter_folder": drafters})
    merged = next(c for c in found.configurations if c.name == MERGED)
    assert "head" in [c.name for c in found.configurations] and "head" not in merged.sources
