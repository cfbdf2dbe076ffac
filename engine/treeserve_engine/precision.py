"""Chooses the number formats of a model: of its weights and of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import load_config

AUTO = "auto"
DTYPES = ("int8", "bfloat16", "float32")


@dataclass(frozen=True)
class Precision:
    """What a model computes with.

    Attributes:
        dtype: of the weights: "int8" (with int8 inputs to each layer), "bfloat16" or "float32".
        kv_dtype: of the KV cache.
        is_native: computed by the native decoder, without torch.
        reason: why, for the log.
    """

    dtype: str
    kv_dtype: str
    is_native: bool
    reason: str


def check_dtype(field: str, name: str) -> None:
    """Raise InvalidArgumentError for `field` if `name` is neither one of DTYPES nor "auto"."""
    if name not in (AUTO, *DTYPES):
        raise InvalidArgumentError(field, f"{name!r} is not one of {AUTO}, {', '.join(DTYPES)}")


def choose_precision(folder: Path, dtype: str, kv_dtype: str, device: str) -> Precision:
    """Resolve "auto", and refuse what does not exist.

    Args:
        folder: of the model.
        dtype: one of DTYPES, or "auto": int8 on a CPU where the native decoder can run the model, else float32;
            bfloat16 on a GPU.
        kv_dtype: one of DTYPES, or "auto": bfloat16 beside int8 weights, else the weights' own.
        device: torch's name of it.

    Raises:
        InvalidArgumentError: if the combination does not exist, with the reason.
    """
    check_dtype("dtype", dtype)
    check_dtype("kv_dtype", kv_dtype)
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgumentError("device", f"{device!r} is neither cpu nor cuda")
    reason = "as configured"
    if dtype == AUTO:
        dtype, reason = _automatic(folder, device)
    if dtype == "int8":
        return _int8(folder, kv_dtype, device, reason)
    if kv_dtype not in (AUTO, dtype):
        raise InvalidArgumentError("kv_dtype", f"{kv_dtype} beside {dtype} weights: torch keeps KV in their own dtype")
    return Precision(dtype, dtype, False, reason)


def _automatic(folder: Path, device: str) -> tuple[str, str]:
    if not _is_cpu(device):
        return "bfloat16", f"what {device} computes fastest"
    if (refusal := _refusal(folder)) is not None:
        return "float32", f"the native int8 decoder does not run this model ({refusal})"
    if not _native_is_built():
        return "float32", "the native int8 decoder is not built here"
    return "int8", "the native decoder runs it"


def _int8(folder: Path, kv_dtype: str, device: str, reason: str) -> Precision:
    if not _is_cpu(device):
        raise InvalidArgumentError("dtype", f"int8 runs on CPUs, not on {device}; bfloat16 and float32 do")
    if (refusal := _refusal(folder)) is not None:
        raise InvalidArgumentError("dtype", f"int8 is not for this model: {refusal}")
    is_native = _native_is_built()
    if kv_dtype == "int8" and not is_native:
        raise InvalidArgumentError("kv_dtype", "int8 needs the native decoder, which is not built here")
    return Precision("int8", "bfloat16" if kv_dtype == AUTO else kv_dtype, is_native, reason)


def _refusal(folder: Path) -> str | None:
    """Why the fast path cannot run a model; None if it can."""
    try:
        load_config(folder)
    except InvalidArgumentError as error:
        return str(error)
    return None


def _native_is_built() -> bool:
    from treeserve_kernels.cpu import library  # with numpy, which a command that only names dtypes need not load

    return library.is_built()


def _is_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"
