"""The shared object of the native kernels: what cannot be loaded is refused, and ends no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeserve_kernels.cpu.library import LIBRARY_VARIABLE, is_built, library_path
from treeserve_kernels.shared_object import find_compiler

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

SCRIPT = """
from treeserve_kernels.cpu import library
print(library.is_built())
try:
    library.load()
except OSError as error:
    print(error)
"""


def load_elsewhere(path: Path) -> list[str]:
    environ = os.environ | {LIBRARY_VARIABLE: str(path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, check=True)
    return done.stdout.splitlines()


def test_the_whole_file_loads(tmp_path):
    copy = tmp_path / "copy.so"
    copy.write_bytes(library_path().read_bytes())
    assert load_elsewhere(copy) == ["True"]


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_a_file_cut_short_is_refused(tmp_path, kept):
    content = library_path().read_bytes()
    cut = tmp_path / "cut.so"
    cut.write_bytes(content[: int(len(content) * kept)])
    built, reason = load_elsewhere(cut)
    assert built == "False" and "cut.so does not load" in reason


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "text.so"
    text.write_text("not a library" * 100)
    for path in (text, tmp_path, tmp_path / "missing.so"):
        assert load_elsewhere(path)[0] == "False"


def test_one_of_another_version_is_refused(tmp_path):
    source, older = tmp_path / "older.cpp", tmp_path / "older.so"
    source.write_text('extern "C" int ts_abi_version() { return 4; }')
    subprocess.run([*find_compiler(), "-shared", "-fPIC", str(source), "-o", str(older)], check=True)
    built, reason = load_elsewhere(older)
    assert built == "False" and "has interface version 4 instead of 7; build it anew" in reason
