"""The whole system on a model that runs through transformers, and drafts for itself: a tiny random GPT-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.self_drafting import self_drafting_config
from support.tiny_families import write_tiny_family
from support.tokenizer_folders import byte_level_bpe, write_folder

from treeserve_cli.cluster import LocalCluster
from treeserve_client import Client

PROMPTS = ("the quick brown fox", "one two three four", "aab aab aab")
NEW_TOKENS = 24


@pytest.mark.timeout(120)
def test_greedy_output_equals_transformers(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    folder = write_folder(backend, tmp_path / "gpt2")
    reference = write_tiny_family(folder, "gpt2", vocab_size=backend.get_vocab_size(), initializer_range=0.6)
    config = self_drafting_config(folder, tmp_path / "run")
    accepted = 0
    with LocalCluster(config) as cluster, Client(cluster.grpc_address) as client:
        for prompt in PROMPTS:
            expected = _generate(reference, backend.encode(prompt).ids)
            completion = client.complete(prompt=prompt, max_tokens=NEW_TOKENS)
            assert list(completion.token_ids) == expected
            accepted += completion.speculation.accepted
    assert accepted > len(PROMPTS)


def _generate(model: Any, prompt: list[int]) -> list[int]:
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
