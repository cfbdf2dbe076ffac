"""A folder of trained drafters for one target model: what is in it, for whom it was made, and whether it is whole.

    <folder>/drafter.json     the target, the licence, and for each source its file, its hash and its recipe
            /ssm.int8         files of the sources, in formats of their own

Sources are named as in the speculator's configuration: ssm, ssm2, ngram_table, head. Folders for some models are
shipped, in `drafters` beside this file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.array_file import FOOTER_BYTES, DamagedFileError, map_arrays
from treeserve_engine.made_once import content_hash, default_cache_dir

_T = TypeVar("_T")

MANIFEST = "drafter.json"
FOLDER_FIELD = "drafter_folder"  # of the configuration, which errors name
_FORMAT = 1
_SHIPPED = Path(__file__).parent / "drafters"


@dataclass(frozen=True)
class DrafterTarget:
    """The model that drafters were trained for.

    Attributes:
        vocab_size: ids of its tokenizer, without padding.
    """

    name: str
    tokenizer_hash: str
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class DrafterFile:
    """One source's file.

    Attributes:
        file: its name within the folder.
        sha256: of its content, hex.
        recipe: how it was trained; for people.
    """

    file: str
    sha256: str
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class DrafterFolder:
    """The content of drafter.json.

    Attributes:
        licence: SPDX identifier of the drafters' licence.
        sources: files by the name of their source.
    """

    folder: Path
    target: DrafterTarget
    licence: str
    sources: Mapping[str, DrafterFile]

    @classmethod
    def read(cls, folder: Path) -> DrafterFolder:
        """What a folder holds, for whatever target.

        Raises:
            InvalidArgumentError: if it holds no drafter.json, a broken one, or one of another version.
        """
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidArgumentError(FOLDER_FIELD, f"{folder} holds no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(FOLDER_FIELD, f"{path} cannot be read: {error}") from error
        try:
            if raw["format"] != _FORMAT:
                raise InvalidArgumentError(FOLDER_FIELD, f"{path} is of version {raw['format']}; {_FORMAT} is known")
            sources = {name: DrafterFile(**entry) for name, entry in raw["sources"].items()}
            return cls(folder, DrafterTarget(**raw["target"]), str(raw["licence"]), sources)
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(FOLDER_FIELD, f"{path} is broken: {error!r}") from error

    def check_target(self, tokenizer_hash: str, vocab_size: int, hidden_size: int | None = None) -> None:
        """Raise InvalidArgumentError unless the drafters were trained for this target.

        Args:
            vocab_size: ids of the target's tokenizer, without padding.
            hidden_size: of the target, where a source depends on it.
        """
        expected = self.target
        if tokenizer_hash != expected.tokenizer_hash or vocab_size != expected.vocab_size:
            raise InvalidArgumentError(
                FOLDER_FIELD, f"{self.folder} was trained for {expected.name}, whose tokenizer is not the target's"
            )
        if hidden_size not in (None, expected.hidden_size):
            raise InvalidArgumentError(
                FOLDER_FIELD,
                f"{self.folder} was trained for {expected.name} of hidden size {expected.hidden_size}; "
                f"the target's is {hidden_size}",
            )

    def file(self, source: str, cache_dir: Path | None = None) -> Path:
        """The file of a source, its content checked.

        Args:
            cache_dir: where hashes of unchanged files are remembered; by default the user's cache folder.

        Raises:
            InvalidArgumentError: if the folder lacks the source, or its file is not what was written.
        """
        if source not in self.sources:
            known = ", ".join(self.sources) or "none"
            raise InvalidArgumentError(FOLDER_FIELD, f"{self.folder} holds no {source} drafter; it holds {known}")
        entry = self.sources[source]
        path = self.folder / Path(entry.file).name
        if not path.is_file():
            raise InvalidArgumentError(FOLDER_FIELD, f"{path} is missing")
        if content_hash(path, cache_dir or default_cache_dir()) != entry.sha256:
            raise InvalidArgumentError(FOLDER_FIELD, f"{path} is damaged: its content is not what {MANIFEST} says")
        return path

    def with_written(self, source: str, write: Callable[[Path], None], recipe: Mapping[str, Any]) -> DrafterFolder:
        """The folder with an int8 file for a source, in place of an earlier one; it appears when it is complete."""
        path = self.folder / f"{source}.int8"
        unfinished = path.with_suffix(".unfinished")
        write(unfinished)
        unfinished.replace(path)
        return self.with_file(source, path, recipe)

    def with_file(self, source: str, file: Path, recipe: Mapping[str, Any]) -> DrafterFolder:
        """The folder with a source's file, which lies in it already, recorded anew; written to drafter.json."""
        with file.open("rb") as content:
            entry = DrafterFile(file.name, hashlib.file_digest(content, "sha256").hexdigest(), dict(recipe))
        changed = DrafterFolder(self.folder, self.target, self.licence, {**self.sources, source: entry})
        changed._write()
        return changed

    def _write(self) -> None:
        content = {
            "format": _FORMAT,
            "target": asdict(self.target),
            "licence": self.licence,
            "sources": {name: asdict(entry) for name, entry in sorted(self.sources.items())},
        }
        unfinished = self.folder / f".{MANIFEST}.unfinished"
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(self.folder / MANIFEST)


def find_drafters(
    folder: Path | None, tokenizer_hash: str, vocab_size: int, hidden_size: int | None
) -> DrafterFolder | None:
    """The drafters of a folder; without one those shipped for the target, if any.

    Args:
        vocab_size: ids of the target's tokenizer, without padding.
        hidden_size: of the target, if it has such a size.

    Raises:
        InvalidArgumentError: if the folder holds none, or those of a target with another tokenizer.
    """
    if folder is not None:
        held = DrafterFolder.read(folder)
        held.check_target(tokenizer_hash, vocab_size)
        return held
    for manifest in sorted(_SHIPPED.glob(f"*/{MANIFEST}")):
        shipped = DrafterFolder.read(manifest.parent)
        target = shipped.target
        if (target.tokenizer_hash, target.vocab_size, target.hidden_size) == (tokenizer_hash, vocab_size, hidden_size):
            return shipped
    return None


def read_drafter(path: Path, kind: str, make: Callable[[Mapping[str, Any]], _T], cache_dir: Path) -> _T:
    """What a source makes of its file, mapped read-only.

    Args:
        kind: format and version, which the file names under "kind".
        make: from the file's parts by name.
        cache_dir: where the hashes of unchanged files are remembered.

    Raises:
        InvalidArgumentError: if it cannot be read, is damaged, of another kind, or lacks a part.
    """
    try:
        parts = map_arrays(path, lambda file: content_hash(file, cache_dir, skip_last=FOOTER_BYTES))
    except (DamagedFileError, OSError) as error:
        raise InvalidArgumentError(FOLDER_FIELD, f"{path} cannot be used: {error}") from error
    if parts.get("kind") != kind:
        raise InvalidArgumentError(FOLDER_FIELD, f"{path} is {parts.get('kind')!r}, not {kind!r}")
    try:
        return make(parts)
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(FOLDER_FIELD, f"{path} lacks a part: {error!r}") from error


def check_vocabulary(token_ids: npt.NDArray[np.int64], num_outputs: int, vocab_size: int) -> None:
    """Raise InvalidArgumentError unless a drafter's outputs stand for an ascending part of the target's ids."""
    ids = token_ids
    if len(ids) != num_outputs or not (ids[0] >= 0 and ids[-1] < vocab_size and (np.diff(ids) > 0).all()):
        raise InvalidArgumentError(FOLDER_FIELD, "a drafter's vocabulary is not one of the target's")


def open_for_writing(folder: Path, target: DrafterTarget, licence: str) -> DrafterFolder:
    """A folder to put drafters into, made if it is not there; what it holds for this target stays.

    Raises:
        InvalidArgumentError: if it holds drafters of another target, or drafter.json is broken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = check_for_writing(folder, target)
    return DrafterFolder(folder, target, licence, {} if held is None else held.sources)


def check_for_writing(folder: Path, target: DrafterTarget) -> DrafterFolder | None:
    """What a folder to put drafters into holds already; None if nothing. The folder is left as it is.

    Raises:
        InvalidArgumentError: as `open_for_writing`.
    """
    if not (folder / MANIFEST).exists():
        return None
    held = DrafterFolder.read(folder)
    held.check_target(target.tokenizer_hash, target.vocab_size, target.hidden_size)
    return held
