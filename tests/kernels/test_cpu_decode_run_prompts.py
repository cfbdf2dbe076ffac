"""Runs of decode steps that compute prompts, too: the same tokens in the same rows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
from support.run_bench import (
    Bench,
    drafter_of,
    long_plain,
    plain,
    script,
)

from treeserve_kernels.cpu.decode_run import Ran
from treeserve_kernels.cpu.library import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


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
    ran = bench.run(drafter, positions=220, max_steps=2, step_rows=999, unread_rows=2 * chunk)
    nodes = [each.records[0].verified for each in ran.sequences]
    assert ran.error is None and min(nodes[0], nodes[2]) >= 64
    assert ran.steps[0].rows == 2 + sum(nodes) + min(200, max(chunk, 2 * chunk - sum(nodes)))
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
        before: by sequence, as they were; of those who decode the room matters.
    """
    reading = [seq_id for seq_id in order if before[seq_id].left]
    results = dict(zip(order, ran.sequences, strict=True))
    verified = [sum(each.records[i].verified for each in ran.sequences) for i in range(len(ran.steps))]
    for seq_id in set(order) - set(reading):
        emitted = [0, *accumulate(record.emitted for record in results[seq_id].records)]
        most = min([most, *(i for i, count in enumerate(emitted) if count >= before[seq_id].room)])
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
        positions = {i: rng.choice([1, 10, 120] if bench.live[i].unread else [40, 50]) for i in order}
        before = dict[int, Reader]()
        for i, live in enumerate(bench.live):
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
    """The second of the bench comes first. Of the third nothing is computed."""
    plains = [long_plain(33), long_plain(25), long_plain(100), plain(0)]
    bench = Bench(plains, unread=(20, 25, 90, 0))
    ran = bench.run(positions=100, only=[1, 0, 3, 2], unread_rows=12)
    assert [(step.rows, step.prefill_rows) for step in ran.steps] == [(13, 12), (13, 12), (13, 11)]
    assert [step.attended for step in ran.steps] == [12 * 6.0, 12 * 18.0, 11 * (13 + 5.5)]
    assert [each.num_read for each in ran.sequences] == [25, 11, 0, 0]
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
