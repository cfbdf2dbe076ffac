"""Compiles the shared object. The package's own build calls this; so does anyone who wants other flags.

    python -m treeserve_kernels.cpu.build [--sanitize address,undefined] [--out FOLDER]

Without --out the object replaces the one beside this file. TREESERVE_CPU_LIBRARY=FOLDER/libtreeserve_cpu.so makes the
package load another. One built with the address sanitizer needs its runtime to come first:

    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY_NAME = "libtreeserve_cpu.so"

_SOURCES = Path(__file__).parent
# Code that only some CPUs run is compiled with their instructions; all else with what every CPU of the machine has.
_PORTABLE = (
    "api", "batch", "cpu_features", "decoder", "kv_cache", "memory", "rivals", "thread_pool", "kernels_portable",
)  # fmt: skip
_X86 = {
    "kernels_avx2": ("-mavx2", "-mfma"),
    "kernels_avx512": (
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma",
        "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # GCC 12 warns of its own header
    ),
}  # fmt: skip
# Contraction would fuse a multiplication and an addition on one instruction set and not on another.
_FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall",
    "-Wextra",
)  # fmt: skip
_COMPILERS = ("g++", "c++", "clang++")


class BuildError(Exception):
    """There is no compiler, or it failed."""


def build(folder: Path, sanitizers: Sequence[str] = ()) -> Path:
    """Compile the sources and link the shared object into `folder`.

    Raises:
        BuildError: if there is no C++20 compiler (the environment's CXX, g++, c++ or clang++) or it fails.
    """
    compiler = find_compiler()
    extra = [f"-fsanitize={','.join(sanitizers)}", "-fno-sanitize-recover=all", "-g", "-O1"] if sanitizers else []
    sources = dict.fromkeys(_PORTABLE, ()) | (_X86 if platform.machine() in ("x86_64", "AMD64") else {})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_one(name: str) -> str:
            target = str(Path(objects, f"{name}.o"))
            _run([*compiler, *_FLAGS, *sources[name], *extra, "-c", str(_SOURCES / f"{name}.cpp"), "-o", target])
            return target

        slowest_first = sorted(sources, key=lambda name: not name.startswith("kernels"))
        compiled = list(pool.map(compile_one, slowest_first))
        linked = Path(objects, LIBRARY_NAME)
        # Objects for every CPU come first: should two hold the same inline function, the linker keeps the first.
        compiled.sort(key=lambda path: Path(path).stem in _X86)
        _run([*compiler, "-shared", "-pthread", *extra, *compiled, "-o", str(linked)])
        # Renamed into place: a process that has the old one mapped must not see it overwritten.
        copied = Path(shutil.copy(linked, folder / f".{LIBRARY_NAME}.new"))
        return copied.replace(folder / LIBRARY_NAME)


def find_compiler() -> list[str]:
    """The compiler's command line.

    Raises:
        BuildError: if there is none.
    """
    for candidate in (os.environ.get("CXX", ""), *_COMPILERS):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler found: set CXX, or install one of {', '.join(_COMPILERS)}")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr}")
    if done.stderr:
        print(done.stderr, end="")


def main() -> None:
    """Build as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", default="", help="sanitizers to build in, such as address,undefined")
    parser.add_argument("--out", type=Path, default=_SOURCES, help="folder for the shared object")
    arguments = parser.parse_args()
    try:
        print(build(arguments.out, [s for s in arguments.sanitize.split(",") if s]))
    except BuildError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
