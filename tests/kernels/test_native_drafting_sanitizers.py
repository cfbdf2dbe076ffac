"""The tests of native drafting once more, on a build that stops at a stray access or an undefined operation."""

from pathlib import Path

import pytest
from support.sanitizers import assert_reported, assert_silent, sanitized_environment

from treeserve_speculator.native.build import build
from treeserve_speculator.native.library import LIBRARY_VARIABLE, is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="native drafting is not built")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return sanitized_environment(build, LIBRARY_VARIABLE, tmp_path_factory.mktemp("sanitizers"))


def test_the_sanitizer_is_at_work(environment):
    """Room for the counts of one source, where there are two, must be reported."""
    assert_reported(environment, STRAY_WRITE)


def test_no_test_makes_it_speak(environment):
    assert_silent(environment, [Path(__file__).parent.parent / "unit" / "test_native_drafter.py"])


STRAY_WRITE = """
import ctypes
from treeserve_speculator.native import library
lib = library.load()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
counts = libc.malloc(ctypes.c_size_t(ctypes.sizeof(library.SourceCounts)))
sources = (ctypes.c_int32 * 2)(0, 1)
config = library.DraftingConfig(sources=sources, num_sources=2, vocab_size=9, max_nodes=1, max_depth=1)
drafter = ctypes.c_void_p()
library.check(lib.ts_drafter_create(config, drafter))
lib.ts_drafter_counts(drafter, ctypes.cast(counts, ctypes.POINTER(library.SourceCounts)))
"""
