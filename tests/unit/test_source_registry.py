"""Where draft sources come from: built in, installed, or named by their path; functions, factories and classes."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer_folders import byte_level_bpe, write_folder

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import DraftSource, SourceSettings
from treeserve_speculator.sources.isolated import IsolatedSource
from treeserve_speculator.sources.registry import build_sources
from treeserve_text.tokenizer import Tokenizer

DOCS = Path(__file__).parent.parent.parent / "docs"


def settings(*sources: str, folder: Path = Path("model"), **fields: Any) -> SourceSettings:
    config = SpeculatorConfig(folder, "m", sources=sources, source_budget_ms=5000.0, **fields)
    return SourceSettings(config, 300, "hash", frozenset())


def proposed(source: DraftSource, *tokens: int, budget: int = 30) -> tuple[int, ...] | None:
    state = DraftSequence(1, list(tokens), len(tokens), SamplingParams(), 8)
    source.open(state)
    tree = source.propose(state, budget)
    return None if tree is None else tree.token_ids


def double(token_ids: list[int], budget: int) -> list[list[int]]:
    return [token_ids]


def double_by_default(token_ids: list[int], budget: int, times: int = 2) -> list[list[int]]:
    return [token_ids * times]


def function_factory(given: SourceSettings) -> Any:
    return lambda token_ids, budget: [[given.vocab_size - 1]]


class OwnSource:
    name = "own"
    wants_top_tokens = True

    def __init__(self, given: SourceSettings) -> None:
        self._last = given.vocab_size - 1

    def open(self, state: DraftSequence) -> None: ...

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Any) -> None: ...

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        return TokenTree.chain([state.tokens[-1], self._last], [0.0, -0.1])

    def close(self, state: DraftSequence) -> None: ...


def no_parameters() -> None: ...


def broken_factory(given: SourceSettings) -> Any:
    raise ValueError("no")


not_callable = 3


@pytest.mark.parametrize(
    ("attribute", "name", "expected"),
    [
        ("double", "double", (2, 1, 2)),
        ("double_by_default", "double_by_default", (2, 1, 2, 1, 2)),
        ("function_factory", "function_factory", (2, 299)),
        ("OwnSource", "own", (2, 299)),
    ],
)
def test_functions_factories_and_classes(attribute: str, name: str, expected: tuple[int, ...]) -> None:
    ngram, source = build_sources(settings("ngram", f"{__name__}:{attribute}"))
    assert not isinstance(ngram, IsolatedSource) and isinstance(source, IsolatedSource)
    assert (source.name, source.wants_top_tokens) == (name, attribute == "OwnSource")
    assert proposed(source, 1, 2) == expected


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("no_parameters", "takes 0 arguments"),
        ("broken_factory", "cannot be built"),
        ("not_callable", "neither a function nor a class"),
        ("nothing", "cannot be loaded"),
    ],
)
def test_what_leads_to_no_source_is_refused(attribute: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        build_sources(settings(f"{__name__}:{attribute}"))


def test_a_module_that_breaks_when_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_when_imported.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgumentError, match="ZeroDivisionError"):
        build_sources(settings("breaks_when_imported:build"))


def test_installed_sources_are_found_by_name_and_replace_no_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "phrases-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: phrases\nVersion: 1.0\n")
    points = f"phrases = {__name__}:double\nngram = {__name__}:double\n"
    (installed / "entry_points.txt").write_text(f"[treeserve.draft_sources]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    phrases, ngram = build_sources(settings("phrases", "ngram"))
    assert phrases.name == "phrases" and proposed(phrases, 1, 2) == (2, 1, 2)
    assert not isinstance(ngram, IsolatedSource)
    with pytest.raises(InvalidArgumentError, match=r"neither one of .*phrases"):
        build_sources(settings("phrase"))


def test_the_source_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "drafting.md").read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20
    (tmp_path / "my_phrases.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_folder(byte_level_bpe(), tmp_path / "model", eos_token="<|im_end|>")
    tokenizer = Tokenizer.from_folder(folder)
    try:
        given = settings("my_phrases:build", folder=folder)
        (source,) = build_sources(replace(given, vocab_size=tokenizer.vocab_size))
    finally:
        sys.modules.pop("my_phrases", None)
    assert source.name == "my_phrases"
    tokens = proposed(source, *tokenizer.encode("Done. I hope this"))
    assert tokens is not None
    assert tokenizer.decode(tokens[1:]).startswith(" helps! Let")
    assert proposed(source, *tokenizer.encode("Quite another thing")) is None
