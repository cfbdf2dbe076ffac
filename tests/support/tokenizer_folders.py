"""Tiny tokenizers of both families that the text package decodes, as checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = (
    "the quick quick quick quick brown fox jumps over the lazy dog",
    "one two three four five 1 22 333 4444",
    "aab aab aab stop stop end end",
    "naïve café — 東京 東京 🙂 🙂 🙂",
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
ADDED = "<工具>"  # not special: part of the text, written with characters outside the byte alphabet


def byte_level_bpe() -> Tokenizer:
    """Byte-level BPE (GPT-2's kind) of about 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """SentencePiece-style BPE with byte fallback (Llama 2's and Mistral's kind)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw", "▁h", "▁w", "▁he"]
    merges = [("▁", "h"), ("▁", "w"), ("▁h", "e")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_folder(tokenizer: Tokenizer, folder: Path, **settings: object) -> Path:
    """Write tokenizer.json, and `settings` as tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
