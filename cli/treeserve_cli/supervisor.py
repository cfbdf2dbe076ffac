"""Keeps child processes running, as a Deployment would: restarts what crashes, stops in order, leaves no orphan."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from treeserve_cli import exec_child

_POLL_S = 0.05
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ProcessSpec:
    """A program to keep running. Its output is appended to `log`.

    Attributes:
        role, index: what it is and which one of its kind.
        stop_timeout_s: how long it may take to end after SIGTERM.
    """

    role: str
    index: int
    command: tuple[str, ...]
    log: Path
    stop_timeout_s: float = 10.0

    @property
    def name(self) -> str:
        """For people: verifier-0."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class RestartPolicy:
    """Delays double from the first to the longest; a process that ran for `healthy_after_s` starts over."""

    enabled: bool = True
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    healthy_after_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """The wait after so many failures in a row, one at least."""
        return min(self.first_delay_s * 2.0 ** (failures - 1), self.max_delay_s)


class Child:
    """One supervised program across its restarts. Any thread may read it and signal it; the supervisor does the rest.

    Attributes:
        exit_code: of the last incarnation that ended by itself (negative: the signal that ended it); None if none did.
        restarts: how often it was started again.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.exit_code: int | None = None
        self.restarts = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._failures = 0
        self._restart_at: float | None = None

    @property
    def pid(self) -> int:
        """Process id of the present incarnation, which may have ended. Raises RuntimeError before the first."""
        if self._popen is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives now."""
        return self._popen is not None and self._popen.poll() is None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal; nothing happens if it has ended."""
        if self._popen is not None:
            self._popen.send_signal(signum)

    def spawn(self) -> None:
        """Start it in a process group of its own: the terminal's Ctrl-C is for the supervisor alone."""
        tied = (sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), *self.spec.command)
        with self.spec.log.open("ab") as log:
            self._popen = subprocess.Popen(
                tied, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._started_at = time.monotonic()

    def tend(self, policy: RestartPolicy, report: Callable[[str], None]) -> None:
        """Notice an exit, and restart when it is time."""
        if self.is_running or self._popen is None:
            return
        if self._restart_at is None:
            self._note_exit(self._popen.returncode, policy, report)
        elif policy.enabled and time.monotonic() >= self._restart_at:
            self._restart_at = None
            self.restarts += 1
            self.spawn()

    def _note_exit(self, code: int, policy: RestartPolicy, report: Callable[[str], None]) -> None:
        now = time.monotonic()
        self._failures = 1 if now - self._started_at >= policy.healthy_after_s else self._failures + 1
        delay_s = policy.delay_s(self._failures)
        self._restart_at = now + delay_s
        self.exit_code = code
        follow_up = f"restarting in {delay_s:g} s" if policy.enabled else "not restarted"
        report(f"{self.spec.name} exited with {code}, {follow_up}; see {self.spec.log}")

    def wait(self, timeout_s: float) -> None:
        """Wait until it ended, by force once the time is over."""
        if self._popen is None:
            return
        try:
            self._popen.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(_KILL_TIMEOUT_S)


class Supervisor:
    """Starts programs in order, tends them from one thread, and stops them role by role in the reverse order.

    Attributes:
        children: in start order.
        policy: what becomes of those that exit; it may be replaced while they run.
    """

    def __init__(
        self, specs: Sequence[ProcessSpec], policy: RestartPolicy, report: Callable[[str], None] = lambda _line: None
    ) -> None:
        self.children = tuple(Child(spec) for spec in specs)
        self.policy = policy
        self._report = report
        self._stopping = threading.Event()
        self._spawned: Future[None] = Future()
        # A daemon, so that a main thread that leaves in a hurry takes the children with it (exec_child).
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start all programs; returns once they were started, not ready. Raises OSError if one cannot be."""
        self._thread.start()
        self._spawned.result()

    def stop(self) -> None:
        """Stop all programs; returns when none is left. Harmless if they never started or have stopped."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        # All children start here, because they die with the thread that started them.
        try:
            for child in self.children:
                child.spawn()
        except OSError as error:
            self._stop_all()
            self._spawned.set_exception(error)
            return
        self._spawned.set_result(None)
        while not self._stopping.wait(_POLL_S):
            for child in self.children:
                child.tend(self.policy, self._report)
        self._stop_all()

    def _stop_all(self) -> None:
        for _role, group in itertools.groupby(reversed(self.children), key=lambda child: child.spec.role):
            _stop_together(list(group))


def _stop_together(children: Iterable[Child]) -> None:
    for child in children:
        child.kill(signal.SIGTERM)
    began = time.monotonic()
    for child in children:
        child.wait(began + child.spec.stop_timeout_s - time.monotonic())
