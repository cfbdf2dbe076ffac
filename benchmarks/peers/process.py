"""Child processes of the benchmark: start, suspend, measure and end whole process trees (Linux's /proc)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.peers.peer import PeerError
from treeserve_cli import exec_child

ROOT = Path(__file__).resolve().parents[2]
_PROC = Path("/proc")
_STOP_TIMEOUT_S = 30.0
_LOG_TAIL_CHARS = 2000


@dataclass(frozen=True)
class ProcessMemory:
    """Peak resident set, and the present proportional set (shared pages divided by their users), of one process."""

    name: str
    peak_rss_mb: float
    pss_mb: float | None


class Program:
    """A child that dies with this process. Its output goes to a temporary log, standard output only if not piped.

    Args:
        command: program and arguments; relative paths are the repository's.
        environ: added to the environment.
        piped: whether standard input and output are pipes of text.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, piped: bool = False) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (it lives as long as the program)
        self._popen = subprocess.Popen(
            (sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), *command),
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else self._log,
            stderr=self._log,
            cwd=ROOT,
            env=os.environ | dict(environ),
            text=True,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    @property
    def stdin(self) -> IO[str]:
        """Its standard input, if piped."""
        assert self._popen.stdin is not None
        return self._popen.stdin

    def read_line(self) -> str:
        """The next line of its standard output, if piped. Raises PeerError if it ended."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            self._popen.wait(_STOP_TIMEOUT_S)
            raise PeerError(self.failure())
        return line

    def check_alive(self) -> None:
        """Raise PeerError if it ended."""
        if self._popen.poll() is not None:
            raise PeerError(self.failure())

    def failure(self) -> str:
        """How it ended and the end of its log."""
        self._log.seek(0)
        return f"exited with {self._popen.poll()}: {self._log.read()[-_LOG_TAIL_CHARS:]}"

    def stop(self) -> None:
        """End it and its children, by force if need be."""
        family = process_tree(self.pid)
        self._popen.terminate()
        send_signal(family, signal.SIGCONT)
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # children that outlived it
        for pipe in (self._popen.stdin, self._popen.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def process_tree(root: int) -> list[int]:
    """Process ids of `root` and everything below it, parents first."""
    children: dict[int, list[int]] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    tree = [root]
    for pid in tree:
        tree += children.get(pid, ())
    return tree


def send_signal(pids: Iterable[int], signum: signal.Signals) -> None:
    """Send a signal to processes; those that are gone do not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def suspend(root: int) -> None:
    """Stop a process tree where it stands: until `resume` it costs no CPU."""
    send_signal(process_tree(root), signal.SIGSTOP)


def resume(root: int) -> None:
    """Let a suspended process tree go on."""
    send_signal(process_tree(root), signal.SIGCONT)


def tree_memory(root: int) -> list[ProcessMemory]:
    """Memory of each process of a tree."""
    found = []
    for pid in process_tree(root):
        with contextlib.suppress(OSError, KeyError):
            peak = _kilobytes(_PROC / str(pid) / "status")["VmHWM"]
            found.append(ProcessMemory(_name(pid), peak / 1024, _pss_mb(pid)))
    return found


def _pss_mb(pid: int) -> float | None:
    try:
        return _kilobytes(_PROC / str(pid) / "smaps_rollup")["Pss"] / 1024
    except (OSError, KeyError):
        return None


def _kilobytes(path: Path) -> dict[str, int]:
    """The sizes in a /proc file with lines such as ``VmHWM:  1234 kB``."""
    sizes = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0])
    return sizes


def _name(pid: int) -> str:
    """What a process is, for people: its Python module or its program."""
    words = (_PROC / str(pid) / "cmdline").read_text().split("\0")
    if "-m" in words[:4]:
        return words[words.index("-m") + 1]
    script = next((word for word in words[1:2] if Path(words[0]).name.startswith("python")), words[0])
    return Path(script.partition(" ")[0]).name  # some programs write a whole line there


def installed_version(python: str, package: str) -> str:
    """Name and version of a package in another interpreter's environment."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return f"{package} {done.stdout.strip()}"
