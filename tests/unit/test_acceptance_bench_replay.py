"""Offline replay accepts, step for step, what the verifier accepts of the same drafter's trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support.sequences import make_config

from benchmarks.acceptance.drafters import fresh_drafter
from benchmarks.acceptance.record import PlainOutput, Prompt, Recorder
from benchmarks.acceptance.replay import SourceClock, Step, followed, replay
from benchmarks.acceptance.tally import Tally
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.drafter import Drafter, TreeLimits
from treeserve_speculator.sequence import CommittedTokens, DraftSequence
from treeserve_text.tokenizer import Tokenizer
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import Candidate, StepPlanner
from treeserve_verifier.sequence import Sequence as VerifierSequence
from treeserve_verifier.sequence import Submission

MAX_TOKENS = 40
NODES = 6
TEXTS = ("the quick brown fox", "one two three four", "def add(a, b):\n", "naïve café")


@dataclass(frozen=True)
class Target:
    """The tiny model with what tells its tokens apart."""

    model: Model
    folder: Path
    vocab_size: int
    eos: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    def sampler(self, prompt: Sequence[int], params: SamplingParams) -> SequenceSampler:
        stopping = StoppingCriteria(max_tokens=MAX_TOKENS)
        return SequenceSampler(params, stopping, prompt, eos_token_ids=self.eos, vocab_size=self.vocab_size)


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny model with an end of sequence that it happens to say."""
    tokenizer = Tokenizer.from_folder(tiny_model)
    model = load_model(tiny_model, dtype="float32", device="cpu", threads=1)
    prompts = tuple(tuple(tokenizer.encode(text)) for text in TEXTS)
    endless = Target(model, tiny_model, tokenizer.vocab_size, (), prompts)
    said = record(endless, tmp_path_factory.mktemp("endless"))
    return replace(endless, eos=(said[0].output_ids[20], said[-1].output_ids[20]))


@pytest.fixture(scope="module")
def recordings(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[PlainOutput]:
    recorded = record(target, tmp_path_factory.mktemp("recordings"))
    assert {r.output_ids[-1] in target.eos for r in recorded} == {False, True}
    return recorded


def record(target: Target, folder: Path) -> list[PlainOutput]:
    prompts = [
        Prompt(f"kind{i % 2}", prompt, temperature, seed=i)
        for temperature in (0.0, 1.0)
        for i, prompt in enumerate(target.prompts)
    ]
    recorder = Recorder(
        lambda: target.model,
        "tiny",
        folder,
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos,
        max_tokens=MAX_TOKENS,
    )
    return recorder.record(prompts)


def drafter_of(target: Target, *sources: str) -> Drafter:
    model = {"ssm_folder": target.folder, "ssm_dtype": "float32", "ssm_kv_tokens": 2048} if "ssm" in sources else {}
    return fresh_drafter(target.folder, sources, **model)


# --- the verifier, a sequence at a time ----------------------------------------------------------------------------


@dataclass
class Verified:
    """What the verifier did to one request after its prefill."""

    outcomes: list[VerifyOutcome] = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def verify(target: Target, drafter: Drafter, recording: PlainOutput) -> Verified:
    """Generate as the service does: the planner's tree, one forward pass over it, `accept`, commits with top tokens."""
    params = SamplingParams(temperature=recording.temperature, seed=recording.seed)
    sampler = target.sampler(recording.prompt_ids, params)
    submission = Submission(
        "r", recording.prompt_ids, (), params, StoppingCriteria(max_tokens=MAX_TOKENS), SequenceLimits(max_nodes=NODES)
    )
    sequence = VerifierSequence(1, submission, lambda emission: None, sampler, None, list(recording.prompt_ids))
    planner = StepPlanner(make_config(max_nodes=NODES), CostModel.free_rows())
    drafted_for = DraftSequence(1, list(sequence.tokens), sequence.prompt_len, params, 0)
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
        tree = TokenTree.root_only(sequence.tokens[-1])
        if budget > 0 and sampler.finish_reason is None:
            (proposal,) = drafter.draft([drafted_for], TreeLimits(budget, 16))
            tree = proposal.tree
    drafter.close(drafted_for)
    done.output = sequence.tokens[sequence.prompt_len :]
    return done


@pytest.mark.parametrize("sources", [("ngram", "suffix", "recycling"), ("ssm",), ("recycling", "ssm")])
def test_replay_accepts_what_the_verifier_accepts(
    target: Target, recordings: list[PlainOutput], sources: tuple[str, ...]
) -> None:
    steps: list[Step] = []
    replay(drafter_of(target, *sources), recordings, NODES, eos_token_ids=target.eos, watch=steps.append)
    verifying = drafter_of(target, *sources)
    for recording in recordings:
        verified = verify(target, verifying, recording)
        assert verified.output == list(recording.output_ids), "what was recorded is what is served"
        replayed = [step for step in steps if step.recording is recording]
        assert [step.token_ids for step in replayed] == [outcome.token_ids for outcome in verified.outcomes]
        assert [step.path for step in replayed] == [outcome.accepted_nodes for outcome in verified.outcomes]
        assert [set(paths(step.tree)) for step in replayed] == [set(paths(tree)) for tree in verified.trees]
    assert any(step.path for step in steps)


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[node] for node in tree.path(i)) for i in range(len(tree))]
