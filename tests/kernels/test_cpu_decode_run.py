"""Runs of decode steps emit, plan, accept and learn what plain decoding and the verifier do, and tell drafters."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.decode_runs import (
    KINDS,
    Call,
    Drafted,
    Plain,
    ScriptedDrafter,
)
from support.int8_decoders import NativeModel
from support.run_bench import (
    SIZES,
    SOUND,
    TABLES,
    TERMS,
    VOCAB,
    Bench,
    drafter_of,
    native_model,
    plain,
    plain_model,
    script,
    weights,
)
from support.sequences import make_config

from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.accept import accept as accept_tokens
from treeserve_kernels.cpu.decode_run import RunSequence, RunTerms
from treeserve_kernels.cpu.library import is_built
from treeserve_kernels.cpu.sampling import find_largest, find_rivals
from treeserve_verifier.calibration import Calibrator
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.sequence import Sequence as VerifierSequence
from treeserve_verifier.sequence import Submission
from treeserve_verifier.step_plan import Candidate

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_without_a_drafter_tokens_are_those_of_plain_decoding(count: int, temperature: float) -> None:
    bench = Bench([plain(i, temperature) for i in range(count)])
    all_ran = bench.decode(60)
    assert all(step.rows == len(ran.sequences) for ran in all_ran for step in ran.steps)
    bench.check_kv()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [4, 7, 16])
def test_with_trees_of_all_kinds_likewise(block_size: int, kv_dtype: str, temperature: float) -> None:
    plains = [plain(i, temperature, kv_dtype) for i in range(3 if block_size == 7 else 4)]
    bench = Bench(plains, kv_dtype, block_size)
    all_ran = bench.decode(60, drafter_of(script(plains, seed=block_size)), top_tokens=2)
    records = [record for ran in all_ran for each in ran.sequences for record in each.records]
    accepted, verified = sum(r.accepted for r in records), sum(r.verified for r in records)
    assert 40 < accepted < verified
    bench.check_kv()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tree_for_eight_sequences(kind: str) -> None:
    plains = [plain(i, (0.0, 0.7, 1.3)[i % 3]) for i in range(8)]
    bench = Bench(plains)
    all_ran = bench.decode(40, drafter_of(script(plains, [kind])))
    records = [record for ran in all_ran for each in ran.sequences for record in each.records]
    offered, accepted = sum(r.offered for r in records), sum(r.accepted for r in records)
    assert (offered > 0) == (kind != "none")
    if kind in ("wrong", "none"):
        assert accepted == 0
    else:
        assert accepted > 20
    assert sum(ran.num_empty_trees for ran in all_ran) == (
        sum(ran.num_trees for ran in all_ran) if kind == "none" else 0
    )
    bench.check_kv()


def test_trees_beyond_one_word_of_ancestors() -> None:
    plains = [plain(i) for i in range(3)]
    bench = Bench(plains, block_size=16)
    for each in bench.live:
        each.most_nodes, each.verified = 150, 200.0
    ran = bench.run(drafter_of(script(plains, ["branched"])), positions=200, max_steps=3)
    assert max(record.verified for each in ran.sequences for record in each.records) == 150
    assert max(record.accepted for each in ran.sequences for record in each.records) > 30
    bench.check_kv()


def test_several_threads_change_nothing() -> None:
    plains = [plain(i, 0.7) for i in range(3)]
    bench = Bench(plains, model=NativeModel(weights(), threads=3, is_poisoned=True))
    bench.decode(30, drafter_of(script(plains)))
    bench.check_kv()


def test_only_some_are_drafted_for() -> None:
    plains = [plain(i) for i in range(3)]
    bench, drafter = Bench(plains), drafter_of(script(plains, ["right"]))
    bench.live[1].is_drafted = False
    ran = bench.run(drafter, max_steps=3, top_tokens=1)
    assert {call.handle for call in drafter.calls if call.name != "learn"} == {0, 2}
    assert [sum(record.offered for record in each.records) > 0 for each in ran.sequences] == [True, False, True]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_who_asks_is_told_all_its_tokens(temperature: float) -> None:
    plains = [plain(i, temperature) for i in range(3)]
    bench = Bench(plains)
    bench.live[1].asks = True
    bench.decode(40, drafter_of(script(plains)), top_tokens=3)
    asked = [tokens for seq_id, tokens in bench.chosen if seq_id == 1]
    assert asked == list(range(len(plains[1].prompt), len(plains[1].prompt) + 40))
    if not temperature:
        assert len(bench.chosen) == 40, "nobody else"
    bench.check_kv()


@pytest.mark.parametrize("is_end", [False, True])
def test_tokens_too_near_each_other_to_tell_are_left_to_the_caller(is_end: bool) -> None:
    prompt = plain(0).prompt
    logits = plain(0).after(len(prompt))[:VOCAB].copy()
    seed = next(seed for seed in range(10**5) if len(find_rivals(logits, None, 1.0, seed, len(prompt))) > 1)
    near = Plain(plain_model("float32"), prompt, 1.0, seed, VOCAB)
    bench = Bench([near])
    bench.live[0].end_ids = (near.tokens(len(prompt) + 1)[-1],) if is_end else ()
    ran = bench.run(max_steps=2)
    assert bench.chosen[0] == (0, len(prompt))
    assert (ran.sequences[0].has_ended, len(ran.steps)) == (is_end, 1 if is_end else 2)


@pytest.mark.parametrize("answer", [-1, -(2**31), VOCAB, 2**31 - 1])
def test_what_is_no_token_fails_a_sequence(answer: int) -> None:
    """The second of two asks, and after two tokens gets none."""
    decoder = native_model("float32").decoder
    of_each = [RunSequence(**SOUND), RunSequence(**SOUND, asks=True)]

    def choose(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
        assert place == 1 and len(logits) == SIZES.vocab_size
        return (answer if len(new) == 2 else 5, False)

    ran = decoder.run(decoder.new_kv(6, 8, "float32"), [(0, 1), (4, 2)], of_each, RunTerms(**TERMS), choose)
    assert ran.error is None and [each.has_failed for each in ran.sequences] == [False, True]
    assert len(ran.sequences[0].token_ids) == len(ran.steps) == 3
    assert ran.sequences[1].token_ids == (5, 5) and not ran.sequences[1].has_ended


# --- What is planned, learned and counted ---


def verifier_sequence(seq_id: int, each: Plain, max_tokens: int, tpot_ms: float | None) -> VerifierSequence:
    submission = Submission(
        request_id="",
        prompt_token_ids=each.prompt,
        generated_token_ids=(),
        sampling=SamplingParams(temperature=each.temperature, seed=each.seed),
        stopping=StoppingCriteria(max_tokens=max_tokens),
        limits=SequenceLimits(tpot_ms=tpot_ms),
    )
    sampler = SequenceSampler(submission.sampling, submission.stopping, each.prompt, eos_token_ids=(), vocab_size=VOCAB)
    return VerifierSequence(seq_id, submission, lambda emission: None, sampler, None, list(each.prompt))


MANY_MS = 1e6  # of a step, as runs are told: beside that what they do take is nothing


@pytest.mark.parametrize("is_promised", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_plans_accepts_and_learns_as_the_verifier(seed: int, is_promised: bool) -> None:
    rng = random.Random(seed)
    count, block_size, max_tokens = rng.choice([2, 4]), rng.choice([4, 16]), 70
    plains = [plain(i, rng.choice([0.0, 0.7])) for i in range(count)]
    table = {rows: MANY_MS * ms for rows, ms in TABLES[(0, 1, 3, 4)[seed]].items()}
    planner = StepPlanner(make_config(step_rows=(14, 40)[seed % 2], max_nodes=12, prefill_rows=4), CostModel(table))
    bench, calibrator, tree_of = Bench(plains, block_size=block_size), Calibrator(), script(plains, seed=seed)
    calibrator.prior = 0.9
    sequences = []
    for seq_id, live in enumerate(bench.live):
        tpot_ms = MANY_MS * rng.uniform(6.0, 20.0) if is_promised and seq_id != 1 else None
        sequence = verifier_sequence(seq_id, live.plain, max_tokens, tpot_ms)
        sequence.calibration, sequence.verified = rng.uniform(0.6, 1.3), rng.uniform(0.0, 5.0)
        sequence.promise.first_at = 0.0
        live.calibration, live.verified, live.tokens_left = sequence.calibration, sequence.verified, max_tokens
        live.most_nodes = planner.most_nodes(sequence, count)
        if tpot_ms is not None:
            live.slack_ms, live.token_ms = rng.uniform(-15.0, 0.0) * tpot_ms, TPOT_SHARE * tpot_ms
            live.reserve_ms = sequence.promise.reserve_ms(max_tokens)
        sequences.append(sequence)
    slacks = [live.slack_ms for live in bench.live]
    # Calls for each step, as they should come.
    drafter, calls = drafter_of(tree_of), list[tuple[Any, ...]]()
    node_price = planner.prices(count).node
    ran = bench.run(
        drafter,
        positions=90,
        cost_table=table,
        step_rows=planner.step_rows,
        prior=calibrator.prior,
        node_price=node_price,
    )
    assert ran.error is None and len(ran.steps) > 8
    by_source, seen = [0] * 32, Counter[str]()
    for step, *records in zip(ran.steps, *(each.records for each in ran.sequences), strict=True):
        candidates, trees = [], list[TokenTree | None]()
        for sequence, slack_ms in zip(sequences, slacks, strict=True):
            base = sequence.prompt_len - 1
            room = -(-(base + 90) // block_size) * block_size - len(sequence.tokens)
            budget = min(planner.draft_budget(sequence, count), room)
            tree = None
            if budget >= 1:
                calls.append(("draft", sequence.seq_id, (budget, node_price)))
                tree = tree_of(sequence.seq_id, sequence.tokens, budget)
                seen["trees"] += 1
                seen["empty trees"] += len(tree) == 1
            trees.append(tree)
            candidates.append(Candidate(sequence, 1, tree if tree is not None and len(tree) > 1 else None, slack_ms))
        plan = planner.plan(candidates)
        assert plan.rows == step.rows
        relaxed = planner.plan([replace(candidate, slack_ms=math.inf) for candidate in candidates])
        seen["steps with late ones"] += [p.rows for p in relaxed.sequences] != [p.rows for p in plan.sequences]
        for planned, tree, record, each in zip(plan.sequences, trees, records, plains, strict=True):
            sequence, verified = planned.sequence, planned.tree
            base_len = len(sequence.tokens)

            def logits_of(
                node: int, each: Plain = each, base_len: int = base_len, verified: TokenTree | None = verified
            ) -> Any:
                assert verified is not None
                return each.after(base_len + verified.depths[node])

            assert verified is not None
            outcome = accept_tokens(verified, logits_of, sequence.sampler)
            calibrator.learn(planned, outcome)
            sequence.tokens += outcome.token_ids
            sequence.promise.emitted(len(outcome.token_ids), 0.0)
            slacks[sequence.seq_id] += len(outcome.token_ids) * bench.live[sequence.seq_id].token_ms
            offered = 0 if tree is None else len(tree) - 1
            assert record == (offered, len(verified) - 1, len(outcome.accepted_nodes), len(outcome.token_ids))
            for node in outcome.accepted_nodes:
                mask = (verified.source_masks or ())[node]
                by_source = [total + (mask >> bit & 1) for bit, total in enumerate(by_source)]
            calls.append(("commit", sequence.seq_id, (base_len, outcome.token_ids)))
            seen["untried"] += planned.untried is not None
            seen["tried in vain"] += planned.expected > 0.0 and not outcome.accepted_nodes
            seen["accepted"] += len(outcome.accepted_nodes)
        calls.append(("learn", 0, None))
    assert [(call.name, call.handle, call.told) for call in drafter.calls] == calls
    assert list(ran.accepted_by_source) == by_source and sum(by_source) > 0
    assert (ran.num_trees, ran.num_empty_trees) == (seen["trees"], seen["empty trees"])
    assert min(seen[name] for name in ("empty trees", "untried", "tried in vain", "accepted")) > 0, seen
    if is_promised:
        assert seen["steps with late ones"] > 0
    assert ran.prior == pytest.approx(calibrator.prior, rel=1e-12)
    for sequence, found in zip(sequences, ran.sequences, strict=True):
        assert found.calibration == pytest.approx(sequence.calibration, rel=1e-12)
        assert found.verified == pytest.approx(sequence.verified, rel=1e-12)
        assert found.calibration not in (1.0, 0.9)
    assert all(0.0 < step.forward_ms <= step.step_ms for step in ran.steps)
    assert 0.0 < ran.draft_s < sum(step.step_ms for step in ran.steps) / 1e3
    bench.check_kv()


def test_time_that_steps_take_makes_sequences_late() -> None:
    """The node does not pay, and is verified only for who is late: 50 ms, of which steps take 30 and bring 1."""

    def tree(handle: int, tokens: list[int], budget: int) -> Drafted:
        wrong = (plain(handle).tokens(len(tokens) + 1)[-1] + 1) % VOCAB
        return Drafted((tokens[-1], wrong), (-1, 0), (0.0, math.log(0.45)), None, len(tokens))

    def dawdle(call: Call) -> bool:
        time.sleep(0.03 if call.name == "learn" else 0.0)
        return False

    bench = Bench([plain(0), plain(1)])
    bench.live[0].slack_ms, bench.live[0].token_ms, bench.live[0].reserve_ms = 50.0, 1.0, 1e9
    bench.live[1].is_drafted = False
    ran = bench.run(ScriptedDrafter(tree, fails=dawdle), cost_table={2: 10.0, 3: 13.0}, max_steps=3)
    verified = [record.verified for record in ran.sequences[0].records]
    assert (verified[0], verified[2]) == (0, 1)


# --- What the drafter is told ---


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("width", [1, 8, 64])
def test_commits_and_the_most_probable_tokens(width: int, temperature: float) -> None:
    plains = [plain(i, temperature) for i in range(3)]
    bench, drafter = Bench(plains), drafter_of(script(plains))
    bench.decode(40, drafter, top_tokens=width)
    told, emitted = drafter.named("commit"), Counter[int]()
    assert len(told) == len(drafter.named("remember")) > 10
    before: Call | None = None
    for call in drafter.calls:
        if call.name == "commit":
            base_len, new = call.told
            emitted[call.handle] += len(new)
            assert list(new) == plains[call.handle].tokens(base_len + len(new))[base_len:]
        elif call.name == "remember":
            assert before is not None and (before.name, before.handle) == ("commit", call.handle)
            position, top = call.told
            assert (position, len(top)) == (before.told[0], len(before.told[1]))
            for i, row in enumerate(top):
                logits = np.ascontiguousarray(plains[call.handle].after(position + i)[:VOCAB])
                assert list(row) == find_largest(logits, width)
        before = call
    assert list(emitted.values()) == [40] * 3


def test_no_top_tokens_are_told_unless_wanted() -> None:
    plains = [plain(0)]
    bench, drafter = Bench(plains), drafter_of(script(plains))
    bench.run(drafter, max_steps=4)
    assert {call.name for call in drafter.calls} == {"draft", "commit", "learn"}


@pytest.mark.parametrize(
    ("verified", "most_nodes", "budget"),
    [(0.0, 30, 4), (0.1, 30, 5), (2.5, 30, 9), (7.0, 11, 11), (1e300, 30, 30), (4.0, 1, 1), (4.0, 0, None)],
)
def test_the_budget_of_a_tree(verified: float, most_nodes: int, budget: int | None) -> None:
    bench, drafter = Bench([plain(0)]), drafter_of(script([plain(0)]))
    bench.live[0].verified, bench.live[0].most_nodes = verified, most_nodes
    bench.run(drafter, max_steps=1, node_price=0.125)
    assert [call.told for call in drafter.named("draft")] == ([] if budget is None else [(budget, 0.125)])


def test_a_tree_never_outgrows_the_blocks() -> None:
    """Of 16 positions 4 are computed and the root takes one."""
    bench, drafter = Bench([plain(0)], block_size=4), drafter_of(script([plain(0)], ["right"]))
    ran = bench.run(drafter, positions=12, max_s=1e9)
    assert [call.told[0] for call in drafter.named("draft")] == [11]
    assert [step.rows for step in ran.steps] == [12]
    assert len(ran.sequences[0].token_ids) == 12
    bench.check_kv()


def test_the_last_position_takes_a_root_alone() -> None:
    bench, drafter = Bench([plain(0)], block_size=4), drafter_of(script([plain(0)], ["wrong"]))
    ran = bench.run(drafter, positions=4)
    assert [call.told[0] for call in drafter.named("draft")] == [3, 2, 1]
    assert [record.emitted for record in ran.sequences[0].records] == [1, 1, 1, 1]
    bench.check_kv()


def test_nothing_is_drafted_for_the_last_token() -> None:
    bench, drafter = Bench([plain(0)]), drafter_of(script([plain(0)], ["wrong"]))
    bench.live[0].tokens_left = 3
    ran = bench.run(drafter)
    assert len(drafter.named("draft")) == 2 and len(drafter.named("commit")) == 3
    assert ran.sequences[0].has_ended


def test_steps_have_no_more_rows_than_they_may() -> None:
    bench = Bench([plain(i) for i in range(3)])
    ran = bench.run(drafter_of(script([plain(i) for i in range(3)], ["right"])), step_rows=10, max_steps=4)
    assert [step.rows for step in ran.steps] == [10] * 4
    assert all(sum(each.records[i].verified for each in ran.sequences) == 7 for i in range(4))


def test_of_nodes_that_all_seem_certain_the_more_probable_comes_first() -> None:
    """Calibration makes both certain, and there is room for one."""

    def tree(handle: int, tokens: list[int], budget: int) -> Drafted:
        right = plain(0).tokens(len(tokens) + 1)[-1]
        return Drafted((tokens[-1], (right + 1) % VOCAB, right), (-1, 0, 0), (0.0, -0.5, -0.1), None, len(tokens))

    bench = Bench([plain(0)])
    bench.live[0].calibration = 2.0
    ran = bench.run(ScriptedDrafter(tree), step_rows=2, max_steps=1)
    assert ran.sequences[0].records == ((2, 1, 1, 2),)


def test_no_node_lies_deeper_than_the_tokens_left() -> None:
    bench, drafter = Bench([plain(0)]), drafter_of(script([plain(0)], ["right"]))
    bench.live[0].tokens_left = 4
    ran = bench.run(drafter)
    assert ran.sequences[0].records == ((12, 3, 3, 4),)
    bench.check_kv()
