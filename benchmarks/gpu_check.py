"""Proves the Triton kernels on a CUDA device and times them: attention, KV, sampling, the tree walk, CUDA graphs.

    python -m benchmarks.gpu_check [--model FOLDER] [--json benchmarks/results/gpu.json]

Attention must agree with its torch twin to a tolerance, since the twin sums in another order; KV writes and moves,
chosen tokens and walks must be equal. SDPA and FlashInfer are timed beside attention, the host's path beside sampling.
The bits of a row alone against the same row inside a tree are reported, not judged: attention does not promise them.

Exit status: 0 if everything agrees, 1 if something does not, 2 without a CUDA device. With `--interpreted`, Triton's
interpreter runs tiny cases on the CPU: that proves this script, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import triton

from benchmarks.gpu import attention, graphs, kv, sampling
from benchmarks.gpu.device import Device
from treeserve_engine.checkpoint import prepare_checkpoint

RESULTS = Path(__file__).parent / "results" / "gpu.json"


class Checked(Protocol):
    """The result of one check."""

    @property
    def agrees(self) -> bool:
        """Whether it passed."""

    def line(self) -> str:
        """For reading along."""


Result = TypeVar("Result", bound=Checked)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every check, prints a line for each and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, help="Hugging Face folder or .gguf file, for the CUDA graphs")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"), help="where a converted .gguf is kept")
    parser.add_argument("--interpreted", action="store_true", help="tiny cases on the CPU, with TRITON_INTERPRET=1")
    args = parser.parse_args(argv)
    if args.interpreted and not triton.knobs.runtime.interpret:
        parser.error("set TRITON_INTERPRET=1")
    if not args.interpreted and not torch.cuda.is_available():
        print("gpu_check needs a CUDA device and found none: nothing was checked", file=sys.stderr)
        return 2
    model = args.model and prepare_checkpoint(args.model, args.cache_dir, lambda line: print(line, file=sys.stderr))
    report, passed = run_checks(Device("cpu" if args.interpreted else "cuda"), model)
    report = {"command": [Path(sys.executable).name, *sys.argv], "passed": passed, **report}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'passed' if passed else 'FAILED'}: {args.json}")
    return 0 if passed else 1


def run_checks(device: Device, model: Path | None) -> tuple[dict[str, object], bool]:
    """All checks' results for the JSON file, and whether all passed."""
    tiny = not device.is_cuda
    heads = attention.TINY_HEADS if tiny else attention.HEADS
    kv_sizes = (64, 2, 64) if tiny else (4096, 8, 128)
    attended = _shown(attention.check_attention(device, attention.TINY_CASES if tiny else attention.CASES, heads))
    copied = _shown(kv.check_kv(device, dtype, *kv_sizes) for dtype in attention.TOLERANCE)
    sampled = _shown(sampling.check_sampling(device, sampling.TINY_SIZES if tiny else sampling.SIZES))
    graphed = _shown(graphs.check_graphs(device, model)) if model else []
    skipped = [note for note in (attention.flashinfer_note(), "" if model else "CUDA graphs: no --model") if note]
    if skipped:
        print(f"skipped: {'; '.join(skipped)}")
    report: dict[str, object] = {
        "machine": device.describe(),
        "skipped": skipped,
        "attention": [asdict(r) for r in attended],
        "kv": [asdict(r) for r in copied],
        "sampling": [asdict(r) for r in sampled],
        "cuda_graphs": [asdict(r) for r in graphed],
        "root_alone_and_in_tree": [attention.root_bits(h, d, device) for h in heads for d in attention.TOLERANCE],
    }
    results: list[Checked] = [*attended, *copied, *sampled, *graphed]
    return report, all(result.agrees for result in results)


def _shown(results: Iterable[Result]) -> list[Result]:
    """The results, each printed when it is there."""
    shown: list[Result] = []
    for result in results:
        print(result.line(), flush=True)
        shown.append(result)
    return shown


if __name__ == "__main__":
    sys.exit(main())
