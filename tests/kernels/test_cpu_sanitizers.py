"""The native decoder's tests once more, on builds that stop at a stray access or an undefined operation."""

from pathlib import Path

import pytest
from support.sanitizers import assert_reported, assert_silent, sanitized_environment

from treeserve_kernels.cpu.build import build
from treeserve_kernels.cpu.library import LIBRARY_VARIABLE, is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

HERE = Path(__file__).parent
# What between them reaches every kernel and every check, on every instruction set.
TESTS = (
    "test_cpu_linear.py", "test_cpu_boundary.py", "test_cpu_decoder.py", "test_cpu_hidden.py", "test_cpu_kv_blocks.py",
    "test_cpu_sampling.py", "test_cpu_node_choice.py", "test_cpu_decode_run.py", "test_cpu_decode_run_ends.py",
    "test_cpu_decode_run_refusals.py", "test_cpu_decode_run_prompts.py", "test_cpu_decode_run_prompt_ends.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return sanitized_environment(build, LIBRARY_VARIABLE, tmp_path_factory.mktemp("sanitizers"))


def test_the_sanitizer_is_at_work(environment):
    """A weight array that is too short by its last panel, passed below the checks, must be reported."""
    assert_reported(environment, STRAY_READ)


def test_no_test_makes_it_speak(environment):
    assert_silent(environment, [HERE / name for name in TESTS])


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
