"""Traces: their files, and what is drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.arrivals import CONVERSATIONS, MIXED, Arrivals, Pattern, draw_trace
from treeserve_simulator.trace import TraceRequest, read_trace, write_trace


def test_a_file_holds_what_was_written_in_order_of_arrival(tmp_path: Path) -> None:
    later = TraceRequest(2.5, 10, 20, ServiceClass.BATCH, "acme", "code", "s1")
    sooner = TraceRequest(1.0, 3, 4)
    write_trace(tmp_path / "t.jsonl", [later, sooner])
    assert read_trace(tmp_path / "t.jsonl") == [sooner, later]


def test_fields_of_a_measured_run_are_left_alone_and_defaults_hold(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('\n{"at_s": 0, "prompt_tokens": 5, "output_tokens": 6, "ttft_ms": 7.5}\n')
    assert read_trace(tmp_path / "t.jsonl") == [TraceRequest(0.0, 5, 6)]


def test_null_is_as_if_the_field_were_not_there() -> None:
    line = {"at_s": 0, "prompt_tokens": 5, "output_tokens": 6, "tenant": None, "kind": None, "session": None}
    assert TraceRequest.from_json(line) == TraceRequest(0.0, 5, 6)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"at_s": 0, "prompt_tokens": 5}',
        '{"at_s": -1, "prompt_tokens": 5, "output_tokens": 6}',
        '{"at_s": 0, "prompt_tokens": 0, "output_tokens": 6}',
        '{"at_s": 0, "prompt_tokens": 5, "output_tokens": 6, "service_class": "royal"}',
        '{"at_s": "soon", "prompt_tokens": 5, "output_tokens": 6}',
    ],
)
def test_a_line_without_sense_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(InvalidArgumentError):
        read_trace(tmp_path / "t.jsonl")


def test_a_refusal_names_the_field() -> None:
    line = {"at_s": 0, "prompt_tokens": 5, "output_tokens": 6}
    with pytest.raises(InvalidArgumentError) as refused:
        TraceRequest.from_json({**line, "service_class": "royal"})
    known = "realtime, interactive, standard, batch"
    assert str(refused.value) == f"service_class: 'royal' is none of {known}"
    with pytest.raises(InvalidArgumentError, match=r"^prompt_tokens: is missing$"):
        TraceRequest.from_json({"at_s": 0})
    assert TraceRequest.from_json({**line, "service_class": "Batch"}).service_class is ServiceClass.BATCH


def test_a_session_has_as_many_characters_as_a_verifier_takes() -> None:
    assert TraceRequest(0.0, 5, 6, session="s" * 128).session == "s" * 128
    with pytest.raises(InvalidArgumentError, match=r"^session: has more than 128 characters$"):
        TraceRequest(0.0, 5, 6, session="s" * 129)


def test_a_character_that_python_takes_for_a_line_end_does_not_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 6, "session": "a\u2028b"}\n')
    assert read_trace(tmp_path / "t.jsonl") == [TraceRequest(0.0, 5, 6, session="a\u2028b")]


def test_a_file_without_requests_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(InvalidArgumentError, match="holds no request"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize("pattern", list(Pattern))
def test_the_same_seed_draws_the_same_trace(pattern: Pattern) -> None:
    arrivals = Arrivals(200, 5.0, pattern=pattern, peak=2.0)
    assert draw_trace(arrivals, 7) == draw_trace(arrivals, 7)
    assert draw_trace(arrivals, 7) != draw_trace(arrivals, 8)


@pytest.mark.parametrize("pattern", list(Pattern))
def test_every_pattern_has_the_stated_mean_rate(pattern: Pattern) -> None:
    trace = draw_trace(Arrivals(20_000, 10.0, pattern=pattern, peak=2.0, period_s=20.0), 1)
    assert len(trace) / trace[-1].at_s == pytest.approx(10.0, rel=0.03)


def _rates(arrivals: Arrivals) -> np.ndarray:
    """Arrivals a second in each tenth of a period, over all periods."""
    times = np.array([request.at_s for request in draw_trace(arrivals, 1)])
    phases = np.floor(times / arrivals.period_s % 1.0 * 10).astype(int)
    return np.bincount(phases, minlength=10) / (times[-1] / 10)


def test_bursts_come_at_the_end_of_each_period_and_at_the_stated_peak() -> None:
    rates = _rates(Arrivals(20_000, 10.0, pattern=Pattern.BURSTS, peak=4.0, burst_share=0.1, period_s=10.0))
    assert rates[9] == pytest.approx(40.0, rel=0.05)
    assert rates[:9] == pytest.approx([(1 - 0.4) / 0.9 * 10] * 9, rel=0.12)


def test_a_day_rises_to_its_peak_in_the_middle() -> None:
    rates = _rates(Arrivals(20_000, 10.0, pattern=Pattern.DIURNAL, peak=1.8, period_s=10.0))
    assert rates[4:6].mean() == pytest.approx(18.0, rel=0.08)
    assert rates[[0, 9]].mean() == pytest.approx(2.0, abs=1.0)


def test_gaps_are_those_of_a_poisson_process() -> None:
    gaps = np.diff([request.at_s for request in draw_trace(Arrivals(20_000, 4.0), 3)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_the_mix_has_its_shares() -> None:
    trace = draw_trace(Arrivals(8_000, 4.0), 2)
    for traffic in MIXED:
        share = sum(request.service_class is traffic.service_class for request in trace) / len(trace)
        assert share == pytest.approx(traffic.share, abs=0.02)


def test_a_later_turn_has_the_conversation_before_it_in_its_prompt() -> None:
    trace = draw_trace(Arrivals(400, 2.0, CONVERSATIONS, max_tokens=100_000), 5)
    by_session: dict[str, list[TraceRequest]] = {}
    for request in trace:
        by_session.setdefault(request.session, []).append(request)
    assert "" not in by_session
    assert {len(turns) for turns in by_session.values()} == {4}
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert (after.at_s, after.kind, after.tenant) >= (before.at_s, before.kind, before.tenant)


def test_nothing_drawn_is_longer_than_the_window() -> None:
    long = tuple(replace(traffic, prompt_tokens=900, output_tokens=600) for traffic in (*MIXED, *CONVERSATIONS))
    trace = draw_trace(Arrivals(500, 2.0, long, max_tokens=1024), 5)
    assert max(request.prompt_tokens + request.output_tokens for request in trace) <= 1024
