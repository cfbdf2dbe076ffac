"""Compiles every kernel variant ahead of time, without a GPU, and reports what each one costs.

    python -m treeserve_kernels.triton.compile [--arch 80 90] [--dtype bfloat16] [--head-dim 64 128] [--json FILE]

A variant that does not compile ends the run with its error. Registers and stack come from the cubin itself; a kernel
keeps nothing on the stack but what did not fit in registers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from treeserve_kernels.triton import kv, tree_attention

ARCHES = (80, 90, 100)
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 128)
# The variants' block size and query heads per KV head; neither changes a kernel's shape.
BLOCK_SIZE = 16
GROUP = 4
KV_WIDTH = 1024

_POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
_WARP_SIZE = 32


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: the types of its run-time arguments by name, and its constants."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, int | str]
    options: Mapping[str, int | bool]
    label: str

    def source(self) -> ASTSource:
        """The kernel with pointers assumed aligned to 16 bytes, as torch allocates them."""
        names = self.kernel.arg_names
        signature = {name: self.types.get(name, "constexpr" if name in self.constants else "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
        return ASTSource(self.kernel, signature, dict(self.constants), aligned)


@dataclass(frozen=True)
class Report:
    """What a compiled variant costs on one architecture; sizes in bytes, stack per thread, shared per program."""

    kernel: str
    variant: str
    arch: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    cubin_bytes: int
    compile_s: float


def variants(dtypes: Sequence[str] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Variant]:
    """Every kernel for every dtype, head size and row tile that a launch can choose."""
    for dtype in dtypes:
        for head_dim in head_dims:
            for tile_rows in tree_attention.tile_row_choices(getattr(torch, dtype)):
                # One split writes the model's dtype; several write float32 parts.
                for out in sorted({dtype, "float32"}):
                    yield _attention(dtype, out, head_dim, tile_rows)
            yield _merge(dtype, head_dim)
        yield from _kv(dtype)


def compile_variant(variant: Variant, arch: int) -> Report:
    """Compiles one variant to a cubin for sm_`arch` and reads its resource usage.

    Raises:
        RuntimeError: if the cubin does not state its registers; Triton's own errors if it does not compile.
    """
    begin = time.perf_counter()
    compiled = triton.compile(
        variant.source(), target=GPUTarget("cuda", arch, _WARP_SIZE), options=dict(variant.options)
    )
    compile_s = time.perf_counter() - begin
    cubin: bytes = compiled.asm["cubin"]
    registers, stack_bytes = _resource_usage(cubin)
    return Report(
        kernel=compiled.name,
        variant=variant.label,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=compiled.metadata.shared,
        cubin_bytes=len(cubin),
        compile_s=round(compile_s, 3),
    )


def _attention(dtype: str, out: str, head_dim: int, tile_rows: int) -> Variant:
    torch_dtype = getattr(torch, dtype)
    data = dict.fromkeys(("q_ptr", "k_cache", "v_cache"), _POINTERS[dtype])
    tables = dict.fromkeys(("block_tables", "context_lens", "query_offsets", "node_offsets"), "*i32")
    other = {"out_ptr": _POINTERS[out], "lse_ptr": "*fp32", "ancestor_words": "*i64", "scale_log2": "fp32"}
    constants: dict[str, int | str] = {
        "block_size": BLOCK_SIZE,
        "group": GROUP,
        "head_dim": head_dim,
        "head_block": triton.next_power_of_2(head_dim),
        "tile_rows": tile_rows,
        "split_positions": tree_attention.SPLIT_POSITIONS,
        "precision": tree_attention.dot_precision(torch_dtype),
    }
    label = f"{dtype}->{out} head_dim={head_dim} rows={tile_rows}"
    options = tree_attention.compile_options(torch_dtype, tile_rows)
    return Variant(tree_attention.attention_kernel, data | tables | other, constants, options, label)


def _merge(dtype: str, head_dim: int) -> Variant:
    types = {"split_out_ptr": "*fp32", "split_lse_ptr": "*fp32", "out_ptr": _POINTERS[dtype]}
    head_block = triton.next_power_of_2(head_dim)
    constants = {"head_dim": head_dim, "head_block": head_block, "tile_rows": tree_attention.MERGE_ROWS}
    return Variant(
        tree_attention.merge_kernel, types, constants, {"enable_fp_fusion": True}, f"{dtype} head_dim={head_dim}"
    )


def _kv(dtype: str) -> Iterator[Variant]:
    pointer = _POINTERS[dtype]
    types = {"cache": pointer, "values": pointer, "slots": "*i64"}
    copies = {"enable_fp_fusion": False}
    yield Variant(kv.write_kernel, types, {"width_block": KV_WIDTH}, copies, f"{dtype} width={KV_WIDTH}")
    types = {"cache": pointer, "src": "*i64", "dst": "*i64"}
    tile = {"moves_per_tile": kv.MOVES_PER_TILE, "move_width": kv.MOVE_WIDTH}
    yield Variant(kv.move_kernel, types, tile, copies, f"{dtype} tile={kv.MOVES_PER_TILE}x{kv.MOVE_WIDTH}")


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as cuobjdump reads them from the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers: {text!r}")
    return int(found[1]), int(found[2])


def _table(reports: Sequence[Report]) -> Iterator[str]:
    yield f"{'kernel':<17}{'variant':<44}{'arch':>5}{'warps':>6}{'regs':>5}{'stack B':>8}{'shared B':>9}{'seconds':>8}"
    for r in reports:
        yield (
            f"{r.kernel:<17}{r.variant:<44}{r.arch:>5}{r.num_warps:>6}{r.registers:>5}{r.stack_bytes:>8}"
            f"{r.shared_bytes:>9}{r.compile_s:>8.2f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the chosen variants, prints a table and writes JSON if asked; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m treeserve_kernels.triton.compile", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHES, help="compute capabilities, such as 90")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--json", type=Path, help="also write the reports here")
    args = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    reports = [compile_variant(v, arch) for v in variants(args.dtype, args.head_dim) for arch in args.arch]
    print("\n".join(_table(reports)))
    if args.json is not None:
        result = {
            "command": [parser.prog, *(sys.argv[1:] if argv is None else argv)],
            "triton": triton.__version__,
            "kernels": [asdict(r) for r in reports],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
