"""Answers for training data are the engine's own, and a data folder is filled in steps that can be interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.tiny_model import write_tiny_model

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import SamplingParams
from treeserve_engine.batch import SequenceRows
from treeserve_engine.interface import Model
from treeserve_engine.loading import load_model
from treeserve_engine.next_token import next_token
from treeserve_engine.processors import TokenContext
from treeserve_engine.runner import ModelRunner
from treeserve_text.tokenizer import Tokenizer
from treeserve_training import shard_maker
from treeserve_training.answering import Answerer, Task, choose
from treeserve_training.generate import generate_data
from treeserve_training.loops import loop_start
from treeserve_training.records import Sample, read_counts, read_samples
from treeserve_training.shard_maker import ShardMaker

PADDING = 40  # rows of the output layer that mean nothing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_padding=PADDING, scale=0.1)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, dtype="float32", device="cpu", threads=1)


def answerer(model: Model, tokenizer: Tokenizer, width: int) -> Answerer:
    return Answerer(model, tokenizer.vocab_size, tokenizer.eos_token_ids, width=width, on_tokens=lambda _: None)


def greedy_answer(model: Model, tokenizer: Tokenizer, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    """One sequence alone, by `next_token`."""
    runner = ModelRunner(model, 40, 16)
    runner.blocks.add(0)
    output: list[int] = []
    pending = list(prompt)
    while len(output) < n and not (output and output[-1] in tokenizer.eos_token_ids):
        runner.blocks.reserve(0, len(pending))
        (logits,) = runner.forward([SequenceRows.from_chain(0, pending, (len(pending) - 1,))])
        runner.commit(0, range(len(pending)))
        position = len(prompt) + len(output)
        kept = logits[0, : tokenizer.vocab_size]
        output.append(next_token(kept, SamplingParams(), TokenContext(prompt), position))
        pending = output[-1:]
    return tuple(output)


def tasks(n: int, temperature: float, max_tokens: int = 40) -> list[Task]:
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(2, 250, rng.integers(1, 300)).tolist()) for _ in range(n)]
    return [Task(prompt, max_tokens, temperature, seed) for seed, prompt in enumerate(prompts)]


def test_greedy_answers_are_those_of_one_sequence_alone(model: Model, tokenizer: Tokenizer) -> None:
    asked = tasks(12, 0.0)
    answers = answerer(model, tokenizer, width=5).answer(asked)
    for task, answer in zip(asked, answers, strict=True):
        assert answer.output_ids == greedy_answer(model, tokenizer, task.prompt_ids, 40)
        assert answer.ended == (answer.output_ids[-1] in tokenizer.eos_token_ids)
        assert tuple(answer.top_ids[:, 0]) == answer.output_ids


def test_an_answer_depends_on_its_task_alone(model: Model, tokenizer: Tokenizer) -> None:
    asked = tasks(12, 1.0)
    one_by_one = answerer(model, tokenizer, width=1).answer(asked)
    together = answerer(model, tokenizer, width=12).answer(asked)
    assert [a.output_ids for a in one_by_one] == [a.output_ids for a in together]
    other_seed = answerer(model, tokenizer, width=1).answer([Task(asked[0].prompt_ids, 40, 1.0, 99)])
    assert other_seed[0].output_ids != together[0].output_ids


def test_an_answer_ends_with_the_end_of_sequence(model: Model, tokenizer: Tokenizer) -> None:
    task = tasks(1, 1.0)[0]
    (unending,) = answerer(model, tokenizer, width=1).answer([task])
    end = unending.output_ids[10]
    stopping = Answerer(model, tokenizer.vocab_size, [end], width=1, on_tokens=lambda _: None)
    (answer,) = stopping.answer([task])
    assert answer.output_ids == unending.output_ids[: unending.output_ids.index(end) + 1]
    assert answer.ended and len(answer.top_ids) == len(answer.top_log_probs) == len(answer.output_ids)


def test_an_answer_that_loops_is_cut_where_it_begins_to(model: Model, tokenizer: Tokenizer) -> None:
    asked = tasks(8, 0.0, max_tokens=200)
    looped = 0
    for task, answer in zip(asked, answerer(model, tokenizer, width=8).answer(asked), strict=True):
        plain = greedy_answer(model, tokenizer, task.prompt_ids, 200)
        assert answer.looped == (loop_start(plain) is not None)
        assert answer.output_ids == plain[: loop_start(plain)]
        assert len(answer.output_ids) == len(answer.top_ids) == len(answer.top_log_probs)
        looped += answer.looped
        assert not (answer.looped and answer.ended)
    assert looped, "a model of small random weights often repeats itself"


def test_what_does_not_fit_is_refused(model: Model, tokenizer: Tokenizer) -> None:
    tight = answerer(model, tokenizer, width=1)
    with pytest.raises(ValueError, match="over 512 tokens"):
        tight.answer([Task((1,) * 500, 13, 0.0, 0)])
    with pytest.raises(ValueError, match="empty"):
        tight.answer([Task((), 13, 0.0, 0)])


@pytest.mark.parametrize("vocab_size", [300, 576, 5000])
def test_the_most_probable_tokens_and_their_log_probs(vocab_size: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (19, vocab_size)).astype(np.float32)
    chosen = choose(logits, [0.0] * 19, [0.5] * 19)
    order = np.argsort(-logits, axis=1)[:, :8]
    exact = logits.astype(np.float64)
    log_probs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(chosen.top_ids, order)
    np.testing.assert_allclose(chosen.top_log_probs, np.take_along_axis(log_probs, order, axis=1), atol=5e-3)
    assert chosen.token_ids == logits.argmax(axis=1).tolist()


def test_the_lowest_of_equal_logits_wins() -> None:
    logits = np.zeros((1, 640), np.float32)
    logits[0, [630, 17, 81, 40]] = 5.0
    assert choose(logits, [0.0], [0.0]).top_ids[0, :4].tolist() == [17, 40, 81, 630]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_softmax(temperature: float) -> None:
    n, vocab_size = 40_000, 300
    logits = np.random.default_rng(1).normal(0, 2, vocab_size).astype(np.float32)
    uniforms = np.random.default_rng(2).random(n)
    rows = np.broadcast_to(logits, (n, vocab_size))
    drawn = np.bincount(choose(rows, [temperature] * n, uniforms.tolist()).token_ids, minlength=vocab_size)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = n * weights / weights.sum()
    common = expected > 10
    found = np.append(drawn[common], drawn[~common].sum())
    assert stats.chisquare(found, np.append(expected[common], expected[~common].sum())).pvalue > 1e-3


def test_extreme_uniforms_draw_tokens_that_exist() -> None:
    logits = np.full((2, 300), -np.inf, np.float32)
    logits[:, [3, 250]] = 0.0, 1.0
    for uniform in (0.0, np.nextafter(1.0, 0.0)):
        assert set(choose(logits, [1.0, 0.6], [uniform, uniform]).token_ids) <= {3, 250}


def test_a_shard_follows_from_its_index(model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_OPENINGS": 12, "_PASSAGES": 6, "_PROGRAMS": 6, "_FIRST_TURNS": 6, "_PROMPTS": 20}.items():
        monkeypatch.setattr(shard_maker, name, size)
    for name in ("_MAX_TOKENS", "_OPENING_TOKENS", "_PASSAGE_TOKENS"):
        monkeypatch.setattr(shard_maker, name, 24)

    def make(index: int) -> tuple[list[Sample], dict[str, int]]:
        samples, counts = ShardMaker(tokenizer, answerer(model, tokenizer, width=8), seed=1).make(index)
        return samples, dict(counts)

    samples, counts = make(0)
    assert [(s.prompt_ids, s.output_ids, s.seed) for s in samples] == [
        (s.prompt_ids, s.output_ids, s.seed) for s in make(0)[0]
    ]
    assert {s.prompt_ids for s in samples}.isdisjoint(s.prompt_ids for s in make(1)[0])
    assert counts["tokens"] == sum(len(s.output_ids) for s in samples)
    assert counts["samples"] == len(samples) and len({s.kind for s in samples}) >= 6
    assert {s.temperature for s in samples} == {0.0, 0.6, 1.0}
    assert all(s.top_ids.dtype == np.uint16 and s.top_ids.shape == (len(s.output_ids), 8) for s in samples)


def user_prompts(path: Path) -> Path:
    lines = [{"prompt": "one two three"}, {"messages": [{"role": "user", "content": "four five"}]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_a_folder_is_filled_and_filling_goes_on_where_it_stopped(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts, out, told = user_prompts(tmp_path / "prompts.jsonl"), tmp_path / "data", list[str]()

    def fill(tokens: int) -> int:
        generate_data(
            folder,
            out,
            tokens=tokens,
            threads=1,
            cache_dir=tmp_path,
            prompts_jsonl=prompts,
            progress=told.append,
        )
        return read_counts(out)["tokens"]

    first = fill(1)
    assert first > 0 and told
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert fill(first + 1) > first
    assert before == {path: path.stat().st_mtime_ns for path in before}, "what is there is left alone"

    samples = list(read_samples(out, split="train")) + list(read_samples(out, split="validation"))
    expected = {
        tuple(tokenizer.render_chat([{"role": "user", "content": content}]))
        for content in ("one two three", "four five")
    }
    assert {s.prompt_ids for s in samples} == expected
    assert sorted(s.temperature for s in samples) == [0.0, 0.0, 1.0, 1.0], "greedy first, then at temperature 1"
    with pytest.raises(InvalidArgumentError, match="holds other data"):
        generate_data(folder, out, tokens=1, threads=1, cache_dir=tmp_path, seed=9, progress=told.append)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds none"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "fine"}\n{"text": "?"}', "line 2 has neither"),
        ('{"messages": []}', "line 1 has neither"),
        ('{"messages": [{"role": "user"}]}', "line 1 has neither"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(folder: Path, tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=reason):
        generate_data(
            folder,
            tmp_path / "data",
            tokens=1,
            threads=1,
            cache_dir=tmp_path,
            prompts_jsonl=path,
            progress=lambda _: None,
        )


def test_prompts_without_a_usable_answer_do_not_go_on_for_ever(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "too long for the context " * 100}))
    with pytest.raises(InvalidArgumentError, match="no answer"):
        generate_data(
            folder,
            tmp_path / "data",
            tokens=1,
            threads=1,
            cache_dir=tmp_path,
            prompts_jsonl=path,
            progress=lambda _: None,
        )
