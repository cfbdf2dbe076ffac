"""Generate the Python stubs in protos/gen from the .proto files; with --check, fail if the committed ones are stale.

Run by `make protos` and `make lint`.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.rpc import status_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).parent
GENERATED = PROTOS / "gen"
SOURCES = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "treeserve").rglob("*.proto"))
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"  # google/protobuf/*.proto
GOOGLE_APIS = Path(status_pb2.__file__).parents[2]  # google/rpc/*.proto


def run_protoc(*flags: str) -> None:
    """Run protoc over all our protos.

    Raises:
        RuntimeError: if it reports an error.
    """
    includes = [f"-I{path}" for path in (PROTOS, WELL_KNOWN, GOOGLE_APIS)]
    if protoc.main(["protoc", *includes, *flags, *SOURCES]) != 0:
        raise RuntimeError("protoc failed")


def generate(out: Path) -> None:
    """Write stubs (messages, type stubs, services) for every .proto below `out`."""
    run_protoc(
        *(f"--{plugin}_out={out}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *(f"--plugin={Path(sys.executable).parent / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
    )
    for directory in {p.parent for p in out.rglob("*.py")} | {out / "treeserve"}:
        for package in (directory, *directory.parents):
            if package == out:
                break
            (package / "__init__.py").write_text('"""Generated stubs."""\n')
    (out / "treeserve" / "py.typed").touch()


def describe(out: Path) -> None:
    """Write one descriptor image of all protos with their imports, which buf lints and compares."""
    run_protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={out}")


def stale_files(fresh: Path) -> list[str]:
    """Names that differ between the fresh stubs and the committed ones."""
    names = {str(p.relative_to(root)) for root in (fresh, GENERATED) for p in root.rglob("*.py*") if p.suffix != ".pyc"}
    _, differing, missing = filecmp.cmpfiles(fresh, GENERATED, names, shallow=False)
    return sorted(differing + missing)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if the committed stubs are stale")
    parser.add_argument("--image", type=Path, help="only write the descriptor image here")
    options = parser.parse_args()
    if options.image:
        describe(options.image)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(fresh)
        if options.check:
            if stale := stale_files(fresh):
                print("stale stubs, run `make protos`:", *stale, sep="\n  ", file=sys.stderr)
                return 1
            return 0
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(fresh, GENERATED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
