"""Ahead-of-time compilation of the kernels to cubins, without a GPU."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest


def _compile(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "treeserve_kernels.triton.compile", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    file = folder / "reports.json"
    # A cache of its own, so that the kernels are compiled and not remembered.
    chosen = ["--arch", "80", "90", "--dtype", "bfloat16", "--head-dim", "64"]
    done = _compile(*chosen, "--json", str(file), TRITON_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["kernels"]


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles(reports, arch):
    compiled = Counter(r["kernel"] for r in reports if r["arch"] == arch and r["cubin_bytes"] > 0)
    # Attention: two row tiles, each writing the model's dtype or float32 parts.
    assert compiled == {"attention_kernel": 4, "merge_kernel": 1, "write_kernel": 1, "move_kernel": 1}


def test_nothing_spills_and_shared_memory_fits(reports):
    for report in reports:
        assert 0 < report["registers"] <= 255
        assert report["stack_bytes"] == 0, report
        assert report["shared_bytes"] <= 99 * 1024, report  # what the smallest consumer GPU of these series offers


def test_interpreted_kernels_are_refused():
    done = _compile("--arch", "80", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
