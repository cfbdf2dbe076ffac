"""Runs tests again with native code that was built with sanitizers, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from treeserve_kernels.shared_object import find_compiler

REPOSITORY = Path(__file__).parent.parent.parent
SANITIZERS = ("address", "undefined")


def sanitized_environment(build: Callable[[Path, Sequence[str]], Path], variable: str, folder: Path) -> dict[str, str]:
    """Loads a library with sanitizers, whose runtime must be there before Python's own libraries.

    Args:
        build: what compiles the library.
        variable: names the library to load.
    """
    asan, stdcxx = _runtime("libasan.so"), _runtime("libstdc++.so")
    if not Path(asan).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    return os.environ | {
        variable: str(build(folder, SANITIZERS)),
        "LD_PRELOAD": f"{asan} {stdcxx}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",  # Python itself never frees everything
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def assert_reported(environment: dict[str, str], script: str) -> None:
    """The script's stray access is."""
    done = _run(environment, "-c", script)
    assert done.returncode == 99 and "AddressSanitizer" in done.stderr, done.stderr[-3000:]


def assert_silent(environment: dict[str, str], files: Sequence[Path]) -> None:
    """These tests pass and make no sanitizer speak."""
    # Without capturing: a report is written by a process that ends at once.
    done = _run(
        environment, "-m", "pytest", "-q", "-x", "-s", "--noconftest", "-p", "no:cacheprovider", *map(str, files)
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "Sanitizer" not in output and "runtime error" not in output, output[-6000:]
    assert " passed" in done.stdout


def _run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )


def _runtime(name: str) -> str:
    """Where the compiler keeps a library; its bare name if it has none."""
    command = [*find_compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
