"""Finds and loads the shared object, and declares its functions and structures (drafting.h)."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from treeserve_kernels.cpu.structures import DrafterCalls
from treeserve_kernels.shared_object import Signatures, load_shared_object
from treeserve_speculator.native.build import LIBRARY_NAME

# Names another shared object than the one beside this file, such as one built with sanitizers.
LIBRARY_VARIABLE = "TREESERVE_DRAFTING_LIBRARY"
_ABI_VERSION = 1
_OK, _INVALID_ARGUMENT = 0, 1

NOTHING = -1  # in place of a top token where there are no more
SOURCES = ("ngram", "suffix", "recycling", "ngram_table")  # by their number in TsSource

_int32, _int64, _float64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
Int32s = ctypes.POINTER(_int32)


class NgramTableArrays(ctypes.Structure):
    """TsNgramTable."""

    _fields_ = (
        *((name, _pointer) for name in ("first_context", "first_token", "fingerprints", "lengths", "token_ids")),
        ("log_probs", _pointer),
        *((name, _int64) for name in ("num_buckets", "num_contexts", "num_entries")),
        *((name, _int32) for name in ("token_bytes", "max_order")),
        *((name, _float64) for name in ("exponent", "again", "noise", "rest", "rest_noise")),
    )


class DraftingConfig(ctypes.Structure):
    """TsDraftingConfig."""

    _fields_ = (
        *((name, Int32s) for name in ("sources", "eos")),
        *((name, _int32) for name in ("num_sources", "num_eos", "vocab_size", "max_nodes", "max_depth")),
        ("table", ctypes.POINTER(NgramTableArrays)),
        *((name, _int64) for name in ("max_shared_nodes", "max_shared_rows")),
    )


class AssignedSequence(ctypes.Structure):
    """TsDraftSequence."""

    _fields_ = (
        ("token_ids", Int32s),
        *((name, _int32) for name in ("num_tokens", "prompt_len")),
        ("temperature", _float64),
        ("seed", ctypes.c_uint64),
        ("asks_table", _int32),
        ("tenant", ctypes.c_char_p),
    )


class DraftedTree(ctypes.Structure):
    """TsDraftTree."""

    _fields_ = (
        *((name, Int32s) for name in ("token_ids", "parents")),
        ("log_probs", ctypes.POINTER(_float64)),
        ("masks", ctypes.POINTER(ctypes.c_uint32)),
        *((name, _int32) for name in ("num_nodes", "base_len")),
    )


class SourceCounts(ctypes.Structure):
    """TsSourceCounts."""

    _fields_ = (("seconds", _float64), *((name, _int64) for name in ("nodes", "visits", "right")))


def is_built() -> bool:
    """Whether the shared object is there and loads."""
    try:
        load()
    except OSError:
        return False
    return True


@cache
def load() -> ctypes.CDLL:
    """Load the shared object.

    Raises:
        OSError: if it is missing, does not load, or belongs to another version of this package.
    """
    path = Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name(LIBRARY_NAME))
    return load_shared_object(
        path,
        "ts_drafting_abi_version",
        _ABI_VERSION,
        _signatures(),
        build_module="treeserve_speculator.native.build",
    )


def calls_of(drafter: ctypes.c_void_p) -> DrafterCalls:
    """How native code calls a drafter; valid as long as that is."""
    names = ("commit", "remember", "learn", "draft")
    addresses = [ctypes.cast(getattr(load(), f"ts_drafter_{name}"), _pointer).value for name in names]
    return DrafterCalls(drafter, *addresses)


def check(status: int) -> None:
    """Raise what a function's status stands for: ValueError for an invalid argument, RuntimeError for anything else."""
    if status != _OK:
        message: bytes = load().ts_drafting_last_error()
        raise (ValueError if status == _INVALID_ARGUMENT else RuntimeError)(message.decode())


def _signatures() -> Signatures:
    reference = ctypes.POINTER
    return {
        "ts_drafting_last_error": (ctypes.c_char_p, ()),
        "ts_drafter_create": (_int32, (reference(DraftingConfig), reference(_pointer))),
        "ts_drafter_destroy": (None, (_pointer,)),
        "ts_drafter_assign": (_int32, (_pointer, _int64, reference(AssignedSequence))),
        "ts_drafter_commit": (_int32, (_pointer, _int64, _int32, Int32s, _int32)),
        "ts_drafter_release": (_int32, (_pointer, _int64)),
        "ts_drafter_remember": (_int32, (_pointer, _int64, _int32, Int32s, _int32, _int32)),
        "ts_drafter_draft": (_int32, (_pointer, _int64, _int32, _float64, reference(DraftedTree))),
        "ts_drafter_learn": (_int32, (_pointer,)),
        "ts_drafter_counts": (None, (_pointer, reference(SourceCounts))),
    }
