"""Runs of decode steps against the verifier's own planning, plain decoding and calibration; how they end; what they
refuse."""

from __future__ import annotations

import ctypes
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
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
    scattered_runner,
    scripted_tree,
)
from support.int8_decoders import NativeModel, Sizes, native_shape, native_weights, random_model
from support.int8_twin import PlainModel
from support.plain_decoding import assert_same_bits, prefill
from support.sequences import make_config

from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.accept import accept as accept_tokens
from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu import library
from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms, costs_of
from treeserve_kernels.cpu.decoder import Decoder
from treeserve_kernels.cpu.library import is_built
from treeserve_kernels.cpu.sampling import find_largest, find_rivals
from treeserve_verifier.calibration import Calibrator
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.promise import TPOT_SHARE
from treeserve_verifier.selection import Offer, Selection
from treeserve_verifier.sequence import Sequence as VerifierSequence
from treeserve_verifier.sequence import Submission
from treeserve_verifier.step_plan import Candidate

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

SIZES = Sizes(num_layers=3)
VOCAB = 197  # the head has 203 outputs
PROMPT_LENS = (5, 1, 13, 2, 8, 21, 3, 4)
FREE = {1: 1.0, 2**31: 1.0}
STAIRS = {1: 10.0, 4: 11.0, 8: 13.0, 16: 19.0, 32: 33.0}


# --- Which nodes are chosen ---


TABLES = (
    {rows: 5.0 + 0.5 * rows for rows in range(1, 129)},
    {1: 5.0, 4: 5.5, 8: 7.0, 16: 10.0, 32: 17.0},
    {1: 10.0, 64: 10.0},
    {3: 10.0, 6: 11.0, 9: 30.0, 40: 31.0},
    {1: 20.0, 2: 20.0, 5: 21.5, 6: 29.0, 64: 80.0, 256: 81.0},
    {1: 1e9, 2**31: 1e9},
)


def random_offer(rng: random.Random, index: int, step_ms: float) -> Offer:
    some = rng.choice([(0.25, 0.5, 0.9, 1.0), (0.6,), (0.0,), [rng.random() for _ in range(24)]])
    rated = sorted((-rng.choice(some), rng.randint(1, 9)) for _ in range(rng.choice([0, 1, 3, 8, 24])))
    nodes = [(value, depth, index, order, order) for order, (value, depth) in enumerate(rated)]
    if rng.random() < 0.3:
        return Offer(nodes, tokens_left=rng.randint(1, 300))
    token_ms = step_ms * rng.choice([0.3, 0.7, 0.95, 1.5, 4.0, math.inf])
    slack_ms = rng.choice([step_ms, rng.uniform(-4.0, 4.0) * step_ms, rng.uniform(-60.0, 1.0) * step_ms])
    reserve_ms = rng.choice([0.0, rng.uniform(0.0, 40.0) * min(token_ms, step_ms)])
    return Offer(nodes, slack_ms, token_ms, rng.choice([1, 2, 20, 300]), reserve_ms=reserve_ms)


def choose(offers: Sequence[Offer], table: dict[int, float], room: int) -> tuple[list[int], list[float]]:
    of_each, kept = (c.Offer * len(offers))(), []
    for each, offer in zip(of_each, offers, strict=True):
        n = len(offer.nodes)
        accepted = (ctypes.c_double * n)(*[-node[0] for node in offer.nodes])
        depths = (ctypes.c_int32 * n)(*[node[1] for node in offer.nodes])
        kept += [accepted, depths]
        each.num_nodes, each.accepted, each.depths = n, accepted, depths
        each.slack_ms, each.token_ms, each.reserve_ms = offer.slack_ms, offer.token_ms, offer.reserve_ms
        each.tokens_left = offer.tokens_left
    counts, expected = (ctypes.c_int32 * len(offers))(*[-1] * len(offers)), (ctypes.c_double * len(offers))()
    library.check(library.load().ts_choose_nodes(costs_of(table), len(offers), of_each, room, counts, expected))
    return list(counts), list(expected)


def selected(offers: Sequence[Offer], cost: CostModel, room: int) -> Selection:
    selection = Selection(offers, cost)
    selection.choose(room)
    return selection


def test_the_nodes_chosen_are_those_of_the_verifier() -> None:
    rng, seen = random.Random(1), Counter[str]()
    for _ in range(3000):
        table = rng.choice(TABLES)
        cost, count, room = CostModel(table), rng.choice([0, 1, 2, 3, 5, 8]), rng.choice([0, 1, 4, 12, 30, 64])
        offers = [random_offer(rng, i, cost.step_ms(count)) for i in range(count)]
        expected = selected(offers, cost, room)
        counts, emitted = choose(offers, table, room)
        assert counts == expected.counts, (offers, table, room)
        assert emitted == pytest.approx(expected.expected, rel=1e-12, abs=1e-12)
        seen["some"] += any(counts)
        seen["targets"] += Selection(offers, cost)._meet_targets(room) > 0
        without = [offer._replace(slack_ms=math.inf, token_ms=math.inf) for offer in offers]
        seen["targets matter"] += selected(without, cost, room).counts != counts
        forgiven = [offer._replace(reserve_ms=1e15) for offer in offers]
        seen["lost"] += selected(forgiven, cost, room).counts != counts
    assert min(seen[name] for name in ("some", "targets", "targets matter")) > 300 and seen["lost"] > 60, seen


def test_rounding_is_that_of_the_verifier() -> None:
    """Whether a node pays for those who are behind is a matter of the last bit here."""
    chains = ((0.7,), (0.8,), (0.3, 0.1))
    nodes = [[(-f, depth, i, depth, depth) for depth, f in enumerate(each, start=1)] for i, each in enumerate(chains)]
    terms = ((-10.0, 10.0), (0.0, 5.0), (-20.0, 5.0))
    offers = [Offer(each, *of_each, 1000, reserve_ms=1e9) for each, of_each in zip(nodes, terms, strict=True)]
    table = {1: 10.0, 4: 11.0, 5: 11.55, 6: 12.13}
    assert choose(offers, table, 6)[0] == selected(offers, CostModel(table), 6).counts == [1, 1, 2]


# --- Runs beside plain decoding ---


@cache
def weights() -> PlainModel:
    return random_model(SIZES, 3)


@cache
def native_model(kv_dtype: str) -> NativeModel:
    """All that no row may see is NaN in its caches."""
    return NativeModel(weights(), kv_dtype, is_poisoned=True)


@cache
def plain_model(kv_dtype: str) -> NativeModel:
    return NativeModel(weights(), kv_dtype)


@cache
def plain(index: int, temperature: float = 0.0, kv_dtype: str = "float32") -> Plain:
    rng = random.Random(index)
    prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_LENS[index])]
    return Plain(plain_model(kv_dtype), prompt, temperature, 2**64 - 1 - index, VOCAB)


@dataclass
class Live:
    """A sequence of a bench: what runs are told of it, and learn."""

    plain: Plain
    tokens: list[int]
    tokens_left: int = 10**6
    end_ids: tuple[int, ...] = ()
    asks: bool = False
    is_drafted: bool = True
    most_nodes: int = 30
    slack_ms: float = math.inf
    token_ms: float = math.inf
    reserve_ms: float = 0.0
    calibration: float = 1.0
    verified: float = 4.0


class Bench:
    """Sequences with their prompts computed but for the last token, which run as they are told."""

    def __init__(
        self, plains: Sequence[Plain], kv_dtype: str = "float32", block_size: int = 7, model: NativeModel | None = None
    ) -> None:
        self.model = model or native_model(kv_dtype)
        self.plain_model = plain_model(kv_dtype)
        self.runner = scattered_runner(self.model, random.Random(block_size), block_size)
        self.live = [Live(each, list(each.prompt)) for each in plains]
        self.chosen: list[tuple[int, int]] = []  # who asked for a token, and after how many
        self._raised: list[Exception] = []
        for seq_id, each in enumerate(plains):
            self.runner.blocks.add(seq_id)
            if len(each.prompt) > 1:
                prefill(self.runner, seq_id, each.prompt[:-1], 6)

    def run(
        self,
        drafter: ScriptedDrafter | None = None,
        *,
        positions: int = 60,
        only: Sequence[int] | None = None,
        **terms: Any,
    ) -> Ran:
        """One run, whose tokens are those of plain decoding."""
        running = range(len(self.live)) if only is None else only
        self.runner.blocks.reserve_ahead(dict.fromkeys(running, positions))
        of_each = [self._described(seq_id, drafter) for seq_id in running]
        if drafter is not None:
            drafter.tokens |= {seq_id: list(self.live[seq_id].tokens) for seq_id in running}
            terms["drafter"] = drafter.structure
        defaults: dict[str, Any] = {"step_rows": 512, "cost_table": FREE, "max_steps": 64}
        ran = self.runner.decode(
            running, of_each, RunTerms(vocab_size=VOCAB, **defaults | terms), self._chooser(running)
        )
        if self._raised:
            raise self._raised[0]
        if drafter is not None:
            drafter.check()
        for seq_id, each in zip(running, ran.sequences, strict=True):
            self._take(self.live[seq_id], each.token_ids)
            self.live[seq_id].calibration, self.live[seq_id].verified = each.calibration, each.verified
            assert sum(record.emitted for record in each.records) == len(each.token_ids)
            assert len(each.records) == len(ran.steps)
        self.runner.blocks.check_integrity()
        return ran

    def _described(self, seq_id: int, drafter: ScriptedDrafter | None) -> RunSequence:
        live = self.live[seq_id]
        return RunSequence(
            num_tokens=len(live.tokens),
            root=live.tokens[-1],
            tokens_left=live.tokens_left,
            end_ids=live.end_ids,
            asks=live.asks,
            temperature=live.plain.temperature,
            seed=live.plain.seed,
            handle=seq_id if drafter is not None and live.is_drafted else None,
            most_nodes=live.most_nodes,
            slack_ms=live.slack_ms,
            token_ms=live.token_ms,
            reserve_ms=live.reserve_ms,
            calibration=live.calibration,
            verified=live.verified,
        )

    def _take(self, live: Live, new: Sequence[int]) -> None:
        base_len = len(live.tokens)
        assert list(new) == live.plain.tokens(base_len + len(new))[base_len:]
        live.tokens += new
        live.tokens_left -= len(new)

    def _chooser(self, running: Sequence[int]) -> Choose:
        """Chooses as plain decoding does, and nothing where logits are not finite. There must be reason to be asked."""
        before = {seq_id: list(self.live[seq_id].tokens) for seq_id in running}

        def choose(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
            live, tokens = self.live[running[place]], [*before[running[place]], *new]
            self.chosen.append((running[place], len(tokens)))
            if not np.isfinite(logits[:VOCAB]).all():
                return -1, False
            assert tokens == live.plain.tokens(len(tokens))
            assert_same_bits(logits[None], live.plain.after(len(tokens))[None])
            if not live.asks:
                temperature, seed = live.plain.temperature, live.plain.seed
                assert temperature > 0.0
                assert len(find_rivals(logits[:VOCAB].copy(), None, temperature, seed, len(tokens))) > 1
            token = live.plain.tokens(len(tokens) + 1)[-1]
            return token, token in live.end_ids

        def guarded(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
            try:
                return choose(place, new, logits)
            except Exception as error:
                self._raised.append(error)
                return -1, False

        return guarded

    def decode(self, count: int, drafter: ScriptedDrafter | None = None, **terms: Any) -> list[Ran]:
        """Runs, short and long ones, until every sequence has so many new tokens."""
        rng, all_ran = random.Random(count), []
        for each in self.live:
            each.tokens_left = count
        while only := [seq_id for seq_id, each in enumerate(self.live) if each.tokens_left]:
            ran = self.run(drafter, positions=rng.choice([1, 4, 20, 60]), only=only, **terms)
            assert ran.error is None and not ran.drafter_failed and ran.steps
            all_ran.append(ran)
            for seq_id, done in zip(only, ran.sequences, strict=True):
                assert done.has_ended == (not self.live[seq_id].tokens_left) and not done.has_failed
        return all_ran

    def check_kv(self) -> None:
        """What comes next is what it would be after a prefill of the same tokens, to the bit."""
        for seq_id, each in enumerate(self.live):
            fresh = ModelRunner(self.plain_model, 64, 16)
            fresh.blocks.add(0)
            expected = prefill(fresh, 0, each.tokens, 500)[-1:]
            self.runner.blocks.reserve(seq_id, 1)
            (found,) = self.runner.forward([SequenceRows.from_chain(seq_id, each.tokens[-1:], [0])])
            self.runner.rollback(seq_id)
            assert_same_bits(found, expected)


def script(
    plains: Sequence[Plain], kinds: Sequence[str] = KINDS, seed: int = 0
) -> Callable[[int, list[int], int], TokenTree]:
    """Trees by handle, tokens so far and budget: the same for the same."""

    def tree(handle: int, tokens: list[int], budget: int) -> TokenTree:
        rng = random.Random(f"{seed} {handle} {len(tokens)} {budget}")
        ahead = plains[handle].tokens(len(tokens) + budget + 1)[len(tokens) :]
        return scripted_tree(rng, rng.choice(kinds), tokens[-1], ahead, budget, VOCAB)

    return tree


def drafter_of(tree: Callable[[int, list[int], int], TokenTree], **arguments: Any) -> ScriptedDrafter:
    return ScriptedDrafter(
        lambda handle, tokens, budget: Drafted.of(tree(handle, tokens, budget), len(tokens)), **arguments
    )


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


# --- How runs end ---


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


# --- What is refused ---


def nobody(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
    """Whom to ask where nothing is asked."""
    raise AssertionError


SOUND: dict[str, Any] = {"num_tokens": 3, "root": 4, "tokens_left": 9, "end_ids": ()}
TERMS: dict[str, Any] = {"vocab_size": VOCAB, "step_rows": 8, "cost_table": FREE, "max_steps": 4}


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
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_the_first_step(wrong: dict[str, Any]) -> None:
    assert_refused(run_bare(**wrong))


@pytest.mark.parametrize("temperature", [-0.5, math.nan, 2.0**-101, 2.0**101])
def test_a_temperature_that_nothing_can_be_drawn_at_is_refused_likewise(temperature: float) -> None:
    assert_refused(run_bare(temperature=temperature))


def assert_refused(ran: Ran) -> None:
    assert isinstance(ran.error, ValueError)
    assert ran.steps == () and not ran.drafter_failed
    assert all(each.token_ids == () and each.records == () and not each.has_ended for each in ran.sequences)


def test_a_run_of_nobody_is_refused() -> None:
    decoder = native_model("float32").decoder
    ran = decoder.run(decoder.new_kv(1, 8, "float32"), [], [], RunTerms(**TERMS), nobody)
    assert isinstance(ran.error, ValueError) and ran.steps == ()


def test_what_is_on_the_edge_is_not_refused() -> None:
    ran = run_bare(
        root=VOCAB - 1, temperature=2.0**-100, terms={"top_tokens": 64, "step_rows": 2, "vocab_size": SIZES.vocab_size}
    )
    assert ran.error is None and len(ran.steps) == 4


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
