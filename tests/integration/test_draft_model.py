"""A small draft model as a source, through the real services: coupled drafting agrees with the target at any T."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.self_drafting import self_drafting_config

from treeserve_cli.cluster import LocalCluster
from treeserve_client import Client

PROMPTS = ("the quick brown fox", "one two three four", "def add(a, b):")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_drafter_that_is_the_target_agrees_with_it_at_any_temperature(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    settings = (f"speculator.ssm_dtype={dtype}",)
    config = self_drafting_config(tiny_model, tmp_path / "run", settings, dtype=dtype)
    with LocalCluster(config) as cluster, Client(cluster.grpc_address) as client:
        for temperature in (0.0, 0.7, 1.0):
            steps = accepted = 0
            for seed, prompt in enumerate(PROMPTS):
                params = {"prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": seed}
                plain = client.complete(speculation=False, ignore_eos=True, **params)
                drafted = client.complete(ignore_eos=True, **params)
                assert list(drafted.token_ids) == list(plain.token_ids)
                steps += drafted.speculation.steps
                accepted += drafted.speculation.accepted
            # Independent samples would agree about as often as two draws from the same distribution: far below this.
            assert (accepted + steps) / steps > 3.0, f"acceptance length at T = {temperature}"
