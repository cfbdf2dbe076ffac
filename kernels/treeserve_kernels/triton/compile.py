"""Compiles every kernel variant ahead of time, without a GPU, and reports what each one costs.

    python -m treeserve_kernels.triton.compile [--arch 80 90] [--dtype bfloat16] [--head-dim 64 128] [--json FILE]

A variant that does not compile, or that spills registers, ends the run with an error. The numbers are ptxas's own.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from treeserve_kernels.triton.variants import DTYPES, HEAD_DIMS, Variant, variants

ARCHES = (80, 90, 100)
_WARP_SIZE = 32
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Report:
    """What a compiled variant costs on one architecture.

    Sizes in bytes: stack and spills per thread, shared per program. Spills count what is stored and loaded again.
    """

    kernel: str
    variant: str
    arch: int
    num_warps: int
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    cubin_bytes: int
    compile_s: float

    @property
    def spills(self) -> bool:
        """Whether something did not fit in registers."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True)
class Compiled:
    """A variant's report and the PTX it was assembled from."""

    report: Report
    ptx: str


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compiles one variant to a cubin for sm_`arch`, past Triton's cache: only then does ptxas say what it did.

    Raises:
        RuntimeError: if ptxas does not state its registers; Triton's own errors if the variant does not compile.
    """
    begin = time.perf_counter()
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            variant.source(), target=GPUTarget("cuda", arch, _WARP_SIZE), options=dict(variant.options)
        )
    compile_s = time.perf_counter() - begin
    frame, registers = _FRAME.search(log.getvalue()), _REGISTERS.search(log.getvalue())
    if frame is None or registers is None:
        raise RuntimeError(f"ptxas reports no registers: {log.getvalue()!r}")
    stack, stores, loads = map(int, frame.groups())
    report = Report(
        kernel=compiled.name,
        variant=variant.label,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=int(registers[1]),
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        shared_bytes=compiled.metadata.shared,
        cubin_bytes=len(compiled.asm["cubin"]),
        compile_s=round(compile_s, 3),
    )
    return Compiled(report, compiled.asm["ptx"])


def _table(reports: Sequence[Report]) -> Iterator[str]:
    yield (
        f"{'kernel':<17}{'variant':<42}{'arch':>5}{'warps':>6}{'regs':>5}{'stack B':>8}"
        f"{'spilled B: st':>14}{'ld':>5}{'shared B':>9}{'seconds':>8}"
    )
    for r in reports:
        yield (
            f"{r.kernel:<17}{r.variant:<42}{r.arch:>5}{r.num_warps:>6}{r.registers:>5}{r.stack_bytes:>8}"
            f"{r.spill_store_bytes:>14}{r.spill_load_bytes:>5}{r.shared_bytes:>9}{r.compile_s:>8.2f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the chosen variants, prints a table and writes JSON if asked; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m treeserve_kernels.triton.compile", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHES, help="compute capabilities, such as 90")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="of attention and KV kernels")
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--json", type=Path, help="also write the reports here")
    args = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    reports = [compile_variant(v, arch).report for v in variants(args.dtype, args.head_dim) for arch in args.arch]
    print("\n".join(_table(reports)))
    if args.json is not None:
        result = {
            "command": [parser.prog, *(sys.argv[1:] if argv is None else argv)],
            "triton": triton.__version__,
            "kernels": [asdict(r) for r in reports],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    spilling = [f"{r.kernel} {r.variant} sm_{r.arch}" for r in reports if r.spills]
    if spilling:
        print(f"registers spill in: {', '.join(spilling)}", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
