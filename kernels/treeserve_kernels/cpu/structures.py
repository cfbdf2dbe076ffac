"""The structures of api.h for ctypes, field by field."""

from __future__ import annotations

import ctypes

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class Linear(ctypes.Structure):
    """TsLinear."""

    _fields_ = [
        ("panels", _POINTER), ("scales", _POINTER), ("bias", _POINTER), ("num_outputs", _INT64), ("num_inputs", _INT64),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """TsLayer."""

    _fields_ = [
        ("input_norm", _POINTER), ("qkv", Linear), ("q_norm", _POINTER), ("k_norm", _POINTER),
        ("attention_output", Linear), ("feed_forward_norm", _POINTER), ("gate_up", Linear), ("down", Linear),
    ]  # fmt: skip


class Shape(ctypes.Structure):
    """TsShape."""

    _fields_ = [
        ("vocab_size", _INT64), ("hidden_size", _INT64), ("intermediate_size", _INT64), ("num_layers", _INT64),
        ("num_heads", _INT64), ("num_kv_heads", _INT64), ("head_dim", _INT64), ("max_positions", _INT64),
        ("rms_norm_eps", ctypes.c_double),
    ]  # fmt: skip


class Weights(ctypes.Structure):
    """TsWeights."""

    _fields_ = [
        ("embedding", _POINTER), ("layers", ctypes.POINTER(Layer)), ("norm", _POINTER), ("head", Linear),
        ("rope_cos", _POINTER), ("rope_sin", _POINTER),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    """TsBatch."""

    _fields_ = [
        ("num_rows", _INT64), ("num_sequences", _INT64), ("blocks_per_sequence", _INT64), ("words_per_row", _INT64),
        ("num_logits", _INT64), ("block_size", _INT64), ("input_ids", _POINTER), ("positions", _POINTER),
        ("slot_mapping", _POINTER), ("block_tables", _POINTER), ("context_lens", _POINTER),
        ("query_offsets", _POINTER), ("node_offsets", _POINTER), ("ancestor_words", _POINTER),
        ("logits_indices", _POINTER), ("inputs", _POINTER), ("num_features", _INT64), ("num_feature_layers", _INT64),
        ("feature_rows", _POINTER), ("feature_layers", _POINTER),
    ]  # fmt: skip


class Outputs(ctypes.Structure):
    """TsOutputs."""

    _fields_ = [("logits", _POINTER), ("last_hidden", _POINTER), ("features", _POINTER)]
