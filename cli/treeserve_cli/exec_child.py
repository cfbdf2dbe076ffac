"""Becomes another program that dies with its parent, whatever kills the parent.

Run as ``python exec_child.py PARENT_PID PROGRAM ARGUMENTS...``. The kernel's parent-death signal survives exec, so no
helper process stays. It is set here and not in a fork hook, because forking a process with threads (gRPC's) is unsafe.
The signal comes when the *thread* that started the child ends: start children from a thread that outlives them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then exec."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was set
        return
    try:
        os.execvp(program, sys.argv[2:])
    except OSError as error:
        sys.exit(f"{program}: {error.strerror}")


if __name__ == "__main__":
    main()
