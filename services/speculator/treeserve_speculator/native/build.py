"""Compiles the shared object; the package's own build calls this.

    python -m treeserve_speculator.native.build [--sanitize address,undefined] [--out FOLDER]

Without --out the object replaces the one beside this file. TREESERVE_DRAFTING_LIBRARY=FOLDER/libtreeserve_drafting.so
makes the package load another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import treeserve_kernels.cpu
from treeserve_kernels.shared_object import build_as_told, build_shared_object

LIBRARY_NAME = "libtreeserve_drafting.so"

_SOURCES = Path(__file__).parent
_INCLUDE = ("-I", str(Path(treeserve_kernels.cpu.__file__).parent))  # the sampler's noise


def build(folder: Path, sanitizers: Sequence[str] = ()) -> Path:
    """Compile the sources and link the shared object into `folder`. Raises BuildError."""
    sources = dict.fromkeys(sorted(_SOURCES.glob("*.cpp")), _INCLUDE)
    return build_shared_object(sources, folder / LIBRARY_NAME, sanitizers)


def main() -> None:
    """Build as the command line says."""
    build_as_told(__doc__, _SOURCES, build)


if __name__ == "__main__":
    main()
