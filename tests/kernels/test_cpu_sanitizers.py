"""The native decoder's tests once more, on builds that stop at a stray access or an undefined operation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeserve_kernels.cpu.build import build
from treeserve_kernels.cpu.library import LIBRARY_VARIABLE, is_built
from treeserve_kernels.shared_object import find_compiler

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

HERE = Path(__file__).parent
# What between them reaches every kernel and every check, on every instruction set.
TESTS = (
    "test_cpu_linear.py", "test_cpu_boundary.py", "test_cpu_decoder.py", "test_cpu_hidden.py", "test_cpu_kv_blocks.py",
    "test_cpu_sampling.py",
)  # fmt: skip


def runtime(name: str) -> str:
    """Where the compiler keeps a library; its bare name if it has none."""
    command = [*find_compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Loads a library with sanitizers, whose runtime must be there before Python's own libraries."""
    asan, stdcxx = runtime("libasan.so"), runtime("libstdc++.so")
    if not Path(asan).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    library = build(tmp_path_factory.mktemp("sanitizers"), ("address", "undefined"))
    return os.environ | {
        LIBRARY_VARIABLE: str(library),
        "LD_PRELOAD": f"{asan} {stdcxx}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",  # Python itself never frees everything
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=HERE.parent.parent, capture_output=True, text=True, timeout=240
    )


def test_the_sanitizer_is_at_work(environment):
    """A weight array that is too short by its last panel, passed below the checks, must be reported."""
    done = run(environment, "-c", STRAY_READ)
    assert done.returncode == 99 and "AddressSanitizer" in done.stderr, done.stderr[-3000:]


def test_no_test_makes_it_speak(environment):
    files = [str(HERE / name) for name in TESTS]
    # Without capturing: a report is written by a process that ends at once.
    done = run(environment, "-m", "pytest", "-q", "-x", "-s", "--noconftest", "-p", "no:cacheprovider", *files)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "Sanitizer" not in output and "runtime error" not in output, output[-6000:]
    assert " passed" in done.stdout


STRAY_READ = """
import ctypes, numpy as np
from treeserve_kernels.cpu import library, structures
lib = library.load()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
scales = libc.malloc(ctypes.c_size_t(32 * 4))
panels = np.full(64 * 128 * 16, 128, dtype=np.uint8)
panels = panels[-panels.ctypes.data % 64 :]
linear = structures.Linear(panels.ctypes.data, scales, None, 64, 64)  # 64 outputs, scales for 32
x, y = np.ones((1, 64), np.float32), np.empty((1, 64), np.float32)
lib.ts_linear_apply(linear, b"portable", 1, x.ctypes.data, y.ctypes.data)
"""
