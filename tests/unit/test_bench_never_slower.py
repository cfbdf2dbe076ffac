"""The benchmark of speculation on against off: what runs in each cell, and the table that comes of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.never_slower import run
from benchmarks.never_slower.cells import Pair, Plan, make_requests, run_round, summary, tokens_per_s
from benchmarks.peers.peer import Reply
from benchmarks.peers.tasks import Request
from benchmarks.peers.treeserve import OFF, ON

PROMPTS = {task: [(100 * t + i,) for i in range(4)] for t, task in enumerate(("chat", "code"))}


def replies(seconds: float, count: int = 2, tokens: int = 10, task: str = "chat", steps: int = 5) -> tuple[Reply, ...]:
    """One after the other, each in so many seconds."""
    begins = [i * seconds for i in range(count)]
    return tuple(Reply(task, b, b + 0.1, b + seconds, tokens, tuple(range(tokens)), steps) for b in begins)


def test_no_two_requests_of_a_cell_are_the_same() -> None:
    requests = make_requests("chat", PROMPTS["chat"], 32, first=6, max_tokens=8)
    assert len(requests) == 32 and {r.task for r in requests} == {"chat"}
    assert len({(r.token_ids, r.temperature, r.seed) for r in requests}) == 32
    assert {r.token_ids for r in requests} == set(PROMPTS["chat"])
    assert len({r.max_tokens for r in requests[:8]}) > 4, "or those that began together would end together"
    assert sum(r.max_tokens for r in requests[:20]) == 20 * 8
    first = make_requests("chat", PROMPTS["chat"], 4, first=0, max_tokens=8)
    assert [r.temperature > 0 for r in first] == [False, True, False, True]  # greedy and sampled
    assert all(r.temperature > 0 for r in requests)  # prompts that were asked before


def test_a_round_pairs_on_and_off_in_every_cell() -> None:
    ran: list[tuple[str, str, int, tuple[Request, ...]]] = []

    def generate(system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        ran.append((system, requests[0].task, concurrency, tuple(requests)))
        seconds = 1.0 if system == ON else 2.0
        begins = [i * seconds for i in range(len(requests))]
        return [Reply("chat", began, began + 0.1, began + seconds, 8, (1,), 4) for began in begins]

    plan = Plan(concurrencies=(1, 3), rounds=2, least_requests=2, max_tokens=8)
    pairs = run_round(plan, 1, PROMPTS, generate, random.Random(0))
    assert {(p.concurrency, p.task) for p in pairs} == {(c, t) for c in (1, 3) for t in PROMPTS}
    assert {p.ratio for p in pairs} == {2.0}
    for first, second in zip(ran[::2], ran[1::2], strict=True):
        assert {first[0], second[0]} == {ON, OFF}
        assert first[1:] == second[1:]  # the same requests, one after the other
        assert len(first[3]) == first[2] + max(first[2], 2), "as many as run at once end while as many others run"
    for seed in range(8):
        run_round(plan, 0, PROMPTS, generate, random.Random(seed))
    begins = [system for system, *_ in ran[::2]]
    assert 0.3 < begins.count(ON) / len(begins) < 0.7


def test_the_table_has_medians_the_worst_cell_and_those_that_are_slower() -> None:
    pairs = [Pair(8, "chat", replies(s), replies(1.0)) for s in (0.5, 1.25, 1.0)]  # ratios 2, 0.8, 1
    pairs += [Pair(8, "code", replies(2.0), replies(1.0)), Pair(1, "chat", replies(1.0), replies(1.1))]
    result = summary(pairs)
    assert result["on_over_off"] == {"1": {"chat": pytest.approx(1.1)}, "8": {"chat": 1.0, "code": 0.5}}
    assert result["spread"]["8"]["chat"] == [0.8, 2.0]
    assert result["worst"] == {"concurrency": 8, "task": "code", "on_over_off": 0.5}
    assert [cell["task"] for cell in result["slower"]] == ["code"]
    assert result["tokens_per_s"]["on"]["8"]["code"] == 5.0
    assert result["tokens_per_step"]["8"]["code"] == 2.0
    assert result["on_equals_off"] == 1.0
    json.dumps(result)
    console = Console(record=True, width=120)
    run.show(result, console)
    assert "under 0.98: 1 of 3" in console.export_text()


def test_throughput_is_that_of_the_time_in_which_as_many_ran_as_should() -> None:
    def reply(began: float, ended: float) -> Reply:
        return Reply("chat", began, began + 0.1, ended, 10, (1,), 5)

    even = [reply(0.0, 1.0), reply(0.0, 1.0), reply(1.0, 2.0), reply(1.0, 2.0)]
    assert tokens_per_s(even) == 20.0
    uneven = [reply(0.0, 0.5), reply(0.0, 1.5), reply(0.5, 1.0), reply(1.0, 9.0)]  # the last one ran alone for long
    assert tokens_per_s(uneven) == pytest.approx(10 + 10 / 1.5 + 10)


def test_tokens_that_differ_are_seen() -> None:
    other = tuple(replace(reply, token_ids=(9,) * 10) for reply in replies(1.0))
    assert summary([Pair(1, "chat", replies(1.0), other)])["on_equals_off"] == 0.0


def test_the_full_plan_covers_one_to_thirty_two() -> None:
    plan = run.parse_options([]).plan
    assert plan.concurrencies == (1, 2, 4, 8, 16, 32) and plan.rounds >= 3
    assert run.parse_options(["--quick"]).plan == run.QUICK
    assert run.parse_options(["--rounds", "7"]).plan.rounds == 7
    for wrong in (["--rounds", "0"], ["--treeserve-set", "x"]):
        with pytest.raises(SystemExit):
            run.parse_options(wrong)
