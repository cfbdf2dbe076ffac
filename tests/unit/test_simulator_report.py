"""Figures of simulated runs, and predictions beside what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.simulated import cpu_machine, flat_machine, small_cluster
from typer.testing import CliRunner

from treeserve_cli.main import app
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.qos import QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.arrivals import Arrivals, draw_trace
from treeserve_simulator.comparison import compare, predict
from treeserve_simulator.costs import DEFAULT_MACHINE, MachineModel, Overheads, PassRows, StepCosts
from treeserve_simulator.fitting import fit_costs, fit_kinds
from treeserve_simulator.options import parse_settings, parse_targets
from treeserve_simulator.record import Record
from treeserve_simulator.report import figures
from treeserve_simulator.simulation import simulate
from treeserve_simulator.systems import SYSTEMS
from treeserve_simulator.trace import TraceRequest, write_trace

POLICIES = {c: QosPolicy(ttft_ms=100.0, tpot_ms=10.0) for c in ServiceClass}
REQUEST = TraceRequest(1.0, 100, 11)


def _record(ttft_ms: float, tpot_ms: float, **changes: Any) -> Record:
    first_s = 1.0 + ttft_ms / 1e3
    return Record(REQUEST, "finished", 1.0, first_s + 10 * tpot_ms / 1e3, first_s, 11, **changes)


def test_a_request_counts_that_ended_and_met_both_targets() -> None:
    records = [
        _record(99.9, 9.9, cached_tokens=40, steps=5, accepted=5),
        _record(100.5, 9.0),
        _record(50.0, 10.5),
        replace(_record(50.0, 5.0), outcome="failed"),
        Record(REQUEST, "shed", 1.0, 1.1),
    ]
    found = figures(records, POLICIES, window_s=2.0)
    assert (found["requests"], found["violations"], found["attainment"]) == (5, 4, pytest.approx(0.2))
    assert found["met_per_s"] == pytest.approx(0.5)
    assert found["tokens_per_s"] == pytest.approx(22.0)
    assert found["outcomes"] == {"failed": 1, "finished": 3, "shed": 1}
    assert found["ttft_ms"]["p50"] == pytest.approx(74.95)
    assert found["acceptance_length"] == pytest.approx(2.0)
    assert found["prefix_hit_rate"] == pytest.approx(40 / 500)


def test_a_class_without_targets_is_content_with_an_end() -> None:
    policies = dict.fromkeys(ServiceClass, QosPolicy())
    assert figures([_record(1e6, 1e6)], policies, 1.0)["violations"] == 0


def test_errors_are_relative_to_what_was_measured() -> None:
    measured = [{"ttft_ms": 100.0, "tpot_ms": 5.0}, {"ttft_ms": None, "tpot_ms": None}]
    found = {each.quantity: each for each in compare(measured, [_record(120.0, 4.0), _record(1.0, 1.0)])}
    assert found["ttft_ms p50"].error == pytest.approx(0.2)
    assert found["tpot_ms p95"].error == pytest.approx(-0.2)
    with pytest.raises(ValueError, match="1 requests were measured"):
        compare(measured[:1], [_record(1.0, 1.0)] * 2)


def _lines(records: tuple[Record, ...]) -> list[dict[str, Any]]:
    return [record.to_json() for record in records]


def test_a_machine_predicts_itself_and_a_slower_one_is_noticed() -> None:
    trace = draw_trace(Arrivals(40, 2.0), 1)
    cluster = small_cluster(cpu_machine())
    measured = _lines(simulate(trace, cluster, SYSTEMS["fifo"]).records)
    measured.reverse()  # lines come in the order in which requests ended
    assert all(abs(each.error) < 0.01 for each in predict(measured, cluster, SYSTEMS["fifo"]))
    slower = replace(cluster, machine=replace(cluster.machine, overheads=Overheads(step_ms=8.0)))
    assert all(each.error > 0.2 for each in predict(measured, slower, SYSTEMS["fifo"]))


def test_fitting_finds_what_surrounds_a_pass_and_how_well_texts_are_drafted() -> None:
    stated = Overheads(request_ms=7.0, step_ms=1.3, sequence_ms=0.6)
    easy = cpu_machine().kind("chat").shifted(1.5)
    dearer = cpu_machine().costs.with_rows_scaled(1.4)
    true = replace(cpu_machine(), costs=dearer, overheads=stated, kinds={**cpu_machine().kinds, "chat": easy})
    alone = [TraceRequest(10.0 * i, 60 + 100 * (i % 2), 80, kind="chat") for i in range(48)]
    few = [TraceRequest(10.0 * (i // 4), 60, 80, kind="chat") for i in range(24)]
    real = small_cluster(true)
    plain, drafted = (_lines(simulate(alone, real, SYSTEMS[name], 5).records) for name in ("fifo", "treeserve"))
    together = _lines(simulate(few, real, SYSTEMS["fifo"], 5).records)
    assumed = small_cluster(cpu_machine())
    assumed = replace(assumed, machine=fit_costs(assumed, SYSTEMS["fifo"], plain, together))
    assert assumed.machine.costs.logits_pass_ms(64) == pytest.approx(dearer.logits_pass_ms(64), rel=0.02)
    assert assumed.machine.overheads.step_ms == pytest.approx(1.3, abs=0.05)
    assert assumed.machine.overheads.sequence_ms == pytest.approx(0.6, abs=0.05)
    assert assumed.machine.overheads.request_ms == pytest.approx(7.0, abs=0.2)
    assumed = replace(assumed, machine=fit_kinds(assumed, SYSTEMS["treeserve"], drafted))
    found = {each.quantity: each.error for each in predict(drafted, assumed, SYSTEMS["treeserve"])}
    assert found["tpot_ms p50"] == pytest.approx(0.0, abs=0.05)


def test_a_pass_costs_what_was_measured_and_lines_between() -> None:
    costs = StepCosts((1, 4, 8), (0, 100), ((4.0, 5.0), (5.0, 7.0), (8.0, 12.0)), (0.0, 3.0, 7.0), 0.5, 0.01)
    assert costs.step_ms([PassRows(4, 100, 1)]) == pytest.approx(7.0)
    assert costs.step_ms([PassRows(4, 50, 1)]) == pytest.approx(6.0)
    assert costs.step_ms([PassRows(6, 0, 0)]) == pytest.approx(6.5)
    assert costs.step_ms([PassRows(16, 0, 1)]) == pytest.approx(14.0)
    assert costs.step_ms([PassRows(8, 0, 8)]) == pytest.approx(15.0)
    # Four rows of two sequences: 50 positions on average, logits of two rows, one sequence more and its 40 positions.
    assert costs.step_ms([PassRows(3, 20, 1), PassRows(1, 140, 1)]) == pytest.approx(6.0 + 1.0 + 0.5 + 0.01 * 20)


def test_dearer_rows_leave_the_smallest_pass_as_it_was() -> None:
    costs = StepCosts((1, 4), (0, 100), ((4.0, 5.0), (5.0, 8.0)), (0.0, 3.0), 0.5, 0.01)
    assert costs.with_rows_scaled(2.0) == StepCosts((1, 4), (0, 100), ((4.0, 5.0), (6.0, 11.0)), (0.0, 6.0), 0.5, 0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": (4, 1)},
        {"rows": ()},
        {"pass_ms": ((1.0,), (2.0,))},
        {"pass_ms": ((0.0, 1.0), (1.0, 1.0))},
        {"logits_ms": (1.0,)},
        {"logits_ms": (-1.0, 1.0)},
    ],
)
def test_what_is_no_table_is_refused(changes: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"rows": (1, 4), "contexts": (0, 9), "pass_ms": ((1.0, 1.0),) * 2, "logits_ms": (0.0, 1.0)}
    StepCosts(**sound)
    with pytest.raises(InvalidArgumentError):
        StepCosts(**{**sound, **changes})


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    machine = replace(cpu_machine(), kinds={"": cpu_machine().kind("chat").shifted(0.3), **cpu_machine().kinds})
    machine.write(tmp_path / "m.json")
    assert MachineModel.read(tmp_path / "m.json") == machine
    assert MachineModel.read(DEFAULT_MACHINE).origin


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "'costs' is missing"),
        ('{"costs": {}}', "costs: 'rows' is missing"),
        ("[]", "'list' object has no attribute 'get'"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_file_that_holds_no_machine_is_refused_with_what_it_lacks(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(InvalidArgumentError) as refused:
        MachineModel.read(tmp_path / "m.json")
    assert str(refused.value) == f"machine: {tmp_path}/m.json: {reason}"


def test_options_in_words() -> None:
    targets = parse_targets(["realtime=250:20", "batch=:90"])
    assert asdict(targets[ServiceClass.REALTIME])["ttft_ms"] == 250
    assert (targets[ServiceClass.BATCH].ttft_ms, targets[ServiceClass.BATCH].tpot_ms) == (None, 90)
    assert parse_settings(["verifier.max_nodes=4"]) == {"router": {}, "verifier": {"max_nodes": "4"}}
    for wrong in ("royal=1:2", "realtime=fast"):
        with pytest.raises(InvalidArgumentError):
            parse_targets([wrong])
    for wrong in ("speculator.x=1", "verifier.max_nodes", "verifier"):
        with pytest.raises(InvalidArgumentError):
            parse_settings([wrong])


def test_the_commands_draw_run_and_compare(tmp_path: Path) -> None:
    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["simulate", *arguments])

    trace, records, machine = (str(tmp_path / name) for name in ("t.jsonl", "r.jsonl", "m.json"))
    cpu_machine().write(Path(machine))
    assert invoke("trace", "--out", trace, "--requests", "12", "--rate", "3").exit_code == 0
    ran = invoke("run", "--trace", trace, "--machine", machine, "--json", "--records", records, "--system", "fifo")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["fifo"]["all"]["requests"] == 12
    shown = invoke("run", "--trace", trace, "--machine", machine, "--system", "fifo")
    assert shown.stdout.splitlines()[0].split()[:3] == ["system", "class", "requests"]
    assert shown.stdout.splitlines()[-1].split()[:3] == ["fifo", "all", "12"]
    compared = invoke("compare", records, "--machine", machine, "--system", "fifo")
    assert compared.exit_code == 0, compared.output
    assert "ttft_ms p95: measured" in compared.stdout
    write_trace(Path(trace), [TraceRequest(0.0, 5, 5)])
    assert invoke("compare", trace, "--machine", machine).exit_code == 2  # nothing was measured
    for command in (("run",), ("compare", records)):
        refused = invoke(*command, "--system", "magic")
        assert refused.exit_code == 2
        assert refused.stderr == "treeserve: system: there is no 'magic', only treeserve, fifo, fixed\n"
    flat_machine(1000.0).write(Path(machine))
    assert invoke("compare", records, "--machine", machine, "--system", "fifo").exit_code == 1  # far off
