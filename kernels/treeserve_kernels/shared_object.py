"""Compiles C++ into shared objects with a C interface, and loads them: the CPU kernels, and native drafting."""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

# Contraction would fuse a multiplication and an addition on one instruction set and not on another.
_FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall",
    "-Wextra",
)  # fmt: skip
_COMPILERS = ("g++", "c++", "clang++")


Signatures: TypeAlias = Mapping[str, tuple[Any, Sequence[Any]]]


class BuildError(Exception):
    """There is no compiler, or it failed."""


def build_shared_object(sources: Mapping[Path, Sequence[str]], target: Path, sanitizers: Sequence[str] = ()) -> Path:
    """Compile sources, each with flags of its own, and link them, in this order, into `target`.

    Raises:
        BuildError: if there is no C++20 compiler (the environment's CXX, g++, c++ or clang++) or it fails.
    """
    compiler = find_compiler()
    extra = [f"-fsanitize={','.join(sanitizers)}", "-fno-sanitize-recover=all", "-g", "-O1"] if sanitizers else []
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_one(source: Path) -> str:
            compiled = str(Path(objects, f"{source.stem}.o"))
            _run([*compiler, *_FLAGS, *sources[source], *extra, "-c", str(source), "-o", compiled])
            return compiled

        most_work_first = sorted(sources, key=lambda source: -len(sources[source]))
        compiled = dict(zip(most_work_first, pool.map(compile_one, most_work_first), strict=True))
        linked = Path(objects, target.name)
        _run([*compiler, "-shared", "-pthread", *extra, *[compiled[source] for source in sources], "-o", str(linked)])
        # Renamed into place: a process that has the old one mapped must not see it overwritten.
        copied = Path(shutil.copy(linked, target.with_name(f".{target.name}.new")))
        return copied.replace(target)


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


def build_as_told(description: str | None, folder: Path, build: Callable[[Path, Sequence[str]], Path]) -> None:
    """Build as the command line says: the body of a build module's `main`.

    Args:
        folder: where the shared object goes by default.
        build: of a folder and sanitizers.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", default="", help="sanitizers to build in, such as address,undefined")
    parser.add_argument("--out", type=Path, default=folder, help="folder for the shared object")
    arguments = parser.parse_args()
    try:
        print(build(arguments.out, [s for s in arguments.sanitize.split(",") if s]))
    except BuildError as error:
        parser.exit(1, f"{error}\n")


def load_shared_object(
    path: Path,
    version_function: str,
    version: int,
    signatures: Signatures,
    *,
    build_module: str,
    brief: Collection[str] = (),
) -> ctypes.CDLL:
    """Load one and declare its functions.

    Args:
        version_function: its function that says which version its interface has.
        signatures: result and arguments of the others, by name.
        build_module: what builds it, for people.
        brief: those of them that are over so soon that no other thread gets the interpreter meanwhile: to get it back
            would take longer.

    Raises:
        OSError: if it is missing, does not load, lacks a function, or its interface has another version.
    """
    try:
        _check_whole(path)
        library = ctypes.CDLL(str(path))
        found = getattr(library, version_function)()
        if found == version:
            keeping = ctypes.PyDLL(str(path))
            for name in brief:
                setattr(library, name, getattr(keeping, name))
            for name, (result, arguments) in signatures.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise OSError(f"{path} does not load ({error}); build it: python -m {build_module}") from error
    if found != version:
        raise OSError(f"{path} has interface version {found} instead of {version}; build it anew")
    return library


def _check_whole(path: Path) -> None:
    """Raise OSError for a file cut short, of which the loader would map pages that are not there: a fatal signal."""
    with path.open("rb") as file:
        header, size = file.read(64), file.seek(0, os.SEEK_END)
    if len(header) == 64 and header.startswith(b"\x7fELF\x02"):
        table, entry_bytes, entries = struct.unpack_from("<40xQ10xHH", header)
        if size < table + entry_bytes * entries:  # the table of sections comes last
            raise OSError("it is cut short")
