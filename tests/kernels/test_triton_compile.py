"""Ahead-of-time compilation of the kernels to cubins, without a GPU."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from treeserve_kernels.triton import compile as compile_module
from treeserve_kernels.triton.compile import Compiled, compile_variant
from treeserve_kernels.triton.variants import Variant, variants

SAMPLING = {"edit_kernel", "scan_kernel", "weigh_kernel", "filter_kernel", "score_kernel", "pick_kernel", "walk_kernel"}
# What the smallest consumer GPUs of these series offer a program.
SHARED_BYTES = 99 * 1024


def _compile(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "treeserve_kernels.triton.compile", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    file = folder / "reports.json"
    done = _compile("--arch", "90", "--dtype", "bfloat16", "--head-dim", "64", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["kernels"]


def test_every_kernel_compiles(reports):
    compiled = Counter(r["kernel"] for r in reports if r["cubin_bytes"] > 0)
    # Attention: two row tiles, each writing the model's dtype or float32 parts. Scores: with and without filters.
    expected = {"attention_kernel": 4, "merge_kernel": 1, "write_kernel": 1, "move_kernel": 1}
    assert compiled == expected | dict.fromkeys(SAMPLING, 1) | {"score_kernel": 2}


def test_nothing_spills_and_shared_memory_fits(reports):
    for report in reports:
        assert 0 < report["registers"] <= 255
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == report["stack_bytes"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES, report


def test_a_kernel_that_spills_is_found_out(monkeypatch, capsys):
    roomy = next(v for v in variants((), ()) if v.kernel.__name__ == "weigh_kernel")
    tight = replace(roomy, options={**roomy.options, "maxnreg": 24})
    monkeypatch.setattr(compile_module, "variants", lambda dtypes, head_dims: [tight])
    assert compile_module.main(["--arch", "90"]) == 1
    captured = capsys.readouterr()
    assert "weigh_kernel" in captured.err and "sm_90" in captured.err
    report = compile_variant(tight, 90).report
    assert report.spills and report.registers <= 24 and min(report.spill_store_bytes, report.spill_load_bytes) > 0


@pytest.fixture(scope="module")
def sampling() -> dict[str, Compiled]:
    return {
        name: compile_variant(variant, 80)
        for variant in variants((), ())
        if (name := variant.kernel.__name__) in ("weigh_kernel", "filter_kernel", "score_kernel", "edit_kernel")
    }


def test_the_samplers_arithmetic_is_what_was_written(sampling):
    """IEEE operations in double precision, nothing contracted, approximated or flushed to zero."""
    for name, compiled in sampling.items():
        operations = set(re.findall(r"^\s+(?:@\S+ )?([a-z][a-z0-9_.]+)", compiled.ptx, re.MULTILINE))
        assert not [op for op in operations if "fma" in op or "approx" in op or ".ftz" in op], name
        assert not [op for op in operations if op.startswith(("mad", "div")) and op.endswith("f32")], name
    for name in ("weigh_kernel", "score_kernel", "edit_kernel"):
        assert "div.rn.f64" in sampling[name].ptx
    # 2 / 19 and 1 / 13!, which float32 does not hold.
    assert "0D3FBAF286BCA1AF28" in sampling["score_kernel"].ptx.upper()
    assert "0D3DE6124613A86D09" in sampling["weigh_kernel"].ptx.upper()


@pytest.mark.parametrize("name", ["vocab_size", "num_chunks", "stride", "max_path"])
def test_sizes_of_one_compile_too(name):
    """Triton makes a constant of an argument that is 1: a vocabulary within one chunk, trees of roots alone."""
    taking = [v for v in variants((), ()) if name in v.kernel.arg_names]
    assert taking
    for variant in taking[-2:]:
        assert compile_variant(_with_constant(variant, name), 80).report.cubin_bytes > 0


def _with_constant(variant: Variant, name: str) -> Variant:
    return replace(variant, constants={**variant.constants, name: 1})


def test_interpreted_kernels_are_refused():
    done = _compile("--arch", "80", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
