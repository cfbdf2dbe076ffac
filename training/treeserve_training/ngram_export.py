"""Puts an n-gram table into a drafter folder, with what it was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_speculator.config import NGRAM_TABLE
from treeserve_speculator.drafter_files import DrafterFolder, DrafterTarget, open_for_writing
from treeserve_training.ngram_table import NgramTableOptions, build_ngram_table
from treeserve_training.records import read_about


def export_ngram_table(
    data: Path,
    *,
    folder: Path,
    target: DrafterTarget,
    licence: str,
    options: NgramTableOptions | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> DrafterFolder:
    """Build a table of all the data that is there and put it into a folder, in place of an earlier one.

    Raises:
        InvalidArgumentError: if the folder holds drafters of another target, or the data are another's or none.
    """
    about = read_about(data)
    if about["tokenizer"] != target.tokenizer_hash:
        raise InvalidArgumentError("data", f"{data} holds answers of another model than {target.name}")
    drafters = open_for_writing(folder, target, licence)
    path = folder / f"{NGRAM_TABLE}.bin"
    options = options or NgramTableOptions()
    report = build_ngram_table(data, path, options, progress=progress)
    recipe = {"command": "treeserve train", "data": about, "options": asdict(options), "result": asdict(report)}
    return drafters.with_file(NGRAM_TABLE, path, recipe)
