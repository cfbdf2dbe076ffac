"""Offline replay accepts, step for step, what the verifier accepts of the same drafter's trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.recorded_target import MAX_TOKENS, SSM_FIELDS, RecordedTarget
from support.sequences import make_config

from benchmarks.acceptance.drafters import fresh_drafter
from benchmarks.acceptance.features import RecordedFeatures
from benchmarks.acceptance.record import PlainOutput
from benchmarks.acceptance.replay import SourceClock, Step, replay
from benchmarks.acceptance.tally import Tally
from treeserve_core.features import FeatureShape
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import accept
from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sequence import CommittedTokens, DraftSequence
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.sequence import Sequence as VerifierSequence
from treeserve_verifier.sequence import Submission
from treeserve_verifier.step_plan import Candidate

NODES = 6


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordedTarget:
    return RecordedTarget.load(tiny_model, tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def recordings(target: RecordedTarget, tmp_path_factory: pytest.TempPathFactory) -> list[PlainOutput]:
    recorded = target.record(tmp_path_factory.mktemp("recordings"))
    assert {r.output_ids[-1] in target.eos for r in recorded} == {False, True}
    return recorded


def drafter_of(target: RecordedTarget, *sources: str) -> Drafter:
    model = {"ssm_folder": target.folder, **SSM_FIELDS} if "ssm" in sources else {}
    return fresh_drafter(target.folder, sources, **model)


# --- the verifier, a sequence at a time ----------------------------------------------------------------------------


@dataclass
class Verified:
    """What the verifier did to one request after its prefill."""

    outcomes: list[VerifyOutcome] = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def verify(target: RecordedTarget, drafter: Drafter, recording: PlainOutput) -> Verified:
    """Generate as the service does: the planner's tree, one forward pass over it, `accept`, commits with top tokens."""
    params = SamplingParams(temperature=recording.temperature, seed=recording.seed)
    sampler = target.sampler(recording.prompt_ids, params)
    submission = Submission(
        "r", recording.prompt_ids, (), params, StoppingCriteria(max_tokens=MAX_TOKENS), SequenceLimits(max_nodes=NODES)
    )
    sequence = VerifierSequence(1, submission, lambda emission: None, sampler, None, list(recording.prompt_ids))
    planner = StepPlanner(make_config(max_nodes=NODES), CostModel.free_rows())
    drafted_for = DraftSequence(1, list(sequence.tokens), sequence.prompt_len, params, 0, tenant="all")
    runner = ModelRunner(target.model, 40, 4)
    runner.blocks.add(1)
    drafter.open(drafted_for)
    done = Verified()
    tree = TokenTree.root_only(sequence.tokens[-1])
    while sampler.finish_reason is None:
        uncomputed = sequence.tokens[runner.blocks.computed_len(1) :]
        if len(uncomputed) > 1:  # the prefill
            rows = SequenceRows.from_chain(1, uncomputed, (len(uncomputed) - 1,))
        else:
            (planned,) = planner.plan([Candidate(sequence, 1, tree)]).sequences
            assert planned.tree is not None
            tree, rows = planned.tree, SequenceRows.from_tree(1, planned.tree)
        runner.blocks.reserve(1, len(rows.token_ids))
        (logits,) = runner.forward([rows])
        outcome = accept(tree, lambda node, rows=logits: rows[node], sampler)
        if len(uncomputed) == 1:
            done.outcomes.append(outcome)
            done.trees.append(tree)
        runner.commit(1, range(len(uncomputed)) if len(uncomputed) > 1 else (0, *outcome.accepted_nodes))
        path = (0, *outcome.accepted_nodes)[: len(outcome.token_ids)]
        top = tuple(tuple(np.argsort(-logits[node][: target.vocab_size], kind="stable")[:8].tolist()) for node in path)
        sequence.tokens += outcome.token_ids
        budget = planner.draft_budget(sequence, 1)
        drafter.commit(drafted_for, CommittedTokens(1, len(drafted_for.tokens), outcome.token_ids, budget, top))
        drafter.learn()
        tree = TokenTree.root_only(sequence.tokens[-1])
        if budget > 0 and sampler.finish_reason is None:
            (proposal,) = drafter.draft([drafted_for], TreeLimits(budget, 16))
            tree = proposal.tree
    drafter.close(drafted_for)
    done.output = sequence.tokens[sequence.prompt_len :]
    return done


@pytest.mark.parametrize("sources", [("ngram", "suffix", "recycling"), ("ssm",), ("recycling", "ssm")])
def test_replay_accepts_what_the_verifier_accepts(
    target: RecordedTarget, recordings: list[PlainOutput], sources: tuple[str, ...]
) -> None:
    steps: list[Step] = []
    replay(drafter_of(target, *sources), recordings, NODES, eos_token_ids=target.eos, watch=steps.append)
    verifying = drafter_of(target, *sources)
    for recording in recordings:
        verified = verify(target, verifying, recording)
        assert verified.output == list(recording.output_ids), "what was recorded is what is served"
        replayed = [step for step in steps if step.recording is recording]
        assert [step.token_ids for step in replayed] == [outcome.token_ids for outcome in verified.outcomes]
        assert [len(step.path) for step in replayed] == [len(outcome.accepted_nodes) for outcome in verified.outcomes]
        assert [set(paths(step.tree)) for step in replayed] == [set(paths(tree)) for tree in verified.trees]
    assert any(step.path for step in steps)


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[node] for node in tree.path(i)) for i in range(len(tree))]


def test_times_by_source_are_within_the_drafters_time(target: RecordedTarget, recordings: list[PlainOutput]) -> None:
    drafter = drafter_of(target, "ngram", "ssm")  # the draft model's `propose` calls its `propose_batch`
    tallies = replay(drafter, recordings, NODES, source_clock=SourceClock(drafter.sources))
    total = Tally.total(tallies.values())
    assert set(tallies) == {"chat", "code"}
    assert total.source_s["ssm"] > total.source_s["ngram"] > 0
    assert sum(total.source_s.values()) < 10 * total.draft_s
    assert total.tokens == sum(len(r.output_ids) - 1 for r in recordings), "all but what the prefill brings"
    assert total.accepted_of["ssm"] >= total.accepted_of_one["ssm"] > 0


def test_only_coupled_drafting_foresees_sampled_text(target: RecordedTarget, recordings: list[PlainOutput]) -> None:
    sampled = [r for r in recordings if r.temperature > 0]
    coupled, uncoupled = (
        Tally.total(replay(drafter_of(target, "ssm"), sampled, NODES, coupled=coupled).values())
        for coupled in (True, False)
    )
    assert coupled.acceptance_length > 1.5 * uncoupled.acceptance_length


def test_the_drafter_keeps_what_it_learnt_between_recordings(
    target: RecordedTarget, recordings: list[PlainOutput]
) -> None:
    again = [recordings[0], recordings[0]]
    steps: list[Step] = []
    replay(drafter_of(target, "suffix"), again, NODES, watch=steps.append)
    first = next(i for i, step in enumerate(steps) if i > 0 and step.tree.token_ids[0] == recordings[0].output_ids[0])
    assert len(steps) - first < first, "the second time it knows the answer"


class FeatureReader:
    """A source that notes which features it was sent by the time it is asked."""

    name = "reader"
    wants_top_tokens = False
    feature_shape = FeatureShape((1,), 1)

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[float]]] = []

    def open(self, state: DraftSequence) -> None:
        pass

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        assert len(top_tokens) == 0

    def propose(self, state: DraftSequence, budget: int) -> TokenTree:
        assert state.features is not None
        rows = state.features.since(0)
        assert rows is not None
        self.seen.append((rows.first, rows.values[:, 0, 0].tolist()))
        return TokenTree.chain([state.tokens[-1], 12, 13], [0.0, -0.1, -0.1])

    def close(self, state: DraftSequence) -> None:
        pass


class Places:
    """A target whose hidden state after a token is the token."""

    shape = FeatureShape((1,), 1)

    def along(self, token_ids: Sequence[int], first: int) -> np.ndarray:
        return np.array(token_ids[first:], np.float16).reshape(-1, 1, 1)


def test_features_come_with_the_tokens_that_they_led_to() -> None:
    recording = PlainOutput((1, 2, 3), (11, 12, 13, 14, 12, 15), "chat", 0.0, 0, np.zeros((6, 8), np.uint32))
    reader = FeatureReader()
    metrics = SpeculatorMetrics(CollectorRegistry())
    drafter = Drafter([reader], vocab_size=20, eos_token_ids=frozenset(), limits=TreeLimits(8, 8), metrics=metrics)
    features = RecordedFeatures(lambda: Places())  # type: ignore[arg-type, return-value]
    tallies = replay(drafter, [recording], NODES, features=features)
    assert (tallies["chat"].steps, tallies["chat"].accepted) == (2, 3)
    # The first token of the prompt has no row; the last row is what led to the root.
    assert reader.seen == [(1, [1.0, 2.0, 3.0]), (1, [1.0, 2.0, 3.0, 11.0, 12.0, 13.0])]
