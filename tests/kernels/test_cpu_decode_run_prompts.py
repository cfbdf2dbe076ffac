"""Runs of decode steps that compute prompts, too: the same tokens in the same rows, and the end of a run."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from support.decode_runs import Plain
from support.run_bench import FREE, STAIRS, VOCAB, Bench, drafter_of, native_model, plain, plain_model, script
from support.sequences import make_sequence

from treeserve_core.outcome import VerifyOutcome
from treeserve_kernels.cpu.decode_run import Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.library import is_built
from treeserve_kernels.cpu.sampling import find_largest, find_rivals
from treeserve_verifier.calibration import Calibrator
from treeserve_verifier.step_plan import Candidate

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


@cache
def long_plain(length: int, temperature: float = 0.0, kv_dtype: str = "float32") -> Plain:
    """With a prompt of so many tokens."""
    rng = random.Random(length)
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    return Plain(plain_model(kv_dtype), prompt, temperature, 2**63 + length, VOCAB)


# --- Tokens and KV ---


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("chunk", [1, 2, 7, 63, 64, 65, 140, 200])
def test_a_prompt_beside_others_changes_nothing(chunk: int, others: int, temperature: float, drafts: bool) -> None:
    """The prompt comes after the first of the others, and has 140 tokens."""
    plains = [plain(i, temperature) for i in range(others)]
    place = min(1, others)
    plains.insert(place, long_plain(140, temperature))
    unread = [0] * (others + 1)
    unread[place] = 140
    bench = Bench(plains, unread=unread)
    all_ran = bench.decode(30, drafter_of(script(plains)) if drafts else None, unread_rows=chunk)
    prefilled = [step.prefill_rows for ran in all_ran for step in ran.steps]
    assert sum(prefilled) == 139 and max(prefilled) <= chunk
    records = [record for ran in all_ran for each in ran.sequences for record in each.records]
    assert (sum(record.accepted for record in records) > 0) == drafts
    bench.check_kv()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [4, 7, 16])
def test_prompts_of_any_length_in_all_kinds_of_caches(block_size: int, kv_dtype: str, temperature: float) -> None:
    """A part of two prompts was computed before."""
    plains = [plain(i, temperature, kv_dtype) for i in range(4)]
    plains += [long_plain(length, temperature, kv_dtype) for length in (33, 90)]
    bench = Bench(plains, kv_dtype, block_size, unread=(0, 1, 13, 0, 20, 83))
    bench.decode(25, drafter_of(script(plains, seed=block_size)), unread_rows=block_size + 3, top_tokens=2)
    bench.check_kv()


@pytest.mark.parametrize("chunk", [40, 64, 66, 129, 200])
def test_rows_and_trees_beyond_one_word_of_ancestors(chunk: int) -> None:
    plains = [plain(0), long_plain(200), plain(2)]
    bench = Bench(plains, block_size=16, unread=(0, 200, 0))
    for each in bench.live:
        each.most_nodes, each.verified = 100, 200.0
    drafter = drafter_of(script(plains, ["branched"]))
    ran = bench.run(drafter, positions=220, max_steps=2, unread_rows=2 * chunk)
    assert ran.error is None and ran.steps[0].rows == 202 + min(chunk, 200)
    assert max(record.accepted for each in ran.sequences for record in each.records) > 20
    bench.check_kv()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("emitted", [1, 12, 70])
def test_a_paused_sequence_computes_all_its_tokens_again(emitted: int, temperature: float) -> None:
    plains = [plain(0, temperature), plain(2, temperature)]
    bench = Bench(plains, unread=(0, 13))
    bench.live[1].tokens = plains[1].tokens(13 + emitted)
    bench.live[1].unread = 13 + emitted
    ran = bench.run(positions=100, unread_rows=9)
    assert len(ran.steps) == math.ceil((13 + emitted) / 9)
    assert [len(each.token_ids) for each in ran.sequences] == [len(ran.steps), 1]
    bench.decode(20)
    bench.check_kv()


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_prompt_of_which_only_the_root_is_missing(temperature: float, others: int) -> None:
    """Three tokens are computed, or nothing, where the prompt has only one."""
    plains = [plain(6, temperature), plain(1, temperature), *(plain(i, temperature) for i in range(others))]
    for unread in ((1, 0), (0, 1)):
        bench = Bench(plains, unread=unread + (0,) * others)
        ran = bench.run(drafter_of(script(plains, ["none"])), unread_rows=5)
        assert [(step.rows, step.prefill_rows, step.attended) for step in ran.steps] == [(2 + others, 0, 0.0)]
        assert all(len(each.token_ids) == 1 for each in ran.sequences)
        assert not any(each.has_ended for each in ran.sequences)
        bench.decode(10)
        bench.check_kv()


# --- Rows of the steps ---


@dataclass
class Reader:
    """A prompt in the twin below: KV positions computed, tokens left, and free positions in its blocks."""

    context: int
    left: int
    room: int


def chunks_of(readers: Sequence[Reader], unread_rows: int, verified: Sequence[int], most: int) -> list[list[range]]:
    """The KV positions that each step computes of each prompt, one token after the other.

    Args:
        verified: draft nodes in each step; none in those beyond.
        most: steps.
    """
    steps = list[list[range]]()
    while len(steps) < most and all(reader.room for reader in readers):
        rows, nodes = unread_rows, (verified[len(steps)] if len(steps) < len(verified) else 0)
        while nodes and 2 * (rows - 1) >= unread_rows:
            rows, nodes = rows - 1, nodes - 1
        before = [reader.context for reader in readers]
        for reader in readers:
            while rows and reader.left and reader.room:
                rows, reader.context, reader.left, reader.room = (
                    rows - 1, reader.context + 1, reader.left - 1, reader.room - 1,
                )  # fmt: skip
        steps.append([range(start, reader.context) for start, reader in zip(before, readers, strict=True)])
        if not all(reader.left for reader in readers):
            break
    return steps


def assert_steps(ran: Ran, bench: Bench, order: Sequence[int], before: dict[int, Reader], rows: int, most: int) -> None:
    """Steps and prompts are as the twin has them.

    Args:
        before: by sequence, as they were; those not there decode.
    """
    reading = [seq_id for seq_id in order if seq_id in before]
    results = dict(zip(order, ran.sequences, strict=True))
    verified = [sum(each.records[i].verified for each in ran.sequences) for i in range(len(ran.steps))]
    lefts = {seq_id: reader.left for seq_id, reader in before.items()}
    steps = chunks_of([before[seq_id] for seq_id in reading], rows, verified, most)
    assert len(ran.steps) == len(steps)
    ends = {seq_id: bench.runner.blocks.computed_len(seq_id) + before[seq_id].left for seq_id in reading}
    for step, nodes, chunks in zip(ran.steps, verified, steps, strict=True):
        of_last = sum(len(chunk) > 0 and chunk.stop == ends[i] for chunk, i in zip(chunks, reading, strict=True))
        without = [
            position
            for chunk, i in zip(chunks, reading, strict=True)
            for position in chunk
            if position + 1 != ends[i]
        ]  # fmt: skip
        assert step.prefill_rows == len(without) == sum(map(len, chunks)) - of_last
        assert step.rows == len(order) - len(reading) + nodes + sum(map(len, chunks))
        assert step.attended == pytest.approx(sum(position + 0.5 for position in without), rel=1e-12)
    for place, seq_id in enumerate(reading):
        assert results[seq_id].num_read == sum(len(chunks[place]) for chunks in steps)
        emits = results[seq_id].num_read == lefts[seq_id]
        records = [(0, 0, 0, int(emits and i + 1 == len(steps))) for i in range(len(steps))]
        assert list(results[seq_id].records) == records
        assert len(results[seq_id].token_ids) == emits and not results[seq_id].has_ended


@pytest.mark.parametrize("seed", range(40))
def test_the_rows_of_each_step(seed: int) -> None:
    """Runs in a row over some prompts and some who decode, in any order, until each of them has emitted something."""
    rng = random.Random(seed)
    block_size, count = rng.choice([4, 7, 16]), rng.randrange(1, 5)
    plains = [long_plain(rng.randrange(1, 110), rng.choice([0.0, 0.7])) for _ in range(count)]
    plains += [plain(i, rng.choice([0.0, 0.7])) for i in range(rng.randrange(4))]
    unread = [rng.randrange(1, len(each.prompt) + 1) for each in plains[:count]] + [0] * (len(plains) - count)
    bench = Bench(plains, block_size=block_size, unread=unread)
    for each in bench.live:
        each.most_nodes = rng.choice([0, 3, 30])
    drafter = drafter_of(script(plains, seed=seed)) if seed % 3 else None
    order = rng.sample(range(len(plains)), len(plains))
    runs = 0
    while any(each.unread for each in bench.live):
        rows, most = rng.choice([1, 2, 5, 9, 30, 80]), rng.choice([1, 3, 64])
        positions = {i: rng.choice([1, 10, 120]) if bench.live[i].unread else 900 // len(plains) // 3 for i in order}
        before = dict[int, Reader]()
        for i in order:
            live = bench.live[i]
            if live.unread:
                slots = -(-(live.computed_len + positions[i]) // block_size) * block_size
                before[i] = Reader(live.computed_len, live.unread, slots - live.computed_len)
        ran = bench.run(
            drafter,
            positions=positions,
            only=order,
            max_steps=most,
            unread_rows=rows,
            step_rows=len(plains) + rows + rng.choice([0, 4, 400]),
        )
        assert ran.error is None and ran.steps
        assert_steps(ran, bench, order, before, rows, most)
        runs += 1
        if runs == 3:
            bench.check_kv()
    bench.check_kv()


def test_rows_go_to_the_first_prompts_first_until_one_of_them_is_complete() -> None:
    """10, 25 and 90 tokens are missing of 33, 25 and 100; each step has 12 rows for them, the second prompt is first."""
    plains = [long_plain(33), long_plain(25), long_plain(100), plain(0)]
    bench = Bench(plains, unread=(10, 25, 90, 0))
    ran = bench.run(positions=100, only=[1, 0, 3, 2], unread_rows=12)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(13, 12), (13, 12), (13, 11)]
    assert [step.attended for step in ran.steps] == [12 * 6.0, 12 * 18.0, 10 * (23 + 5.0) + 1 * (10 + 0.5)]
    assert [each.num_read for each in ran.sequences] == [25, 10, 0, 1]
    bench.check_kv()


def test_rows_go_to_the_first_prompt_until_it_is_complete() -> None:
    plains = [long_plain(33), long_plain(25), long_plain(100), plain(0)]
    bench = Bench(plains, unread=(10, 25, 90, 0))
    ran = bench.run(positions=100, only=[2, 3, 1, 0], unread_rows=12)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(13, 12)] * 7 + [(13, 11)]
    assert [each.num_read for each in ran.sequences] == [90, 0, 6, 0]
    assert [len(each.token_ids) for each in ran.sequences] == [1, 8, 0, 0]
    again = bench.run(positions=100, only=[3, 1, 0], unread_rows=12)
    assert [step.attended for step in again.steps] == [12 * (6 + 6.0), 6 * (18 + 3.0) + 5 * (23 + 2.5)]
    assert [each.num_read for each in again.sequences] == [0, 19, 5]
    bench.check_kv()


def test_two_prompts_may_come_to_their_ends_in_one_step() -> None:
    plains = [long_plain(33), long_plain(25)]
    bench = Bench(plains, unread=(33, 25))
    ran = bench.run(unread_rows=58)
    assert [(step.rows, step.prefill_rows, step.attended) for step in ran.steps] == [(58, 56, 32 * 16.0 + 24 * 12.0)]
    assert [len(each.token_ids) for each in ran.sequences] == [1, 1]
    bench.check_kv()


@pytest.mark.parametrize(
    ("unread_rows", "nodes", "prompt_rows"),
    [
        (9, 0, 9), (9, 3, 6), (9, 4, 5), (9, 5, 5), (9, 12, 5), (10, 4, 6), (10, 5, 5), (10, 6, 5), (1, 1, 1),
        (1, 12, 1), (2, 1, 1), (2, 12, 1), (3, 12, 2), (40, 12, 28),
    ],
)  # fmt: skip
def test_draft_nodes_take_the_place_of_half_of_the_prompt_at_most(
    unread_rows: int, nodes: int, prompt_rows: int
) -> None:
    plains = [plain(0), long_plain(100)]
    bench = Bench(plains, unread=(0, 100))
    bench.live[0].most_nodes = nodes
    ran = bench.run(drafter_of(script(plains, ["wrong"])), unread_rows=unread_rows, max_steps=1)
    assert ran.sequences[0].records == ((nodes, nodes, 0, 1),)
    assert (ran.steps[0].rows, ran.steps[0].prefill_rows) == (1 + nodes + prompt_rows, prompt_rows)
    assert ran.sequences[1].num_read == prompt_rows
    bench.check_kv()


def test_nodes_of_all_sequences_count_together() -> None:
    plains = [plain(0), long_plain(100), plain(2)]
    bench = Bench(plains, unread=(0, 100, 0))
    bench.live[0].most_nodes, bench.live[2].most_nodes = 3, 4
    ran = bench.run(drafter_of(script(plains, ["wrong"])), unread_rows=20, max_steps=1)
    assert (ran.steps[0].rows, ran.steps[0].prefill_rows) == (2 + 7 + 13, 13)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_nodes_leave_room_for_the_prompt(room: int) -> None:
    """12 are offered. Of the rows of a step all roots and the prompt's come first."""
    plains = [plain(0), plain(2), long_plain(100)]
    bench = Bench(plains, unread=(0, 0, 100))
    bench.live[1].is_drafted = False
    ran = bench.run(drafter_of(script(plains, ["wrong"])), unread_rows=16, step_rows=18 + room, max_steps=1)
    assert ran.sequences[0].records == ((12, room, 0, 1),)
    assert (ran.steps[0].rows, ran.steps[0].prefill_rows) == (18, 16 - room)


def test_the_rows_of_prompts_do_not_count_for_what_nodes_cost() -> None:
    """A root and three nodes are as cheap as it gets, further ones cost; those of a prompt change nothing about it."""
    for unread in (0, 100):
        plains = [plain(0), long_plain(100)]
        bench = Bench(plains, unread=(0, unread))
        drafter = drafter_of(script(plains, ["right"]))
        only = [0, 1] if unread else [0]
        ran = bench.run(drafter, only=only, unread_rows=20, cost_table={4: 1.0, 5: 1e6, 512: 1e9}, max_steps=1)
        assert ran.sequences[0].records[0].verified == 3


# --- Where the blocks end ---


def saved(bench: Bench) -> npt.NDArray[np.uint8]:
    """All blocks of the cache."""
    kv = bench.runner._kv
    data = np.empty((kv.num_blocks, kv.block_nbytes), np.uint8)
    for block in range(kv.num_blocks):
        kv.save(block, data[block])
    return data


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize(("chunk", "rows"), [(8, [8, 8, 5]), (21, [21]), (50, [21]), (7, [7, 7, 7]), (20, [20, 1])])
@pytest.mark.parametrize("others", [0, 2])
def test_a_prompt_is_computed_as_far_as_its_blocks_go(
    others: int, chunk: int, rows: list[int], kv_dtype: str
) -> None:
    """20 positions in blocks of 7, for a prompt of 90 of which 7 are computed."""
    plains = [long_plain(90, 0.0, kv_dtype), *(plain(i, 0.0, kv_dtype) for i in range(others))]
    bench = Bench(plains, kv_dtype, unread=(83, *[0] * others))
    before = saved(bench)
    ran = bench.run(positions={0: 20, 1: 40, 2: 40}, unread_rows=chunk)
    assert ran.error is None and [step.prefill_rows for step in ran.steps] == rows
    assert [step.rows for step in ran.steps] == [others + n for n in rows]
    assert ran.sequences[0].num_read == 21 and ran.sequences[0].token_ids == ()
    assert not ran.sequences[0].has_ended and not ran.sequences[0].has_failed
    written = set(np.flatnonzero((saved(bench) != before).any(axis=1)).tolist())
    tables = [bench.runner.blocks.block_table(seq_id) for seq_id in range(len(plains))]
    assert written == {*tables[0][1:], *(block for table in tables[1:] for block in table if block in written)}
    assert len(tables[0]) == 4
    bench.check_kv()
    bench.decode(10, unread_rows=chunk)
    bench.check_kv()


def test_rows_left_over_where_blocks_end_go_to_the_next_prompt() -> None:
    """The first has 6 positions left in a block of 7, the second 70."""
    bench = Bench([long_plain(90), long_plain(33)], unread=(82, 33))
    ran = bench.run(positions={0: 1, 1: 64}, unread_rows=20)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(20, 20)]
    assert [each.num_read for each in ran.sequences] == [6, 14]
    bench.check_kv()


def test_a_root_that_finds_no_position_waits() -> None:
    """Of 21 tokens 20 fit in blocks of 4: nothing is emitted, and the next run needs a step for the root."""
    bench = Bench([plain(5), plain(0)], block_size=4, unread=(21, 0))
    ran = bench.run(positions={0: 20, 1: 40}, unread_rows=30)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(21, 20)]
    assert ran.sequences[0].num_read == 20 and ran.sequences[0].token_ids == ()
    bench.check_kv()
    ran = bench.run(unread_rows=30)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(2, 0)]
    assert ran.sequences[0].num_read == 1 and len(ran.sequences[0].token_ids) == 1
    bench.check_kv()


def test_a_root_that_takes_the_last_position_is_enough() -> None:
    bench = Bench([long_plain(28)], block_size=7, unread=(28,))
    ran = bench.run(positions=28, unread_rows=30)
    assert ran.sequences[0].num_read == 28 and len(ran.sequences[0].token_ids) == 1
    bench.check_kv()


@pytest.mark.parametrize("place", [0, 1])
def test_no_step_begins_where_a_prompt_has_no_position(place: int) -> None:
    """Of two prompts one has all its blocks full. Nobody would compute the second one in the first step."""
    decoder = native_model("float32").decoder
    of_each = [RunSequence(24, 5, 9, (), unread=[5] * 16) for _ in range(2)]
    tables: list[Sequence[int]] = [(0, 1, 2), (3, 4, 5)]
    tables[place] = tables[place][:1]  # 8 positions, as many as are computed
    terms = RunTerms(VOCAB, 8, FREE, unread_rows=4, max_steps=3)
    ran = decoder.run(decoder.new_kv(6, 8, "float32"), tables, of_each, terms, nobody)
    assert ran.error is None and ran.steps == () and [each.num_read for each in ran.sequences] == [0, 0]


def nobody(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
    raise AssertionError


# --- The first token ---


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_who_asks_is_asked_for_the_first_token(place: int, temperature: float) -> None:
    """Once; nothing is asked before. The bench looks at the logits."""
    plains = [plain(0, temperature), plain(2, temperature), plain(4, temperature)]
    unread = [0, 0, 0]
    unread[place] = len(plains[place].prompt)
    bench = Bench(plains, unread=unread)
    bench.live[place].asks = True
    ran = bench.run(unread_rows=3)
    assert len(ran.steps) == math.ceil(len(plains[place].prompt) / 3)
    asked = [asked for asked in bench.chosen if asked[0] == place]
    assert asked == [(place, len(plains[place].prompt))]
    bench.decode(10, drafter_of(script(plains)))
    assert len([who for who, _ in bench.chosen if who == place]) == 11
    bench.check_kv()


def test_a_first_token_too_near_another_to_tell_is_left_to_the_caller() -> None:
    prompt = plain(2).prompt
    logits = plain(2).after(13)[:VOCAB].copy()
    seed = next(seed for seed in range(10**5) if len(find_rivals(logits, None, 1.0, seed, 13)) > 1)
    bench = Bench([Plain(plain_model("float32"), prompt, 1.0, seed, VOCAB)], unread=(13,))
    bench.run(unread_rows=5)
    assert bench.chosen == [(0, 13)]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("is_end", [False, True])
def test_an_end_id_as_first_token_ends_the_sequence(is_end: bool, asks: bool) -> None:
    bench = Bench([plain(0), plain(2)], unread=(0, 13))
    first = plain(2).tokens(14)[-1]
    assert first not in plain(0).tokens(20)[5:]
    bench.live[1].end_ids = (VOCAB + 3, first if is_end else (first + 1) % VOCAB)
    bench.live[1].asks = asks
    ran = bench.run(unread_rows=4)
    assert len(ran.steps) == 4 and ran.sequences[1].token_ids == (first,)
    assert [each.has_ended for each in ran.sequences] == [False, is_end]


@pytest.mark.parametrize("tokens_left", [1, 2])
@pytest.mark.parametrize("asks", [False, True])
def test_the_only_token_ends_the_sequence(asks: bool, tokens_left: int) -> None:
    bench = Bench([plain(0), plain(2)], unread=(0, 13))
    bench.live[1].tokens_left, bench.live[1].asks = tokens_left, asks
    ran = bench.run(unread_rows=4)
    assert [len(each.token_ids) for each in ran.sequences] == [4, 1]
    assert [each.has_ended for each in ran.sequences] == [False, tokens_left == 1]


@pytest.mark.parametrize("answer", [-1, -(2**31), VOCAB, None])
def test_a_first_token_that_cannot_be_chosen(answer: int | None) -> None:
    """It fails its sequence, whose prompt is computed all the same; the other goes on to the end of the step."""
    decoder, places = native_model("float32").decoder, list[tuple[int, int]]()
    of_each = [RunSequence(3, 4, 9, ()), RunSequence(6, 4, 9, (), unread=(9, 8, 7, 6, 5, 4), asks=True)]

    def choose(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
        places.append((place, len(new)))
        if answer is None:
            raise MemoryError
        return answer, False

    terms = RunTerms(VOCAB, 8, FREE, unread_rows=4, max_steps=9)
    ran = decoder.run(decoder.new_kv(6, 8, "float32"), [(0, 1), (4, 2)], of_each, terms, choose)
    assert ran.error is None and places == [(1, 0)]
    assert [each.has_failed for each in ran.sequences] == [False, True]
    assert [len(each.token_ids) for each in ran.sequences] == [2, 0]
    assert [each.num_read for each in ran.sequences] == [0, 6] and not ran.sequences[1].has_ended
    assert ran.sequences[1].records == ((0, 0, 0, 0),) * 2
    assert (ran.sequences[1].calibration, ran.sequences[1].verified) == (1.0, 0.0)


# --- Drafting, and what is learned ---


@pytest.mark.parametrize("is_drafted", [False, True])
def test_nothing_is_drafted_for_who_reads(is_drafted: bool) -> None:
    """The drafter learns of its first token, if it is to draft after that, and before that nothing."""
    plains = [plain(0), long_plain(33), plain(2)]
    bench, drafter = Bench(plains, unread=(0, 33, 0)), drafter_of(script(plains, ["wrong"]))
    bench.live[1].is_drafted = is_drafted
    ran = bench.run(drafter, unread_rows=18, top_tokens=3)
    assert len(ran.steps) == 4
    assert [call.handle for call in drafter.named("draft")] == [0, 2] * 4
    assert (ran.num_trees, ran.num_empty_trees) == (8, 0)
    commits = [call.told for call in drafter.named("commit") if call.handle == 1]
    remembered = [call.told for call in drafter.named("remember") if call.handle == 1]
    logits = np.ascontiguousarray(plains[1].after(33)[:VOCAB])
    assert commits == ([(33, ran.sequences[1].token_ids)] if is_drafted else [])
    assert remembered == ([(33, (tuple(find_largest(logits, 3)),))] if is_drafted else [])
    assert len(drafter.named("learn")) == 4
    assert len([call for call in drafter.named("commit") if call.handle != 1]) == 8


def test_a_run_of_prompts_alone_asks_for_no_tree() -> None:
    plains = [long_plain(33), long_plain(25)]
    bench, drafter = Bench(plains, unread=(33, 25)), drafter_of(script(plains))
    for each in bench.live:
        each.is_drafted = False
    ran = bench.run(drafter, unread_rows=18)
    assert ran.num_trees == 0 and {call.name for call in drafter.calls} == {"learn"}


@pytest.mark.parametrize("calibration", [0.3, 1.0, 1.7])
def test_a_first_token_teaches_what_it_teaches_the_verifier(calibration: float) -> None:
    """And the steps before it nothing."""
    calibrator, sequence = Calibrator(), make_sequence(range(33))
    calibrator.prior = 0.9
    sequence.calibration, sequence.verified = calibration, 2.5
    planned = Candidate(sequence, 33, None, math.inf).chunk(33)
    calibrator.learn(planned, VerifyOutcome((7,), ()))
    plains = [long_plain(33), long_plain(90)]
    bench = Bench(plains, unread=(33, 90))
    for each in bench.live:
        each.calibration, each.verified = calibration, 2.5
    ran = bench.run(drafter_of(script(plains)), unread_rows=8, prior=0.9)
    assert len(ran.steps) == 5 and ran.prior == calibrator.prior
    assert ran.sequences[0].calibration == pytest.approx(sequence.calibration, rel=1e-12)
    assert (ran.sequences[0].calibration == 1.0) == (calibration == 1.0)
    assert ran.sequences[0].verified == sequence.verified
    assert (ran.sequences[1].calibration, ran.sequences[1].verified) == (calibration, 2.5)


def test_who_decodes_learns_beside_a_prompt_what_it_learns_alone() -> None:
    """Also where it comes after the prompt, and while steps have as many rows for nodes."""
    learned = list[tuple[tuple[object, ...], ...]]()
    for unread in (0, 100):
        plains = [long_plain(100), plain(0), plain(2)]
        bench = Bench(plains, unread=(unread, 0, 0))
        drafter = drafter_of(script(plains, ["partly", "branched", "bushy"]))
        only = [0, 1, 2] if unread else [1, 2]
        terms = {"unread_rows": 10, "step_rows": 512, "cost_table": STAIRS, "max_steps": 8, "prior": 0.8}
        ran = bench.run(drafter, positions=150, only=only, **terms)
        learned.append((tuple((e.calibration, e.verified, e.records) for e in ran.sequences[-2:]), (ran.prior,)))
        assert len(ran.steps) == 8 and ran.prior != 0.8
    assert learned[0] == learned[1]


# --- The end of a run ---


def test_a_second_run_goes_on_where_the_first_ended() -> None:
    """It computes what is left, and no token again."""
    plains = [plain(0, 0.7), long_plain(100, 0.7)]
    bench = Bench(plains, unread=(0, 100))
    attended = list[float]()
    for left in (100, 76, 52, 28, 4):
        assert bench.live[1].unread == left
        ran = bench.run(positions=100, unread_rows=12, max_steps=2)
        attended += [step.attended for step in ran.steps]
    assert attended == [12 * (12 * i + 6.0) for i in range(8)] + [3 * (96 + 1.5)]
    assert len(ran.steps) == 1 and len(ran.sequences[1].token_ids) == 1
    ran = bench.run(positions=100, unread_rows=12, max_steps=3)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(2, 0)] * 3
    bench.check_kv()


def test_a_stop_before_the_run() -> None:
    bench, drafter = Bench([plain(0), plain(2)], unread=(0, 13)), drafter_of(script([plain(0), plain(2)]))
    ran = bench.run(drafter, unread_rows=4, stop=ctypes.c_int32(1))
    assert ran.steps == () and not drafter.calls and ran.error is None
    assert [(each.num_read, each.token_ids) for each in ran.sequences] == [(0, ())] * 2
    bench.check_kv()


def test_a_stop_within_a_run() -> None:
    stop = ctypes.c_int32()
    plains = [plain(0), long_plain(90)]

    def stop_in_the_third(_: object) -> bool:
        stop.value = len(drafter.named("learn")) >= 3
        return False

    drafter = drafter_of(script(plains, ["none"]), fails=stop_in_the_third)
    bench = Bench(plains, unread=(0, 90))
    ran = bench.run(drafter, positions=90, unread_rows=4, stop=stop)
    assert len(ran.steps) == 3 and ran.sequences[1].num_read == 12
    bench.check_kv()


@pytest.mark.parametrize(("max_steps", "num_read"), [(0, 0), (1, 4), (3, 12), (4, 13)])
def test_the_most_steps(max_steps: int, num_read: int) -> None:
    bench = Bench([plain(0), plain(2)], unread=(0, 13))
    ran = bench.run(unread_rows=4, max_steps=max_steps)
    assert len(ran.steps) == max_steps and ran.sequences[1].num_read == num_read
    assert [len(each.token_ids) for each in ran.sequences] == [max_steps, int(num_read == 13)]
    bench.check_kv()


def test_who_decodes_may_end_while_another_reads() -> None:
    bench = Bench([plain(0), long_plain(90)], unread=(0, 90))
    bench.live[0].tokens_left = 3
    ran = bench.run(positions=100, unread_rows=4)
    assert [each.has_ended for each in ran.sequences] == [True, False]
    assert len(ran.steps) == 3 and ran.sequences[1].num_read == 12
    bench.check_kv()


def test_a_drafter_that_fails_takes_nothing_back_of_a_prompt() -> None:
    """Before the third step's rows, and after those of the second."""
    for name, num_read in (("draft", 8), ("commit", 12)):
        plains = [plain(0), long_plain(90)]
        drafter = drafter_of(script(plains, ["none"]), fails=lambda call, name=name: fails(call, name))

        def fails(call: object, name: str) -> bool:
            return len(drafter.named(name)) == 3  # noqa: B023

        bench = Bench(plains, unread=(0, 90))
        ran = bench.run(drafter, positions=90, unread_rows=4)
        assert ran.drafter_failed and ran.sequences[1].num_read == num_read
        bench.check_kv()
