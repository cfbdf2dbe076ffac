"""The chaos benchmark's own judgement: each kind of damage is seen and counted, and times of silence are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import probe, run
from benchmarks.chaos.disturbances import FULL, SHORT
from benchmarks.chaos.probe import Holdings, RouterCounters
from benchmarks.chaos.run import Outcome
from benchmarks.chaos.traffic import Trace
from benchmarks.chaos.verdict import judge, recovery_ms
from benchmarks.chaos.workload import cases
from benchmarks.peers.peer import Settings
from treeserve_client.types import Completion, SpeculationStats, Timing, Usage

SETTINGS = Settings("m.gguf", "m", "cache", "tools", 1, 4096, 8)
TOKENS = (5, 6, 7, 8)
EXPECTED = Completion(
    TOKENS, "text", (), "length", None, Usage(3, 4), SpeculationStats(), Timing(ttft_ms=1.0, tpot_ms=1.0, e2e_ms=4.0)
)


def trace(token_ids: tuple[int, ...] = TOKENS, completion: Completion | None = EXPECTED, **changes: Any) -> Trace:
    return Trace(cases(1, (4, 4))[0], token_ids=list(token_ids), completion=completion, **changes)


def counts(*traces: Trace) -> dict[str, int]:
    verdict = judge(traces, {0: EXPECTED})
    names = ("wrong", "lost", "duplicated", "hung", "failed")
    return {name: count for name in names if (count := getattr(verdict, name))}


def test_an_undisturbed_output_is_clean() -> None:
    assert judge([trace(), trace()], {0: EXPECTED}).is_clean
    other_speed = replace(EXPECTED, timing=Timing(9.0, 9.0, 9.0), speculation=SpeculationStats(steps=1))
    assert counts(trace(completion=other_speed)) == {}


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (trace((5, 9, 9, 8)), {"wrong": 2}),
        (trace((5, 6)), {"lost": 2}),
        (trace((5, 6, 7, 8, 9)), {"duplicated": 1}),
        (trace(repeated=3), {"duplicated": 3}),
        (trace(skipped=2), {"lost": 2}),
        (trace((5,), None, error="Unavailable: gone"), {"lost": 3, "failed": 1}),
        (trace((), None, hung=True), {"lost": 4, "hung": 1}),
        (trace(completion=replace(EXPECTED, text="tex")), {"wrong": 1}),
        (trace(completion=replace(EXPECTED, finish_reason="stop")), {"wrong": 1}),
        (trace(completion=replace(EXPECTED, usage=Usage(3, 5))), {"wrong": 1}),
    ],
)
def test_damage_is_counted(damaged: Trace, expected: dict[str, int]) -> None:
    assert counts(trace(), damaged) == expected
    assert not judge([damaged], {0: EXPECTED}).is_clean


def test_silence_is_the_longest_that_begins_soon_after_a_disturbance() -> None:
    running = trace(began=0.0, ended=60.0, arrivals=[1.0, 9.9, 10.1, 12.0, 15.0, 16.0, 40.0])
    assert running.silence_s(10.0) == pytest.approx(3.0)
    assert running.silence_s(2.0) == pytest.approx(7.9)
    assert running.silence_s(45.0) == pytest.approx(15.0)
    assert running.silence_s(60.0) is None
    assert trace(began=20.0, ended=30.0).silence_s(10.0) is None


def test_recovery_is_reported_by_kind() -> None:
    fast, slow = (
        trace(began=0.0, ended=30.0, arrivals=[at for at in range(30) if at not in gap]) for gap in ([], [11])
    )
    table = recovery_ms([fast, slow], [("kill router", 10.0), ("kill router", 20.0), ("pause valkey", 20.0)])
    assert table["kill router"] == {"times": 2, "streams": 4, "p50": 1000.0, "max": 2000.0}
    assert table["pause valkey"] == {"times": 1, "streams": 2, "p50": 1000.0, "max": 1000.0}


@pytest.mark.parametrize(
    ("held", "exit_status"), [(Holdings(0, 0), 0), (Holdings(sequences=0, blocks=3), 1), (Holdings(1, blocks=0), 1)]
)
def test_a_run_fails_if_a_verifier_holds_anything_at_the_end(
    held: Holdings, exit_status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recovery = {"kill router": {"times": 1, "streams": 0, "p50": 0.0, "max": 0.0}}

    async def ran(_base: object, _plan: object) -> Outcome:
        return Outcome(judge([trace()], {0: EXPECTED}), recovery, (Holdings(0, 0), held), {})

    monkeypatch.setattr(run, "_run", ran)
    monkeypatch.setattr(run, "make_settings", lambda threads, max_batch: SETTINGS)
    assert run.main(["--quick", "--json", str(tmp_path / "chaos.json")]) == exit_status


async def test_counters_survive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([2.0, 5.0, 1.0])
    monkeypatch.setattr(probe, "_fetch", lambda _url: f"treeserve_router_replays_total {next(values)}\nother 9\n")
    counters = RouterCounters(["a"])
    for _ in range(3):
        await counters.read()
    assert counters.totals == {"treeserve_router_replays_total": 6}


def test_the_workload_is_mixed_and_always_the_same() -> None:
    first, second = cases(300, (16, 64)), cases(300, (16, 64))
    assert first == second
    for name in ("top_p", "top_k", "repetition_penalty", "presence_penalty", "stop", "top_log_probs", "session_id"):
        assert 10 < sum(name in case.params for case in first) < 290
    assert len({case.params["temperature"] for case in first}) >= 5
    assert {16 <= (case.params["max_tokens"] or 0) <= 64 for case in first} == {True}


def test_every_role_is_disturbed_in_every_way_that_it_can_be() -> None:
    assert {each.kind for each in FULL} == {
        f"{action} {role}"
        for action in ("kill", "drain", "pause")
        for role in ("verifier", "speculator", "router", "valkey")
        if (action, role) != ("drain", "valkey")
    }
    assert {each.kind for each in SHORT} < {each.kind for each in FULL}
