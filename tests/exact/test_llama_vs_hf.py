"""Our decoder's logits against transformers' on tiny random models: every architecture and rotary variant we take."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.model import LlamaModel
from treeserve_engine.runner import ModelRunner

VOCAB = 160
TOKENS = 40
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "llama-llama3": ("llama", {"rope_parameters": dict(rope_theta=100.0, **LLAMA3_ROPE)}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": TOKENS}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
}


def _save(folder, name, changes):
    config = AutoConfig.for_model(name, **{**BASE, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a mix-up
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def _load(folder, dtype=torch.float32):
    return LlamaModel.load(folder, load_config(folder), dtype, torch.device("cpu"))


def _chain_logits(model, tokens, block_size=8):
    runner = ModelRunner(model, num_blocks=16, block_size=block_size)
    runner.blocks.add(1)
    runner.blocks.reserve(1, len(tokens))
    (logits,) = runner.forward([SequenceRows.from_chain(1, tokens, range(len(tokens)))])
    return torch.from_numpy(logits)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tmp_path, name):
    reference = _save(tmp_path, *MODELS[name])
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    actual = _chain_logits(_load(tmp_path), tokens.tolist())
    assert expected.std() > 1  # decided logits, not noise around zero
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_bfloat16_stays_close_to_transformers_float32(tmp_path):
    reference = _save(tmp_path, *MODELS["llama"])
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
        rounded = reference.to(torch.bfloat16)(tokens[None]).logits[0].float()
    actual = _chain_logits(_load(tmp_path, torch.bfloat16), tokens.tolist())
    # Not further from float32 than transformers' own bfloat16.
    assert (actual - expected).abs().mean() <= 1.1 * (rounded - expected).abs().mean()


def test_a_missing_tensor_is_named(tmp_path):
    _save(tmp_path, "llama", {"tie_word_embeddings": True})
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(InvalidArgumentError, match=r"lacks lm_head\.weight"):
        _load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    _save(tmp_path, "llama", {})
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"intermediate_size": 88', '"intermediate_size": 80'))
    with pytest.raises(InvalidArgumentError, match=r"gate_proj\.weight has shape \(88, 48\)"):
        _load(tmp_path)
