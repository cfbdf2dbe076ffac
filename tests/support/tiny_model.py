"""A random Llama of a few thousand parameters with a byte-level tokenizer: fast, and as real to the code as any."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "one two three four five six seven eight nine ten",
    "def add(a, b):\n    return a + b\n",
    "naïve café — 東京 🙂",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    folder: Path, *, seed: int = 0, vocab_padding: int = 0, num_layers: int = 2, scale: float = 0.4, name: str = "llama"
) -> Path:
    """Write a checkpoint folder.

    Args:
        vocab_padding: rows of the output layer beyond the tokenizer's ids.
        scale: standard deviation of the weights; larger ones give more decided, more varied output.
        name: transformers' model type: llama, mistral or qwen2.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = AutoConfig.for_model(
        name,
        vocab_size=tokenizer.get_vocab_size() + vocab_padding,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=eos,
        bos_token_id=None,
        initializer_range=scale,
        tie_word_embeddings=False,
        **({"sliding_window": None} if name == "mistral" else {}),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer
