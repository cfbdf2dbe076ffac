"""The trainable SSM: the engine's own arithmetic, sequences that do not see each other, the loss and its gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.training_data import rule_sample

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.model import LlamaModel
from treeserve_engine.runner import ModelRunner
from treeserve_training.agreement import agrees, measure_agreement
from treeserve_training.boosting import left_over, shares
from treeserve_training.distillation_loss import distillation_loss
from treeserve_training.draft_vocabulary import OUTSIDE, DraftVocabulary, coverage, expected_counts
from treeserve_training.packed_batch import PackedBatch, TrainingSequence
from treeserve_training.records import Sample
from treeserve_training.ssm_model import SsmModel


@pytest.fixture(scope="module")
def vocab_size(tiny_model: Path) -> int:
    return load_config(tiny_model).vocab_size


@pytest.fixture(scope="module")
def vocabulary(vocab_size: int) -> DraftVocabulary:
    return DraftVocabulary(np.arange(0, vocab_size, 2), vocab_size)


@pytest.fixture(scope="module")
def model(tiny_model: Path, vocabulary: DraftVocabulary) -> SsmModel:
    return SsmModel.from_target(tiny_model, vocabulary, 2)


def _sequence(vocabulary: DraftVocabulary, seed: int = 0, outputs: int = 20, prompt_len: int = 6) -> TrainingSequence:
    rng = np.random.default_rng(seed)
    return TrainingSequence.of(rule_sample(rng, outputs=outputs, prompt_len=prompt_len), vocabulary)


def test_it_computes_what_the_target_does(tiny_model: Path, model: SsmModel, vocabulary: DraftVocabulary) -> None:
    sequence = _sequence(vocabulary)
    target = LlamaModel.load(tiny_model, load_config(tiny_model), torch.float32, torch.device("cpu"))
    runner = ModelRunner(target, num_blocks=8, block_size=8)
    runner.blocks.add(0)
    tokens = sequence.token_ids.tolist()
    runner.blocks.reserve(0, len(tokens))
    (expected,) = runner.forward([SequenceRows.from_chain(0, tokens, logits_rows=sequence.rows.tolist())])
    found = model.logits(PackedBatch.of([sequence], 0.0)).float().numpy() / 0.2  # the norm is scaled by that
    difference = np.abs(found - expected[:, vocabulary.token_ids])
    assert difference.max() < 0.06 * np.abs(expected).max()  # bfloat16 against float32


def test_packed_sequences_do_not_see_each_other(model: SsmModel, vocabulary: DraftVocabulary) -> None:
    sequences = [_sequence(vocabulary, seed, outputs=5 + seed, prompt_len=3 + seed) for seed in range(4)]
    together = model.logits(PackedBatch.of(sequences, 0.0))
    alone = torch.cat([model.logits(PackedBatch.of([sequence], 0.0)) for sequence in sequences])
    assert torch.allclose(together.float(), alone.float(), atol=0.05)
    changed = [_sequence(vocabulary, 9, outputs=5, prompt_len=3), *sequences[1:]]
    others = model.logits(PackedBatch.of(changed, 0.0))
    assert not torch.equal(others[:5], together[:5]) and torch.equal(others[5:], together[5:])


def test_a_target_that_no_drafter_can_be_made_of_is_refused(
    tiny_model: Path, vocabulary: DraftVocabulary, tmp_path: Path
) -> None:
    from support.tiny_model import write_tiny_model

    with pytest.raises(InvalidArgumentError, match="layers"):
        SsmModel.from_target(tiny_model, vocabulary, 3)
    qwen = write_tiny_model(tmp_path / "qwen", name="qwen2", vocab_padding=6)
    with pytest.raises(InvalidArgumentError, match="biases"):
        SsmModel.from_target(qwen, vocabulary, 1)


def test_rows_are_those_before_the_outputs(vocabulary: DraftVocabulary) -> None:
    sample = rule_sample(np.random.default_rng(1), prompt_len=6, outputs=4)
    sequence = TrainingSequence.of(sample, vocabulary)
    tokens = [*sample.prompt_ids, *sample.output_ids]
    assert sequence.token_ids.tolist() == tokens[:-1] and sequence.rows.tolist() == [5, 6, 7, 8]
    known = [i // 2 if i % 2 == 0 else OUTSIDE for i in sample.output_ids]
    assert sequence.next_ids.tolist() == known and sequence.top_ids[:, 0].tolist() == known

    cut = TrainingSequence.of(sample, vocabulary, cut_prefix=sample.prompt_ids[:2])
    assert cut.token_ids.tolist() == tokens[2:-1] and cut.rows.tolist() == [3, 4, 5, 6]
    kept = TrainingSequence.of(sample, vocabulary, cut_prefix=(299, 299))
    assert kept.token_ids.tolist() == tokens[:-1]
    short = TrainingSequence.of(sample, vocabulary, max_tokens=3)
    assert short.token_ids.tolist() == tokens[-4:-1] and short.rows.tolist() == [0, 1, 2]
    assert short.next_ids.tolist() == known[1:]


@pytest.mark.parametrize("hard_weight", [0.0, 0.3])
def test_targets_are_the_recorded_distribution_and_what_lies_outside_it(hard_weight: float) -> None:
    vocabulary = DraftVocabulary(np.array([1, 2, 3, 4, 9, 50]), 100)
    top_ids = np.array([[1, 2, 3, 60, 61, 62, 63, 64]] * 3, dtype=np.uint16)
    probabilities = np.array([[0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01]] * 3)
    emitted = (2, 9, 70)  # among the eight, outside them, outside the vocabulary
    sample = Sample((5,), emitted, "x", 1.0, 0, top_ids, np.log(probabilities).astype(np.float16))
    batch = PackedBatch.of([TrainingSequence.of(sample, vocabulary)], hard_weight)
    weights = np.zeros((3, len(vocabulary)))
    for row in range(3):
        np.add.at(weights[row], batch.target_ids[row].numpy(), batch.target_weights[row].numpy())
    soft = np.array([0.5, 0.2, 0.1, 0.0, 0.0, 0.0]) * (1 - hard_weight)
    emitted_in, emitted_out = np.eye(6)[1] * hard_weight, np.eye(6)[4]
    expected = np.stack([soft + emitted_in, soft + emitted_out, soft])
    assert weights == pytest.approx(expected, abs=1e-3)


def test_the_loss_and_its_gradients_are_those_of_a_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, outputs, hidden_size = 150, 40, 16
    hidden = torch.randn(rows, hidden_size, generator=generator)
    head = torch.randn(outputs, hidden_size, generator=generator)
    ids = torch.randint(0, outputs, (rows, 9), generator=generator)
    weights = torch.rand(rows, 9, generator=generator)
    dense = torch.zeros(rows, outputs).scatter_add_(1, ids, weights)

    expected_inputs = [x.clone().requires_grad_() for x in (hidden, head)]
    expected = -(dense * torch.log_softmax(expected_inputs[0] @ expected_inputs[1].t(), 1)).sum()
    (expected * 3.0).backward()
    inputs = [x.clone().requires_grad_() for x in (hidden, head)]
    loss = distillation_loss(*inputs, ids, weights)
    (loss * 3.0).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, wanted in zip(inputs, expected_inputs, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-4, atol=1e-4)


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    top_ids = np.array([[5, 7, 2], [5, 9, 2]], dtype=np.uint16)
    log_probs = np.log([[0.5, 0.125, 0.25], [0.5, 0.125, 0.25]]).astype(np.float16)
    counts = expected_counts([Sample((1,), (7, 9), "x", 0.0, 0, top_ids, log_probs)], 10)
    vocabulary = DraftVocabulary.most_frequent(counts, 3)
    assert vocabulary.token_ids.tolist() == [2, 5, 7]  # 7 and 9 are as probable: the lower id
    assert coverage(counts, vocabulary) == pytest.approx(1.625 / 1.75, rel=1e-3)
    assert vocabulary.draft_ids(np.array([[7, 9], [2, 5]])).tolist() == [[2, OUTSIDE], [0, 1]]


class _Scripted:
    """A drafter whose best token is what it is told, for every row."""

    def __init__(self, best: list[int], size: int) -> None:
        self._logits = torch.nn.functional.one_hot(torch.tensor(best), size).float()

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        return self._logits


def test_only_samples_that_every_drafter_gets_wrong_are_left(vocabulary: DraftVocabulary) -> None:
    sequence = _sequence(DraftVocabulary(np.arange(300), 300), outputs=6)
    right = sequence.top_ids[:, 0].tolist()
    wrong = [299] * 6
    first = _Scripted([*right[:2], *wrong[2:]], 300)
    second = _Scripted([*right[2:4], *wrong[4:]], 300)  # it looks at what the first one gets wrong alone
    assert agrees(first, sequence).tolist() == [True, True, False, False, False, False]
    (left,) = left_over(left_over([sequence], first), second)
    assert left.rows.tolist() == sequence.rows[4:].tolist() and left.next_ids.tolist() == sequence.next_ids[4:].tolist()
    assert left.token_ids is sequence.token_ids  # the context stays whole
    assert left_over([sequence], _Scripted(right, 300)) == []
    agreement = measure_agreement(first, [sequence], 0.0)
    assert agreement.rows == 6 and agreement.top_by_rank[0] == pytest.approx(1 / 3)


def test_a_budget_is_shared_out_whole() -> None:
    assert shares(1000, 1) == [1000]
    assert shares(1003, 5) == [200, 201, 200, 201, 201] and sum(shares(1003, 5)) == 1003
