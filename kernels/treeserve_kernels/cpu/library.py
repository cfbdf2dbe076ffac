"""Finds and loads the shared object, and declares its functions."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import numpy as np

from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.build import LIBRARY_NAME
from treeserve_kernels.shared_object import Signatures, load_shared_object

# Names another shared object than the one beside this file, such as one built with sanitizers.
LIBRARY_VARIABLE = "TREESERVE_CPU_LIBRARY"
_ABI_VERSION = 7
_BRIEF = ("ts_kv_save", "ts_kv_load", "ts_kv_move", "ts_find_largest", "ts_find_rivals", "ts_choose_nodes")
_OK, _INVALID_ARGUMENT, _OUT_OF_MEMORY = 0, 1, 2
_ANYTHING = ctypes.c_char * 0  # fits at the beginning of any buffer


def library_path() -> Path:
    """The shared object that `load` loads."""
    return Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name(LIBRARY_NAME))


def is_built() -> bool:
    """Whether the shared object is there and loads."""
    try:
        load()
    except OSError:
        return False
    return True


def isas() -> tuple[str, ...]:
    """What this CPU can run, best first, out of "avx512vnni", "avx2" and "portable".

    Raises:
        OSError: if the shared object is missing or does not load.
    """
    names: bytes = load().ts_isas()
    return tuple(names.decode().split())


@cache
def load() -> ctypes.CDLL:
    """Load the shared object.

    Raises:
        OSError: if it is missing, does not load, or belongs to another version of this package.
    """
    return load_shared_object(
        library_path(),
        "ts_abi_version",
        _ABI_VERSION,
        _signatures(),
        build_module="treeserve_kernels.cpu.build",
        brief=_BRIEF,
    )


def check(status: int) -> None:
    """Raise what a function's status stands for.

    Raises:
        ValueError: for an invalid argument.
        MemoryError: if memory ran out.
        RuntimeError: for anything else.
    """
    if status == _OK:
        return
    message: bytes = load().ts_last_error()
    error = {_INVALID_ARGUMENT: ValueError, _OUT_OF_MEMORY: MemoryError}.get(status, RuntimeError)
    raise error(message.decode())


def address(array: np.ndarray) -> int:
    """Where the data of a contiguous array lie."""
    if array.flags.writeable:  # a quarter of the time that the array's description takes
        return ctypes.addressof(_ANYTHING.from_buffer(array.data))
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def _signatures() -> Signatures:
    pointer, int32, int64, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
    float64, uint64, count = ctypes.c_double, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int64)
    out, doubles = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_double)
    shape, linear = ctypes.POINTER(c.Shape), ctypes.POINTER(c.Linear)
    return {
        "ts_last_error": (text, ()),
        "ts_isas": (text, ()),
        "ts_decoder_create": (int32, (shape, ctypes.POINTER(c.Weights), int32, text, out)),
        "ts_decoder_destroy": (None, (pointer,)),
        "ts_decoder_forward": (int32, (pointer, pointer, ctypes.POINTER(c.Batch), ctypes.POINTER(c.Outputs))),
        "ts_decode_run": (int32, (pointer, pointer, ctypes.POINTER(c.Run))),
        "ts_choose_nodes": (
            int32,
            (ctypes.POINTER(c.Costs), int64, ctypes.POINTER(c.Offer), int64, ctypes.POINTER(int32), doubles),
        ),
        "ts_kv_create": (int32, (shape, int64, int64, int32, out)),
        "ts_kv_destroy": (None, (pointer,)),
        "ts_kv_nbytes": (int64, (pointer,)),
        "ts_kv_block_nbytes": (int64, (pointer,)),
        "ts_kv_move": (int32, (pointer, int64, pointer, pointer)),
        "ts_kv_save": (int32, (pointer, int64, pointer)),
        "ts_kv_load": (int32, (pointer, int64, pointer)),
        "ts_linear_apply": (int32, (linear, text, int64, pointer, pointer)),
        "ts_find_largest": (int32, (text, int64, pointer, int64, ctypes.POINTER(int64), ctypes.POINTER(int32))),
        "ts_find_rivals": (int32, (text, int64, pointer, pointer, float64, uint64, int64, pointer, count)),
    }
