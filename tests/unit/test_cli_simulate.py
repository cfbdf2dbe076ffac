"""`treeserve simulate run` where it cannot do as asked: one line says why, before anything is simulated if it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treeserve_cli.main import app
from treeserve_simulator import simulation

FIFO = ("--requests", "3", "--system", "fifo")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "run", *arguments])


@pytest.fixture
def no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(*_arguments: object) -> None:
        pytest.fail("simulated before the options were checked")

    monkeypatch.setattr(simulation, "simulate", simulated)


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
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"treeserve: {reason}")
    assert refused.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_simulation")
def test_a_trace_without_requests(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    refused = invoke("--trace", str(tmp_path / "empty.jsonl"))
    assert refused.exit_code == 1
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
