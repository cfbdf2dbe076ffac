"""Retrieval: the index finds what a plain search finds, trees follow counts, and a wrong file is refused."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from treeserve_cli.main import app
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import SamplingParams
from treeserve_engine.array_file import write_arrays
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.corpus import CorpusSource
from treeserve_speculator.sources.corpus_file import Corpus, open_corpus, write_corpus
from treeserve_speculator.sources.registry import build_sources
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.corpus import build_corpus, index_tokens

VOCAB = 20


def corpus_of(*documents: list[int], depth: int = 16) -> Corpus:
    return Corpus(_index(documents, depth))


def _index(documents: tuple[list[int], ...], depth: int = 16):  # type: ignore[no-untyped-def]
    tokens = [VOCAB]
    for document in documents:
        tokens += [*document, VOCAB]
    return index_tokens(np.array(tokens, dtype=np.uint32), "hash", VOCAB, depth)


def state_of(*tokens: int) -> DraftSequence:
    return DraftSequence(1, list(tokens), len(tokens), SamplingParams(), 8)


def _searched(documents: list[list[int]], context: list[int], depth: int) -> tuple[int, list[int]]:
    """Length of the longest end of a context that occurs, and what followed it, by looking everywhere."""
    for length in range(min(len(context), depth), 0, -1):
        end = context[-length:]
        followed = [d[i + length] for d in documents for i in range(len(d) - length) if d[i : i + length] == end]
        if followed:
            return length, sorted(followed)
    return 0, []


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
def test_finds_what_a_plain_search_finds(depth: int) -> None:
    rng = random.Random(depth)
    documents = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(30)]
    documents.append([VOCAB - 1] * 50)
    corpus = corpus_of(*documents, depth=depth)
    for _ in range(300):
        context = [rng.choice((0, 1, 2, VOCAB - 1, 7)) for _ in range(rng.randrange(1, 20))]
        length, places = corpus.longest(context)
        followed = sorted(corpus.tokens[corpus.places[i]] for i in places)
        assert (length, followed) == _searched(documents, context, depth)


def test_the_tree_follows_the_counts_after_the_longest_context() -> None:
    corpus = corpus_of(*[[9, 1, 2, 3, 4]] * 6, *[[9, 1, 2, 5]] * 3, *[[8, 2, 6]] * 50)
    tree = CorpusSource(corpus).propose(state_of(9, 1, 2), 8)
    assert tree is not None and tree.log_probs is not None
    assert (tree.token_ids, tree.parents) == ((2, 3, 4, 5), (-1, 0, 1, 0)), "6 follows a shorter context only"
    assert math.exp(tree.log_probs[1]) > math.exp(tree.log_probs[3]) > 0.2
    short = CorpusSource(corpus).propose(state_of(2), 1)
    assert short is not None and short.token_ids == (2, 6)


def test_documents_end() -> None:
    corpus = corpus_of([1, 2], [3, 4])
    source = CorpusSource(corpus)
    assert source.propose(state_of(1, 2), 8) is None
    tree = source.propose(state_of(1), 8)
    assert tree is not None and tree.token_ids == (1, 2)
    assert source.propose(state_of(7), 8) is None and source.propose(state_of(2, 3), 8) is not None


def test_a_bounded_number_of_occurrences_from_all_over_the_range() -> None:
    corpus = corpus_of(*([[i % 7, 10, 11 + i % 7] for i in range(7000)]))
    seen: list[int] = []

    class Counting:
        def __getitem__(self, index: int) -> int:
            seen.append(index)
            return places[index]

    places = corpus.places
    corpus.places = Counting()  # type: ignore[assignment]
    tree = CorpusSource(corpus, max_context=1, max_places=70).propose(state_of(10), 12)
    assert len(seen) == 70
    assert tree is not None and set(tree.token_ids[1:]) == set(range(11, 18))


def test_a_proposal_takes_microseconds() -> None:
    rng = random.Random(3)
    corpus = corpus_of(*[[rng.randrange(VOCAB) for _ in range(1000)] for _ in range(100)])
    source, state = CorpusSource(corpus), state_of(*[rng.randrange(VOCAB) for _ in range(16)])
    started = time.process_time()
    for _ in range(300):
        state.tokens.append(rng.randrange(VOCAB))
        source.propose(state, 8)
    assert (time.process_time() - started) / 300 < 1e-3  # tens of microseconds when the machine is idle


def test_a_file_is_mapped_read_only_and_equal(tmp_path: Path) -> None:
    index = _index(([1, 2, 3], [2, 3]))
    write_corpus(tmp_path / "corpus", index)
    corpus = open_corpus(tmp_path / "corpus", "hash", tmp_path)
    assert list(corpus.tokens) == list(index.tokens) and list(corpus.places) == list(index.places)
    assert corpus.tokens.readonly and corpus.places.readonly
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["corpus"]


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    write_corpus(path, _index(([1, 2, 3],)))
    with pytest.raises(InvalidArgumentError, match="another tokenizer"):
        open_corpus(path, "other", tmp_path)
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="content has changed"):
        open_corpus(path, "hash", tmp_path)
    path.write_bytes(content[:-5])
    with pytest.raises(InvalidArgumentError, match="cannot be used"):
        open_corpus(path, "hash", tmp_path)
    write_arrays(path, [("weights", np.zeros(3))])
    with pytest.raises(InvalidArgumentError, match="not a corpus of this version"):
        open_corpus(path, "hash", tmp_path)
    with pytest.raises(InvalidArgumentError, match="cannot be used"):
        open_corpus(tmp_path / "nothing", "hash", tmp_path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "hidden.txt").write_text("nobody reads this")
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "copy.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "picture.bin").write_bytes(b"\xff\xfe\x00\x80")
    records = [{"messages": [{"role": "user", "content": "the quick brown fox"}]}, ["jumps over", 3, None], "lazy dog"]
    (folder / "b.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    return folder


def test_texts_of_all_kinds_are_read_once(texts: Path, tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    summary = build_corpus([texts, texts / "b.jsonl"], tokenizer, tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus", tokenizer.hash, tmp_path)
    tokens, documents = list(corpus.tokens), []
    while len(tokens) > 1:
        end = tokens.index(corpus.separator, 1)
        documents.append(tokenizer.decode(tokens[1:end]))
        tokens = tokens[end:]
    expected = ["def add(a, b):\n    return a + b\n", "user", "the quick brown fox", "jumps over", "lazy dog"]
    assert documents == expected
    assert summary.documents == 5 and summary.tokens == sum(len(tokenizer.encode(text)) for text in expected)
    assert [path.name for path in summary.skipped] == ["picture.bin"]


def test_long_texts_are_cut_at_line_ends(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeserve_training.corpus._PIECE_CHARS", 7)
    text = "one\ntwo\nthree four five\nsix"
    (tmp_path / "a.txt").write_text(text)
    tokenizer = Tokenizer.from_folder(tiny_model)
    build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus", tokenizer.hash, tmp_path)
    assert tokenizer.decode(list(corpus.tokens)[1:-1]) == text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [("a.jsonl", "{", "line 1 is no JSON"), ("a.txt", " \n", "hold no text"), (None, "", "does not exist")],
)
def test_inputs_that_cannot_be_used_are_named(
    tiny_model: Path, tmp_path: Path, name: str | None, content: str, reason: str
) -> None:
    if name is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgumentError, match=reason):
        build_corpus([tmp_path / (name or "a")], Tokenizer.from_folder(tiny_model), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_from_the_command_line_to_a_tree(texts: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    done = CliRunner().invoke(app, ["corpus", "build", str(texts), "--model", str(tiny_model), "--out", str(out)])
    assert done.exit_code == 0 and "5 texts" in done.output, done.output
    tokenizer = Tokenizer.from_folder(tiny_model)
    config = SpeculatorConfig(tiny_model, "tiny", sources=("ngram",), corpus=out, cache_dir=tmp_path)
    settings = SourceSettings(config, tokenizer.vocab_size, tokenizer.hash, frozenset(tokenizer.eos_token_ids))
    _, source = build_sources(settings)
    tree = source.propose(state_of(*tokenizer.encode("def add(a")), 30)
    assert tree is not None and tokenizer.decode(tree.token_ids[1:]).startswith(", b):\n    return")
    missing = ["corpus", "build", str(tmp_path / "no"), "--model", str(tiny_model), "--out", "x"]
    failed = CliRunner().invoke(app, missing)
    assert failed.exit_code == 1 and "does not exist" in failed.output


def test_the_corpus_source_needs_its_file() -> None:
    with pytest.raises(InvalidArgumentError, match="corpus"):
        SpeculatorConfig(Path("model"), "m", sources=("corpus",))
