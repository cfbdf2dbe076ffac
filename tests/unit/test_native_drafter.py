"""Native drafting: the trees of the drafter in Python, bit for bit; what makes no sense changes nothing."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.drafting_twins import LIMITS, Stream, Twins, Vocabulary, assert_same, make_table, sampled

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.identity import ModelIdentity
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_speculator.colocated import ColocatedDrafter, build
from treeserve_speculator.drafter import TreeLimits
from treeserve_speculator.drafter_files import DrafterTarget, open_for_writing
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.native import library
from treeserve_speculator.native_drafter import NativeDrafter
from treeserve_speculator.sources.ngram_table_file import NgramTable
from treeserve_speculator.sources.recycling import RecyclingSource
from treeserve_speculator.sources.suffix import SuffixSource

pytestmark = pytest.mark.skipif(not library.is_built(), reason="native drafting is not built")

GREEDY = (AcceptanceRule.REPLAY, 0.0)
SAMPLED = ((AcceptanceRule.REPLAY, 0.7), (AcceptanceRule.REPLAY, 1.0))
TYPICAL = (AcceptanceRule.TYPICAL, 0.8)
HOWS = (GREEDY, *SAMPLED, TYPICAL, (AcceptanceRule.MULTI_STEP, 0.0))
SMALL, MEDIUM, LARGE = map(Vocabulary.spread, (200, 5000, 70_000))  # token ids of 1, 2 and 4 bytes in a table
A, B, C, D, E, F = SMALL.tokens[1:7]
TEXT = [A, B, C, D, A, B, C, D, A, B, E, A, B, C, D, A]


def twins(folder: Path, vocabulary: Vocabulary = SMALL, **settings: Any) -> Twins:
    return Twins(vocabulary, table=make_table(folder, vocabulary), **settings)


class TestSameTrees:
    @pytest.mark.parametrize("vocabulary", [SMALL, MEDIUM, LARGE], ids=lambda vocabulary: vocabulary.size)
    @pytest.mark.parametrize("how", [(GREEDY,), SAMPLED, HOWS], ids=["greedy", "sampled", "mixed"])
    def test_of_all_sources(self, tmp_path: Path, vocabulary: Vocabulary, how: tuple[Any, ...]) -> None:
        pair = twins(tmp_path, vocabulary)
        Stream(pair, seed=vocabulary.size, hows=how).run(120)
        assert len(pair.trees) > 200
        for bit in range(4):
            with_it = sum(any(mask >> bit & 1 for mask in tree.source_masks or ()) for tree in pair.trees)
            assert with_it > len(pair.trees) / 20, f"{library.SOURCES[bit]} is put to the test"

    @pytest.mark.parametrize("source", library.SOURCES)
    def test_of_each_source_alone(self, tmp_path: Path, source: str) -> None:
        pair = twins(tmp_path, sources=(source,))
        Stream(pair, 1, hows=HOWS).run(80)
        assert sum(len(tree) > 1 for tree in pair.trees) > len(pair.trees) / 10

    @pytest.mark.parametrize("sources", [library.SOURCES[::-1], ("suffix", "recycling"), ("ngram_table", "ngram")])
    def test_in_any_order(self, tmp_path: Path, sources: tuple[str, ...]) -> None:
        Stream(twins(tmp_path, sources=sources), 2, hows=HOWS).run(80)

    @pytest.mark.parametrize("limits", [TreeLimits(1, 1), TreeLimits(5, 2), TreeLimits(64, 16)], ids=str)
    def test_within_any_limits(self, tmp_path: Path, limits: TreeLimits) -> None:
        pair = twins(tmp_path, limits=limits)
        Stream(pair, 3, hows=HOWS).run(60)
        assert max(len(tree) - 1 for tree in pair.trees) <= limits.max_nodes
        assert max(max(tree.depths) for tree in pair.trees) <= limits.max_depth

    @pytest.mark.parametrize("learns", [1.0, 0.2], ids=["each time", "seldom"])
    def test_whenever_they_learn(self, tmp_path: Path, learns: float) -> None:
        Stream(twins(tmp_path), 4, hows=HOWS, learns=learns, at_once=8).run(60)

    @pytest.mark.parametrize("order", [0, 1, 2])
    def test_with_tables_of_short_contexts(self, tmp_path: Path, order: int) -> None:
        table = make_table(tmp_path, SMALL, max_order=order)
        Stream(Twins(SMALL, ("ngram_table",), table), 5, hows=HOWS).run(40)

    def test_tenants_with_labels_that_c_would_cut(self, tmp_path: Path) -> None:
        tenants = ("", "a", "a\0", "a\0b", "\0", "\0\0", "ä", "\ud800", "a" * 64)
        Stream(twins(tmp_path, sources=("suffix", "recycling")), 6, hows=(GREEDY,), tenants=tenants).run(80)

    def test_where_draws_must_not_depend_on_the_noise_the_table_is_not_asked(self, tmp_path: Path) -> None:
        pair = twins(tmp_path, python_sources=library.SOURCES[:3])
        Stream(pair, 7, hows=((AcceptanceRule.MULTI_STEP, 0.8),)).run(80)
        assert not any(mask >> 3 & 1 for tree in pair.trees for mask in tree.source_masks or ())

    def test_thousands_of_tokens(self, tmp_path: Path) -> None:
        """More than the suffix source counts of a prompt or a response."""
        pair = twins(tmp_path)
        long = [SMALL.tokens[int(t)] for t in np.random.default_rng(0).integers(0, 14, 6000)]
        pair.assign(1, long[:2500])
        for at in range(2500, 5000, 500):
            pair.draft()
            pair.commit(1, long[at : at + 500])
        pair.release(1)
        pair.draft()
        for handle, at in enumerate((0, 2400, 3000, 4500), start=2):
            pair.assign(handle, long[at : at + 30])
            assert len(pair.draft()[0]) > 1


class TestLearning:
    """What the mixture learns, and when."""

    def test_commits_are_followed_in_the_latest_tree_one_after_the_other(self) -> None:
        pair = Twins(SMALL, ("ngram", "suffix"))
        pair.assign(1, TEXT[:8])
        pair.draft()
        for at in (8, 9):
            pair.commit(1, TEXT[at : at + 1])
        pair.draft()
        pair.learn()
        pair.commit(1, TEXT[10:12])
        pair.draft()

    def test_nothing_is_learnt_before_it_is_asked_for(self) -> None:
        def drafted(*, learns: bool) -> TokenTree:
            pair = Twins(SMALL, ("ngram", "suffix"))
            pair.assign(1, TEXT[:8])
            for _ in range(3):
                pair.draft()
                if learns:
                    pair.learn()
                pair.commit(1, [A, B, C, D])
            return pair.draft()[0]

        assert drafted(learns=False).log_probs != drafted(learns=True).log_probs

    def test_commits_without_a_tree_are_learnt_from_the_next_time(self) -> None:
        pair = Twins(SMALL, ("ngram", "suffix"))
        pair.assign(1, TEXT[:8])
        pair.draft()
        pair.commit(1, TEXT[8:11], budget=0)
        for _ in range(2):
            pair.learn()
            pair.assert_same_counts()
        pair.commit(1, TEXT[11:12])
        pair.draft()

    def test_the_last_tokens_of_a_sequence_count(self) -> None:
        pair = Twins(SMALL, ("ngram", "suffix", "recycling"))
        pair.assign(1, TEXT[:8])
        pair.draft()
        pair.commit(1, TEXT[8:10], top=[[A, E], [B, F]])
        pair.release(1)
        pair.draft()
        pair.learn()
        counts = pair.counts(pair.registries[1])
        assert counts["visits of ngram"] == counts["right of ngram"] == 2 and counts["sequences"] == 0
        pair.assert_same_counts()
        pair.assign(2, [F, A])
        assert B in pair.draft()[0].token_ids, "what the target held probable"

    def test_trees_are_drafted_in_the_order_in_which_sequences_were_told_of(self) -> None:
        pair = Twins(SMALL, ("ngram",))
        pair.assign(1, TEXT[:8], budget=0)
        pair.assign(2, TEXT[:6])
        pair.commit(1, TEXT[8:9])
        assert [len(tree) > 1 for tree in pair.draft()] == [True, True]
        assert not pair.native.is_due

    def test_who_ends_while_others_wait_is_forgotten_later(self) -> None:
        pair = Twins(SMALL, ("ngram",))
        pair.assign(1, TEXT[:8])
        pair.assign(2, TEXT[:8])
        pair.commit(1, TEXT[8:9], budget=0)
        pair.release(2)
        assert len(pair.draft()) == 1, "the tree that sequence 2 was asked for; nobody looks at it any more"
        assert pair.counts(pair.registries[1])["sequences"] == 2
        pair.learn()
        assert pair.counts(pair.registries[1])["sequences"] == 1
        pair.assert_same_counts()


class TestBounds:
    @pytest.mark.parametrize(("nodes", "rows"), [(0, 0), (40, 3), (300, 10), (1500, 20)])
    def test_who_was_heard_of_longest_ago_forgets_first(self, tmp_path: Path, nodes: int, rows: int) -> None:
        def remembered(pair: Twins) -> tuple[int, int]:
            Stream(pair, nodes, hows=HOWS, tenants=("", "a", "b", "c", "d")).run(80)
            suffix, recycling = pair.by_name["suffix"], pair.by_name["recycling"]
            assert isinstance(suffix, SuffixSource) and isinstance(recycling, RecyclingSource)
            return suffix._finished.size, recycling._shared.size

        bounded = remembered(twins(tmp_path, max_shared_nodes=nodes, max_shared_rows=rows))
        unbounded = remembered(twins(tmp_path))
        assert bounded[0] <= nodes < unbounded[0] and bounded[1] <= rows < unbounded[1]

    @pytest.mark.parametrize(("bound", "helps"), [(0, False), (500_000, True)])
    def test_a_response_helps_if_it_is_remembered(self, bound: int, helps: bool) -> None:
        pair = Twins(SMALL, ("suffix",), max_shared_nodes=bound)
        pair.assign(1, TEXT, prompt_len=1, budget=0)
        pair.release(1)
        pair.learn()
        pair.assign(2, [F, C])
        assert (len(pair.draft()[0]) > 1) is helps

    @pytest.mark.parametrize(("bound", "helps"), [(0, False), (200_000, True)])
    def test_top_tokens_help_if_they_are_remembered(self, bound: int, helps: bool) -> None:
        pair = Twins(SMALL, ("recycling",), max_shared_rows=bound)
        pair.assign(1, [A], budget=0)
        pair.commit(1, [B], budget=0, top=[[B, C]])
        pair.learn()
        pair.assign(2, [F, A])
        assert (len(pair.draft()[0]) > 1) is helps

    def test_by_default_they_are_those_of_the_sources(self) -> None:
        ours = inspect.signature(NativeDrafter).parameters
        for source, name in ((SuffixSource, "max_shared_nodes"), (RecyclingSource, "max_shared_rows")):
            assert ours[name].default == inspect.signature(source).parameters[name].default

    def test_none_is_below_0(self) -> None:
        with pytest.raises(ValueError, match="a bound below 0"):
            Twins(SMALL, ("suffix",), max_shared_nodes=-1)


Misuse = Callable[[NativeDrafter], None]


def assigned(handle: int, tokens: list[int], prompt_len: int = 1) -> Misuse:
    return lambda drafter: drafter.assign(handle, tokens, prompt_len, SamplingParams(), SequenceLimits(), "a", 0)


def committed(handle: int, base: int, *tokens: int, top: tuple[list[int], ...] = ()) -> Misuse:
    return lambda drafter: drafter.commit(handle, base, tokens, 0, top)


MISUSES: dict[str, tuple[Misuse, str]] = {
    "a handle assigned twice": (assigned(1, [A]), "a handle assigned twice"),
    "no tokens": (assigned(9, []), "a sequence without tokens"),
    "a prompt that is too long": (assigned(9, [A, SMALL.size]), "a token id"),
    "a negative prompt": (assigned(9, [A], prompt_len=-1), "a prompt's length"),
    "a token below the vocabulary": (assigned(9, [-1]), "a token id"),
    "a token far beyond": (assigned(9, [2**32 + A]), "a token id"),
    "a commit to nobody": (committed(9, 8, A), "an unknown handle"),
    "a commit too early": (committed(1, 7, A), "a commit that does not follow what is known"),
    "a commit too late": (committed(1, 9, A), "a commit that does not follow what is known"),
    "nothing committed, too late": (committed(1, 9), "a commit that does not follow what is known"),
    "a committed token beyond the vocabulary": (committed(1, 8, A, SMALL.size), "a token id"),
    "a committed token below it": (committed(1, 8, A, -1), "a token id"),
    "a committed token far beyond": (committed(1, 8, 2**32 + A), "a token id"),
    "a release of nobody": (lambda drafter: drafter.release(9), "an unknown handle"),
}


class TestMisuse:
    @pytest.fixture
    def pair(self, tmp_path: Path) -> Twins:
        pair = twins(tmp_path)
        pair.assign(1, TEXT[:8])
        pair.draft()
        pair.learn()
        return pair

    def go_on(self, pair: Twins) -> None:
        """As if nothing had been."""
        pair.commit(1, TEXT[8:11], top=[[A, B], [B], [C]])
        pair.draft()
        pair.learn()
        pair.release(1)
        pair.assign(9, [F, *TEXT[:9]])
        pair.commit(9, [F])
        pair.draft()
        pair.learn()
        pair.assert_same_counts()

    @pytest.mark.parametrize("what", MISUSES)
    def test_it_is_refused_and_changes_nothing(self, pair: Twins, what: str) -> None:
        misuse, reason = MISUSES[what]
        with pytest.raises(ValueError, match=reason):
            misuse(pair.native)
            pair.native.learn()
        self.go_on(pair)

    def test_a_tree_for_nobody(self, pair: Twins) -> None:
        native = pair.native
        with pytest.raises(ValueError, match="an unknown handle"):
            library.check(native._library.ts_drafter_draft(native._drafter, 9, 8, 0.0, library.DraftedTree()))
        self.go_on(pair)

    @pytest.mark.parametrize(
        ("handle", "position", "top", "reason"),
        [
            (9, 1, [[B]], "an unknown handle"),
            (1, -1, [[B]], "top tokens in place of none"),
            (1, 7, [[B], [C]], "top tokens in place of none"),
            (1, 2**31 - 1, [[B]], "top tokens in place of none"),
            (1, 6, [[B], [-2]], "a top token's id"),
        ],
    )
    def test_top_tokens(self, pair: Twins, handle: int, position: int, top: list[list[int]], reason: str) -> None:
        native, rows = pair.native, np.array(top, np.int32)
        pointer = rows.ctypes.data_as(library.Int32s)
        with pytest.raises(ValueError, match=reason):
            library.check(native._library.ts_drafter_remember(native._drafter, handle, position, pointer, *rows.shape))
        self.go_on(pair)

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"sources": ("ngram", "corpus")}, "an unknown source: corpus"),
            ({"sources": ()}, "one to four sources"),
            ({"sources": ("ngram",) * 5}, "one to four sources"),
            ({"sources": ("ngram", "ngram")}, "a source named twice"),
            ({"sources": ("ngram_table",)}, "a table is missing"),
            ({"vocab_size": 0}, "sizes are above 0"),
            ({"limits": TreeLimits(0, 4)}, "sizes are above 0"),
            ({"limits": TreeLimits(4, 0)}, "sizes are above 0"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            self.created(**settings)

    @pytest.mark.parametrize("number", [-1, 4, 2**31 - 1])
    def test_a_source_without_a_name(self, number: int) -> None:
        config = library.DraftingConfig(
            sources=(ctypes.c_int32 * 1)(number), num_sources=1, vocab_size=9, max_nodes=1, max_depth=1
        )
        with pytest.raises(ValueError, match="an unknown source"):
            library.check(library.load().ts_drafter_create(config, ctypes.c_void_p()))

    def created(self, table: NgramTable | None = None, **settings: Any) -> NativeDrafter:
        usual = {"sources": ("ngram",), "vocab_size": SMALL.size, "eos_token_ids": (0,), "limits": LIMITS}
        return NativeDrafter(table=table, metrics=SpeculatorMetrics(CollectorRegistry()), **{**usual, **settings})


def first_set_to(value: int) -> Callable[[Any], Any]:
    return lambda array: np.concatenate([np.array([value], array.dtype), array[1:]])


def cut(array: Any) -> Any:
    return array[:-1]


class TestCorruptTables:
    @pytest.mark.parametrize(
        ("part", "damage", "reason"),
        [
            ("first_context", first_set_to(2**32 - 1), "the table's buckets"),
            ("first_context", lambda a: np.append(a[:-1], a[-1:] + 1), "the table's buckets"),
            ("first_context", lambda a: a[::-1].copy(), "the table's buckets"),
            ("first_context", lambda a: a[:0], "the table's first_"),
            ("first_context", lambda a: a.astype(np.int64), "the table's first_context"),
            ("first_token", first_set_to(2**32 - 1), "the table's entries"),
            ("first_token", cut, "the table's first_"),
            ("fingerprints", cut, "the table's fingerprints"),
            ("fingerprints", lambda a: a.reshape(1, -1), "the table's fingerprints"),
            ("lengths", lambda a: np.full_like(a, 255), "the table's entries"),
            ("lengths", cut, "the table's fingerprints"),
            ("token_ids", first_set_to(MEDIUM.size), "a token of the table"),
            ("token_ids", lambda a: np.append(a[:-1].astype(np.uint32), np.uint32(2**32 - 1)), "a token of the table"),
            ("token_ids", lambda a: a.astype(np.uint64), "the table's token type"),
            ("token_ids", lambda a: a.astype(np.int16), "the table's token_ids"),
            ("token_ids", cut, "the table's token_ids"),
            ("log_probs", cut, "the table's token_ids"),
            ("log_probs", lambda a: a.astype(np.float64), "the table's log_probs"),
            ("max_order", lambda order: -1, "the table's order"),
        ],
    )
    def test_they_are_refused(self, tmp_path: Path, part: str, damage: Callable[[Any], Any], reason: str) -> None:
        table = make_table(tmp_path, MEDIUM)
        whole: Mapping[str, Any] = {
            **table.arrays, "tokenizer_hash": "", "vocab_size": MEDIUM.size, "max_order": table.max_order
        }  # fmt: skip
        Twins(MEDIUM, ("ngram_table",), NgramTable(whole))
        with pytest.raises(ValueError, match=reason):
            Twins(MEDIUM, ("ngram_table",), NgramTable({**whole, part: damage(whole[part])}))

    def test_one_without_a_bucket(self, tmp_path: Path) -> None:
        table = make_table(tmp_path, SMALL)
        for name in ("first_context", "first_token"):
            table.arrays[name] = table.arrays[name][:0]  # type: ignore[index]
        with pytest.raises(ValueError, match="the table's sizes"):
            Twins(SMALL, ("ngram_table",), table)


class TestBuild:
    @pytest.fixture(autouse=True)
    def library_anew(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield
        monkeypatch.undo()
        library.load.cache_clear()

    def built(self, folder: Path, *sources: str) -> ColocatedDrafter | NativeDrafter | None:
        drafters = open_for_writing(
            folder / "drafters", DrafterTarget("tiny", "tokenizer", SMALL.size, 8), "Apache-2.0"
        )
        make_table(drafters.folder, SMALL)
        drafters.with_file("ngram_table", drafters.folder / "table.bin", {})
        identity = ModelIdentity("tiny", "tokenizer", SMALL.size, SMALL.size, (SMALL.eos,))
        limits = LIMITS.max_nodes, LIMITS.max_depth
        return build(identity, folder, sources, drafters.folder, *limits, CollectorRegistry())

    def test_in_c_where_it_was_built_and_in_python_where_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        native = self.built(tmp_path, "ngram", "suffix", "recycling", "trained")
        monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "missing.so"))
        library.load.cache_clear()
        python = self.built(tmp_path, "ngram", "suffix", "recycling", "trained")
        assert isinstance(native, NativeDrafter) and isinstance(python, ColocatedDrafter)
        assert native.sources == python.sources == library.SOURCES
        assert native.wants_top_tokens and python.wants_top_tokens
        for drafter in (native, python):
            drafter.assign(1, TEXT, 4, *sampled(AcceptanceRule.REPLAY, 0.7), "a", 16)
        ((_, found),), ((_, expected),) = native.draft(0.0, 0.0), python.draft(0.0, 0.0)
        assert_same(found.tree, expected.tree)
        assert any(mask >> 3 & 1 for mask in found.tree.source_masks or ()), "its table is there"

    def test_without_recycling_no_top_tokens_are_wanted(self, tmp_path: Path) -> None:
        native = self.built(tmp_path, "ngram")
        assert isinstance(native, NativeDrafter) and not native.wants_top_tokens
