"""`treeserve simulate` where it cannot do as asked: one line says why, before anything long is begun if it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treeserve_cli.main import app
from treeserve_core.errors import InvalidArgumentError
from treeserve_simulator import calibration, comparison, simulation

FIFO = ("--requests", "3", "--system", "fifo")
LINE: dict[str, Any] = {"at_s": 0.5, "prompt_tokens": 9, "output_tokens": 4, "ttft_ms": 60.0, "tpot_ms": 9.0}


def invoke(*arguments: str) -> Any:
    return _simulate("run", *arguments)


def _simulate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.fixture
def no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(*_arguments: object) -> None:
        pytest.fail("simulated before the options were checked")

    monkeypatch.setattr(simulation, "simulate", simulated)
    monkeypatch.setattr(comparison, "simulate", simulated)


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("verifier.max_sequences=a", "verifier: --max-sequences: "),
        ("verifier.kv_tokens=10", "verifier: kv_tokens: "),
        ("verifier.max_nodes=a", "verifier: --max-nodes: "),  # which `fixed` would not use
        ("router.queue_policy=foo", "router: queue_policy: "),
        ("router.qos={", "router: --qos: "),
        ("router.foo=1", "router: unknown fields foo; known are"),
        ("verifier.help=1", "verifier: unknown fields help; known are"),
    ],
)
def test_a_setting_that_the_services_would_refuse(setting: str, reason: str) -> None:
    refused = invoke("--requests", "3", "--system", "fixed", "--settings", setting)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"treeserve: {reason}")
    assert refused.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_simulation")
def test_a_trace_without_requests(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    refused = invoke("--trace", str(tmp_path / "empty.jsonl"))
    assert refused.exit_code == 2
    assert refused.stderr == f"treeserve: trace: {tmp_path}/empty.jsonl holds no request\n"


@pytest.mark.usefixtures("no_simulation")
def test_records_that_cannot_be_written(tmp_path: Path) -> None:
    refused = invoke(*FIFO, "--records", str(tmp_path / "nowhere" / "r.jsonl"))
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "No such file or directory" in refused.stderr


def test_a_disk_that_is_full_at_the_end_costs_only_the_records() -> None:
    ran = invoke(*FIFO, "--records", "/dev/full")
    assert ran.exit_code == 1
    assert ran.stdout.splitlines()[-1].split()[:3] == ["fifo", "all", "3"]
    assert ran.stderr.splitlines()[-1].endswith("No space left on device")


def test_old_records_are_kept_until_there_are_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    records = tmp_path / "r.jsonl"
    records.write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(simulation, "simulate", interrupted)
        invoke(*FIFO, "--records", str(records))
    assert records.read_text() == "old"
    assert invoke(*FIFO, "--records", str(records)).exit_code == 0
    assert len(records.read_text().splitlines()) == 3


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that `calibrate` set out to measure; none can be."""
    models: list[Path] = []

    def measure(model: Path, *_arguments: object) -> None:
        models.append(model)
        raise InvalidArgumentError("model", "cannot be measured")

    monkeypatch.setattr(calibration, "calibrate", measure)
    return models


@pytest.mark.parametrize("out", ["nowhere/m.json", ""])
def test_a_calibration_that_cannot_be_written_is_not_begun(tmp_path: Path, measured: list[Path], out: str) -> None:
    refused = _simulate("calibrate", "--model", "m", "--out", str(tmp_path / out))
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert str(tmp_path / out) in refused.stderr
    assert measured == []


def test_a_calibration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, measured: list[Path]) -> None:
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        failed = _simulate("calibrate", "--model", "m", "--out", str(tmp_path / name))
        assert (failed.exit_code, failed.stderr) == (1, "treeserve: model: cannot be measured\n")
    assert measured == [Path("m")] * 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("at_s", "prompt_tokens", "ttft_ms", "tpot_ms") for value in ([1], {}, "x")),
        *((name, value) for name in ("ttft_ms", "tpot_ms") for value in (float("nan"), float("inf"), 10**400, -1)),
        ("at_s", None),
        ("at_s", 10**400),
        ("prompt_tokens", float("inf")),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_recorded_line_whose_value_is_no_number_of_its_kind(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (LINE, {**LINE, name: value})))
    refused = _simulate("compare", str(tmp_path / "run.jsonl"))
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.exception
    assert refused.stderr.startswith(f"treeserve: trace: {tmp_path}/run.jsonl, line 2: {name}: must be a number")


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("command", [("compare",), ("run", "--trace")], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("session", "s" * 129, "has more than 128 characters"),
        ("session", "\ud800", "has half of a surrogate pair: it is no Unicode text"),
        ("tenant", "\ud800", "has half of a surrogate pair: it is no Unicode text"),
    ],
    ids=["long", "session", "tenant"],
)
def test_a_trace_that_the_services_would_refuse(
    tmp_path: Path, command: tuple[str, ...], field: str, value: str, reason: str
) -> None:
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (LINE, {**LINE, field: value})))
    refused = _simulate(*command, str(tmp_path / "t.jsonl"))
    assert (refused.exit_code, refused.stdout) == (2, ""), refused.exception
    assert refused.stderr == f"treeserve: trace: {tmp_path}/t.jsonl, line 2: {field}: {reason}\n"


@pytest.mark.usefixtures("no_simulation")
def test_a_recorded_run_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(b"{}\xff")
    refused = _simulate("compare", str(tmp_path / "run.jsonl"))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"treeserve: trace: {tmp_path}/run.jsonl is not UTF-8: invalid start byte at byte 2\n"


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("text", ['{"at_s": ' + "[" * 100_000, "[1]"])
def test_a_recorded_line_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    refused = _simulate("compare", str(tmp_path / "run.jsonl"))
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"treeserve: trace: {tmp_path}/run.jsonl, line 1: is no JSON object\n",
    )


def test_nothing_is_off_from_a_measured_zero_by_a_share(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps({**LINE, "tpot_ms": 0}))
    refused = _simulate("compare", str(tmp_path / "run.jsonl"), "--system", "fifo")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "treeserve: tpot_ms p50 was measured as 0: there is no relative error\n"
