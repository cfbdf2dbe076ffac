"""Fresh drafters for the benchmark, built as a speculator process builds its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from treeserve_core.identity import ModelIdentity
from treeserve_simulator.quiet import warnings_only
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.drafter import Drafter
from treeserve_speculator.main import build_drafter, read_identity
from treeserve_speculator.metrics import SpeculatorMetrics

NAME = "target"  # nobody is told it


def fresh_drafter(model_folder: Path, sources: Sequence[str] | None = None, **fields: Any) -> Drafter:
    """A drafter that has learnt nothing yet.

    Args:
        model_folder: of the target.
        sources: names as in the speculator's configuration; without them its own default.
        fields: other fields of `SpeculatorConfig`, such as cache_dir or ssm_folder.

    Raises:
        InvalidArgumentError: if a source cannot be built.
    """
    if sources is not None:
        fields["sources"] = tuple(sources)
    config = SpeculatorConfig(model_folder=model_folder, model_name=NAME, **fields)
    with warnings_only():
        return build_drafter(config, identity(model_folder), SpeculatorMetrics(CollectorRegistry()))


@cache
def identity(model_folder: Path) -> ModelIdentity:
    """Identity of the target, read once."""
    return read_identity(model_folder, NAME)
