"""The drafter merges what sources say, keeps to every bound, and lets no source hurt a sequence or another source."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from treeserve_core.errors import InvalidArgumentError, StaleBaseError
from treeserve_core.sampling import SamplingParams, SequenceLimits
from treeserve_core.tree import TokenTree
from treeserve_speculator.colocated import ColocatedDrafter
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import CommittedTokens, DraftPrices, DraftSequence, DraftWork
from treeserve_speculator.session import DraftSession
from treeserve_speculator.sources.base import DraftSource, SourceSettings
from treeserve_speculator.sources.registry import build_sources

EOS = 2
Propose = Callable[[DraftSequence, int], TokenTree | None]


class FakeSource:
    """Answers with a function and notes the calls it got."""

    wants_top_tokens = False

    def __init__(self, name: str, propose: Propose, fails_in: tuple[str, ...] = ()) -> None:
        self.name = name
        self.calls: list[tuple[object, ...]] = []
        self._propose = propose
        self._fails_in = fails_in

    def _note(self, call: str, *details: object) -> None:
        self.calls.append((call, *details))
        if call in self._fails_in:
            raise RuntimeError(f"{self.name} cannot {call}")

    def open(self, state: DraftSequence) -> None:
        self._note("open", state.handle)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        self._note("commit", state.handle, tuple(new_tokens), tuple(state.tokens))

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        self._note("propose", state.handle, budget)
        return self._propose(state, budget)

    def close(self, state: DraftSequence) -> None:
        self._note("close", state.handle)


class FakeBatchSource(FakeSource):
    """Also answers for many at once; one bad handle spoils the batch."""

    bad_handle: int | None = None

    def propose_batch(self, wanted: Sequence[tuple[DraftSequence, int]]) -> list[TokenTree | None]:
        self._note("batch", tuple(state.handle for state, _ in wanted))
        if any(state.handle == self.bad_handle for state, _ in wanted):
            raise RuntimeError("bad batch")
        return [self._propose(state, budget) for state, budget in wanted]


def _chain(*token_ids: int, log_prob: float = -0.5) -> Propose:
    return lambda state, budget: TokenTree.chain([state.tokens[-1], *token_ids], [0.0] + [log_prob] * len(token_ids))


def _nothing(state: DraftSequence, budget: int) -> None:
    return None


def _sequence(handle: int = 1, budget: int = 8) -> DraftSequence:
    return DraftSequence(handle, [5, 6, 7], 2, SamplingParams(), budget)


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    yield CollectorRegistry()


def _drafter(registry: CollectorRegistry, *sources: DraftSource) -> Drafter:
    return Drafter(
        sources,
        vocab_size=100,
        eos_token_ids=frozenset({EOS}),
        limits=TreeLimits(64, 16),
        metrics=SpeculatorMetrics(registry),
    )


def _draft(drafter: Drafter, sequence: DraftSequence, limits: TreeLimits | None = None) -> TokenTree:
    (proposal,) = drafter.draft([sequence], limits or TreeLimits(64, 16))
    assert proposal.base_committed_len == len(sequence.tokens)
    assert proposal.tree.token_ids[0] == sequence.tokens[-1]
    return proposal.tree


def test_merges_by_path_and_remembers_sources(registry: CollectorRegistry) -> None:
    a, b = FakeSource("a", _chain(10, 11, log_prob=-0.2)), FakeSource("b", _chain(10, 12, log_prob=-0.4))
    tree = _draft(_drafter(registry, a, b), _sequence())
    assert tree.token_ids == (7, 10, 11, 12)
    assert tree.parents == (-1, 0, 1, 1)
    assert tree.source_masks == (0, 0b11, 0b01, 0b10)
    assert tree.log_probs is not None and 0.0 > tree.log_probs[1] > tree.log_probs[2] > tree.log_probs[3]


def test_the_most_probable_nodes_survive_the_budget(registry: CollectorRegistry) -> None:
    a, b = FakeSource("a", _chain(10, 11, 12, log_prob=-0.1)), FakeSource("b", _chain(20, 21, log_prob=-1.0))
    drafter = _drafter(registry, a, b)
    assert _draft(drafter, _sequence(budget=3)).token_ids == (7, 10, 11, 12)
    assert _draft(drafter, _sequence(budget=4)).token_ids == (7, 10, 11, 12, 20)


@pytest.mark.parametrize(("limits", "expected"), [(TreeLimits(2, 16), 2), (TreeLimits(64, 3), 3)])
def test_verifier_limits_hold(registry: CollectorRegistry, limits: TreeLimits, expected: int) -> None:
    source = FakeSource("a", _chain(10, 11, 12, 13, 14))
    assert len(_draft(_drafter(registry, source), _sequence(), limits)) == expected + 1
    assert source.calls[-1] == ("propose", 1, min(8, limits.max_nodes))


def test_nodes_below_their_price_are_not_sent(registry: CollectorRegistry) -> None:
    drafter = _drafter(registry, FakeSource("a", _chain(10, 11, 12, 13, log_prob=-1.0)))
    lengths = []
    for node in (0.0, 0.05, 0.2, 0.9):
        (proposal,) = drafter.draft([_sequence()], TreeLimits(64, 16), DraftPrices(token_us=4000.0, node=node))
        lengths.append(len(proposal.tree) - 1)
        assert all(math.exp(path) >= node for path in proposal.tree.path_log_probs)
    assert lengths[0] == 4 and lengths[-1] == 0 and lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 2


def test_the_drafter_learns_from_commits_whom_to_believe(registry: CollectorRegistry) -> None:
    """A boaster is never right: the nodes of the other come first in the end, though it claims less."""
    boaster, modest = FakeSource("a", _chain(20, log_prob=-0.05)), FakeSource("b", _chain(10, log_prob=-1.0))
    drafter, sequence = _drafter(registry, boaster, modest), _sequence(budget=1)
    drafter.open(sequence)
    assert _draft(drafter, sequence).token_ids[1] == 20
    for _ in range(20):
        drafter.commit(sequence, CommittedTokens(1, len(sequence.tokens), (10,), 1))
        drafter.learn()
        tree = _draft(drafter, sequence)
    assert tree.token_ids[1] == 10


def test_nothing_grows_below_eos(registry: CollectorRegistry) -> None:
    tree = _draft(_drafter(registry, FakeSource("a", _chain(10, EOS, 11))), _sequence())
    assert tree.token_ids == (7, 10, EOS)


def test_an_eos_root_may_go_on(registry: CollectorRegistry) -> None:
    sequence = _sequence()
    sequence.tokens[-1] = EOS
    assert _draft(_drafter(registry, FakeSource("a", _chain(10, 11))), sequence).token_ids == (EOS, 10, 11)


def test_no_idea_is_a_root_alone(registry: CollectorRegistry) -> None:
    tree = _draft(_drafter(registry, FakeSource("a", _nothing)), _sequence())
    assert tree == TokenTree.root_only(7)
    assert registry.get_sample_value("treeserve_speculator_empty_trees_total") == 1


@pytest.mark.parametrize("call", ["open", "commit", "propose"])
def test_a_failing_source_is_closed_for_that_sequence_alone(registry: CollectorRegistry, call: str) -> None:
    bad, good = FakeSource("bad", _chain(20), fails_in=(call, "close")), FakeSource("good", _chain(10))
    drafter = _drafter(registry, bad, good)
    sequence = _sequence()
    drafter.open(sequence)
    drafter.commit(sequence, CommittedTokens(1, 3, (8,), 8))
    assert _draft(drafter, sequence).token_ids == (8, 10)
    assert [c for c in bad.calls if c[0] == "close"] == [("close", 1)]
    calls = len(bad.calls)
    _draft(drafter, sequence)
    drafter.close(sequence)
    assert len(bad.calls) == calls, "a source that failed on a sequence hears no more of it"
    assert registry.get_sample_value("treeserve_speculator_source_failures_total", {"source": "bad"}) == 1
    drafter.open(other := _sequence(2))
    assert bad.calls[-1 if call != "open" else -2] == ("open", other.handle)


BAD_TREES: dict[str, Propose] = {
    "wrong root": lambda state, budget: TokenTree.chain([99, 10], [0.0, -0.1]),
    "no log-probabilities": lambda state, budget: TokenTree.chain([7, 10]),
    "padding id": lambda state, budget: TokenTree.chain([7, 100], [0.0, -0.1]),
}


@pytest.mark.parametrize("propose", BAD_TREES.values(), ids=BAD_TREES.keys())
def test_a_malformed_tree_is_a_failure_of_its_source(registry: CollectorRegistry, propose: Propose) -> None:
    drafter = _drafter(registry, FakeSource("bad", propose), FakeSource("good", _chain(10)))
    sequence = _sequence()
    assert _draft(drafter, sequence).token_ids == (7, 10)
    assert sequence.disabled == {"bad"}


def test_batch_source_is_asked_once(registry: CollectorRegistry) -> None:
    source = FakeBatchSource("a", lambda state, budget: _chain(10 + state.handle)(state, budget))
    drafter = _drafter(registry, source)
    proposals = drafter.draft([_sequence(1), _sequence(2), _sequence(3)], TreeLimits(64, 16))
    assert source.calls == [("batch", (1, 2, 3))]
    assert [p.tree.token_ids for p in proposals] == [(7, 11), (7, 12), (7, 13)]


def test_one_bad_sequence_does_not_spoil_its_batch(registry: CollectorRegistry) -> None:
    def propose(state: DraftSequence, budget: int) -> TokenTree | None:
        if state.handle == 2:
            raise RuntimeError("bad sequence")
        return _chain(10)(state, budget)

    source = FakeBatchSource("a", propose)
    source.bad_handle = 2
    sequences = [_sequence(1), _sequence(2), _sequence(3)]
    proposals = _drafter(registry, source).draft(sequences, TreeLimits(64, 16))
    assert [len(p.tree) for p in proposals] == [2, 1, 2]
    assert [s.disabled for s in sequences] == [set(), {"a"}, set()]


def test_commit_must_follow_what_is_known(registry: CollectorRegistry) -> None:
    source = FakeSource("a", _nothing)
    drafter = _drafter(registry, source)
    sequence = _sequence()
    for base in (2, 4):
        with pytest.raises(StaleBaseError):
            drafter.commit(sequence, CommittedTokens(1, base, (8,), 8))
    assert sequence.tokens == [5, 6, 7] and source.calls == []
    drafter.commit(sequence, CommittedTokens(1, 3, (8, 9), 4))
    assert sequence.tokens == [5, 6, 7, 8, 9] and sequence.budget == 4
    assert source.calls == [("commit", 1, (8, 9), (5, 6, 7, 8, 9))]


def _session(registry: CollectorRegistry, source: DraftSource) -> DraftSession:
    metrics = SpeculatorMetrics(registry)
    drafter = Drafter([source], vocab_size=100, eos_token_ids=frozenset(), limits=TreeLimits(64, 16), metrics=metrics)
    return DraftSession(drafter, TreeLimits(64, 16), metrics, NoOpTracer())


def test_session_drafts_for_touched_sequences_with_a_budget(registry: CollectorRegistry) -> None:
    session = _session(registry, FakeSource("a", _chain(10)))
    drafted = session.run([DraftWork(assigned=(_sequence(1), _sequence(2, budget=0), _sequence(3)))])
    assert [handle for handle, _ in drafted] == [1, 3]
    drafted = session.run([DraftWork(commits=(CommittedTokens(2, 3, (), 4),))])
    assert [(handle, p.base_committed_len) for handle, p in drafted] == [(2, 3)]
    drafted = session.run([DraftWork(commits=(CommittedTokens(1, 3, (8,), 4),), released=(1, 77))])
    assert drafted == []
    assert registry.get_sample_value("treeserve_speculator_sequences") == 2
    session.close()
    assert registry.get_sample_value("treeserve_speculator_sequences") == 0


def test_a_drafter_in_the_verifier_meets_and_forgets_when_nobody_waits(registry: CollectorRegistry) -> None:
    source, metrics = FakeSource("a", _chain(10)), SpeculatorMetrics(registry)
    drafter = Drafter([source], vocab_size=100, eos_token_ids=frozenset(), limits=TreeLimits(64, 16), metrics=metrics)
    colocated = ColocatedDrafter(drafter, TreeLimits(64, 16), metrics)

    def assign(handle: int, budget: int) -> None:
        colocated.assign(handle, [5, 6, 7], 2, SamplingParams(), SequenceLimits(), "", budget)

    assign(1, budget=0)
    assert not colocated.is_due and source.calls == []
    colocated.learn()
    assert source.calls == [("open", 1)]
    colocated.commit(1, 3, (8,), 4, ())
    assign(2, budget=4)
    colocated.learn()
    assert colocated.is_due and len(source.calls) == 1, "who waits for a tree is served by draft"
    assert [(handle, p.tree.token_ids) for handle, p in colocated.draft(5000.0, 0.02)] == [(1, (8, 10)), (2, (7, 10))]
    source.calls.clear()
    colocated.release(1)
    assert not colocated.is_due
    colocated.commit(2, 3, (8,), 4, ())
    colocated.release(2)
    assert len(colocated.draft(5000.0, 0.02)) == 1 and not [call for call in source.calls if call[0] == "close"]
    colocated.learn()
    assert [call for call in source.calls if call[0] == "close"] == [("close", 1), ("close", 2)]
    assign(3, budget=0)
    colocated.release(3)
    colocated.learn()
    assert source.calls[-2:] == [("open", 3), ("close", 3)]


def test_trees_that_are_not_checked_are_sound() -> None:
    config = SpeculatorConfig(Path("none"), "m", sources=("ngram", "suffix", "recycling"))
    sources = build_sources(SourceSettings(config, 9, "hash", frozenset({EOS})))
    drafter = _drafter(CollectorRegistry(), *sources)
    rng = random.Random(1)
    found = 0
    for handle in range(30):
        sequence = DraftSequence(handle, [rng.randrange(5) for _ in range(9)], 3, SamplingParams(), 12, tenant="a")
        drafter.open(sequence)
        for _ in range(9):
            trees = [source.propose(sequence, 12) for source in sources]
            for tree in filter(None, [*trees, _draft(drafter, sequence)]):
                assert TokenTree(tree.token_ids, tree.parents, tree.log_probs, tree.source_masks) == tree
                found += 1
            new = tuple(rng.randrange(5) for _ in range(rng.randint(1, 3)))
            top = tuple(tuple(rng.sample(range(9), 4)) for _ in new)
            drafter.commit(sequence, CommittedTokens(handle, len(sequence.tokens), new, 12, top))
            drafter.learn()
        drafter.close(sequence)
    assert found > 900


def test_session_applies_updates_in_order_and_drafts_once(registry: CollectorRegistry) -> None:
    source = FakeSource("a", _chain(10))
    session = _session(registry, source)
    session.run([DraftWork(assigned=(_sequence(1, budget=0),))])
    works = [DraftWork(commits=(CommittedTokens(1, 3 + i, (20 + i,), 4),)) for i in range(3)]
    ((handle, proposal),) = session.run(works)
    assert (handle, proposal.base_committed_len, proposal.tree.token_ids) == (1, 6, (22, 10))
    assert [c[0] for c in source.calls] == ["open", "commit", "commit", "commit", "propose"]


def test_session_drafts_at_the_latest_prices(registry: CollectorRegistry) -> None:
    session = _session(registry, FakeSource("a", _chain(10)))
    dear, nothing_said = DraftPrices(4000.0, node=0.99), None
    sizes = []
    for n, prices in enumerate((nothing_said, dear, nothing_said, DraftPrices(4000.0, node=0.01))):
        ((_, proposal),) = session.run([DraftWork(assigned=(_sequence(n),), prices=prices)])
        sizes.append(len(proposal.tree) - 1)
    assert sizes == [1, 0, 0, 1]


def test_session_drops_a_sequence_that_lost_step(registry: CollectorRegistry) -> None:
    source = FakeSource("a", _chain(10))
    session = _session(registry, source)
    session.run([DraftWork(assigned=(_sequence(1), _sequence(2)))])
    gap = CommittedTokens(1, 9, (8,), 4)
    drafted = session.run([DraftWork(commits=(gap, CommittedTokens(2, 3, (8,), 4)))])
    assert [handle for handle, _ in drafted] == [2]
    assert ("close", 1) in source.calls
    assert registry.get_sample_value("treeserve_speculator_protocol_errors_total") == 1
    assert session.run([DraftWork(commits=(CommittedTokens(1, 3, (8,), 4),))]) == []


def _settings(*sources: str) -> SourceSettings:
    config = SpeculatorConfig(model_folder=Path("model"), model_name="m", sources=sources)
    return SourceSettings(config, 100, "hash", frozenset({EOS}))


def fake_factory(settings: SourceSettings) -> FakeSource:
    return FakeSource("fake", _chain(settings.vocab_size - 1))


def test_registry_builds_in_order_and_takes_a_dotted_factory() -> None:
    sources = build_sources(_settings("recycling", f"{__name__}:fake_factory", "ngram"))
    assert [source.name for source in sources] == ["recycling", "fake", "ngram"]


@pytest.mark.parametrize("name", ["unheard", "no.such.module:factory", f"{__name__}:no_such_factory"])
def test_registry_refuses_unknown_names(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="sources"):
        build_sources(_settings(name))


def test_registry_refuses_two_of_a_name() -> None:
    with pytest.raises(InvalidArgumentError, match="same"):
        build_sources(_settings("ngram", "treeserve_speculator.sources.ngram:build"))


def test_configuration_is_checked() -> None:
    folder = Path("model")
    assert SpeculatorConfig(folder, "m", ssm_folder=Path("small")).source_names[-1] == "ssm"
    for wrong in (
        {"sources": ("ngram", "ngram")},
        {"sources": ()},
        {"verifiers": ()},
        {"max_nodes": 0},
        {"ssm_dtype": "float16"},
    ):
        with pytest.raises(InvalidArgumentError):
            SpeculatorConfig(folder, "m", **wrong)  # type: ignore[arg-type]


def test_without_a_draft_model_torch_is_never_imported() -> None:
    script = """
import sys
from pathlib import Path
import treeserve_speculator.main
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.registry import build_sources
config = SpeculatorConfig(model_folder=Path("model"), model_name="m")
build_sources(SourceSettings(config, 100, "hash", frozenset()))
heavy = [name for name in ("torch", "transformers", "treeserve_engine.runner") if name in sys.modules]
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
