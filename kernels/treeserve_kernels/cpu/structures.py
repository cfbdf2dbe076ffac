"""The structures of api.h for ctypes, field by field."""

from __future__ import annotations

import ctypes

_POINTER, _INT64, _INT32, _FLOAT64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_INT32S = ctypes.POINTER(_INT32)


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


class DrafterCalls(ctypes.Structure):
    """TsDrafterCalls: addresses."""

    _fields_ = [(name, _POINTER) for name in ("drafter", "commit", "remember", "learn", "draft")]


# TsChooseToken.
ChooseToken = ctypes.CFUNCTYPE(_INT32, _INT64, _INT32S, _INT32, ctypes.POINTER(ctypes.c_float), _INT32S)


class Costs(ctypes.Structure):
    """TsCosts."""

    _fields_ = [("num_stairs", _INT64), ("rows", _INT32S), ("ms", ctypes.POINTER(_FLOAT64))]


class Offer(ctypes.Structure):
    """TsOffer."""

    _fields_ = [
        ("num_nodes", _INT64), ("accepted", ctypes.POINTER(_FLOAT64)), ("depths", _INT32S),
        ("slack_ms", _FLOAT64), ("token_ms", _FLOAT64), ("reserve_ms", _FLOAT64), ("tokens_left", _INT32),
    ]  # fmt: skip


class RunSequence(ctypes.Structure):
    """TsRunSequence."""

    _fields_ = [
        ("block_table", _INT32S), ("end_ids", _INT32S), ("unread", _INT32S), ("num_blocks", _INT32),
        ("num_end_ids", _INT32), ("num_unread", _INT32), ("num_tokens", _INT32), ("root", _INT32),
        ("tokens_left", _INT32), ("most_nodes", _INT32), ("asks", _INT32), ("temperature", _FLOAT64),
        ("seed", ctypes.c_uint64), ("handle", _INT64), ("slack_ms", _FLOAT64), ("token_ms", _FLOAT64),
        ("reserve_ms", _FLOAT64), ("calibration", _FLOAT64), ("verified", _FLOAT64), ("token_ids", _INT32S),
        ("num_emitted", _INT32), ("num_read", _INT32), ("has_ended", _INT32), ("has_failed", _INT32),
    ]  # fmt: skip


class RunStep(ctypes.Structure):
    """TsRunStep."""

    _fields_ = [
        ("forward_ms", _FLOAT64), ("step_ms", _FLOAT64), ("attended", _FLOAT64), ("rows", _INT32),
        ("prefill_rows", _INT32),
    ]  # fmt: skip


class RunRecord(ctypes.Structure):
    """TsRunRecord."""

    _fields_ = [("offered", _INT32), ("verified", _INT32), ("accepted", _INT32), ("emitted", _INT32)]


class Run(ctypes.Structure):
    """TsRun."""

    _fields_ = [
        ("num_sequences", _INT64), ("sequences", ctypes.POINTER(RunSequence)), ("costs", Costs),
        ("vocab_size", _INT64), ("step_rows", _INT64), ("unread_rows", _INT64), ("node_price", _FLOAT64),
        ("choose", ChooseToken), ("drafter", ctypes.POINTER(DrafterCalls)), ("top_tokens", _INT32),
        ("max_steps", _INT32), ("max_seconds", _FLOAT64), ("stop", _INT32S), ("prior", _FLOAT64),
        ("steps", ctypes.POINTER(RunStep)), ("records", ctypes.POINTER(RunRecord)),
        ("accepted_by_source", ctypes.POINTER(_INT64)),
        ("num_steps", _INT32), ("num_trees", _INT32), ("num_empty_trees", _INT32), ("drafter_failed", _INT32),
        ("draft_seconds", _FLOAT64),
    ]  # fmt: skip
