"""Tiny random checkpoints of the architectures that run through transformers, each as its own configuration has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 160
CONTEXT = 512
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HEAD_DIM = {"head_dim": 16}
_FFN = {"n_inner": 96}
_MIXTURE = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip

# What differs from `_COMMON`, by model type. Names that a configuration does not have do nothing.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 8, **_FFN},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"sliding_window": CONTEXT, "logit_scale": 1.0, **_HEAD_DIM},
    "deepseek_v2": {"n_routed_experts": 4, "first_k_dense_replace": 1, **_MIXTURE, **_LATENT},
    "diffllama": {},
    "ernie4_5": _HEAD_DIM,
    "exaone4": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "ffn_hidden_size": 96},
    "gemma": _HEAD_DIM,
    "gemma2": {"sliding_window": CONTEXT, "attn_logit_softcapping": 2.0, "tie_word_embeddings": False, **_HEAD_DIM},
    "gemma3_text": {"sliding_window": CONTEXT, "tie_word_embeddings": False, **_HEAD_DIM},
    "glm": _HEAD_DIM,
    "glm4": _HEAD_DIM,
    "gpt2": _FFN,
    "gpt_bigcode": _FFN,
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8, **_FFN},
    "granite": {},
    "granitemoe": _MIXTURE,
    "helium": _HEAD_DIM,
    "hunyuan_v1_dense": _HEAD_DIM,
    "minicpm3": _LATENT,
    "ministral": {"sliding_window": CONTEXT, **_HEAD_DIM},
    "mixtral": _MIXTURE,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": CONTEXT},
    "olmoe": _MIXTURE,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _MIXTURE,
    "qwen2_moe": {"shared_expert_intermediate_size": 48, **_MIXTURE},
    "qwen3_moe": {**_HEAD_DIM, **_MIXTURE},
    "seed_oss": _HEAD_DIM,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


def tiny_reference(name: str, **changes: Any) -> Any:
    """A random model as transformers makes it, float32, with its plainest attention.

    Args:
        name: transformers' model type.
        changes: to its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(name)
    settings = {**_COMMON, **FAMILIES.get(name, {}), **changes}
    accepted = {*known.to_dict(), *known.attribute_map, *changes, *_COMMON}
    config = AutoConfig.for_model(name, **{key: value for key, value in settings.items() if key in accepted})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a mix-up
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id = 0
    return model


def write_tiny_family(folder: Path, name: str, **changes: Any) -> Any:
    """Save `tiny_reference` as a checkpoint folder, and return it."""
    model = tiny_reference(name, **changes)
    model.save_pretrained(folder)
    return model
