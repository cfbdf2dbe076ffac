"""Turn what the operator names (a folder or a .gguf file) into a checkpoint folder that the engine can load."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import load_config
from treeserve_engine.weights import weight_files

# Part of the cache key: raise it when a conversion of the same file comes out differently.
_CONVERSION_VERSION = b"1"


def prepare_checkpoint(source: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """A folder with config.json, tokenizer.json and safetensors weights, in Hugging Face's layout.

    A folder is checked and returned as it is. A .gguf file is converted once into
    `cache_dir`/<name>-<content hash> (float32, which holds every dequantised value exactly) and reused afterwards.
    The conversion appears under its final name only when it is complete, so an interrupted one is never reused.

    Args:
        progress: told what happens, one line at a time.

    Raises:
        InvalidArgumentError: if `source` does not exist or is a model that the engine does not support.
    """
    if source.is_dir():
        return _checked(source)
    if not source.is_file():
        raise InvalidArgumentError("model", f"{source} does not exist")
    if source.suffix.lower() != ".gguf":
        raise InvalidArgumentError("model", f"{source} is neither a checkpoint folder nor a .gguf file")
    target = cache_dir / f"{source.stem}-{_content_hash(source)}"
    if not target.is_dir():  # asked before locking, so that a filled cache may be read-only
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{target.name}.lock"):
            if not target.is_dir():
                _convert_into(target, source, progress)
    return _checked(target)


def _convert_into(target: Path, source: Path, progress: Callable[[str], None]) -> None:
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed conversion left
    unfinished.mkdir()
    try:
        _convert(source, unfinished, progress)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, so that services which start together convert a file once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it, and so does dying
        yield


def _convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    # Imported here: most starts find a converted folder and need neither gguf nor the tokenizer builder.
    from treeserve_engine.gguf_file import GgufFile
    from treeserve_engine.gguf_tokenizer import write_tokenizer
    from treeserve_engine.gguf_weights import write_config, write_weights

    progress(f"reading {source}")
    file = GgufFile(source)
    write_config(file, folder)
    load_config(folder)  # refuse an unsupported model before the long part
    progress("converting the tokenizer")
    write_tokenizer(file, folder)
    progress("converting the weights to float32")
    write_weights(file, folder)


def _checked(folder: Path) -> Path:
    load_config(folder)
    weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise InvalidArgumentError("model", f"{folder} holds no tokenizer.json")
    return folder


def _content_hash(path: Path) -> str:
    """The first 16 hex digits of SHA-256 over the conversion's version and the whole file (0.2 s for 100 MB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha256(_CONVERSION_VERSION)).hexdigest()[:16]
