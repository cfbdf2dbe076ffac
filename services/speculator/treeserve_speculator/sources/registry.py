"""Draft sources by name: built-in ones, installed ones (entry points), and code named ``package.module:attribute``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from prometheus_client import CollectorRegistry

from treeserve_core.errors import InvalidArgumentError
from treeserve_speculator.config import HEAD, NGRAM_TABLE, SSM, SSMS, TRAINED
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.sources.base import DraftSource, SourceSettings
from treeserve_speculator.sources.isolated import IsolatedSource, Isolation
from treeserve_speculator.sources.user_function import FunctionSource

ENTRY_POINTS = "treeserve.draft_sources"

# Modules with a factory `build`; their imports (torch for the draft model) are paid only where they are configured.
_BUILT_IN = ("ngram", "suffix", "recycling", NGRAM_TABLE, HEAD, *SSMS, "corpus")


def build_sources(settings: SourceSettings, metrics: SpeculatorMetrics | None = None) -> tuple[DraftSource, ...]:
    """Build the configured sources in order.

    A name is that of a built-in source, of an entry point in the group `treeserve.draft_sources`, or
    ``package.module:attribute``. What the latter two lead to is told apart by its required positional parameters:

    - two: a user function, ``f(token_ids, budget)``, which returns candidate continuations (see `UserFunction`);
    - one: a factory (a class, too), which takes the `SourceSettings` and returns a `DraftSource` or a user function.

    Such a source runs isolated: it can cost time, and nothing else.

    Args:
        metrics: where failures of isolated sources are counted.

    Raises:
        InvalidArgumentError: for a name that leads to no source, or two sources of one name.
    """
    metrics = metrics or SpeculatorMetrics(CollectorRegistry())
    sources = tuple(_build(name, settings, metrics) for name in source_names(settings))
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise InvalidArgumentError("sources", f"two of them call themselves the same: {', '.join(names)}")
    return sources


def source_names(settings: SourceSettings) -> list[str]:
    """The configured names; those of all trained drafters that are not named in place of `trained`."""
    names = settings.config.source_names
    held = [] if settings.drafters is None else settings.drafters.sources
    trained = [name for name in held if name not in names]
    return [each for name in names for each in (trained if name == TRAINED else [name])]


def _build(name: str, settings: SourceSettings, metrics: SpeculatorMetrics) -> DraftSource:
    entry = _entry(name)
    found = _loaded(name, entry)
    if name in _BUILT_IN:
        return cast(DraftSource, found(replace(settings, name=name)))
    make = _maker(entry.name, found, settings)
    isolation = Isolation(settings.config.source_budget_ms / 1e3)
    try:
        return IsolatedSource(make(), make, vocab_size=settings.vocab_size, metrics=metrics, isolation=isolation)
    except Exception as error:
        raise InvalidArgumentError("sources", f"{name!r} cannot be built: {error!r}") from error


def _entry(name: str) -> EntryPoint:
    if name in _BUILT_IN:
        module = SSM if name in SSMS else name
        return EntryPoint(name, f"treeserve_speculator.sources.{module}:build", ENTRY_POINTS)
    installed = entry_points(group=ENTRY_POINTS)
    if name in installed.names:
        return installed[name]
    if ":" not in name:
        known = ", ".join((*_BUILT_IN, *sorted(installed.names)))
        raise InvalidArgumentError("sources", f"{name!r} is neither one of {known} nor a package.module:attribute")
    module, _, attribute = name.partition(":")
    short = module.rpartition(".")[2] if attribute == "build" else attribute
    return EntryPoint(short, name, ENTRY_POINTS)


def _loaded(name: str, entry: EntryPoint) -> Callable[..., Any]:
    try:
        found = entry.load()
    except Exception as error:  # importing runs whatever the module holds
        raise InvalidArgumentError("sources", f"{name!r} cannot be loaded: {error!r}") from error
    if not callable(found):
        raise InvalidArgumentError("sources", f"{name!r} is neither a function nor a class")
    return cast(Callable[..., Any], found)


def _maker(name: str, found: Callable[..., Any], settings: SourceSettings) -> Callable[[], DraftSource]:
    required = _required_parameters(name, found)
    if required == 1:
        return lambda: _as_source(name, found(settings), settings)
    if required == 2:
        return lambda: _as_source(name, found, settings)
    raise InvalidArgumentError(
        "sources", f"{name!r} takes {required} arguments: a factory takes 1 (the settings), a user function 2"
    )


def _as_source(name: str, made: Any, settings: SourceSettings) -> DraftSource:
    return made if hasattr(made, "propose") else FunctionSource(name, made, settings.vocab_size)


def _required_parameters(name: str, found: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("sources", f"{name!r} does not say what it takes: {error}") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
