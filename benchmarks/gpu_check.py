"""Checks the Triton kernels against their torch twins on a CUDA device and times them beside torch's SDPA.

    python benchmarks/gpu_check.py [--json benchmarks/results/gpu.json]

Exit status: 0 if every case agrees, 1 if one does not, 2 without a CUDA device. Equality is to a tolerance, since the
twin sums in another order. The bits of a row alone against the same row inside a tree are compared too and reported,
not judged: these kernels do not promise them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from treeserve_kernels.kv import move_kv, write_kv
from treeserve_kernels.sample import AttentionInputs, HeadShape, SequenceShape, chain, random_inputs, random_tree
from treeserve_kernels.tree_attention import tree_attention
from treeserve_kernels.triton.kv import move_kv_triton, write_kv_triton
from treeserve_kernels.triton.tree_attention import SPLIT_POSITIONS, LaunchPlan, tree_attention_triton

DEVICE = "cuda"
RESULTS = Path(__file__).parent / "results" / "gpu.json"
# Largest difference from the twin in float32 over the same inputs; half precision rounds the weights and the result.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
HEADS = (HeadShape(9, 3, 64), HeadShape(8, 2, 80), HeadShape(32, 8, 128), HeadShape(8, 8, 96))
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One batch of equal sequences: their number, context length and rows, drawn as a tree or a prefill chunk."""

    name: str
    num_sequences: int
    context_len: int
    parents: tuple[int, ...]

    def inputs(self, heads: HeadShape, dtype: torch.dtype) -> AttentionInputs:
        """Random inputs; the contexts differ by a few positions so that no sequence lines up with another."""
        sequences = [SequenceShape(self.context_len + i, self.parents) for i in range(self.num_sequences)]
        return random_inputs(sequences, heads, block_size=BLOCK_SIZE, dtype=dtype, device=DEVICE)


CASES = (
    Case("first step", 3, 0, chain(1)),
    Case("decode", 16, 255, chain(1)),
    Case("decode, long", 4, 8191, chain(1)),
    Case("tree of 16", 16, 500, random_tree(16)),
    Case("tree of 64", 8, 2048, random_tree(64)),
    Case("tree of 64, long", 2, 16000, random_tree(64)),
    Case("prefill chunk", 2, 1000, chain(512)),
)


@dataclass(frozen=True)
class CaseResult:
    """One case: its sizes, how it was launched, the error against the twin and median times in milliseconds."""

    name: str
    dtype: str
    heads: HeadShape
    num_sequences: int
    context_len: int
    rows_per_sequence: int
    plan: LaunchPlan
    max_error: float
    tolerance: float
    triton_ms: float
    sdpa_dense_ms: float
    gather_and_sdpa_ms: float

    @property
    def agrees(self) -> bool:
        """Whether the kernel is as near to the twin as it must be; NaN is not."""
        return self.max_error <= self.tolerance


def check_case(case: Case, heads: HeadShape, dtype: torch.dtype) -> CaseResult:
    """Compares one case with the twin, then times it beside dense SDPA."""
    inputs = case.inputs(heads, dtype)
    out = _triton(inputs)
    i = inputs
    twin = tree_attention(i.q.float(), i.k_cache.float(), i.v_cache.float(), i.meta, i.scale)
    dense = _DenseAttention(inputs)
    return CaseResult(
        name=case.name,
        dtype=str(dtype).removeprefix("torch."),
        heads=heads,
        num_sequences=case.num_sequences,
        context_len=case.context_len,
        rows_per_sequence=len(case.parents),
        plan=LaunchPlan.of(dtype, len(i.q), heads.num_heads // heads.num_kv_heads, i.meta, SPLIT_POSITIONS),
        max_error=(out.float() - twin).abs().amax().item(),
        tolerance=TOLERANCE[dtype],
        triton_ms=_median_ms(lambda: _triton(inputs)),
        sdpa_dense_ms=_median_ms(lambda: dense.attend(*dense.keys_values)),
        gather_and_sdpa_ms=_median_ms(lambda: dense.attend(*dense.gather())),
    )


class _DenseAttention:
    """The same attention as torch's SDPA does it: KV gathered to dense tensors, and a dense boolean mask."""

    def __init__(self, inputs: AttentionInputs) -> None:
        meta = inputs.meta
        self._inputs = inputs
        num_sequences = len(meta.context_lens)
        rows = len(inputs.q) // num_sequences
        positions = torch.arange(int(meta.context_lens.max()) + rows, device=DEVICE)
        nodes = positions - meta.context_lens[:, None]
        blocks = meta.block_tables.clamp(min=0).long()[:, positions // meta.block_size]
        # Positions past a sequence's end read its first slot, which holds no NaN; the mask hides them.
        slots = blocks * meta.block_size + positions % meta.block_size
        self._slots = torch.where(nodes < rows, slots, slots[:, :1])
        words = meta.ancestor_words.view(num_sequences, rows, -1)
        node = nodes.clamp(0, rows - 1)[:, None, :].expand(-1, rows, -1)
        is_ancestor = (words.gather(2, node // 64) >> (node % 64)) & 1 == 1
        in_context, in_tree = nodes < 0, (nodes >= 0) & (nodes < rows)
        self._mask = (in_context[:, None, :] | (in_tree[:, None, :] & is_ancestor))[:, None]
        self._q = inputs.q.view(num_sequences, rows, *inputs.q.shape[1:]).transpose(1, 2).contiguous()
        self.keys_values = self.gather()

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [S, KVH, positions, D]."""
        k, v = self._inputs.k_cache[self._slots], self._inputs.v_cache[self._slots]
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def attend(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention [S, H, rows, D]."""
        return F.scaled_dot_product_attention(
            self._q, k, v, attn_mask=self._mask, scale=self._inputs.scale, enable_gqa=True
        )


def root_bits(heads: HeadShape, dtype: torch.dtype) -> dict[str, Any]:
    """A root alone against the same root in a 64-node tree: how many of its values keep their bits."""
    whole = random_inputs(
        [SequenceShape(1000, random_tree(64))], heads, block_size=BLOCK_SIZE, dtype=dtype, device=DEVICE
    )
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    meta = replace(whole.meta, query_offsets=offsets, ancestor_words=whole.meta.ancestor_words[:1])
    alone, inside = _triton(replace(whole, q=whole.q[:1], meta=meta))[0], _triton(whole)[0]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "heads": asdict(heads),
        "equal_share": (alone == inside).float().mean().item(),
        "max_difference": (alone.float() - inside.float()).abs().amax().item(),
    }


def kv_agrees(dtype: torch.dtype) -> bool:
    """Whether writes and overlapping moves leave the same bits as their twins."""
    cache = torch.randn(4096, 8, 128, device=DEVICE).to(dtype)
    slots, values = torch.randperm(4096, device=DEVICE)[:1000], torch.randn(1000, 8, 128, device=DEVICE).to(dtype)
    twin = cache.clone()
    write_kv(twin, slots, values)
    write_kv_triton(cache, slots, values)
    src = torch.arange(1, 2000, device=DEVICE)  # each source is the next move's destination
    move_kv(twin, src, src - 1)
    move_kv_triton(cache, src, src - 1)
    return torch.equal(cache, twin)


def main() -> int:
    """Runs every check, prints a line for each and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device and found none: nothing was checked", file=sys.stderr)
        return 2
    results = list(_run_cases())
    kv = {str(dtype).removeprefix("torch."): kv_agrees(dtype) for dtype in TOLERANCE}
    bits = [root_bits(heads, dtype) for heads in HEADS for dtype in TOLERANCE]
    passed = all(r.agrees for r in results) and all(kv.values())
    report = {
        "command": [Path(sys.executable).name, *sys.argv],
        "machine": _machine(),
        "passed": passed,
        "cases": [asdict(r) for r in results],
        "kv_equals_twin": kv,
        "root_alone_and_in_tree": bits,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"KV kernels equal their twins: {kv}\n{'passed' if passed else 'FAILED'}: {args.json}")
    return 0 if passed else 1


def _run_cases() -> Iterator[CaseResult]:
    for case in CASES:
        for heads in HEADS:
            for dtype in TOLERANCE:
                r = check_case(case, heads, dtype)
                print(
                    f"{'ok ' if r.agrees else 'BAD'} {r.name:<17}{r.dtype:<9} H={heads.num_heads:<3} "
                    f"D={heads.head_dim:<4}splits={r.plan.num_splits:<3} error {r.max_error:.1e}  ms: "
                    f"triton {r.triton_ms:.3f}, SDPA {r.sdpa_dense_ms:.3f}, with gather {r.gather_and_sdpa_ms:.3f}"
                )
                yield r


def _triton(inputs: AttentionInputs) -> torch.Tensor:
    i = inputs
    return tree_attention_triton(i.q, i.k_cache, i.v_cache, i.meta, i.scale)


def _median_ms(call: Callable[[], object]) -> float:
    median: float = triton.testing.do_bench(call, return_mode="median")
    return median


def _machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
