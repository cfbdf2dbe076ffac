"""Trained drafters on disk: what is refused and why, and that a loaded one drafts as its training would have it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.config import load_config
from treeserve_engine.packed_weights import convert
from treeserve_kernels.cpu import library
from treeserve_speculator import drafter_files
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.drafter_files import FOLDER_FIELD, MANIFEST, DrafterFolder, DrafterTarget, open_for_writing
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import DraftSource, SourceSettings
from treeserve_speculator.sources.growth import best_children
from treeserve_speculator.sources.registry import build_sources
from treeserve_speculator.sources.ssm import SsmSource
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.ssm_export import drafter_target, export_ssm
from treeserve_training.ssm_model import SsmModel
from treeserve_verifier.config import VerifierConfig

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=9)
PREFIX = (11, 12, 13)


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Path) -> DraftVocabulary:
    known = Tokenizer.from_folder(tiny_model).vocab_size
    return DraftVocabulary(np.arange(1, known, 2), load_config(tiny_model).vocab_size)


@pytest.fixture(scope="module")
def drafters(tiny_model: Path, vocabulary: DraftVocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself as a drafter: all its layers, half of its vocabulary; ssm2 with a prefix cut off."""
    folder = tmp_path_factory.mktemp("drafters")
    model = SsmModel.from_target(tiny_model, vocabulary, 2)
    model.norm.data /= 0.2  # so that it is exactly the target
    for source, cut_prefix in (("ssm", ()), ("ssm2", PREFIX)):
        export_ssm(
            model,
            vocabulary,
            cut_prefix=cut_prefix,
            source=source,
            folder=folder,
            target=drafter_target(tiny_model, "tiny"),
            licence="Apache-2.0",
            recipe={"made": "for a test"},
        )
    return folder


@pytest.fixture
def copied(drafters: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drafters, tmp_path / "drafters"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the target's int8 weights are, converted once."""
    return tmp_path_factory.mktemp("cache")


def _build(tiny_model: Path, cache: Path, *sources: str, **changes: Any) -> tuple[DraftSource, ...]:
    config = SpeculatorConfig(tiny_model, "tiny", sources=sources, cache_dir=cache, ssm_kv_tokens=512, **changes)
    tokenizer = Tokenizer.from_folder(tiny_model)
    return build_sources(SourceSettings(config, tokenizer.vocab_size, tokenizer.hash, frozenset()))


def _propose(source: DraftSource, tokens: list[int], sampling: SamplingParams = GREEDY) -> TokenTree:
    state = DraftSequence(1, list(tokens), len(tokens), sampling, 12)
    source.open(state)
    tree = source.propose(state, 12)
    source.close(state)
    assert tree is not None
    return tree


def _prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 250, length).tolist()


def test_it_is_the_int8_target_over_a_part_of_the_vocabulary(
    tiny_model: Path, drafters: Path, vocabulary: DraftVocabulary, cache: Path
) -> None:
    trained, *_ = _build(tiny_model, cache, "ssm", drafter_folder=drafters)
    whole, *_ = _build(tiny_model, cache, ssm_folder=tiny_model, ssm_dtype="int8")
    assert isinstance(trained, SsmSource) and isinstance(whole, SsmSource)
    for tokens in (_prompt(3), _prompt(40)):
        logits = _logits(whole, tokens)[vocabulary.token_ids]
        assert np.array_equal(_logits(trained, tokens), logits)  # the same bits: outputs are quantised one by one
        for sampling in (GREEDY, SAMPLED):
            tree = _propose(trained, tokens, sampling)
            assert set(tree.token_ids[1:]) <= set(vocabulary.token_ids.tolist())
            # Noise is that of the target's ids: anything else would not be what the target draws.
            ids, _ = best_children(logits, sampling, len(tokens), 6, vocabulary.token_ids)
            assert {tree.token_ids[i] for i in tree.children[0]} <= set(ids)
            full = np.full(load_config(tiny_model).vocab_size, -np.inf, dtype=np.float32)
            full[vocabulary.token_ids] = logits
            with np.errstate(invalid="ignore"):
                assert ids == best_children(full, sampling, len(tokens), 6)[0]


def _logits(source: SsmSource, tokens: list[int]) -> np.ndarray:
    from treeserve_engine.batch import SequenceRows
    from treeserve_engine.runner import ModelRunner

    runner = ModelRunner(source._runner.model, num_blocks=16, block_size=8)
    runner.blocks.add(0)
    runner.blocks.reserve(0, len(tokens))
    (logits,) = runner.forward([SequenceRows.from_chain(0, tokens, logits_rows=[len(tokens) - 1])])
    return np.asarray(logits[0])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_was_cut_off_in_training_is_cut_off_in_drafting(
    tiny_model: Path, drafters: Path, vocabulary: DraftVocabulary, cache: Path, sampling: SamplingParams
) -> None:
    plain, cut = _build(tiny_model, cache, "ssm", "ssm2", drafter_folder=drafters)
    assert (plain.name, cut.name) == ("ssm", "ssm2")
    tokens = _prompt(20)
    assert isinstance(plain, SsmSource)
    tree = _propose(cut, [*PREFIX, *tokens], sampling)
    position = len(PREFIX) + len(tokens)  # the noise is still that of the place in the whole sequence
    ids, _ = best_children(_logits(plain, tokens), sampling, position, 6, vocabulary.token_ids)
    assert tree.token_ids[tree.children[0][0]] in ids[:1] and {tree.token_ids[i] for i in tree.children[0]} <= set(ids)
    if sampling.is_greedy:
        assert tree == _propose(plain, tokens)
    assert _propose(cut, tokens, sampling) == _propose(plain, tokens, sampling)  # where there is nothing to cut
    assert _propose(cut, list(PREFIX), sampling) == _propose(plain, list(PREFIX), sampling)  # nor all of it


def test_a_cut_sequence_lives_on(tiny_model: Path, drafters: Path, cache: Path) -> None:
    (cut,) = _build(tiny_model, cache, "ssm2", drafter_folder=drafters)
    state = DraftSequence(1, [*PREFIX, *_prompt(9)], 12, SAMPLED, 6)
    cut.open(state)
    for length in range(1, 6):
        tree = cut.propose(state, 6)
        assert tree is not None
        state.tokens.extend([*(tree.token_ids[i] for i in tree.path(len(tree) - 1)), length])
        cut.commit(state, [], [])
        (fresh,) = _build(tiny_model, cache, "ssm2", drafter_folder=drafters)
        again = DraftSequence(1, list(state.tokens), 12, SAMPLED, 6)
        fresh.open(again)
        assert cut.propose(state, 6) == fresh.propose(again, 6)


def test_without_the_native_library_torch_drafts_the_same(
    tiny_model: Path, drafters: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library.is_built():
        pytest.skip("the native library is not built")
    (native,) = _build(tiny_model, cache, "ssm", drafter_folder=drafters)
    monkeypatch.setattr(library, "is_built", lambda: False)
    (twin,) = _build(tiny_model, cache, "ssm", drafter_folder=drafters)
    assert isinstance(twin, SsmSource) and type(twin._runner.model).__name__ == "LlamaModel"
    trees = [_propose(source, _prompt(12)) for source in (native, twin)]
    first, second = ([tree.token_ids[i] for i in tree.children[0][:3]] for tree in trees)
    assert first == second and len(first) == 3


def _change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    for name, value in changes.items():
        at = content["target"] if name in content["target"] else content
        at[name] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_hash": "other"}, "whose tokenizer is not the target's"),
        ({"vocab_size": 7}, "whose tokenizer is not the target's"),
        ({"hidden_size": 64}, "hidden size 64; the target's is 48"),
        ({"format": 2}, "version 2; 1 is known"),
        ({"sources": {}}, "holds no ssm drafter"),
        ({"sources": []}, "is broken"),
        ({"sources": {"ssm": {"file": "x"}}}, "is broken"),
    ],
)
def test_a_folder_for_something_else_is_refused(
    tiny_model: Path, copied: Path, cache: Path, changes: dict[str, Any], reason: str
) -> None:
    _change_manifest(copied, **changes)
    with pytest.raises(InvalidArgumentError, match=f"drafter_folder: .*{reason}"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)


@pytest.mark.parametrize("config", [SpeculatorConfig, VerifierConfig])
def test_errors_name_a_field_that_services_have(config: type[SpeculatorConfig | VerifierConfig]) -> None:
    assert FOLDER_FIELD in {field.name for field in fields(config)}


def test_damaged_and_foreign_files_are_refused(tiny_model: Path, copied: Path, tmp_path: Path, cache: Path) -> None:
    path = copied / "ssm.int8"
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-100])
    with pytest.raises(InvalidArgumentError, match="damaged"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)
    content[5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="damaged"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)
    held = DrafterFolder.read(copied)
    held.with_file("ssm", path, {})  # its hash is right now, its own is not
    with pytest.raises(InvalidArgumentError, match="its content has changed"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)
    path.write_text("something else altogether, and long enough to have the place for a footer" * 3)
    held.with_file("ssm", path, {})
    with pytest.raises(InvalidArgumentError, match="its end is missing"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)
    path.unlink()
    with pytest.raises(InvalidArgumentError, match="missing"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)
    (copied / MANIFEST).write_text("{")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        _build(tiny_model, cache, "ssm", drafter_folder=copied)
    with pytest.raises(InvalidArgumentError, match=f"holds no {MANIFEST}"):
        _build(tiny_model, cache, "ssm", drafter_folder=tmp_path)


def test_a_vocabulary_that_is_not_the_targets_is_refused(
    tiny_model: Path, vocabulary: DraftVocabulary, tmp_path: Path, cache: Path
) -> None:
    known = Tokenizer.from_folder(tiny_model).vocab_size
    with_padding = replace(vocabulary, token_ids=np.arange(10, known + 1))
    model = SsmModel.from_target(tiny_model, with_padding, 1)
    target = drafter_target(tiny_model, "tiny")
    export_ssm(
        model, with_padding, cut_prefix=(), source="ssm", folder=tmp_path / "d", target=target, licence="x", recipe={}
    )
    with pytest.raises(InvalidArgumentError, match="vocabulary"):
        _build(tiny_model, cache, "ssm", drafter_folder=tmp_path / "d")


def test_sources_that_need_a_folder_say_so(tiny_model: Path, cache: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="drafter_folder: the ssm3 source needs"):
        _build(tiny_model, cache, "ssm3", ssm_folder=tiny_model)


def test_trained_stands_for_all_that_the_folder_holds(tiny_model: Path, cache: Path, drafters: Path) -> None:
    held = list(DrafterFolder.read(drafters).sources)
    names = [s.name for s in _build(tiny_model, cache, "trained", "ngram", drafter_folder=drafters)]
    assert names == [*held, "ngram"]
    names = [s.name for s in _build(tiny_model, cache, held[-1], "trained", drafter_folder=drafters)]
    assert names == [held[-1], *held[:-1]], "none twice"
    assert [s.name for s in _build(tiny_model, cache, "ngram", "trained")] == ["ngram"], "nothing is shipped for it"


@pytest.mark.model
def test_drafters_are_shipped_for_the_default_model(model_folder: Path, cache: Path) -> None:
    names = {s.name for s in _build(model_folder, cache, "trained")}
    assert "ngram_table" in names
    shipped = Path(drafter_files.__file__).parent / "drafters"
    assert sum(path.stat().st_size for path in shipped.rglob("*")) < 24e6


def test_a_folder_keeps_its_other_sources_and_its_target(drafters: Path, tmp_path: Path) -> None:
    target = DrafterTarget("a", "hash", 300, 48)
    folder = tmp_path / "made" / "here"
    empty = open_for_writing(folder, target, "MIT")
    for name in ("one", "two", "one"):
        (folder / name).write_text(name)
        empty = open_for_writing(folder, target, "MIT").with_file(name, folder / name, {"by": name})
    held = DrafterFolder.read(folder)
    assert held == empty and set(held.sources) == {"one", "two"} and held.licence == "MIT"
    assert held.file("two", tmp_path).read_text() == "two" and held.sources["two"].recipe == {"by": "two"}
    with pytest.raises(InvalidArgumentError, match="trained for a"):
        open_for_writing(folder, replace(target, tokenizer_hash="other"), "MIT")


_SPECULATOR = """
import json, sys
from pathlib import Path
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.main import build_drafter, read_identity
from treeserve_speculator.metrics import SpeculatorMetrics
folder, drafters, cache = map(Path, sys.argv[1:])
config = SpeculatorConfig(folder, "tiny", sources=("ssm",), drafter_folder=drafters, cache_dir=cache, ssm_kv_tokens=64)
drafter = build_drafter(config, read_identity(config.model_folder, "tiny"), SpeculatorMetrics())
assert drafter.source_names == ("ssm",)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.skipif(not library.is_built(), reason="the native library is not built")
def test_it_is_loaded_without_torch(tiny_model: Path, drafters: Path, cache: Path) -> None:
    convert(tiny_model, cache, lambda _line: None)  # what a verifier has done, or a process of its own does
    command = [sys.executable, "-c", _SPECULATOR, str(tiny_model), str(drafters), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "treeserve_engine.native_model" in modules and modules.isdisjoint({"torch", "transformers", "safetensors"})
