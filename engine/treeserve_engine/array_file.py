"""One file of named arrays, each aligned for vector loads, that any number of processes map read-only or read.

Arrays come first, each at a multiple of 64 bytes, so that a writer needs one of them in memory at a time. An index
in JSON follows, then a footer: the index's length, a hash of all bytes before the footer, and a magic number.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treeserve_engine.huge_pages import huge_buffer

_ALIGNMENT = 64
_MAGIC = b"treeserve arrays"
_FOOTER = struct.Struct("<Q32s16s")
FOOTER_BYTES = _FOOTER.size

Item = npt.NDArray[Any] | int | str | None


class DamagedFileError(Exception):
    """The file is not what was written; the message says what is wrong."""


def write_arrays(path: Path, items: Iterable[tuple[str, Item]]) -> None:
    """Write arrays and plain values by name, in order."""
    index: dict[str, Any] = {}
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(data: Any) -> None:
            digest.update(data)
            file.write(data)

        for name, item in items:
            if not isinstance(item, np.ndarray):
                index[name] = {"value": item}
                continue
            write(bytes(-file.tell() % _ALIGNMENT))
            index[name] = {"dtype": item.dtype.str, "shape": item.shape, "offset": file.tell()}
            write(np.ascontiguousarray(item).reshape(-1).view(np.uint8).data)
        encoded = json.dumps(index).encode()
        write(encoded)
        file.write(_FOOTER.pack(len(encoded), digest.digest(), _MAGIC))


def map_arrays(
    path: Path, hash_of: Callable[[Path], str], is_hot: Callable[[str], bool] = lambda _name: False
) -> Mapping[str, Any]:
    """The arrays and values of a file by name; arrays are read-only, and their pages shared between processes.

    Args:
        hash_of: SHA-256 (hex) of the file without its last FOOTER_BYTES.
        is_hot: whether an array, by name, is read into huge pages of this process's own instead.

    Raises:
        DamagedFileError: if the file is shortened, was changed, or is another kind of file.
        OSError: if it cannot be opened.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < FOOTER_BYTES:
            raise DamagedFileError("it is too short")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        index_bytes, digest, magic = _FOOTER.unpack(mapped[-FOOTER_BYTES:])
        if magic != _MAGIC:
            raise DamagedFileError("its end is missing")
        if hash_of(path) != digest.hex():
            raise DamagedFileError("its content has changed")
        if index_bytes > size - FOOTER_BYTES:
            raise DamagedFileError("its end is damaged")
        try:  # the hash does not cover the footer, and so not where the index begins
            index = json.loads(mapped[size - FOOTER_BYTES - index_bytes : size - FOOTER_BYTES])
            items = {name: _item(mapped, entry) for name, entry in index.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DamagedFileError("its end is damaged") from error
        hot = {name: item for name, item in items.items() if isinstance(item, np.ndarray) and is_hot(name)}
        return items | _read(file, hot, {name: index[name]["offset"] for name in hot})


def _read(file: BufferedReader, arrays: Mapping[str, npt.NDArray[Any]], offsets: Mapping[str, int]) -> dict[str, Item]:
    """The same arrays in huge pages, read and not copied: mapped pages that are touched are this process's too."""
    if not arrays:
        return {}
    starts = list(accumulate((array.nbytes + -array.nbytes % _ALIGNMENT for array in arrays.values()), initial=0))
    memory = huge_buffer(starts[-1])
    read: dict[str, Item] = {}
    for start, (name, array) in zip(starts, arrays.items(), strict=False):
        part = memory[start : start + array.nbytes]
        file.seek(offsets[name])
        if file.readinto(part.data) < array.nbytes:
            raise DamagedFileError("it is too short")
        part.flags.writeable = False
        read[name] = part.view(array.dtype).reshape(array.shape)
    return read


def _item(mapped: mmap.mmap, entry: Mapping[str, Any]) -> Item:
    if "value" in entry:
        value: Item = entry["value"]
        return value
    dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mapped, dtype, count, entry["offset"]).reshape(shape)
