"""tokenizer.json and tokenizer_config.json out of a GGUF file's byte-level BPE vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.gguf_file import GgufFile

# llama.cpp's token types (enum llama_token_type).
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5

# How the families split text before BPE, as published in their tokenizer.json files.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template).

    `tokenizer.ggml.pre` decides how text is split, as in llama.cpp. (transformers' own conversion ignores it for
    SmolLM, and then spaces before digits come out in other tokens than in training.)

    Raises:
        InvalidArgumentError: for a vocabulary that is not byte-level BPE or splits text in an unknown way.
    """
    kind = file.required("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InvalidArgumentError("model", f"GGUF tokenizer {kind!r} is not supported (byte-level BPE, 'gpt2', is)")
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    types: list[int] = file.required("tokenizer.ggml.token_type")
    tokenizer = _byte_level_bpe(file, tokens, types)
    _add_special_tokens(tokenizer, tokens, types)
    named = _named_tokens(file, tokens)
    if file.get("tokenizer.ggml.add_bos_token", False):
        bos_id = file.integer("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["BOS", "$A"], special_tokens=[{"id": "BOS", "ids": [bos_id], "tokens": [tokens[bos_id]]}]
        )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.required(f"{file.architecture}.context_length"),
        **named,
    }
    template = file.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _byte_level_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.required("tokenizer.ggml.merges")]
    pre = file.get("tokenizer.ggml.pre", "default")
    # Unused tokens pad the embedding to a round size; the tokenizer does not know them.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("gpt-2", "gpt2"):
        return gpt2
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in ("llama-bpe", "qwen2"):
        split = Regex(_LLAMA3_SPLIT if pre == "llama-bpe" else _QWEN2_SPLIT)
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise InvalidArgumentError("model", f"GGUF pre-tokenizer {pre!r} is not supported")


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are matched whole too, but belong to the text."""
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
