"""A verifier of a model that is not Llama-like: the tokens of transformers' greedy search, along trees of any shape."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.tiny_families import write_tiny_family
from support.tokenizer_folders import byte_level_bpe, write_folder
from support.tree_shapes import SHAPES
from support.verifier_peers import RouterPeer, SpeculatorPeer, running_verifier, until

from treeserve_core.tree import TokenTree

PROMPTS = [[10, 20, 30, 40, 50, seed] for seed in range(6)]
NEW_TOKENS = 24


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
async def test_speculation_gives_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    backend = byte_level_bpe()
    folder = write_folder(backend, tmp_path / "model")
    reference = write_tiny_family(folder, name, vocab_size=backend.get_vocab_size())
    expected = [_generate(reference, prompt) for prompt in PROMPTS]
    rng = random.Random(3)

    def draft(tokens: list[int], budget: int, seed: int) -> TokenTree:
        shape = rng.choice(list(SHAPES.values()))
        return shape(tokens[-1], (PROMPTS[seed] + expected[seed])[len(tokens) :], budget, 300, rng)

    async with running_verifier(folder, tmp_path) as running:
        assert running.engine.divergence == 0.0
        async with RouterPeer(running.address) as router, SpeculatorPeer(running, draft):
            outputs = await asyncio.gather(
                *(router.generate(i, p, seed=i, max_tokens=NEW_TOKENS) for i, p in enumerate(PROMPTS))
            )
        await until(lambda: running.verifier.loop.load().sequences == 0)
        running.check_all_blocks_free()
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.end.speculation.accepted for output in outputs if output.end is not None) > len(PROMPTS)


def _generate(reference: Any, prompt: list[int]) -> list[int]:
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
