"""Training data come back from disk as they were written, whole shards only, split by prompt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_training.records import Sample, ShardWriter, read_about, read_counts, read_samples, split_of


def sample(prompt: int, n: int = 3, kind: str = "qa", temperature: float = 0.6) -> Sample:
    rng = np.random.default_rng(prompt)
    return Sample(
        prompt_ids=(prompt, 2, 3),
        output_ids=tuple(rng.integers(0, 60000, n).tolist()),
        kind=kind,
        temperature=temperature,
        seed=2**63 + prompt,
        top_ids=rng.integers(0, 60000, (n, 8)).astype(np.uint16),
        top_log_probs=-rng.random((n, 8)).astype(np.float16),
    )


def everything(folder: Path) -> list[Sample]:
    return [s for split in ("train", "validation") for s in read_samples(folder, split=split)]


def assert_same(found: Sample, expected: Sample) -> None:
    for name in ("prompt_ids", "output_ids", "kind", "temperature", "seed"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("top_ids", "top_log_probs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype


def test_samples_come_back_as_written(tmp_path: Path) -> None:
    written = {i: sample(i, n=i % 5 + 1, kind="story" if i % 2 else "a longer kind") for i in range(200)}
    writer = ShardWriter(tmp_path / "data", {"model": "m"})
    writer.write(1, [written[i] for i in range(100, 200)], {})
    writer.write(0, [written[i] for i in range(100)], {})
    found = everything(tmp_path / "data")
    assert len(found) == 200
    for one in found:
        assert_same(one, written[one.prompt_ids[0]])
    train = [s.prompt_ids[0] for s in read_samples(tmp_path / "data", split="train")]
    assert train == sorted(train), "shards are read in order"


def test_a_prompt_is_in_one_split_whatever_its_answer(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, {})
    writer.write(0, [sample(i, temperature=t) for i in range(300) for t in (0.0, 1.0)], {})
    train, validation = (
        Counter(s.prompt_ids for s in read_samples(tmp_path, split=split)) for split in ("train", "validation")
    )
    assert train and validation and not train.keys() & validation.keys()
    assert set(train.values()) == set(validation.values()) == {2}


def test_about_two_percent_is_for_validation() -> None:
    held_out = sum(split_of((i, i // 7, 5)) == "validation" for i in range(20_000))
    assert 300 < held_out < 500


def test_an_interrupted_shard_is_not_read(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, {})
    writer.write(0, [sample(1)], {"tokens": 3})
    complete = (tmp_path / "shard-00000.npz").read_bytes()
    (tmp_path / "shard-00001.tmp").write_bytes(complete[: len(complete) // 2])
    assert len(everything(tmp_path)) == 1
    assert writer.has(0) and not writer.has(1)


def test_counts_add_up_over_shards(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, {})
    writer.write(0, [sample(1)], Counter(tokens=3, loops=1))
    writer.write(1, [sample(2)], Counter(tokens=4))
    assert read_counts(tmp_path) == {"tokens": 7, "loops": 1}


def test_a_folder_keeps_data_of_one_making(tmp_path: Path) -> None:
    ShardWriter(tmp_path, {"model": "a", "seed": 1})
    ShardWriter(tmp_path, {"model": "a", "seed": 1})
    with pytest.raises(InvalidArgumentError, match="holds other data"):
        ShardWriter(tmp_path, {"model": "b", "seed": 1})
    assert read_about(tmp_path)["model"] == "a"


def test_what_is_no_data_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no training data"):
        read_samples(tmp_path, split="train")
    (tmp_path / "data.json").write_text('{"format": 99}')
    with pytest.raises(InvalidArgumentError, match="format 99"):
        read_samples(tmp_path, split="train")


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    ShardWriter(tmp_path, {})
    with pytest.raises(InvalidArgumentError, match="split"):
        read_samples(tmp_path, split="test")  # type: ignore[arg-type]
