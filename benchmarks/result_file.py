"""What every result says of its origin, and how it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Settings
from benchmarks.peers.run import rounded, without_paths, without_root


def origin(
    module: str, argv: Sequence[str] | None, ran_on: Mapping[str, Any], settings: Settings, dtype: str
) -> dict[str, Any]:
    """Command, machine, versions and model.

    Args:
        module: what `python -m` runs.
        argv: its arguments; None for those of this process.
        ran_on: `benchmarks.peers.run.machine` of before the run: it has the load of that moment.
    """
    return {
        "command": ["python", "-m", module, *without_paths(sys.argv[1:] if argv is None else argv)],
        "machine": dict(ran_on),
        "versions": {name: version(name) for name in ("treeserve", "grpcio", "torch")},
        "model": {"folder": settings.folder, "dtype": dtype},
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, figures rounded, without this machine's paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(without_root(json.dumps(rounded(dict(result)), indent=1)) + "\n")
