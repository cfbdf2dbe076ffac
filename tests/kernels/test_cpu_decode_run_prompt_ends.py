"""Runs of decode steps that compute prompts, too: where blocks end, first tokens, drafters, and the end of a run."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from support.decode_runs import Call, Plain
from support.run_bench import (
    FREE,
    STAIRS,
    VOCAB,
    Bench,
    drafter_of,
    long_plain,
    native_model,
    nobody,
    plain,
    plain_model,
    script,
)
from support.sequences import make_sequence

from treeserve_core.outcome import VerifyOutcome
from treeserve_kernels.cpu.decode_run import RunSequence, RunTerms
from treeserve_kernels.cpu.library import is_built
from treeserve_kernels.cpu.sampling import find_largest, find_rivals
from treeserve_verifier.calibration import Calibrator
from treeserve_verifier.step_plan import Candidate

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")


# --- Where the blocks end ---


def saved(bench: Bench) -> npt.NDArray[np.uint8]:
    """All blocks of the cache."""
    kv, count = bench.runner._kv, bench.runner.blocks.total_blocks
    data = np.empty((count, kv.block_nbytes), np.uint8)
    for block in range(count):
        kv.save(block, data[block])
    return data


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize(("chunk", "rows"), [(8, [8, 8, 5]), (21, [21]), (50, [21]), (7, [7, 7, 7]), (20, [20, 1])])
@pytest.mark.parametrize("others", [0, 2])
def test_a_prompt_is_computed_as_far_as_its_blocks_go(others: int, chunk: int, rows: list[int], kv_dtype: str) -> None:
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
    assert remembered == ([(33, (tuple(find_largest(logits, 3) or ()),))] if is_drafted else [])
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

    def stop_in_the_third(call: Call) -> bool:
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


@pytest.mark.parametrize(("name", "num_read"), [("draft", 8), ("commit", 12), ("learn", 12)])
def test_a_drafter_that_fails_takes_nothing_back_of_a_prompt(name: str, num_read: int) -> None:
    """Its third call: before the rows of the third step, or after them."""
    plains = [plain(0), long_plain(90)]

    def fails(call: Call) -> bool:
        return call.name == name and len(drafter.named(name)) == 3

    drafter = drafter_of(script(plains, ["none"]), fails=fails)
    bench = Bench(plains, unread=(0, 90))
    ran = bench.run(drafter, positions=90, unread_rows=4)
    assert ran.drafter_failed and ran.sequences[1].num_read == num_read
    bench.check_kv()


def test_others_find_what_was_read_by_its_tokens() -> None:
    """Of a prompt 60 tokens are read, then all: whole blocks of 7 are found by those who begin with the same tokens."""
    each = long_plain(90)
    bench, other = Bench([each], unread=(90,)), [*each.prompt[:50], (each.prompt[50] + 1) % VOCAB, *each.prompt[51:]]
    blocks = bench.runner.blocks
    blocks.free(0)
    blocks.add(0, each.prompt, "tenant")
    bench.run(positions=90, unread_rows=20, max_steps=3)
    assert [blocks.add(i, tokens, "tenant") for i, tokens in enumerate((each.prompt, other), 1)] == [56, 49]
    bench.run(positions=90, unread_rows=20)
    bench.run(positions=20, max_steps=9)
    assert blocks.add(3, each.tokens(120), "tenant") == 98  # of 90 and 9
    bench.check_kv()
