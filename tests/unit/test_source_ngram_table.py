"""The n-gram table: its file is whole and the target's or refused; trees are best first, coupled, or drawn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.noise import gumbel, nearly_gumbel
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.array_file import write_arrays
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.drafter_files import DrafterTarget, open_for_writing
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.ngram_table import NgramTableSource
from treeserve_speculator.sources.ngram_table_file import (
    EMPTY_CONTEXT,
    Calibration,
    NgramTable,
    TableEntries,
    TableIdentity,
    longer_context,
    write_table,
)
from treeserve_speculator.sources.registry import build_sources

VOCAB, EOS = 100, 2
IDENTITY = TableIdentity("tokenizer", VOCAB)
# context, the latest token last: what follows
Contexts = dict[tuple[int, ...], dict[int, float]]
CONTEXTS: Contexts = {
    (): {9: 0.3, 8: 0.2},
    (5,): {10: 0.6, 11: 0.3},
    (4, 5): {12: 0.9},
    (10,): {13: 0.8, EOS: 0.1},
    (11,): {14: 0.5},
    (EOS,): {15: 0.9},
}
WARM = SamplingParams(temperature=1.0, seed=3)


def context_hash(context: tuple[int, ...]) -> int:
    value = EMPTY_CONTEXT
    for token_id in reversed(context):
        value = longer_context(value, token_id)
    return value


def entries_of(contexts: Contexts) -> TableEntries:
    return TableEntries(
        np.array([context_hash(context) for context in contexts], np.uint64),
        np.cumsum([len(followers) for followers in contexts.values()]),
        np.array([token_id for followers in contexts.values() for token_id in followers]),
        np.log([q for followers in contexts.values() for q in followers.values()]),
    )


def table_of(folder: Path, contexts: Contexts = CONTEXTS, calibration: Calibration | None = None) -> NgramTable:
    order = max(map(len, contexts))
    write_table(folder / "table.bin", IDENTITY, order, entries_of(contexts), calibration or Calibration())
    return NgramTable.open(folder / "table.bin", IDENTITY, folder)


def propose(
    table: NgramTable,
    tokens: list[int],
    budget: int = 8,
    sampling: SamplingParams | None = None,
    rule: AcceptanceRule = AcceptanceRule.REPLAY,
    **limits: float,
) -> TokenTree | None:
    source = NgramTableSource(table, frozenset({EOS}), **limits)  # type: ignore[arg-type]
    state = DraftSequence(1, tokens, 1, sampling or SamplingParams(), budget, acceptance=rule)
    source.open(state)
    tree = source.propose(state, budget)
    source.close(state)
    assert not state.source_state
    assert tree is None or TokenTree(tree.token_ids, tree.parents, tree.log_probs, draws=tree.draws) == tree
    return tree


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens that lead to each node."""
    found: list[tuple[int, ...]] = [()]
    for i in range(1, len(tree)):
        found.append((*found[tree.parents[i]], tree.token_ids[i]))
    return found


class TestFile:
    def test_the_longest_known_context_answers(self, tmp_path: Path) -> None:
        table = table_of(tmp_path)
        assert table.successors((5, 4)).token_ids == (12,)
        assert table.successors((5, 3)).token_ids == (10, 11)
        assert table.successors((77, 5)).token_ids == (9, 8)
        assert table.successors((5, 3)).weights == pytest.approx((0.6, 0.3), rel=1 / 31)
        assert table.successors((5, 3)).rest == pytest.approx(0.1, abs=0.03)

    def test_thousands_of_contexts(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        contexts: Contexts = {(int(a), int(b)): {int(c): 0.5} for a, b, c in rng.integers(0, VOCAB, (4000, 3))}
        table = table_of(tmp_path, {(): {}, **contexts})
        assert len(table) == len(contexts) + 1
        for (far, late), followers in contexts.items():
            assert table.successors((late, far)).token_ids == tuple(followers)
        unknown = [table.successors((late, VOCAB + 1)).token_ids for late in range(VOCAB)]
        assert sum(map(len, unknown)) <= 1

    def test_it_is_mapped_read_only(self, tmp_path: Path) -> None:
        table = table_of(tmp_path)
        assert table._token_ids.readonly and table._first_context.readonly

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:], "its content has changed"),
            (lambda raw: raw[:-1], "its end is missing"),
            (lambda raw: raw[:10], "too short"),
        ],
    )
    def test_damage_is_refused(self, tmp_path: Path, damage: object, reason: str) -> None:
        table_of(tmp_path)
        path = tmp_path / "table.bin"
        path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
        with pytest.raises(InvalidArgumentError, match=reason):
            NgramTable.open(path, IDENTITY, tmp_path)

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "other.bin"
        with pytest.raises(InvalidArgumentError, match="cannot be used"):
            NgramTable.open(path, IDENTITY, tmp_path)
        write_arrays(path, [("kind", "ssm 1")])
        with pytest.raises(InvalidArgumentError, match="'ssm 1', not 'ngram table 1'"):
            NgramTable.open(path, IDENTITY, tmp_path)
        write_arrays(path, [("kind", "ngram table 1"), ("vocab_size", 7)])
        with pytest.raises(InvalidArgumentError, match="lacks a part"):
            NgramTable.open(path, IDENTITY, tmp_path)

    @pytest.mark.parametrize("target", [TableIdentity("another", VOCAB), TableIdentity("tokenizer", VOCAB + 1)])
    def test_another_targets_table_is_refused(self, tmp_path: Path, target: TableIdentity) -> None:
        table_of(tmp_path)
        with pytest.raises(InvalidArgumentError, match="another tokenizer"):
            NgramTable.open(tmp_path / "table.bin", target, tmp_path)


class TestBestFirst:
    def test_the_most_probable_paths(self, tmp_path: Path) -> None:
        tree = propose(table_of(tmp_path), [1, 5], budget=4)
        assert tree is not None
        # next would be 10-13-9, by what follows any context: 0.144
        expected = {(10,): 0.6, (10, 13): 0.48, (11,): 0.3, (11, 14): 0.15}
        found = {paths(tree)[i]: tree.path_log_probs[i] for i in range(1, 5)}
        assert found == {path: pytest.approx(math.log(q), abs=0.07) for path, q in expected.items()}

    def test_no_node_below_the_end_of_the_text(self, tmp_path: Path) -> None:
        tree = propose(table_of(tmp_path), [1, 10], budget=16, min_probability=1e-3)
        assert tree is not None
        end = tree.token_ids.index(EOS)
        assert tree.parents[end] == 0 and not tree.children[end]

    def test_but_below_a_root_that_is_one(self, tmp_path: Path) -> None:
        tree = propose(table_of(tmp_path), [1, EOS], budget=1)
        assert tree is not None and tree.token_ids == (EOS, 15)

    def test_limits(self, tmp_path: Path) -> None:
        table = table_of(tmp_path)
        for budget in range(1, 7):
            tree = propose(table, [1, 5], budget)
            assert tree is not None and len(tree) == budget + 1
        shallow = propose(table, [1, 5], 40, max_depth=2, min_probability=1e-6)
        assert shallow is not None and max(shallow.depths) == 2
        sure = propose(table, [1, 5], 40, min_probability=0.2)
        assert sure is not None and set(paths(sure)) == {(), (10,), (10, 13), (11,)}
        assert propose(table, [1, 77], 8, min_probability=0.5) is None

    def test_a_token_that_occurred_weighs_more(self, tmp_path: Path) -> None:
        table = table_of(tmp_path, calibration=Calibration(again=4.0))
        fresh, again = propose(table, [1, 5], 1), propose(table, [11, 1, 5], 1)
        assert fresh is not None and fresh.token_ids == (5, 10)
        assert again is not None and again.token_ids == (5, 11)
        assert again.path_log_probs[1] == pytest.approx(math.log(1.2 / (0.6 + 1.2 + 0.1)), abs=0.05)

    def test_committed_tokens_occur_too(self, tmp_path: Path) -> None:
        table = table_of(tmp_path, calibration=Calibration(again=4.0))
        source = NgramTableSource(table, frozenset({EOS}))
        state = DraftSequence(1, [1], 1, SamplingParams(), 1)
        source.open(state)
        state.tokens += [11, 5]
        source.commit(state, [11, 5], [])
        tree = source.propose(state, 1)
        assert tree is not None and tree.token_ids == (5, 11)


class TestTemperature:
    def test_a_perfect_table_foresees_every_draw(self, tmp_path: Path) -> None:
        q = {10: 0.5, 11: 0.25, 12: 0.15, 13: 0.1}
        table = table_of(tmp_path, {(): q})
        ids = np.array(list(q))
        for seed in range(50):
            sampling = SamplingParams(temperature=0.7, seed=seed)
            tree = propose(table, [1, 5], 3, sampling, max_depth=1)
            drawn = ids[np.argmax(np.log(list(q.values())) / 0.7 + gumbel(seed, 2, ids))]
            assert tree is not None and tree.token_ids[1] == drawn

    def test_noise_counts_as_much_as_the_calibration_says(self, tmp_path: Path) -> None:
        deaf = table_of(tmp_path, calibration=Calibration(noise=0.0))
        firsts = {propose(deaf, [1, 5], 1, SamplingParams(temperature=1.0, seed=s)).token_ids for s in range(20)}  # type: ignore[union-attr]
        assert firsts == {(5, 10)}

    def test_the_position_is_that_of_the_token_to_draw(self, tmp_path: Path) -> None:
        table = table_of(tmp_path, {(): {10: 0.4, 11: 0.4}})
        ids = np.array([10, 11])
        tree = propose(table, [1, 5, 6], 2, WARM, max_depth=2, min_probability=1e-6)
        assert tree is not None
        path = [int(ids[np.argmax(gumbel(WARM.seed, 3 + depth, ids))]) for depth in range(2)]
        assert tree.child(0, path[0]) is not None

    def test_the_rest_grows_with_the_temperature(self, tmp_path: Path) -> None:
        table = table_of(tmp_path, calibration=Calibration(noise=0.0, rest_noise=2.0))
        cold = propose(table, [1, 5], 1, SamplingParams(temperature=0.1, seed=1))
        warm = propose(table, [1, 5], 1, SamplingParams(temperature=1.0, seed=1))
        assert cold is not None and warm is not None and cold.path_log_probs[1] > warm.path_log_probs[1] + 0.3

    def test_extreme_temperatures(self, tmp_path: Path) -> None:
        table = table_of(tmp_path)
        for temperature in (1e-6, 100.0):
            propose(table, [1, 5], 8, SamplingParams(temperature=temperature, seed=1))

    def test_typical_acceptance_ignores_the_noise(self, tmp_path: Path) -> None:
        table = table_of(tmp_path)
        tree = propose(table, [1, 5], 4, WARM, AcceptanceRule.TYPICAL)
        assert tree == propose(table, [1, 5], 4)

    def test_multi_step_gets_draws(self, tmp_path: Path) -> None:
        table = table_of(tmp_path)
        trees = [
            propose(table, [1, 5], 8, SamplingParams(temperature=1.0, seed=seed), AcceptanceRule.MULTI_STEP)
            for seed in range(200)
        ]
        firsts = []
        for tree in trees:
            assert tree is not None and tree.draws is not None and tree.draws[0] is not None
            assert tree.draws[0].support == (10, 11)
            assert tree.draws[0].weights == pytest.approx((2 / 3, 1 / 3), abs=0.03)
            firsts.append(tree.draws[0].token_ids[0])
        assert 100 < firsts.count(10) < 165

    def test_quick_noise_is_the_noise(self) -> None:
        ids = np.arange(0, 49152, 77)
        assert nearly_gumbel(2**64 - 1, 1234, ids.tolist()) == pytest.approx(gumbel(2**64 - 1, 1234, ids), rel=1e-9)


class TestConfigured:
    def settings(self, folder: Path | None, tokenizer_hash: str = "tokenizer") -> SourceSettings:
        cache_dir = Path("unused") if folder is None else folder
        config = SpeculatorConfig(
            Path("unused"), "tiny", sources=("ngram_table",), drafter_folder=folder, cache_dir=cache_dir
        )
        return SourceSettings(config, VOCAB, tokenizer_hash, frozenset({EOS}))

    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "drafters"
        drafters = open_for_writing(folder, DrafterTarget("tiny", "tokenizer", VOCAB, 8), "Apache-2.0")
        table_of(folder)
        drafters.with_file("ngram_table", folder / "table.bin", {})
        return folder

    def test_from_a_drafter_folder(self, tmp_path: Path) -> None:
        (source,) = build_sources(self.settings(self.folder(tmp_path)))
        state = DraftSequence(1, [1, 5], 1, SamplingParams(), 1)
        source.open(state)
        tree = source.propose(state, 1)
        assert source.name == "ngram_table" and tree is not None and tree.token_ids == (5, 10)

    def test_without_a_folder(self) -> None:
        with pytest.raises(InvalidArgumentError, match="ngram_table source needs a folder"):
            build_sources(self.settings(None))

    def test_another_targets_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgumentError, match="trained for tiny"):
            build_sources(self.settings(self.folder(tmp_path), "another"))

    def test_a_folder_whose_table_is_damaged(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        path = folder / "table.bin"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(InvalidArgumentError, match="is damaged"):
            build_sources(self.settings(folder))
