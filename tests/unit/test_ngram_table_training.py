"""N-gram tables are what their definition says, fit their file, and are calibrated on what they have not seen."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.noise import gumbel
from treeserve_speculator.drafter_files import DrafterFolder, DrafterTarget
from treeserve_speculator.sources.ngram_table_file import Calibration, NgramTable, TableIdentity
from treeserve_training import ngram_table
from treeserve_training.ngram_calibration import calibrate
from treeserve_training.ngram_export import export_ngram_table
from treeserve_training.ngram_table import NgramTableOptions, build_ngram_table
from treeserve_training.records import Sample, ShardWriter, split_of

VOCAB = 12
IDENTITY = TableIdentity("tokenizer", VOCAB)
EVERYTHING = NgramTableOptions(max_order=3, max_successors=VOCAB, least_probability=0.0, least_uses=0.0)


def samples_of(count: int, temperature: float = 1.0, output_len: int = 12) -> list[Sample]:
    """Of a target whose next token depends on the last two, with distributions over 8 tokens that leave nothing out."""
    rng = np.random.default_rng(5)
    top_of = {(a, b): rng.permutation(VOCAB)[:8] for a in range(VOCAB) for b in range(VOCAB)}
    q_of = {pair: -np.sort(-rng.dirichlet(np.full(8, 0.5))) for pair in top_of}
    samples = []
    for seed in range(count):
        tokens = rng.integers(0, VOCAB, 6).tolist()
        top_ids, log_probs = [], []
        for _ in range(output_len):
            pair = (tokens[-2], tokens[-1])
            log_q = np.log(np.maximum(q_of[pair], 1e-5)).astype(np.float16)
            noise = temperature * gumbel(seed, len(tokens), top_of[pair].astype(np.int64))
            top_ids.append(top_of[pair])
            log_probs.append(log_q)
            tokens.append(int(top_of[pair][np.argmax(log_q + noise)]))
        samples.append(
            Sample(
                tuple(tokens[:6]),
                tuple(tokens[6:]),
                "test",
                temperature,
                seed,
                np.array(top_ids, np.uint16),
                np.array(log_probs),
            )
        )
    return samples


def write(folder: Path, samples: Sequence[Sample], tokenizer: str = "tokenizer") -> Path:
    ShardWriter(folder, {"model": "tiny", "tokenizer": tokenizer, "vocab_size": VOCAB}).write(0, samples, {})
    return folder


def open_table(path: Path) -> NgramTable:
    return NgramTable.open(path, IDENTITY, path.parent)


def mixtures(samples: Sequence[Sample], options: NgramTableOptions) -> dict[tuple[int, ...], dict[int, float]]:
    """The definition, one dictionary at a time. Contexts have their latest token first."""
    observed: dict[tuple[int, ...], list[dict[int, float]]] = defaultdict(list)
    for sample in samples:
        tokens = sample.prompt_ids + sample.output_ids
        for i, (ids, log_probs) in enumerate(zip(sample.top_ids, sample.top_log_probs, strict=True)):
            at = len(sample.prompt_ids) + i
            probabilities = np.exp(log_probs.astype(np.float32))
            one = {int(v): float(q) for v, q in zip(ids, probabilities, strict=True) if q >= 0.002}
            for order in range(options.max_order + 1):
                observed[tuple(reversed(tokens[at - order : at]))].append(one)
    found: dict[tuple[int, ...], dict[int, float]] = {}
    for context in sorted(observed, key=len):
        rows = observed[context]
        shorter = found.get(context[:-1], {}) if context else {}
        share = len(rows) / (len(rows) + options.concentration) if context else 1.0
        found[context] = {
            v: share * sum(row.get(v, 0.0) for row in rows) / len(rows) + (1 - share) * shorter.get(v, 0.0)
            for v in {v for row in rows for v in row} | shorter.keys()
        }
    return found


def test_every_context_holds_the_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_table, "_GROUPS_AT_ONCE", 100)
    samples = samples_of(60)
    report = build_ngram_table(write(tmp_path / "data", samples), tmp_path / "table.bin", EVERYTHING)
    train = [sample for sample in samples if split_of(sample.prompt_ids) == "train"]
    expected = mixtures(train, EVERYTHING)
    assert report.contexts == report.contexts_seen == len(expected) > 500
    table = open_table(tmp_path / "table.bin")
    exponent = table.calibration.exponent
    for context, mixture in expected.items():
        found = table.successors(context)
        assert set(found.token_ids) == set(mixture)
        assert [*found.weights] == sorted(found.weights, reverse=True)
        for token_id, weight in zip(found.token_ids, found.weights, strict=True):
            assert math.log(weight) / exponent == pytest.approx(max(math.log(mixture[token_id]), -15.94), abs=1 / 31)


def test_the_file_keeps_to_its_size_and_keeps_what_tells_most(tmp_path: Path) -> None:
    data = write(tmp_path / "data", samples_of(300))
    sizes = []
    for max_bytes in (4_000, 12_000, 40_000):
        options = NgramTableOptions(max_bytes=max_bytes)
        report = build_ngram_table(data, tmp_path / "table.bin", options)
        assert report.file_bytes <= max_bytes and report.file_bytes > max_bytes * 0.4
        assert report.contexts < report.contexts_seen
        sizes.append(report.contexts)
    assert sizes == sorted(set(sizes))
    # the target looks at two tokens: contexts of two are worth their room, and that of none is always there
    table = open_table(tmp_path / "table.bin")
    pairs = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    by_pair = [table.successors(pair) for pair in pairs]
    by_one = [table.successors((a,)) for a, _ in pairs]
    assert np.mean([pair != one for pair, one in zip(by_pair, by_one, strict=True)]) > 0.9
    assert table.successors(()).token_ids


def test_lists_are_cut(tmp_path: Path) -> None:
    data = write(tmp_path / "data", samples_of(60))
    build_ngram_table(data, tmp_path / "table.bin", NgramTableOptions(max_successors=3))
    table = open_table(tmp_path / "table.bin")
    assert max(len(table.successors((a, b)).token_ids) for a in range(VOCAB) for b in range(VOCAB)) == 3
    build_ngram_table(data, tmp_path / "table.bin", NgramTableOptions(least_probability=0.3))
    table = open_table(tmp_path / "table.bin")
    lengths = [len(table.successors((a, b)).token_ids) for a in range(VOCAB) for b in range(VOCAB)]
    assert min(lengths) >= 1 and max(lengths) <= 3


def test_a_rebuild_is_the_same_file(tmp_path: Path) -> None:
    data = write(tmp_path / "data", samples_of(60))
    for name in ("a", "b"):
        build_ngram_table(data, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a", "b"]


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no training data"):
        build_ngram_table(tmp_path, tmp_path / "table.bin")
    only = [sample for sample in samples_of(200) if split_of(sample.prompt_ids) == "validation"]
    with pytest.raises(InvalidArgumentError, match="nothing in it"):
        build_ngram_table(write(tmp_path / "data", only), tmp_path / "table.bin")


def test_a_table_that_knows_all_is_trusted_and_its_noise_too(tmp_path: Path) -> None:
    samples = samples_of(600, output_len=24)
    options = NgramTableOptions(concentration=0.01, max_order=2, max_successors=8, least_probability=0.0)
    build_ngram_table(write(tmp_path / "data", samples), tmp_path / "table.bin", options)
    calibration = open_table(tmp_path / "table.bin").calibration
    assert calibration.exponent > 2.0
    assert calibration.noise / calibration.exponent == pytest.approx(1.0, rel=0.25)
    assert calibration.again == pytest.approx(1.0, abs=0.5)


def test_noise_is_useless_where_the_table_knows_nothing(tmp_path: Path) -> None:
    samples = samples_of(300)
    strangers = [replace(sample, top_ids=(sample.top_ids * 5 + 3) % VOCAB) for sample in samples]
    build_ngram_table(write(tmp_path / "data", samples), tmp_path / "table.bin")
    informed, lost = (calibrate(_neutral(tmp_path / "table.bin"), some) for some in (samples, strangers))
    assert informed.exponent > 0.7 and lost.exponent < 0.3
    assert informed.noise > lost.noise + 0.1


def test_repetition_is_learned(tmp_path: Path) -> None:
    repeating = [
        replace(sample, output_ids=(sample.prompt_ids[0],) * 12, temperature=0.0) for sample in samples_of(100)
    ]
    build_ngram_table(write(tmp_path / "data", samples_of(100)), tmp_path / "table.bin")
    assert calibrate(_neutral(tmp_path / "table.bin"), repeating).again > 5.0


def test_nothing_held_out(tmp_path: Path) -> None:
    build_ngram_table(write(tmp_path / "data", samples_of(10)), tmp_path / "table.bin")
    calibration = calibrate(_neutral(tmp_path / "table.bin"), [])
    assert calibration.exponent == 0.75 and calibration.again == pytest.approx(math.exp(1.8))


def _neutral(path: Path) -> NgramTable:
    table = open_table(path)
    table.calibration = Calibration()
    table._powers = [math.exp(-step / 16) for step in range(256)]
    return table


def test_export(tmp_path: Path) -> None:
    data = write(tmp_path / "data", samples_of(60))
    target = DrafterTarget("tiny", "tokenizer", VOCAB, 8)
    export_ngram_table(data, folder=tmp_path / "out", target=target, licence="Apache-2.0")
    folder = DrafterFolder.read(tmp_path / "out")
    assert open_table(folder.file("ngram_table", tmp_path)).successors(()).token_ids
    recipe = folder.sources["ngram_table"].recipe
    assert recipe["result"]["observations"] > 600 and recipe["options"]["max_order"] == 4
    json.dumps(recipe)
    with pytest.raises(InvalidArgumentError, match="another model"):
        export_ngram_table(
            write(tmp_path / "other", samples_of(10), "another"),
            folder=tmp_path / "out",
            target=target,
            licence="Apache-2.0",
        )
