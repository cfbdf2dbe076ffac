"""Python's arrays and sizes as the structures of api.h, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treeserve_kernels.cpu import structures as c
from treeserve_kernels.cpu.library import address
from treeserve_kernels.cpu.packing import (
    ALIGNMENT,
    GROUP_INPUTS,
    HALF_PANEL,
    PANEL_OUTPUTS,
    STEP_INPUTS,
    Float32Array,
    PackedLinear,
)

if TYPE_CHECKING:
    from treeserve_kernels.cpu.decoder import DecoderShape, DecoderWeights, LayerWeights


def array_address(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> int:
    """Where an array's data lie. Raises ValueError unless it is of this type and shape and contiguous."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)} instead of {np.dtype(dtype)}{list(shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return address(array)


def shape_of(shape: DecoderShape, max_positions: int) -> c.Shape:
    """TsShape."""
    return c.Shape(
        shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads,
        shape.num_kv_heads, shape.head_dim, max_positions, shape.rms_norm_eps,
    )  # fmt: skip


def weights_of(shape: DecoderShape, weights: DecoderWeights) -> c.Weights:
    """TsWeights. Raises ValueError for what does not fit the shape."""
    if len(weights.layers) != shape.num_layers:
        raise ValueError(f"{len(weights.layers)} layers instead of {shape.num_layers}")
    hidden, rotary = shape.hidden_size, (len(weights.rope_cos), shape.head_dim // 2)
    layers = (c.Layer * shape.num_layers)(*(_layer(shape, i, layer) for i, layer in enumerate(weights.layers)))
    embedding = weights.embedding
    return c.Weights(
        None if embedding is None else array_address("embedding", embedding, np.float32, (shape.vocab_size, hidden)),
        layers,
        array_address("norm", weights.norm, np.float32, (hidden,)),
        linear_of("head", weights.head, weights.head.num_outputs, hidden),
        array_address("rope_cos", weights.rope_cos, np.float32, rotary),
        array_address("rope_sin", weights.rope_sin, np.float32, rotary),
    )


def _layer(shape: DecoderShape, index: int, layer: LayerWeights) -> c.Layer:
    hidden, intermediate, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    attended = shape.num_heads * head_dim
    qkv = attended + 2 * shape.num_kv_heads * head_dim
    name = f"layer {index}'s"
    if not layer.gate_up.interleaved:
        raise ValueError(f"{name} gate_up is not interleaved")

    def norm(what: str, array: Float32Array | None, size: int) -> int | None:
        return None if array is None else array_address(f"{name} {what}", array, np.float32, (size,))

    return c.Layer(
        norm("input_norm", layer.input_norm, hidden),
        linear_of(f"{name} qkv", layer.qkv, qkv, hidden),
        norm("q_norm", layer.q_norm, head_dim),
        norm("k_norm", layer.k_norm, head_dim),
        linear_of(f"{name} attention_output", layer.attention_output, hidden, attended),
        norm("feed_forward_norm", layer.feed_forward_norm, hidden),
        linear_of(f"{name} gate_up", layer.gate_up, 2 * intermediate, hidden),
        linear_of(f"{name} down", layer.down, hidden, intermediate),
    )


def linear_of(name: str, packed: PackedLinear, outputs: int, inputs: int) -> c.Linear:
    """TsLinear. Raises ValueError for other sizes, or panels that are not aligned."""
    if (packed.num_outputs, packed.num_inputs) != (outputs, inputs):
        raise ValueError(
            f"{name} has {packed.num_outputs} outputs and {packed.num_inputs} inputs instead of {outputs} and {inputs}"
        )
    per_panel = PANEL_OUTPUTS if not packed.interleaved else HALF_PANEL
    num_panels = -(-(outputs if not packed.interleaved else outputs // 2) // per_panel)
    steps = -(-inputs // GROUP_INPUTS) * (GROUP_INPUTS // STEP_INPUTS)
    places = (num_panels * PANEL_OUTPUTS,)
    panels = array_address(f"{name} panels", packed.panels, np.uint8, (num_panels, steps, PANEL_OUTPUTS, STEP_INPUTS))
    if panels % ALIGNMENT:
        raise ValueError(f"{name} panels begin at no multiple of {ALIGNMENT} bytes")
    bias = None if packed.bias is None else array_address(f"{name} bias", packed.bias, np.float32, places)
    scales = array_address(f"{name} scales", packed.scales, np.float32, places)
    return c.Linear(panels, scales, bias, places[0] if packed.interleaved else outputs, inputs)
