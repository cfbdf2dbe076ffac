"""What is compared: each source alone, all merged, and one to five draft models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.acceptance.drafters import fresh_drafter
from treeserve_cli.layout import ClusterConfig
from treeserve_core.errors import InvalidArgumentError
from treeserve_speculator.config import HEAD, SSMS
from treeserve_speculator.drafter import Drafter

SINGLE = ("ngram", "suffix", "recycling", "ngram_table", "ssm", HEAD)
CORPUS = "corpus"  # alone only: which text an operator has says little of how others would fare
MERGED = "merged"
OUT_OF_THE_BOX = "out_of_the_box"
WIDTHS = tuple(f"ssm{width}" for width in range(1, len(SSMS) + 1))


@dataclass(frozen=True)
class Configuration:
    """Sources that draft together.

    Attributes:
        fields: of `SpeculatorConfig`, besides the sources.
    """

    name: str
    sources: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def is_like(self, other: Configuration) -> bool:
        """Whether the other one differs in name at most."""
        return (self.sources, self.fields) == (other.sources, other.fields)

    def drafter(self, model_folder: Path) -> Drafter:
        """A drafter that has learnt nothing yet. Raises InvalidArgumentError if it cannot be built."""
        return fresh_drafter(model_folder, self.sources, **self.fields)


@dataclass(frozen=True)
class Found:
    """Configurations that can be built here, and why the others cannot."""

    configurations: tuple[Configuration, ...]
    skipped: Mapping[str, str]


def find_configurations(
    model_folder: Path,
    common: Mapping[str, Any],
    ssms: Mapping[str, Any],
    also: Mapping[str, Mapping[str, Any]],
    corpus: Path | None = None,
    head: Mapping[str, Any] | None = None,
) -> Found:
    """Try to build everything.

    Args:
        common: fields of `SpeculatorConfig` for all.
        ssms: fields besides those for `ssm1` to `ssm5`, whose draft models need not be the shipped ones.
        also: more draft models alone, by name: fields besides the common ones.
        corpus: file of `treeserve corpus build`; None for none.
        head: fields besides the common ones for a head that is not merged with the others; None for the shipped one.
    """
    found: list[Configuration] = []
    skipped: dict[str, str] = {}

    def try_all(configurations: Iterable[Configuration]) -> list[Configuration]:
        usable = []
        for configuration in configurations:
            try:
                configuration.drafter(model_folder)
                usable.append(configuration)
            except InvalidArgumentError as error:
                skipped[configuration.name] = str(error)
        found.extend(usable)
        return usable

    shipped = [name for name in SINGLE if name != HEAD or head is None]
    alone = try_all(Configuration(name, (name,), common) for name in shipped)
    merged = Configuration(MERGED, tuple(name for c in alone for name in c.sources), common)
    try_all([merged, Configuration(CORPUS, (CORPUS,), {**common, "corpus": corpus})])
    default = Configuration(OUT_OF_THE_BOX, ClusterConfig().sources, common)
    if set(default.drafter(model_folder).source_names) != set(merged.sources):
        try_all([default])
    try_all(Configuration(name, SSMS[: i + 1], {**common, **ssms}) for i, name in enumerate(WIDTHS))
    try_all(Configuration(name, SSMS[:1], {**common, **fields}) for name, fields in also.items())
    if head is not None:
        try_all([Configuration(HEAD, (HEAD,), {**common, **head})])
    return Found(tuple(found), skipped)
