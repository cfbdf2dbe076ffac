"""What runs int8 never imports torch: a verifier with its model loaded, a speculator with its default sources."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treeserve_engine.packed_weights import convert
from treeserve_kernels.cpu.library import is_built

_VERIFIER = """
import json, sys
from pathlib import Path
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.main import load_engine
folder, cache = map(Path, sys.argv[1:])
config = VerifierConfig(folder, "tiny", cache_dir=cache, kv_tokens=1024, max_context_tokens=256)
engine = load_engine(config)
assert (engine.precision.dtype, engine.divergence) == ("int8", 0.0), engine
print(json.dumps(sorted(sys.modules)))
"""
_SPECULATOR = """
import json, sys
from pathlib import Path
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.main import build_drafter, read_identity
from treeserve_speculator.metrics import SpeculatorMetrics
config = SpeculatorConfig(Path(sys.argv[1]), "tiny")
drafter = build_drafter(config, read_identity(config.model_folder, "tiny"), SpeculatorMetrics())
assert drafter.source_names == ("ngram", "suffix", "recycling")
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {"torch", "triton", "transformers", "safetensors", "gguf"}


def modules_of(program: str, *arguments: Path) -> set[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(not is_built(), reason="the native decoder is not built")
def test_a_verifier_that_runs_int8(tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path, lambda _line: None)
    modules = modules_of(_VERIFIER, tiny_model, tmp_path)
    assert "treeserve_engine.native_model" in modules
    assert HEAVY.isdisjoint(modules)


def test_a_speculator_with_its_default_sources(tiny_model: Path) -> None:
    modules = modules_of(_SPECULATOR, tiny_model)
    assert "treeserve_speculator.sources.suffix" in modules
    assert HEAVY.isdisjoint(modules)


def test_the_command_line() -> None:
    modules = modules_of("import json, sys, treeserve_cli.main; print(json.dumps(sorted(sys.modules)))")
    assert (HEAVY | {"numpy"}).isdisjoint(modules)
