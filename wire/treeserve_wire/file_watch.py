"""Notices that files have changed, also where a link to them was pointed elsewhere, as Kubernetes does with Secrets."""

from __future__ import annotations

from pathlib import Path

_Stamp = tuple[int, int, int] | None


class FileWatch:
    """Compares files with what they were when it last looked; it has not looked yet when it is new."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: tuple[_Stamp, ...] = ()

    def changed(self) -> bool:
        """Whether any file differs from the last call's; always true for the first."""
        before, self._seen = self._seen, tuple(_stamp(path) for path in self._paths)
        return self._seen != before


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
