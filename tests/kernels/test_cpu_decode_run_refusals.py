"""What runs of decode steps refuse, and what is on the edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.decode_runs import (
    Plain,
)
from support.int8_decoders import NativeModel, random_model
from support.run_bench import FREE, SIZES, SOUND, TERMS, VOCAB, Bench, native_model, nobody, plain, weights

from treeserve_kernels.cpu.decode_run import Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.library import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


def run_bare(
    *, table: Sequence[int] = (1, 0), terms: dict[str, Any] | None = None, seqs: int = 2, **sequence: Any
) -> Ran:
    """Sequences after two tokens, of which the last is as told."""
    decoder = native_model("float32").decoder
    kv = decoder.new_kv(6, 8, "float32")
    tables: list[Sequence[int]] = [(2 * i + 2, 2 * i + 3) for i in range(seqs - 1)]
    of_each = [RunSequence(**SOUND) for _ in tables]
    last = RunSequence(**SOUND | sequence)
    return decoder.run(kv, [*tables, table], [*of_each, last], RunTerms(**TERMS | (terms or {})), nobody)


def test_what_the_refusals_change_is_sound_otherwise() -> None:
    ran = run_bare()
    assert ran.error is None and len(ran.steps) == 4 and all(len(each.token_ids) == 4 for each in ran.sequences)


@pytest.mark.parametrize(
    "wrong",
    [
        {"root": VOCAB},
        {"root": -1},
        {"table": (1, 6)},
        {"table": (-1, 0)},
        {"num_tokens": 0},
        {"num_tokens": -2},
        {"tokens_left": 0},
        {"tokens_left": -1},
        {"most_nodes": -1},
        {"terms": {"vocab_size": 0}},
        {"terms": {"vocab_size": SIZES.vocab_size + 1}},
        {"terms": {"top_tokens": 65}},
        {"terms": {"top_tokens": -1}},
        {"terms": {"top_tokens": 7, "vocab_size": 6}},
        {"terms": {"step_rows": 1}},
        {"terms": {"cost_table": {}}},
        {"terms": {"cost_table": {0: 1.0}}},
        {"terms": {"unread_rows": -1}},
        {"terms": {"unread_rows": -(2**62)}},
        {"terms": {"unread_rows": 7}},
        {"terms": {"unread_rows": 2**63 - 1}},
        {"unread": (4,)},
        {"unread": (4,), "terms": {"unread_rows": 0}},
        {"unread": (4,), "terms": {"unread_rows": -1}},
        {"unread": (4,), "terms": {"unread_rows": 8}},
        {"unread": (4,), "terms": {"unread_rows": 1, "step_rows": 1}},
        {"unread": (VOCAB, 4), "terms": {"unread_rows": 4}},
        {"unread": (-1, 5, 4), "terms": {"unread_rows": 4}},
        {"unread": (VOCAB,), "root": VOCAB, "terms": {"unread_rows": 4}},
        {"unread": (4, 5), "terms": {"unread_rows": 4}},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_the_first_step(wrong: dict[str, Any]) -> None:
    assert_refused(run_bare(**wrong))


@pytest.mark.parametrize("temperature", [-0.5, math.nan, 2.0**-101, 2.0**101])
def test_a_temperature_that_nothing_can_be_drawn_at_is_refused_likewise(temperature: float) -> None:
    assert_refused(run_bare(temperature=temperature))


@pytest.mark.parametrize("wrong", [{"unread": (1, 2, 3, 4)}, {"unread": (4, 4), "num_tokens": 1}], ids=str)
def test_more_unread_tokens_than_there_are_likewise(wrong: dict[str, Any]) -> None:
    ran = run_bare(**wrong, terms={"unread_rows": 4})
    assert_refused(ran)
    assert "unread tokens of" in str(ran.error), "not a forward pass that refuses its batch"


def assert_refused(ran: Ran) -> None:
    assert isinstance(ran.error, ValueError)
    assert ran.steps == () and not ran.drafter_failed
    assert all(each.token_ids == () and each.records == () and not each.has_ended for each in ran.sequences)
    assert all(each.num_read == 0 and not each.has_failed for each in ran.sequences)


def test_a_run_of_nobody_is_refused() -> None:
    decoder = native_model("float32").decoder
    ran = decoder.run(decoder.new_kv(1, 8, "float32"), [], [], RunTerms(**TERMS), nobody)
    assert isinstance(ran.error, ValueError) and ran.steps == ()


def test_what_is_on_the_edge_is_not_refused() -> None:
    ran = run_bare(
        root=VOCAB - 1, temperature=2.0**-100, terms={"top_tokens": 64, "step_rows": 2, "vocab_size": SIZES.vocab_size}
    )
    assert ran.error is None and len(ran.steps) == 4


def test_prompts_on_the_edge_are_not_refused() -> None:
    """A prompt of as many tokens as there are, beside a root, in steps of as many rows as both may take."""
    ran = run_bare(unread=(VOCAB - 1, 0, 4), terms={"unread_rows": 7, "max_steps": 9})
    assert ran.error is None and [(step.rows, step.prefill_rows) for step in ran.steps] == [(4, 2)]
    ran = run_bare(seqs=1, unread=(4,), terms={"unread_rows": 1, "step_rows": 1})
    assert ran.error is None and [(step.rows, step.prefill_rows) for step in ran.steps] == [(1, 0)]
    ran = run_bare(terms={"unread_rows": 6})
    assert ran.error is None and len(ran.steps) == 4


def test_a_prompt_beyond_the_rope_table() -> None:
    """It has 16 positions: the chunk that goes beyond counts nothing, those before it do."""
    model = NativeModel(random_model(replace(SIZES, max_positions=16), 3))
    sequence = RunSequence(20, 9, 50, (), unread=[9] * 20)
    terms = RunTerms(VOCAB, 8, FREE, unread_rows=6, max_steps=40)
    ran = model.decoder.run(model.new_kv(4, 8), [(3, 1, 2)], [sequence], terms, nobody)
    assert isinstance(ran.error, ValueError) and len(ran.steps) == 2
    assert ran.sequences[0].num_read == 12 and ran.sequences[0].token_ids == ()


def test_positions_beyond_the_rope_table() -> None:
    """It has 16: what comes before its end counts."""
    model = NativeModel(random_model(replace(SIZES, max_positions=16), 3))
    each = Plain(NativeModel(random_model(replace(SIZES, max_positions=64), 3)), [7, 9], 0.0, 0, VOCAB)
    kv = model.decoder.new_kv(4, 8, "float32")

    def run(num_tokens: int, root: int) -> Ran:
        sequence = RunSequence(num_tokens, root, 50, ())
        return model.decoder.run(kv, [(3, 1, 2)], [sequence], RunTerms(VOCAB, 8, FREE, max_steps=40), nobody)

    model.decoder.run(kv, [(3, 1, 2)], [RunSequence(1, 7, 50, ())], RunTerms(VOCAB, 8, FREE), nobody)
    ran = run(2, 9)
    assert isinstance(ran.error, ValueError) and len(ran.steps) == 15
    assert list(ran.sequences[0].token_ids) == each.tokens(17)[2:]
    ran = run(17, 9)
    assert isinstance(ran.error, ValueError) and ran.steps == () and ran.sequences[0].token_ids == ()


def test_runs_need_a_cache_of_the_same_shape_and_an_open_decoder() -> None:
    model = NativeModel(weights())
    other = NativeModel(random_model(replace(SIZES, num_layers=1))).decoder
    with pytest.raises(ValueError, match="shape"):
        model.decoder.run(other.new_kv(1, 8, "float32"), [(0,)], [RunSequence(**SOUND)], RunTerms(**TERMS), nobody)
    kv = model.new_kv(1, 8)
    model.decoder.close()
    with pytest.raises(ValueError, match="closed"):
        model.decoder.run(kv, [(0,)], [RunSequence(**SOUND)], RunTerms(**TERMS), nobody)


def test_runs_of_two_threads_wait_for_each_other() -> None:
    """One decoder has one place for a run's logits."""
    model, plains = NativeModel(weights()), [plain(0), plain(5)]
    for each in plains:
        each.tokens(len(each.prompt) + 60)  # what is expected, computed before

    def run_often(each: Plain) -> None:
        for _ in range(10):
            Bench([each], model=model).run(positions=60, max_steps=50)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_often, plains))


def test_a_choice_that_raises_fails_its_sequence() -> None:
    def choose(*_: object) -> tuple[int, bool]:
        raise MemoryError

    decoder = native_model("float32").decoder
    of_each = [RunSequence(**SOUND, asks=True)]
    ran = decoder.run(decoder.new_kv(6, 8, "float32"), [(0, 1)], of_each, RunTerms(**TERMS), choose)
    assert ran.error is None and ran.sequences[0].has_failed and ran.sequences[0].token_ids == ()
