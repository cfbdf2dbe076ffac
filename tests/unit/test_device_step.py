"""A verifier's steps with logits that stay on a device: the same results as on the host, whatever is in the step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.sampling_cases import tree_of

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.config import load_config
from treeserve_engine.device_accept import accept_on_device
from treeserve_engine.model import LlamaModel
from treeserve_engine.runner import ModelRunner
from treeserve_engine.torch_batch import TorchBatch
from treeserve_verifier import device_step
from treeserve_verifier.executor import NO_PLAIN_RUN, StepExecutor, StepResult
from treeserve_verifier.sequence import Sequence, Submission
from treeserve_verifier.step_plan import PlannedSequence, StepPlan

CPU = torch.device("cpu")
VOCAB = 250


class OnDevice(LlamaModel):
    """Keeps its logits as a tensor: the CPU in a device's place."""

    def device_logits(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        return self.logits(TorchBatch.of(batch, CPU), kv)


class Rig:
    """An executor with sequences 0, 1, ... of the given parameters."""

    def __init__(self, model: LlamaModel, submissions: list[Submission]) -> None:
        self.runner = ModelRunner(model, num_blocks=64, block_size=4)
        self.thread = ThreadPoolExecutor(1)
        self.executor = StepExecutor(self.runner, self.thread, VOCAB)
        self.sequences: list[Sequence] = []
        for seq_id, s in enumerate(submissions):
            sampler = SequenceSampler(s.sampling, s.stopping, s.prompt_token_ids, eos_token_ids=(0,), vocab_size=VOCAB)
            self.runner.blocks.add(seq_id)
            self.sequences.append(Sequence(seq_id, s, lambda _: None, sampler, None, list(s.prompt_token_ids)))

    def step(self, planned: list[tuple[int, int, TokenTree | None]], top_for: frozenset[int]) -> tuple[StepResult, ...]:
        plan = StepPlan(tuple(PlannedSequence(self.sequences[i], chunk, tree) for i, chunk, tree in planned))
        for p in plan.sequences:
            self.runner.blocks.reserve(p.sequence.seq_id, p.rows)
        (step,) = asyncio.run(self.executor.run(plan, top_for, lambda: None, NO_PLAIN_RUN))
        for p, result in zip(plan.sequences, step.results, strict=True):
            if result.outcome is not None:
                p.sequence.tokens += result.outcome.token_ids
        return step.results


@pytest.fixture
def rigs(tiny_model) -> Iterator[tuple[Rig, Rig]]:
    config = load_config(tiny_model)

    def submission(sampling: SamplingParams, rule: AcceptanceRule = AcceptanceRule.REPLAY) -> Submission:
        limits = SequenceLimits(acceptance=Acceptance(rule))
        return Submission("test", (5, 6, 7, 8, 9), (), sampling, StoppingCriteria(60), limits)

    submissions = [
        submission(SamplingParams()),
        submission(SamplingParams(temperature=1.0, seed=3, top_p=0.9, frequency_penalty=0.2)),
        submission(SamplingParams(temperature=1.0, seed=4, top_log_probs=2)),
        submission(SamplingParams(temperature=1.0, seed=5), AcceptanceRule.TYPICAL),
        submission(SamplingParams(), AcceptanceRule.MULTI_STEP),
    ]
    made = [Rig(kind.load(tiny_model, config, torch.float32, CPU), submissions) for kind in (LlamaModel, OnDevice)]
    yield made[0], made[1]
    for rig in made:
        rig.thread.shutdown()


def test_steps_on_a_device_equal_steps_on_the_host(rigs, monkeypatch):
    accepted = []
    monkeypatch.setattr(
        device_step, "accept_on_device", lambda *args: accepted.append(len(args[1])) or accept_on_device(*args)
    )
    host, device = rigs
    rng = random.Random(0)
    for rig in rigs:  # two chunks of the prompt: only the second reaches the root
        rig.step([(i, 3, None) for i in range(5)], frozenset())
    assert accepted == []
    for step in range(8):
        chosen = sorted(rng.sample(range(5), rng.choice([2, 3, 5])))
        plans: list[list[tuple[int, int, TokenTree | None]]] = []
        for rig in rigs:
            tree_rng = random.Random(step)
            plan: list[tuple[int, int, TokenTree | None]] = []
            for i in chosen:
                sequence = rig.sequences[i]
                uncomputed = len(sequence.tokens) - rig.runner.blocks.computed_len(i)
                drawn = tree_of(8, (10, 20, 30), tree_rng)
                tree = TokenTree((sequence.tokens[-1], *drawn.token_ids[1:]), drawn.parents)
                plan.append((i, uncomputed, tree if uncomputed == 1 else TokenTree.root_only(sequence.tokens[-1])))
            plans.append(plan)
        top_for = frozenset(chosen[::2])
        expected, results = host.step(plans[0], top_for), device.step(plans[1], top_for)
        for e, r in zip(expected, results, strict=True):
            assert (e.error, r.error) == (None, None)
            assert (r.outcome, r.top_token_ids) == (e.outcome, e.top_token_ids)
            assert bool(r.top_token_ids) == (r.planned.sequence.seq_id in top_for)
        assert accepted.pop() == len([i for i in chosen if i != 3])  # TYPICAL alone goes to the host
    assert [s.tokens for s in device.sequences] == [s.tokens for s in host.sequences]


def test_a_failing_device_fails_the_step_and_keeps_nothing(rigs, monkeypatch):
    def broken(*args: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(device_step, "accept_on_device", broken)
    _, device = rigs
    (result,) = device.step([(0, 5, TokenTree.root_only(9))], frozenset())
    assert result.outcome is None and result.error is not None
    assert device.runner.blocks.computed_len(0) == 0
