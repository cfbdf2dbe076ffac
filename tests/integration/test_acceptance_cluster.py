"""Every acceptance rule through the real services with a draft model, over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.self_drafting import self_drafting_config

from treeserve_cli.cluster import LocalCluster
from treeserve_client import Client, Completion, InvalidArgument

PROMPTS = ("the quick brown fox", "one two three four", "def add(a, b):")
RULES = ("replay", "multi_step", "typical")


@pytest.fixture(scope="module")
def small_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The tiny model, drafted for by itself and by what was said before."""
    run_dir = tmp_path_factory.mktemp("run")
    config = self_drafting_config(tiny_model, run_dir, sources=("ngram", "ssm"), dtype="float32")
    with LocalCluster(config) as running:
        yield running


def complete(cluster: LocalCluster, prompt: str, **params: Any) -> Completion:
    with Client(cluster.grpc_address) as client:
        return client.complete(prompt=prompt, max_tokens=40, ignore_eos=True, **params)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_accepts_and_is_labelled(small_cluster: LocalCluster, rule: str) -> None:
    steps = accepted = 0
    for seed, prompt in enumerate(PROMPTS):
        done = complete(small_cluster, prompt, temperature=1.0, seed=seed, acceptance=rule)
        assert len(done.token_ids) == 40
        assert (done.speculation.acceptance, done.speculation.lossy) == (rule, rule == "typical")
        steps += done.speculation.steps
        accepted += done.speculation.accepted
    assert (accepted + steps) / steps > 1.5, "a drafter that is the target must be believed"


@pytest.mark.timeout(120)
def test_only_replay_gives_the_tokens_of_plain_decoding(small_cluster: LocalCluster) -> None:
    same = dict.fromkeys(RULES, 0)
    for seed, prompt in enumerate(PROMPTS):
        plain = complete(small_cluster, prompt, temperature=1.0, seed=seed, speculation=False)
        for rule in RULES:
            done = complete(small_cluster, prompt, temperature=1.0, seed=seed, acceptance=rule)
            same[rule] += done.token_ids == plain.token_ids
    assert same == {"replay": len(PROMPTS), "multi_step": 0, "typical": 0}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_tokens_are_the_same_under_every_rule(small_cluster: LocalCluster, rule: str) -> None:
    plain = complete(small_cluster, PROMPTS[0], speculation=False)
    assert complete(small_cluster, PROMPTS[0], acceptance=rule).token_ids == plain.token_ids


@pytest.mark.parametrize("rule", RULES)
def test_http(small_cluster: LocalCluster, rule: str) -> None:
    body = {
        "prompt": PROMPTS[1], "max_tokens": 24, "seed": 4,
        "speculation": {"acceptance": rule},
    }  # fmt: skip
    answer = httpx.post(f"http://{small_cluster.http_address}/v1/completions", json=body, trust_env=False).json()
    labels = answer["metrics"]["speculative_decoding"]
    assert (labels["acceptance"], labels["lossy"]) == (rule, rule == "typical")
    assert labels["num_accepted_tokens"] > 0


def test_an_unknown_rule_and_parameters_out_of_place_are_refused(small_cluster: LocalCluster) -> None:
    with pytest.raises(InvalidArgument, match="'hopeful' is unknown"):
        complete(small_cluster, "x", acceptance="hopeful")
    with pytest.raises(InvalidArgument, match="typical_epsilon"):
        complete(small_cluster, "x", acceptance="multi_step", typical_epsilon=0.2)
    with pytest.raises(InvalidArgument, match=r"speculation\.acceptance"):
        complete(small_cluster, "x", acceptance="typical", speculation=False)
