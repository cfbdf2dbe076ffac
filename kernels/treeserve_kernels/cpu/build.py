"""Compiles the shared object. The package's own build calls this; so does anyone who wants other flags.

    python -m treeserve_kernels.cpu.build [--sanitize address,undefined] [--out FOLDER]

Without --out the object replaces the one beside this file. TREESERVE_CPU_LIBRARY=FOLDER/libtreeserve_cpu.so makes the
package load another. One built with the address sanitizer needs its runtime to come first:

    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from treeserve_kernels.shared_object import build_as_told, build_shared_object

LIBRARY_NAME = "libtreeserve_cpu.so"

_SOURCES = Path(__file__).parent
# Code that only some CPUs run is compiled with their instructions; all else with what every CPU of the machine has, and
# linked first: should two objects hold the same inline function, the linker keeps the first.
_PORTABLE = (
    "api", "batch", "cpu_features", "decode_run", "decoder", "kv_cache", "memory", "node_choice", "rivals",
    "thread_pool", "kernels_portable",
)  # fmt: skip
_X86 = {
    "kernels_avx2": ("-mavx2", "-mfma"),
    "kernels_avx512": (
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma",
        "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # GCC 12 warns of its own header
    ),
}  # fmt: skip


def build(folder: Path, sanitizers: Sequence[str] = ()) -> Path:
    """Compile the sources and link the shared object into `folder`. Raises BuildError."""
    names = dict.fromkeys(_PORTABLE, ()) | (_X86 if platform.machine() in ("x86_64", "AMD64") else {})
    sources = {_SOURCES / f"{name}.cpp": flags for name, flags in names.items()}
    return build_shared_object(sources, folder / LIBRARY_NAME, sanitizers)


def main() -> None:
    """Build as the command line says."""
    build_as_told(__doc__, _SOURCES, build)


if __name__ == "__main__":
    main()
