"""Whether a folder takes files: asked before the long work whose results go there."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError


def check_folder_writable(folder: Path, option: str) -> None:
    """Raise InvalidArgumentError unless files can be written in a folder, which need not exist. It stays as it was.

    Args:
        option: that names the folder, for the error.
    """
    missing: list[Path] = []
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError:
        raise InvalidArgumentError(option, f"{folder} is not a folder") from None
    except OSError as error:
        raise InvalidArgumentError(option, f"{folder} cannot be written: {error.strerror}") from None
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
