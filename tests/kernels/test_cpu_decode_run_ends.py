"""How runs of decode steps end: by themselves, as told, and by what goes wrong on the way."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.decode_runs import (
    Call,
    Drafted,
    Plain,
    ScriptedDrafter,
)
from support.int8_decoders import NativeModel, native_shape, native_weights
from support.run_bench import FREE, VOCAB, Bench, drafter_of, nobody, plain, script, weights

from treeserve_core.tree import TokenTree
from treeserve_kernels.cpu.decode_run import RunTerms
from treeserve_kernels.cpu.decoder import Decoder
from treeserve_kernels.cpu.library import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


def first_new(each: Plain, at_least: int) -> int:
    """A token that plain decoding brings after so many others, for the first time."""
    tokens = each.tokens(200)
    start = len(each.prompt) + at_least
    return next(token for i, token in enumerate(tokens) if i >= start and token not in tokens[:i])


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("kinds", [None, ["right"], ["branched"]])
def test_an_end_id_ends_the_run(kinds: list[str] | None, asks: bool) -> None:
    plains = [plain(i, 0.7) for i in range(3)]
    bench = Bench(plains)
    end = first_new(plains[1], 9)
    bench.live[1].end_ids = (VOCAB + 1, end)
    bench.live[1].asks = asks
    ran = bench.run(None if kinds is None else drafter_of(script(plains, kinds)))
    assert [each.has_ended for each in ran.sequences] == [False, True, False]
    assert bench.live[1].tokens[-1] == end and not any(each.has_failed for each in ran.sequences)
    bench.check_kv()


def test_the_number_of_tokens_ends_the_run() -> None:
    plains = [plain(i) for i in range(3)]
    bench = Bench(plains)
    bench.live[2].tokens_left = 5
    ran = bench.run()
    assert [len(each.token_ids) for each in ran.sequences] == [5, 5, 5]
    assert [each.has_ended for each in ran.sequences] == [False, False, True]


def test_a_run_ends_where_the_blocks_do_and_goes_on_with_more() -> None:
    """Of 5, 1 and 13 tokens all but the last are computed: in blocks of 4 that leaves room for four steps."""
    bench = Bench([plain(i) for i in range(3)], block_size=4)
    assert len(bench.run(positions=4).steps) == 4
    assert len(bench.run(positions=1).steps) == 4
    tables = [bench.runner.blocks.block_table(i) for i in range(3)]
    assert all(4 * len(table) == len(each.tokens) - 1 for table, each in zip(tables, bench.live, strict=True))
    sequences = [bench._described(i, None) for i in range(3)]
    kv = bench.model.new_kv(1024 // 4, 4)
    ran = bench.model.decoder.run(kv, tables, sequences, RunTerms(VOCAB, 8, FREE, max_steps=3), nobody)
    assert ran.error is None and ran.steps == () and all(each.token_ids == () for each in ran.sequences)
    assert len(bench.run(positions=9).steps) == 12
    bench.check_kv()


def test_a_stop_before_the_run() -> None:
    bench, drafter = Bench([plain(0)]), drafter_of(script([plain(0)]))
    ran = bench.run(drafter, stop=ctypes.c_int32(1))
    assert ran.steps == () and ran.sequences[0].token_ids == () and ran.error is None and not drafter.calls
    bench.check_kv()


@pytest.mark.parametrize("name", ["draft", "commit", "learn"])
def test_a_stop_within_a_step_is_one_before_the_next(name: str) -> None:
    stop = ctypes.c_int32()

    def stop_in_the_third(call: Call) -> bool:
        stop.value = len(drafter.named(name)) >= 3
        return False

    drafter = drafter_of(script([plain(0)], ["wrong"]), fails=stop_in_the_third)
    bench = Bench([plain(0)])
    ran = bench.run(drafter, stop=stop)
    assert len(ran.steps) == 3 and len(ran.sequences[0].token_ids) == 3
    assert drafter.calls[-1].name == "learn" and len(drafter.named("learn")) == 3


def test_the_most_steps() -> None:
    bench = Bench([plain(i) for i in range(2)])
    assert [len(bench.run(max_steps=n).steps) for n in (0, 1, 3)] == [0, 1, 3]
    bench.check_kv()


def test_no_step_begins_after_its_time() -> None:
    def dawdle(call: Call) -> bool:
        time.sleep(0.12 if call.name == "learn" else 0.0)
        return False

    bench = Bench([plain(0)])
    drafter = drafter_of(script([plain(0)]), fails=dawdle)
    assert bench.run(drafter, max_s=0.0).steps == ()
    ran = bench.run(drafter, max_s=0.1)
    assert len(ran.steps) == 1 and ran.draft_s > 0.11 and ran.steps[0].step_ms > 110.0


@pytest.mark.parametrize("name", ["draft", "commit", "remember", "learn"])
@pytest.mark.parametrize("nth", [1, 5])
def test_a_drafter_that_fails_ends_the_run_after_its_step(name: str, nth: int) -> None:
    """Three sequences: the fifth call, but for `learn`, is that of the second sequence in the second step."""
    plains = [plain(i) for i in range(3)]

    def fails(call: Call) -> bool:
        return call.name == name and len(drafter.named(name)) == nth

    drafter = drafter_of(script(plains, ["branched"]), fails=fails)
    bench = Bench(plains)
    ran = bench.run(drafter, top_tokens=3)
    whole = nth if name == "learn" else (nth + 2) // 3
    assert ran.drafter_failed and ran.error is None
    assert len(ran.steps) == whole - (name == "draft")
    assert drafter.calls[-1].name == name
    if name != "learn":
        assert drafter.calls[-1].handle == (nth - 1) % 3
    bench.check_kv()


def spoiled(tree: TokenTree, base_len: int, fault: str) -> Drafted:
    """A chain of right tokens with something wrong about it."""
    token_ids, parents, log_probs = list(tree.token_ids), list(tree.parents), list(tree.log_probs or ())
    match fault:
        case "a parent after its child":
            parents[2] = 3
        case "a node its own parent":
            parents[2] = 2
        case "a second root":
            parents[2] = -1
        case "a parent that is none":
            parents[-1] = 2**31 - 1
        case "a token beyond the vocabulary":
            token_ids[-1] = VOCAB
        case "a token below it":
            token_ids[1] = -1
        case "another base":
            base_len -= 1
        case "a base to come":
            base_len += 1
        case "another root":
            token_ids[0] = (token_ids[0] + 1) % VOCAB
        case "no node":
            token_ids, parents, log_probs = [], [], []
        case "one node too many":
            token_ids.append(0)
            parents.append(0)
            log_probs.append(0.0)
    return Drafted(token_ids, parents, log_probs, None, base_len)


@pytest.mark.parametrize(
    ("fault", "is_error"),
    [
        ("a parent after its child", True),
        ("a node its own parent", True),
        ("a second root", True),
        ("a parent that is none", True),
        ("a token beyond the vocabulary", True),
        ("a token below it", True),
        ("another base", False),
        ("a base to come", False),
        ("another root", False),
        ("no node", False),
        ("one node too many", False),
    ],
)
def test_an_unsound_tree_ends_the_run_without_harm(fault: str, is_error: bool) -> None:
    plains = [plain(i) for i in range(3)]
    tree_of = script(plains, ["right"])

    def tree(handle: int, tokens: list[int], budget: int) -> Drafted:
        drafted = tree_of(handle, tokens, budget)
        is_bad = handle == 1 and len(drafter.named("draft")) == 5
        return spoiled(drafted, len(tokens), fault if is_bad else "")

    drafter = ScriptedDrafter(tree)
    bench = Bench(plains)
    ran = bench.run(drafter)
    assert len(ran.steps) == 1 and len(drafter.named("draft")) == 5
    assert (isinstance(ran.error, ValueError), ran.drafter_failed) == (is_error, not is_error)
    assert all(each.records[0].accepted > 3 for each in ran.sequences)
    bench.check_kv()
    bench.decode(20, drafter_of(tree_of))
    bench.check_kv()


def test_siblings_that_are_the_same_do_no_harm() -> None:
    plains = [plain(0)]

    def tree(handle: int, tokens: list[int], budget: int) -> Drafted:
        first, second = plains[0].tokens(len(tokens) + 2)[-2:]
        token_ids, parents = (tokens[-1], first, first, second, second), (-1, 0, 0, 2, 1)
        return Drafted(token_ids, parents, [0.0] * 5, [3] * 5, len(tokens))

    bench = Bench(plains)
    ran = bench.run(ScriptedDrafter(tree), max_steps=5)
    assert [record.accepted for record in ran.sequences[0].records] == [2] * 5
    assert ran.accepted_by_source == (10, 10, *[0] * 30)
    bench.check_kv()


@pytest.mark.parametrize("log_prob", [5.0, math.nan])
def test_a_child_more_probable_than_its_parent_does_no_harm(log_prob: float) -> None:
    """Three nodes pay: without its parent, a node must not pass for the child of another at another depth."""
    plains = [plain(0)]

    def tree(handle: int, tokens: list[int], budget: int) -> Drafted:
        first, second = plains[0].tokens(len(tokens) + 2)[-2:]
        wrong = (first + 1) % VOCAB
        token_ids, parents = (tokens[-1], wrong, wrong, first, second), (-1, 0, 1, 0, 2)
        return Drafted(token_ids, parents, (0.0, -0.1, -5.0, -0.1, log_prob), None, len(tokens))

    bench = Bench(plains)
    bench.run(ScriptedDrafter(tree), max_steps=5, cost_table={4: 1.0, 5: 100.0})
    bench.check_kv()


# --- Logits that are no numbers ---


def with_head(biases: dict[int, float], scales: dict[int, float] | None = None) -> NativeModel:
    """A model that adds to some logits, and multiplies some before."""
    model, packed = NativeModel(weights()), native_weights(weights())
    head_bias, head_scales = np.zeros_like(packed.head.scales), packed.head.scales.copy()
    for token, bias in biases.items():
        head_bias[token] = bias
    for token, scale in (scales or {}).items():
        head_scales[token] *= np.float32(scale)
    head = replace(packed.head, bias=head_bias, scales=head_scales)
    model.decoder = Decoder(native_shape(weights()), replace(packed, head=head), threads=1)
    return model


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_decide_nothing(value: float, temperature: float) -> None:
    plains = [plain(i, temperature) for i in range(2)]
    bench = Bench(plains, model=with_head({VOCAB - 1: value}))
    drafter = drafter_of(script(plains, ["right"]))
    ran = bench.run(drafter, top_tokens=2)
    assert ran.error is None and not ran.drafter_failed
    assert bench.chosen == [(i, len(plains[i].prompt)) for i in range(2)]
    assert len(ran.steps) == 1 and all(each.has_failed and not each.has_ended for each in ran.sequences)
    assert all(each.token_ids == () and each.records[0].emitted == 0 for each in ran.sequences)
    assert [(each.calibration, each.verified) for each in ran.sequences] == [(1.0, 4.0)] * 2
    assert not drafter.named("commit") and not drafter.named("remember")


def test_padding_need_not_be_numbers() -> None:
    bench = Bench([plain(0), plain(1, 0.7)], model=with_head({VOCAB: math.nan, VOCAB + 5: math.inf}))
    assert len(bench.run(max_steps=5).steps) == 5


def overflowing_model(plains: Sequence[Plain], at: int) -> NativeModel:
    """A token's logit is -3e38 and a bit, so never chosen, and for the first of these -inf after `at` new tokens."""
    others = [each.after(len(each.prompt) + k) for each in plains[1:] for k in range(at + 1)]
    before = [plains[0].after(len(plains[0].prompt) + k) for k in range(at)]
    chosen = {token for each in plains for token in each.tokens(len(each.prompt) + at + 2)}
    last = plains[0].after(len(plains[0].prompt) + at)
    gap, token = max(
        (min(float(row[token]) for row in others + before) - float(last[token]), token)
        for token in range(VOCAB)
        if token not in chosen and last[token] < 0.0
    )
    assert gap > 0.1
    overflow = float(np.finfo(np.float32).max) - 3e38
    return with_head({token: -3e38}, {token: overflow / -(float(last[token]) + gap / 2.0)})


@pytest.mark.parametrize("drafts", [False, True])
def test_one_sequence_comes_to_logits_that_are_no_numbers(drafts: bool) -> None:
    """What it emitted before counts, also that of the same step, and what others emit."""
    plains, at = [plain(0), plain(4), plain(7)], 7
    bench = Bench(plains, model=overflowing_model(plains, at))
    for each in bench.live[1:]:
        each.is_drafted = False
    drafter = drafter_of(script(plains, ["right"]))
    ran = bench.run(drafter if drafts else None, top_tokens=1)
    assert ran.error is None
    assert [each.has_failed for each in ran.sequences] == [True, False, False]
    assert bench.chosen == [(0, len(plains[0].prompt) + at)]
    assert [len(each.token_ids) for each in ran.sequences] == [at, len(ran.steps), len(ran.steps)]
    assert len(ran.steps) == (1 if drafts else at + 1)
    assert ran.sequences[0].records[-1] == ((12, 12, at, at) if drafts else (0, 0, 0, 0))
    if drafts:
        assert [len(call.told[1]) for call in drafter.named("remember")] == [at]
