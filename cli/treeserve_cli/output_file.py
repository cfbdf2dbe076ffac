"""Where a command writes what takes it long to make."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError if a file cannot be written: asked before long work. It stays as it was, or away."""
    is_new = not os.path.lexists(path)
    path.open("a").close()
    if is_new:
        path.unlink()
