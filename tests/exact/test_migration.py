"""A generation moves to another process, with another thread count and instruction set: not a bit changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treeserve_engine.packed_weights import convert
from treeserve_kernels.cpu.library import is_built, isas

pytestmark = [pytest.mark.model, pytest.mark.skipif(not is_built(), reason="the native decoder is not built")]

PROMPT = (504, 3575, 282, 4649, 314)
TOKENS = 16

# Prefills what it is given in chunks and decodes greedily, one row a pass; prints tokens and a hash of all logits.
_PROCESS = """
import hashlib, json, sys
from pathlib import Path
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.native_model import NativeModel
from treeserve_engine.packed_weights import packed_weights
from treeserve_engine.runner import ModelRunner

job = json.loads(sys.argv[1])
folder = Path(job["folder"])
weights = packed_weights(folder, Path(job["cache"]), lambda line: sys.exit(f"not in the cache: {line}"))
options = {key: job[key] for key in ("threads", "isa", "kv_dtype")}
runner = ModelRunner(NativeModel(load_config(folder), weights, **options), 16, job["block_size"])
runner.blocks.add(0)

def forward(tokens):
    runner.blocks.reserve(0, len(tokens))
    (logits,) = runner.forward([SequenceRows.from_chain(0, tokens, [len(tokens) - 1])])
    runner.commit(0, range(len(tokens)))
    return logits[0]

given, chunk = job["tokens"], job["chunk"]
for start in range(0, len(given), chunk):
    logits = forward(given[start : start + chunk])
output, hashes = [], []
for _ in range(job["count"]):
    hashes.append(hashlib.sha256(logits.tobytes()).hexdigest())
    output.append(int(logits.argmax()))
    logits = forward(output[-1:])
print(json.dumps([output, hashes]))
"""


def decode(folder: Path, cache: Path, **job: Any) -> tuple[list[int], list[str]]:
    argument = json.dumps({"folder": str(folder), "cache": str(cache), **job})
    done = subprocess.run([sys.executable, "-c", _PROCESS, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output, hashes = json.loads(done.stdout)
    return output, hashes


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_replay_in_another_process_goes_on_as_if_nothing_had_happened(
    model_folder: Path, cache_dir: Path, kv_dtype: str
) -> None:
    convert(model_folder, cache_dir, lambda _line: None)
    common: dict[str, Any] = {"kv_dtype": kv_dtype}
    tokens, hashes = decode(
        model_folder, cache_dir, tokens=PROMPT, count=TOKENS, threads=1, isa=None, chunk=64, block_size=16, **common
    )
    assert len(set(tokens)) > 4, "a text, not one token again and again"
    half = TOKENS // 2
    for isa, threads, chunk in zip(isas(), (2, 3, 2), (3, 64, 1), strict=False):
        continued, later = decode(
            model_folder, cache_dir, tokens=[*PROMPT, *tokens[:half]], count=half, threads=threads, isa=isa,
            chunk=chunk, block_size=32, **common,
        )  # fmt: skip
        assert (continued, later) == (tokens[half:], hashes[half:]), isa
