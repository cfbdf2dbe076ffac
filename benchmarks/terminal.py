"""Where a benchmark prints: the terminal, or a file with room for whole lines."""

from __future__ import annotations

import os
import sys

from rich.console import Console


def make_console() -> Console:
    """As wide as the terminal, or wide enough for all columns if the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "200")))
