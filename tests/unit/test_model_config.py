"""config.json: which settings are read, and what the engine would run wrongly is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.model_configs import write_config

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import LinearRopeScaling, Llama3RopeScaling, load_config


def test_defaults_of_a_plain_config(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, num_key_value_heads=...))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert config.rope_scaling is None
    assert not (config.tie_word_embeddings or config.qkv_bias or config.output_bias)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, 1e6, LinearRopeScaling(2.0)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            Llama3RopeScaling(8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            Llama3RopeScaling(8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rotary_settings_of_both_styles(tmp_path: Path, changes: dict[str, Any], theta: float, scaling: object) -> None:
    config = load_config(write_config(tmp_path, **changes))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({"attention_bias": True}, (True, True)),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, (True, False)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True)),
        ({"model_type": "mistral", "sliding_window": None}, (False, False)),
    ],
)
def test_supported_families(tmp_path: Path, changes: dict[str, Any], biases: tuple[bool, bool]) -> None:
    config = load_config(write_config(tmp_path, **changes))
    assert (config.qkv_bias, config.output_bias) == biases
    assert config.qk_norm == (changes.get("model_type") == "qwen3")


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"sliding_window": None}, 8192),
        ({"sliding_window": 100}, 100),
        ({"sliding_window": 10_000}, 8192),
        ({}, 4096),  # transformers' default
    ],
)
def test_a_window_ends_the_context_where_it_would_begin_to_matter(tmp_path: Path, changes: Any, context: int) -> None:
    folder = write_config(tmp_path, model_type="mistral", max_position_embeddings=8192, **changes)
    assert load_config(folder).max_position_embeddings == context


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"model_type": ...}, "None is not supported"),
        ({"model_type": "mistral", "sliding_window": "far"}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 0}, "max_position_embeddings is 0"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "lacks 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "feed-forward"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "odd"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_attention_heads": 0, "head_dim": ...}, "makes no sense"),
        ({"num_key_value_heads": "2"}, "num_kv_heads is 2"),
        ({"num_key_value_heads": 2.0}, "num_kv_heads is 2.0"),
        ({"layer_types": 5}, "makes no sense"),
        ({"rms_norm_eps": "small"}, "makes no sense"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1"),
        ({"rope_parameters": [1]}, "makes no sense"),
        ({"rope_parameters": {"rope_theta": "far"}}, "makes no sense"),
        ({"rope_parameters": {"rope_theta": -1}}, "rotary base -1"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}}, "factor 0"),
    ],
)
def test_what_the_engine_would_run_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        load_config(write_config(tmp_path, **changes))


def test_no_position_is_beyond_what_angles_are_exact_for(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, max_position_embeddings=10**15)).max_position_embeddings == 2**20


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        load_config(tmp_path)
