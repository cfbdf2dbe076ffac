"""Training data that follow a rule, so that a drafter can learn them in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from treeserve_training.records import Sample, ShardWriter

MODULUS = 200


def successor(token_id: int) -> int:
    """What the "target" says after a token."""
    return (token_id * 7 + 13) % MODULUS


def rule_sample(
    rng: np.random.Generator, *, prompt_len: int = 6, outputs: int = 20, temperature: float = 0.0
) -> Sample:
    """A random prompt, and the outputs that follow by the rule, which the target is 90 % sure of."""
    prompt = tuple(int(t) for t in rng.integers(0, MODULUS, prompt_len))
    tokens = [prompt[-1]]
    for _ in range(outputs):
        tokens.append(successor(tokens[-1]))
    others = rng.permuted(np.tile(np.arange(MODULUS, MODULUS + 40), (outputs, 1)), axis=1)[:, :7]
    top_ids = np.concatenate([np.array(tokens[1:])[:, None], others], axis=1).astype(np.uint16)
    log_probs = np.log(np.tile([0.9, *[0.01] * 7], (outputs, 1))).astype(np.float16)
    return Sample(prompt, tuple(tokens[1:]), "rule", temperature, 7, top_ids, log_probs)


def write_rule_data(folder: Path, tokenizer_hash: str, *, samples: int = 120, seed: int = 0) -> Path:
    """A data folder of such samples; about one in 50 is for validation."""
    rng = np.random.default_rng(seed)
    made = [rule_sample(rng, temperature=float(i % 2)) for i in range(samples)]
    writer = ShardWriter(folder, {"model": "tiny", "tokenizer": tokenizer_hash, "vocab_size": 300, "seed": seed})
    counts = {"samples": samples, "tokens": sum(len(sample.output_ids) for sample in made)}
    writer.write(0, made, counts)
    return folder
