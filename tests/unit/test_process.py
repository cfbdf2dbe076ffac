"""A service runs until a signal, and says in one line why it cannot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio, os, signal, sys
from dataclasses import dataclass, field
from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.process import run_service

@dataclass(frozen=True)
class Config:
    does: str
    log_level: str = "info"

async def run(config, stop):
    if config.does == "refuse":
        raise InvalidArgumentError("model", "cannot be served")
    if config.does == "bind":
        raise OSError("address in use")
    if config.does == "break":
        raise ZeroDivisionError
    os.kill(os.getpid(), getattr(signal, config.does))
    async with asyncio.timeout(10):
        await stop.wait()
    print("drained")

run_service("tester", Config, run, sys.argv[1:])
"""


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_a_signal_lets_it_drain(signal_name: str) -> None:
    done = run_program("--does", signal_name)
    assert (done.returncode, done.stdout) == (0, "drained\n")
    (line,) = (json.loads(line) for line in done.stderr.splitlines())
    assert (line["event"], line["service"]) == ("draining", "tester")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing: --does"),
        (("--does", "refuse"), "model: cannot be served"),
        (("--does", "bind"), "address in use"),
        (("--does", "SIGTERM", "--log-level", "loud"), "log_level: 'loud' is unknown"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run_program(*arguments)
    assert (done.returncode, done.stderr) == (1, f"treeserve_tester: {message}\n")


def test_a_bug_keeps_its_traceback() -> None:
    done = run_program("--does", "break")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr and "Traceback" in done.stderr


def test_what_exists_once_a_service_is_ready_is_left_alone_by_the_garbage_collector() -> None:
    program = "import gc, treeserve_wire.process as p; p.settle_in(); print(gc.get_freeze_count() > 1000)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "True", ran.stderr
