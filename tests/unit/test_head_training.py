"""Training a head: the target's features along recordings, unrolled passes, resuming, and `treeserve train`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.training_data import rule_sample, write_rule_data

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.features import FeatureShape
from treeserve_engine.config import load_config
from treeserve_kernels.cpu import library
from treeserve_speculator.drafter_files import DrafterFolder
from treeserve_speculator.head_file import HeadFile
from treeserve_text.tokenizer import Tokenizer
from treeserve_training import head_model, head_training
from treeserve_training import train as training
from treeserve_training.config import TrainConfig
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.head_model import HeadBatch, HeadModel
from treeserve_training.head_training import HeadTrainingSet, train_head
from treeserve_training.packed_batch import TrainingSequence
from treeserve_training.ssm_training import Supervision
from treeserve_training.target_features import TargetFeatures
from treeserve_training.training_set import Position

pytestmark = pytest.mark.skipif(not library.is_built(), reason="the native decoder is not built")


@pytest.fixture(autouse=True)
def _signals_and_threads() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def features(tiny_model: Path, cache: Path) -> TargetFeatures:
    return TargetFeatures(tiny_model, cache, threads=1, max_tokens=600)


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Path) -> DraftVocabulary:
    return DraftVocabulary(np.arange(0, 250), load_config(tiny_model).vocab_size)


def sequences(vocabulary: DraftVocabulary, count: int, prompt_len: int = 6) -> list[TrainingSequence]:
    rng = np.random.default_rng(count)
    return [TrainingSequence.of(rule_sample(rng, prompt_len=prompt_len), vocabulary) for _ in range(count)]


def test_features_are_the_same_in_one_go_and_bit_by_bit(features: TargetFeatures) -> None:
    tokens = np.random.default_rng(0).integers(2, 250, 500).tolist()
    whole = features.along(tokens, 0)
    assert whole.shape == (500, *features.shape.row_shape) and whole.dtype == np.float16
    assert np.array_equal(features.along(tokens, 300), whole[300:])
    features.open(7)
    parts = [features.further(7, tokens[:end]) for end in (1, 9, 300, 500)]
    features.close(7)
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(features.along([3, *tokens[1:]], 499), whole[499:]), "they depend on all that came before"


def test_a_batch_begins_where_a_drafters_window_does(features: TargetFeatures, vocabulary: DraftVocabulary) -> None:
    """Each row comes with the features of the position before it."""
    longer, shorter = sequences(vocabulary, 1, prompt_len=90)[0], sequences(vocabulary, 2)[0]
    data = HeadTrainingSet(lambda: [longer, shorter], features, sequences_per_step=2, hard_weight=0.0, seed=0)
    batch, _ = next(data.batches(Position()))
    assert isinstance(batch, HeadBatch)
    expected = {64 + 19: (longer, 26), 5 + 19: (shorter, 1)}
    assert sorted(batch.lengths) == sorted(expected), "64 tokens of the prompt, and all but its first"
    start = 0
    for length in batch.lengths:
        sequence, first = expected[length]
        rows = slice(start, start + length)
        assert batch.token_ids[rows].tolist() == sequence.token_ids[first:].tolist()
        whole = features.along(sequence.token_ids.tolist(), 0)
        assert np.array_equal(batch.features[rows].numpy(), whole[first - 1 : -1])
        of_rows = batch.rows[(batch.rows >= start) & (batch.rows < start + length)] - start
        assert (of_rows + first).tolist() == sequence.rows.tolist()
        start += length


def test_passes_do_not_see_what_a_drafter_would_not(
    features: TargetFeatures, vocabulary: DraftVocabulary, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th drafted token knows features up to n before it, and no neighbour's."""
    monkeypatch.setattr(head_model, "_TRAINING_DTYPE", torch.float32)  # bfloat16 rounds small influences away
    model = HeadModel.from_target(tiny_model, features.shape, vocabulary, passes=3)
    model.from_features.data += 0.3 * torch.randn(model.from_features.shape)
    pair = sequences(vocabulary, 2)
    data = HeadTrainingSet(lambda: pair, features, sequences_per_step=2, hard_weight=0.0, seed=0)
    batch, _ = next(data.batches(Position()))
    assert isinstance(batch, HeadBatch)
    last = len(batch.rows) - 1  # the second sequence's last row, the batch's last
    reference = [hidden[last].clone() for hidden in model.hidden(batch)]
    for back in range(4):
        changed = batch.features.clone()
        changed[-1 - back] += 1.0
        moved = [
            not torch.equal(h[last], r)
            for h, r in zip(model.hidden(replace(batch, features=changed)), reference, strict=True)
        ]
        assert moved == [back >= drafted for drafted in range(3)]
    changed = batch.features.clone()
    changed[: batch.lengths[0]] += 1.0
    assert all(
        torch.equal(h[last], r) for h, r in zip(model.hidden(replace(batch, features=changed)), reference, strict=True)
    )


def _config(tiny_model: Path, data: Path, cache: Path, folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": tiny_model, "model_name": "tiny", "data": data, "out": folder / "drafters", "build": ("head",),
        "work_dir": folder / "work", "cache_dir": cache, "vocabulary": 220, "sequences": 160, "held_out": 6,
        "learning_rate": 5e-3, **changes,
    }  # fmt: skip
    return TrainConfig(**values)


@pytest.fixture(scope="module")
def data(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rule_data(tmp_path_factory.mktemp("data"), Tokenizer.from_folder(tiny_model).hash)


def test_the_command_trains_exports_and_follows(
    tiny_model: Path, data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_model, "_NORM_SCALE", 1.0)  # a tiny target's norm is not made for its last layer
    config = _config(tiny_model, data, cache, tmp_path, sequences=1600)
    assert training.train(config, Console(quiet=True))
    held = DrafterFolder.read(config.out_folder)
    assert held.sources["head"].recipe["trained_on"]["sequences"] >= 1600
    file = HeadFile.read(held.file("head", cache), cache)
    assert file.shape == FeatureShape.of_model(2, 48) and len(file.token_ids) == 220
    report = json.loads((config.work_folder / "report.json").read_text())
    assert report["acceptance"]["head"]["8"]["acceptance_length"] > 1.5, "the rule is easy"


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    tiny_model: Path, data: Path, cache: Path, tmp_path: Path
) -> None:
    def run(folder: str, stop_at: int | None) -> dict[str, torch.Tensor] | None:
        config = _config(tiny_model, data, cache, tmp_path / folder, sequences=96)
        seen: list[int] = []
        watch = Supervision(
            lambda _: None, lambda *args: seen.append(args[2].step), lambda *_: None, lambda: seen[-1] == stop_at
        )
        done = train_head(config, tiny_model, data, watch)
        return None if done is None else done.model.state_dict()

    whole = run("a", None)
    assert run("b", 5) is None
    resumed = run("b", None)
    assert whole is not None and resumed is not None
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_target_that_shows_no_features_is_refused(
    tiny_model: Path, data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeserve_engine.native_model.NativeModel.feature_shape", FeatureShape((), 48))
    watch = Supervision(lambda _: None, lambda *_: None, lambda *_: None, lambda: False)
    with pytest.raises(InvalidArgumentError, match="hidden states"):
        head_training.train_head(_config(tiny_model, data, cache, tmp_path), tiny_model, data, watch)
