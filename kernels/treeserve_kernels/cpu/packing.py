"""Quantises linear layers to int8 and packs them in the layout that the native kernels read.

A panel holds 32 outputs. It is stored in steps of 4 inputs: for each step, the 4 weights of output 0, then those of
output 1, and so on: 128 bytes, two vectors of 64, of which one dot-product instruction takes 16 outputs x 4 inputs.
Weights are stored as weight + 128: that instruction multiplies unsigned by signed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PANEL_OUTPUTS = 32
HALF_PANEL = PANEL_OUTPUTS // 2
GROUP_INPUTS = 64  # inputs that share an activation scale: their int8 products sum below 2^24, exact in float32
SMALLEST = 1e-30  # smaller values count as zeros, as in elementwise.h
STEP_INPUTS = 4
ALIGNMENT = 64

_OFFSET = 128
_LARGEST = 127

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]
Int8Array = npt.NDArray[np.int8]


@dataclass(frozen=True)
class PackedLinear:
    """An int8 linear layer. P panels of 32 outputs, K inputs padded to a multiple of 64.

    Attributes:
        panels: uint8[P, padded K / 4, 32, 4], aligned to 64 bytes: weight + 128. Padding holds the weight 0.
        scales: float32[P * 32], what one step of an output's weights is worth, in the order of the panels.
        bias: float32[P * 32], in the same order, or None.
        num_outputs: rows of the unpacked weight.
        num_inputs: its columns.
        interleaved: a panel holds 16 outputs of the weight's first half and the same 16 of its second half.
    """

    panels: UInt8Array
    scales: Float32Array
    bias: Float32Array | None
    num_outputs: int
    num_inputs: int
    interleaved: bool = False


def pack_linear(weight: Float32Array, bias: Float32Array | None = None, *, interleave: bool = False) -> PackedLinear:
    """Quantise a weight per output (symmetric, largest magnitude to 127, round to nearest even) and pack it.

    Args:
        weight: float32[N, K], finite.
        bias: float32[N].
        interleave: put the two halves of the outputs side by side, as the kernel for silu(gate) * up wants them.

    Raises:
        ValueError: if the sizes do not fit together or a number is not finite.
    """
    _check(weight, bias, interleave)
    quantised, scales = quantise_rows(weight)
    num_outputs, num_inputs = weight.shape
    order = panel_order(num_outputs, interleave)
    padded_inputs = _padded(num_inputs, GROUP_INPUTS)
    rows = np.zeros((len(order), padded_inputs), dtype=np.int8)
    present = order >= 0
    rows[present, :num_inputs] = quantised[order[present]]
    steps = rows.view(np.uint8).reshape(-1, PANEL_OUTPUTS, padded_inputs // STEP_INPUTS, STEP_INPUTS)
    panels = aligned_empty((len(steps), padded_inputs // STEP_INPUTS, PANEL_OUTPUTS, STEP_INPUTS))
    np.bitwise_xor(steps.transpose(0, 2, 1, 3), _OFFSET, out=panels)  # in two's complement, adding 128
    return PackedLinear(
        panels, _ordered(scales, order), None if bias is None else _ordered(bias, order), num_outputs, num_inputs,
        interleave,
    )  # fmt: skip


def unpack_linear(packed: PackedLinear) -> tuple[Int8Array, Float32Array]:
    """The quantised weight, int8[N, K], and its scales, float32[N]."""
    order = panel_order(packed.num_outputs, packed.interleaved)
    num_panels, num_steps = packed.panels.shape[:2]
    rows = packed.panels.transpose(0, 2, 1, 3).reshape(num_panels * PANEL_OUTPUTS, num_steps * STEP_INPUTS)
    present = order >= 0
    weight = np.empty((packed.num_outputs, packed.num_inputs), dtype=np.int8)
    weight[order[present]] = (rows[present, : packed.num_inputs] ^ np.uint8(_OFFSET)).view(np.int8)
    scales = np.empty(packed.num_outputs, dtype=np.float32)
    scales[order[present]] = packed.scales[present]
    return weight, scales


def quantise_rows(weight: Float32Array) -> tuple[Int8Array, Float32Array]:
    """Rows as int8 and what one step is worth: float32 absmax / 127, and 0 for a row of zeros."""
    largest = np.abs(weight).max(axis=1, initial=0.0).astype(np.float32)
    scales = largest / np.float32(_LARGEST)
    inverse = np.divide(np.float32(_LARGEST), largest, out=np.zeros_like(largest), where=scales > SMALLEST)
    steps = np.rint(weight * inverse[:, None])
    return np.clip(steps, -_LARGEST, _LARGEST).astype(np.int8), scales


def panel_order(num_outputs: int, interleaved: bool) -> npt.NDArray[np.int64]:
    """int64[P * 32]: which output each place of the panels holds, -1 for padding."""
    if not interleaved:
        order = np.full(_padded(num_outputs, PANEL_OUTPUTS), -1, dtype=np.int64)
        order[:num_outputs] = np.arange(num_outputs)
        return order
    half = num_outputs // 2
    order = np.full((_padded(half, HALF_PANEL) // HALF_PANEL, 2, HALF_PANEL), -1, dtype=np.int64)
    places = np.arange(half)
    order[places // HALF_PANEL, 0, places % HALF_PANEL] = places
    order[places // HALF_PANEL, 1, places % HALF_PANEL] = half + places
    return order.reshape(-1)


def aligned_empty(shape: tuple[int, ...]) -> UInt8Array:
    """An uninitialised uint8 array that begins at a multiple of 64 bytes."""
    nbytes = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + nbytes].reshape(shape)


def _ordered(values: Float32Array, order: npt.NDArray[np.int64]) -> Float32Array:
    ordered = np.zeros(len(order), dtype=np.float32)
    ordered[order >= 0] = values[order[order >= 0]]
    return ordered


def _check(weight: Float32Array, bias: Float32Array | None, interleave: bool) -> None:
    if weight.ndim != 2 or 0 in weight.shape or weight.dtype != np.float32:
        raise ValueError(f"a weight of shape {weight.shape} and type {weight.dtype}; float32[N, K] is needed")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != np.float32):
        raise ValueError(f"a bias of shape {bias.shape} and type {bias.dtype} beside a weight of {weight.shape}")
    if interleave and weight.shape[0] % 2:
        raise ValueError(f"{weight.shape[0]} outputs have no halves to interleave")
    if not np.isfinite(weight).all() or (bias is not None and not np.isfinite(bias).all()):
        raise ValueError("a weight or bias is not finite")


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
