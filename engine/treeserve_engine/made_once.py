"""Files that are made once and shared between processes, named by what they are made of."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from treeserve_core.errors import InvalidArgumentError

# A write this soon after the last one might leave the same time stamp, where clocks are coarse.
_SETTLED_NS = 2_000_000_000


def default_cache_dir() -> Path:
    """Where converted models go: a folder of the user's if it can be written, else of the machine's temporary files."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "treeserve"
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    return home if os.access(nearest, os.W_OK) else Path(tempfile.gettempdir()) / "treeserve"


def make_once(target: Path, is_ready: Callable[[], bool], make: Callable[[Path], None]) -> None:
    """Make a file or folder unless it is ready. Of several processes one makes it, and the others wait.

    It appears under its name only when it is complete, so an interrupted attempt is never reused.

    Args:
        is_ready: whether the target is there and good; one that is not is replaced.
        make: called with the path to make it at.

    Raises:
        InvalidArgumentError: if the cache cannot be written.
    """
    if is_ready():  # asked before locking, so that a filled cache may be read-only
        return
    with _locked(target):
        if is_ready():
            return
        unfinished = target.with_name(f".{target.name}.unfinished")
        _remove(unfinished)  # what a killed attempt left
        try:
            make(unfinished)
            if target.is_dir():  # a file is replaced at once, a folder is not
                shutil.rmtree(target)
            unfinished.rename(target)
        finally:
            _remove(unfinished)


def cache_key(*parts: object) -> str:
    """16 hex digits for a name, of a hash over all that decides a file's content."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def content_hash(path: Path, memory: Path, *, skip_last: int = 0) -> str:
    """SHA-256 (hex) of a file without its last bytes, remembered in the folder `memory` until the file changes.

    A change is noticed as git does it: by inode, size and the times of the last write and of the last change of any
    kind, which nobody can set. A file that changed a moment ago is not remembered yet. Where `memory` cannot be
    written, the hash is computed each time.
    """
    note = memory / ".hashes" / f"{cache_key(path.resolve())}-{skip_last}.json"
    signature, began_ns = _signature(path), time.time_ns()
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text())
        if known["signature"] == signature:
            return str(known["sha256"])
    digest = _sha256(path, skip_last)
    if _signature(path) == signature and path.stat().st_ctime_ns < began_ns - _SETTLED_NS:
        with suppress(OSError):
            _write_whole(note, {"path": str(path), "signature": signature, "sha256": digest})
    return digest


def _signature(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _sha256(path: Path, skip_last: int) -> str:
    digest, left = hashlib.sha256(), path.stat().st_size - skip_last
    with path.open("rb") as file:
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def _write_whole(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(value, file)
    Path(file.name).rename(path)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold a lock between processes, so that services which start together do the work once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        reason = f"{target.parent} cannot be written ({error.strerror}) and does not hold {target.name}"
        raise InvalidArgumentError("cache_dir", reason) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it, and so does dying
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
