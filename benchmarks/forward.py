"""Times one forward pass of each numeric mode beside the memory bus: rows x cached tokens x threads x KV dtypes.

    make bench-forward

Every repeat runs all cases once, in another order, and reads the memory once; so each ratio compares what was measured
in the same minutes. A pass computes a random tree of one sequence (or one row of each of 32 sequences) with the logits
of every row. The floors: reading the int8 weights once at the speed just measured, and max(4.8 ms, 0.3 ms x rows).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import ForwardBatch, SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_engine.config import ModelConfig, load_config
from treeserve_engine.interface import Kv, Model
from treeserve_engine.loading import load_model
from treeserve_kernels.cpu.library import is_built

RESULTS = Path(__file__).parent / "results" / "forward.json"
# Weights and activations, then KV.
MODES = (
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
)
ROWS = (1, 4, 8, 16, 32, 64)
CACHED = (256, 1024)
MANY_SEQUENCES = 32
BLOCK_SIZE = 16
_CHUNK = 128
_PROBE_BYTES = 256 << 20
# torch's workers spin for a few milliseconds after each call; the next measurement begins when they sleep.
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Load:
    """What one forward pass computes: `rows` rows, of one sequence or of as many sequences."""

    rows: int
    cached: int
    sequences: int

    @property
    def target_ms(self) -> float:
        """What the pass should cost on two cores of the machine it was designed on."""
        return max(4.8, 0.3 * self.rows)


LOADS = (
    *(Load(rows, cached, 1) for cached in CACHED for rows in ROWS),
    Load(MANY_SEQUENCES, CACHED[0], MANY_SEQUENCES),
)


@dataclass
class Case:
    """One mode under one load, and its times."""

    mode: str
    load: Load
    run: Callable[[], object]
    times_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The median of all repeats."""
        return statistics.median(self.times_ms)


class Bench:
    """The cases of one thread count, ready to run."""

    def __init__(self, folder: Path, cache_dir: Path, threads: int, modes: Sequence[tuple[str, str]]) -> None:
        self.threads = threads
        self.cases: list[Case] = []
        self.bandwidths: list[float] = []  # GB/s
        self._probe = np.ones(_PROBE_BYTES // 8, dtype=np.int64)
        self._pool = ThreadPoolExecutor(threads)
        for dtype, kv_dtype in modes:
            model = load_model(
                folder, dtype=dtype, kv_dtype=kv_dtype, device="cpu", threads=threads, cache_dir=cache_dir
            )
            self.cases += _cases(_mode_name(dtype, kv_dtype), model)

    def repeat(self, rng: random.Random) -> None:
        """Run every case once."""
        self.bandwidths.append(self._read_memory())
        for case in rng.sample(self.cases, len(self.cases)):
            time.sleep(_PAUSE_S)
            start = time.perf_counter()
            case.run()
            case.times_ms.append((time.perf_counter() - start) * 1e3)

    def _read_memory(self) -> float:
        """Streaming read of a buffer larger than the caches by all threads, in GB/s."""
        start = time.perf_counter()
        list(self._pool.map(np.bitwise_or.reduce, np.array_split(self._probe, self.threads)))
        return self._probe.nbytes / (time.perf_counter() - start) / 1e9


def _cases(mode: str, model: Model) -> list[Case]:
    """One model's cases on one cache, whose sequences all hold the same random tokens, each its own copy of them."""
    rng = random.Random(0)
    vocab = model.config.vocab_size
    lengths = [max(CACHED), *(n for n in CACHED if n < max(CACHED)), *[CACHED[0]] * (MANY_SEQUENCES - 1)]
    blocks = BlockManager(sum(-(-(n + max(ROWS)) // BLOCK_SIZE) for n in lengths), BLOCK_SIZE)
    kv = model.new_kv(blocks.total_blocks, BLOCK_SIZE)
    for seq_id, length in enumerate(lengths):
        blocks.add(seq_id)
        if seq_id == 0:
            _prefill(model, kv, blocks, [rng.randrange(vocab) for _ in range(length)])
        else:
            blocks.reserve(seq_id, length)
            kv.move(blocks.slots(0, 0, length), blocks.slots(seq_id, 0, length))
            blocks.commit(seq_id, range(length))
    short = [seq_id for seq_id, length in enumerate(lengths) if length == CACHED[0]]
    cases = []
    for load in LOADS:
        seq_ids = short[: load.sequences] if load.cached == CACHED[0] else [lengths.index(load.cached)]
        trees = {seq_id: _random_tree(rng, load.rows // load.sequences, vocab) for seq_id in seq_ids}
        batch = _batch(trees, blocks)
        cases.append(Case(mode, load, partial(model.forward, batch, kv)))
        cases[-1].run()  # warm
    return cases


def _prefill(model: Model, kv: Kv, blocks: BlockManager, tokens: Sequence[int]) -> None:
    """Compute the first sequence's tokens in chunks."""
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        blocks.reserve(0, len(chunk))
        model.forward(build_batch([SequenceRows.from_chain(0, chunk, [])], blocks), kv)
        blocks.commit(0, range(len(chunk)))


def _batch(trees: dict[int, TokenTree], blocks: BlockManager) -> ForwardBatch:
    """All trees in one batch. The blocks are free again, but nothing else is computed meanwhile."""
    for seq_id, tree in trees.items():
        blocks.reserve(seq_id, len(tree))
    batch = build_batch([SequenceRows.from_tree(seq_id, tree) for seq_id, tree in trees.items()], blocks)
    for seq_id in trees:
        blocks.rollback(seq_id)
    return batch


def _random_tree(rng: random.Random, n: int, vocab: int) -> TokenTree:
    return TokenTree(tuple(rng.sample(range(vocab), n)), (-1, *(rng.randrange(i) for i in range(1, n))))


def _mode_name(dtype: str, kv_dtype: str) -> str:
    return f"int8, KV {kv_dtype}" if dtype == "int8" else f"torch {dtype}"


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all int8 matrices that a pass reads."""
    c = config
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim + c.num_heads * c.head_dim
    return c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size) + c.vocab_size * c.hidden_size


def results(bench: Bench, floor_bytes: int) -> list[dict[str, Any]]:
    """Times of each case of a thread count, and their ratios to the floors and to torch."""
    floor_ms = floor_bytes / (statistics.median(bench.bandwidths) * 1e9) * 1e3
    median = {(case.mode, case.load): case.median_ms for case in bench.cases}
    return [
        {
            "mode": case.mode,
            "threads": bench.threads,
            "rows": case.load.rows,
            "cached": case.load.cached,
            "sequences": case.load.sequences,
            "median_ms": case.median_ms,
            "min_ms": min(case.times_ms),
            "to_memory_floor": case.median_ms / floor_ms,
            "to_target": case.median_ms / case.load.target_ms,
            "torch_speedup": {
                mode: ms / case.median_ms
                for (mode, load), ms in median.items()
                if load == case.load and mode.startswith("torch") and mode != case.mode
            },
        }
        for case in bench.cases
    ]


def print_table(rows: Sequence[dict[str, Any]], bench: Bench) -> None:
    """The cases of one thread count."""
    print(
        f"\n{bench.threads} thread(s), memory read {statistics.median(bench.bandwidths):.1f} GB/s "
        f"(best {max(bench.bandwidths):.1f})\n"
        f"{'mode':<19}{'seqs':>5}{'rows':>5}{'cached':>7}{'median ms':>11}{'min ms':>8}{'x floor':>9}{'x target':>9}"
        "  times faster than"
    )
    for r in rows:
        torch = ", ".join(f"{mode} {speedup:.1f}" for mode, speedup in r["torch_speedup"].items())
        print(
            f"{r['mode']:<19}{r['sequences']:>5}{r['rows']:>5}{r['cached']:>7}{r['median_ms']:>11.2f}{r['min_ms']:>8.2f}"
            f"{r['to_memory_floor']:>9.2f}{r['to_target']:>9.2f}  {torch}"
        )


def machine() -> dict[str, Any]:
    """The CPU as Linux describes it."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    wanted = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cores": os.cpu_count(),
        "flags": [flag for flag in wanted if flag in fields.get("flags", "").split()],
        "load_average_1min": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
    }


def main() -> int:
    """Run the repeats, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder or .gguf file")
    parser.add_argument("--cache-dir", type=Path, default=Path(os.environ.get("TREESERVE_CACHE", ".cache")))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--native-only", action="store_true", help="leave torch out")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not is_built():
        print("the native decoder is not built: python -m treeserve_kernels.cpu.build", file=sys.stderr)
        return 2
    before = machine()
    folder = prepare_checkpoint(args.model, args.cache_dir, lambda message: print(message, file=sys.stderr))
    floor_bytes = weight_bytes(load_config(folder))
    modes = [mode for mode in MODES if mode[0] == "int8" or not args.native_only]
    report: dict[str, Any] = {
        "command": ["python", "benchmarks/forward.py", "--repeats", str(args.repeats), *_threads(args.threads)],
        "model": args.model.name,
        "machine": before,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "numpy")},
        "repeats": args.repeats,
        "weight_bytes": floor_bytes,
        "memory_read_gb_per_s": {},
        "cases": [],
    }
    for threads in args.threads:
        bench = Bench(folder, args.cache_dir, threads, modes)
        rng = random.Random(threads)
        for _ in range(args.repeats):
            bench.repeat(rng)
        rows = results(bench, floor_bytes)
        print_table(rows, bench)
        report["cases"] += rows
        report["memory_read_gb_per_s"][threads] = {
            "median": statistics.median(bench.bandwidths),
            "best": max(bench.bandwidths),
        }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {args.json}")
    return 0


def _threads(threads: Sequence[int]) -> list[str]:
    return ["--threads", *map(str, threads)]


if __name__ == "__main__":
    sys.exit(main())
