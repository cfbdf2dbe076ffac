"""The GPU check itself: a clean end without a GPU, and every check of it on tiny cases in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _check(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "benchmarks.gpu_check", *args]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = _check("--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert done.stderr.strip() == "gpu_check needs a CUDA device and found none: nothing was checked"
    assert not list(tmp_path.iterdir())


def test_every_check_runs_and_passes_in_the_interpreter(tiny_model, tmp_path):
    file = tmp_path / "gpu.json"
    done = _check("--interpreted", "--model", str(tiny_model), "--json", str(file), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["passed"] and report["skipped"] == ["flashinfer is not installed"]
    attention, sampling = report["attention"], report["sampling"]
    assert {(r["name"], r["dtype"]) for r in attention} == {
        (name, dtype) for name in ("decode", "tree of 5") for dtype in ("float32", "float16", "bfloat16")
    }
    assert all(0 <= r["max_error"] <= r["tolerance"] for r in attention)
    assert all(r["flashinfer_ms"] is None and r["flashinfer_note"] for r in attention)
    assert len(report["kv"]) == 3 and all(r["agrees"] for r in report["kv"])
    assert [r["params"] for r in sampling] == ["greedy", "sampled", "top-k", "top-p", "all"]
    assert all(r["differing_tokens"] == 0 and r["outcomes_agree"] and r["host_ms"] > 0 for r in sampling)
    assert len(report["cuda_graphs"]) == 1 and len(report["root_alone_and_in_tree"]) == 3
    assert done.stdout.count("ok ") == len(attention) + 3 + len(sampling) + 1


def test_the_interpreter_must_be_asked_for_in_the_environment():
    done = _check("--interpreted")
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr
