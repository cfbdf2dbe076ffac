"""The rotary table: right to float32's last bit, and the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from treeserve_engine.config import Llama3RopeScaling, ModelConfig
from treeserve_engine.rope import RopeTable

CONFIG = ModelConfig(
    vocab_size=1, hidden_size=64, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64,
    rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, max_position_embeddings=2048, tie_word_embeddings=True,
    qkv_bias=False, output_bias=False,
)  # fmt: skip
LONG = replace(
    CONFIG, rope_theta=500000.0, max_position_embeddings=40_000, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
)


@pytest.mark.parametrize("config", [CONFIG, LONG], ids=["plain", "llama3"])
def test_entries_are_rounded_cosines_and_sines(config: ModelConfig) -> None:
    table = RopeTable.of(config)
    frequencies = np.arctan2(table.sin[1].astype(np.float64), table.cos[1])  # the angles of position 1
    for position in (0, 1, 7, config.max_position_embeddings - 1):
        for i, frequency in enumerate(frequencies[:3]):
            angle = float(np.float32(position) * np.float32(frequency))
            assert table.cos[position, i] == np.float32(math.cos(angle))
            assert table.sin[position, i] == np.float32(math.sin(angle))
    assert np.abs(table.cos.astype(np.float64) ** 2 + table.sin.astype(np.float64) ** 2 - 1).max() < 2e-7


def test_bits_are_those_of_every_machine() -> None:
    """Should one differ, replays on another machine would too."""
    digests = []
    for config in (CONFIG, LONG):
        table = RopeTable.of(config)
        digests.append(hashlib.sha256(table.cos.tobytes() + table.sin.tobytes()).hexdigest()[:16])
    assert digests == ["892f852419a1475c", "995c7af898c380ed"]
