"""Supervision of child processes: restarts, order of stopping, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treeserve_cli.supervisor import ProcessSpec, RestartPolicy, Supervisor

FAST = RestartPolicy(first_delay_s=0.05, max_delay_s=0.1)
SLEEP = "while :; do sleep 0.02; done"


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has collected yet does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state not in "ZX"


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., ProcessSpec]:
    """A spec that runs a shell script."""

    def spec(script: str, role: str = "a", index: int = 0, stop_timeout_s: float = 5.0) -> ProcessSpec:
        return ProcessSpec(role, index, ("sh", "-c", script), tmp_path / f"{role}-{index}.log", stop_timeout_s)

    return spec


@pytest.fixture
def start() -> Iterator[Callable[..., Supervisor]]:
    """Starts supervisors, and stops what a failed test leaves."""
    started: list[Supervisor] = []

    def run(*specs: ProcessSpec, policy: RestartPolicy = FAST, report: Callable[[str], None] = print) -> Supervisor:
        started.append(Supervisor(specs, policy, report))
        started[-1].start()
        return started[-1]

    yield run
    for supervisor in started:
        supervisor.stop()


def test_a_killed_child_is_restarted(shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]) -> None:
    lines: list[str] = []
    supervisor = start(shell(SLEEP), report=lines.append)
    (child,) = supervisor.children
    first = child.pid
    child.kill()
    eventually(lambda: child.restarts == 1 and child.is_running)
    assert child.pid != first
    assert child.exit_code == -signal.SIGKILL
    assert lines[0].startswith("a-0 exited with -9, restarting in 0.05 s")


def test_a_crash_loop_slows_down(shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]) -> None:
    lines: list[str] = []
    supervisor = start(shell("exit 3"), report=lines.append)
    eventually(lambda: len(lines) >= 4)
    delays = [line.split("restarting in ")[1].split(" ")[0] for line in lines[:4]]
    assert delays == ["0.05", "0.1", "0.1", "0.1"]
    assert supervisor.children[0].exit_code == 3


def test_a_child_that_ran_well_starts_over(shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]) -> None:
    lines: list[str] = []
    start(shell("exit 3"), policy=RestartPolicy(first_delay_s=0.05, healthy_after_s=0.0), report=lines.append)
    eventually(lambda: len(lines) >= 3)
    assert all("restarting in 0.05 s" in line for line in lines[:3])


def test_without_restarts_a_dead_child_stays_dead(
    shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]
) -> None:
    supervisor = start(shell("exit 0"), shell(SLEEP, index=1), policy=RestartPolicy(enabled=False))
    dead, other = supervisor.children
    eventually(lambda: dead.exit_code == 0)
    time.sleep(0.3)
    assert (dead.restarts, dead.is_running, other.is_running) == (0, False, True)


def test_a_policy_may_be_replaced(shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]) -> None:
    lines: list[str] = []
    supervisor = start(shell(SLEEP), policy=RestartPolicy(enabled=False), report=lines.append)
    supervisor.policy = FAST
    (child,) = supervisor.children
    child.kill()
    eventually(lambda: child.restarts == 1)
    assert "restarting in" in lines[0]


def test_roles_stop_in_the_reverse_order(
    shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor], tmp_path: Path
) -> None:
    order = tmp_path / "order"

    def noisy(role: str, index: int = 0) -> ProcessSpec:
        return shell(f"trap 'sleep 0.1; echo {role} >> {order}; exit 0' TERM; echo up; {SLEEP}", role, index)

    supervisor = start(noisy("valkey"), noisy("verifier"), noisy("verifier", 1), noisy("router"))
    eventually(lambda: all(child.spec.log.exists() and child.spec.log.read_text() for child in supervisor.children))
    supervisor.stop()
    assert order.read_text().split() == ["router", "verifier", "verifier", "valkey"]
    assert not any(child.is_running for child in supervisor.children)


def test_a_child_that_ignores_sigterm_is_killed_in_time(
    shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]
) -> None:
    supervisor = start(shell(f"trap '' TERM; echo up; {SLEEP}", stop_timeout_s=0.2))
    (child,) = supervisor.children
    eventually(lambda: child.spec.log.exists() and child.spec.log.read_text() == "up\n")
    began = time.monotonic()
    supervisor.stop()
    assert 0.2 <= time.monotonic() - began < 3
    assert not is_alive(child.pid)


def test_nothing_is_restarted_while_stopping(
    shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]
) -> None:
    supervisor = start(*(shell(SLEEP, index=i) for i in range(3)))
    pids = [child.pid for child in supervisor.children]
    supervisor.stop()
    supervisor.stop()
    assert [child.pid for child in supervisor.children] == pids
    assert not any(map(is_alive, pids))


def test_output_goes_to_the_log_of_all_incarnations(
    shell: Callable[..., ProcessSpec], start: Callable[..., Supervisor]
) -> None:
    supervisor = start(shell("echo out; echo err >&2; exit 1"))
    (child,) = supervisor.children
    eventually(lambda: child.restarts >= 2)
    assert child.spec.log.read_text().count("out\nerr\n") >= 2


def test_a_program_that_does_not_exist_says_so(start: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = start(ProcessSpec("a", 0, ("no-such-program",), tmp_path / "log"), policy=RestartPolicy(enabled=False))
    eventually(lambda: supervisor.children[0].exit_code == 1)
    assert "no-such-program: No such file" in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_written_fails_the_start(shell: Callable[..., ProcessSpec], tmp_path: Path) -> None:
    supervisor = Supervisor([shell(SLEEP), ProcessSpec("b", 0, ("true",), tmp_path / "no" / "log")], FAST)
    with pytest.raises(FileNotFoundError):
        supervisor.start()
    supervisor.stop()
    assert not supervisor.children[0].is_running


_SUPERVISING_PROGRAM = """
import sys, time
from pathlib import Path
from treeserve_cli.supervisor import *
supervisor = Supervisor([ProcessSpec("a", 0, ("sleep", "60"), Path(sys.argv[1]))], RestartPolicy())
supervisor.start()
print(supervisor.children[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_killing_the_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    program = [sys.executable, "-c", _SUPERVISING_PROGRAM, str(tmp_path / "log")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        command = Path(f"/proc/{pid}/cmdline")
        eventually(lambda: command.read_bytes().startswith(b"sleep"))  # past the exec
        supervisor.kill()
    eventually(lambda: not is_alive(pid), timeout_s=5)
