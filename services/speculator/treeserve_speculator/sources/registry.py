"""Draft sources by name: the built-in ones, and any factory named ``package.module:factory``."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from treeserve_core.errors import InvalidArgumentError
from treeserve_speculator.sources.base import DraftSource, SourceSettings

# Modules, not classes: a source's imports (torch for the draft model) are paid only where it is configured.
_BUILT_IN = {name: f"treeserve_speculator.sources.{name}:build" for name in ("ngram", "suffix", "recycling", "ssm")}


def build_sources(settings: SourceSettings) -> tuple[DraftSource, ...]:
    """Build the configured sources in order.

    A factory takes the `SourceSettings` and returns a `DraftSource`.

    Raises:
        InvalidArgumentError: for a name that is neither built in nor leads to a factory, or two sources of one name.
    """
    sources = tuple(_build(name, settings) for name in settings.config.source_names)
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise InvalidArgumentError("sources", f"two of them call themselves the same: {', '.join(names)}")
    return sources


def _build(name: str, settings: SourceSettings) -> DraftSource:
    module_name, _, factory_name = _BUILT_IN.get(name, name).partition(":")
    if not factory_name:
        known = ", ".join(_BUILT_IN)
        raise InvalidArgumentError("sources", f"{name!r} is neither one of {known} nor a package.module:factory")
    try:
        factory = getattr(import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError("sources", f"{name!r} cannot be loaded: {error}") from error
    return cast(DraftSource, factory(settings))
