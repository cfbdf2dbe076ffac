"""Limits of sampling parameters, stopping criteria and sequence limits: the border is legal, one step past is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    SequenceLimits,
    StoppingCriteria,
    check_token_ids,
)

LEGAL_SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_k": 0},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 1e-9},
    {"repetition_penalty": 10.0},
    {"presence_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), 0.0)},
    {"logit_bias": {3: -100.0, 4: 100.0}},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"top_log_probs": 0},
    {"top_log_probs": 20},
]

ILLEGAL_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 10.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", math.nan),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    ("logit_bias", {3: 100.1}),
    ("logit_bias", {3: math.nan}),
    ("seed", -1),
    ("seed", 2**64),
    ("top_log_probs", -1),
    ("top_log_probs", 21),
]

ILLEGAL_STOPPING: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": -1}),
    ("stop_strings", {"max_tokens": 4, "stop_strings": ("x",) * (MAX_STOP_STRINGS + 1)}),
    ("stop_strings", {"max_tokens": 4, "stop_strings": ("",)}),
    ("stop_strings", {"max_tokens": 4, "stop_strings": ("ä" * (MAX_STOP_STRING_BYTES // 2 + 1),)}),
    ("stop_token_ids", {"max_tokens": 4, "stop_token_ids": (0,) * (MAX_STOP_TOKEN_IDS + 1)}),
]


@pytest.mark.parametrize("values", LEGAL_SAMPLING, ids=str)
def test_borders_are_legal(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


@pytest.mark.parametrize(("name", "value"), ILLEGAL_SAMPLING)
def test_sampling_limits_name_the_public_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        SamplingParams(**{name: value})
    assert raised.value.field.startswith(f"sampling.{name}")


@pytest.mark.parametrize(("name", "values"), ILLEGAL_STOPPING)
def test_stopping_limits_name_the_public_field(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        StoppingCriteria(**values)
    assert raised.value.field == f"stopping.{name}"


def test_stopping_borders_are_legal() -> None:
    StoppingCriteria(1, 1, ("x" * MAX_STOP_STRING_BYTES,) * MAX_STOP_STRINGS, (0,) * MAX_STOP_TOKEN_IDS)


def test_vocabulary_checks() -> None:
    SamplingParams(top_k=10, logit_bias={9: 1.0}).check_vocab(10)
    StoppingCriteria(4, stop_token_ids=(0, 9)).check_vocab(10)
    for field, check in (
        ("sampling.top_k", SamplingParams(top_k=11).check_vocab),
        ("sampling.logit_bias", SamplingParams(logit_bias={10: 1.0}).check_vocab),
        ("sampling.logit_bias", SamplingParams(logit_bias={-1: 1.0}).check_vocab),
        ("stopping.stop_token_ids", StoppingCriteria(4, stop_token_ids=(10,)).check_vocab),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            check(10)
        assert raised.value.field == field


def test_token_id_range() -> None:
    check_token_ids("prompt", [], 5)
    check_token_ids("prompt", [0, 4], 5)
    for token_ids in ([5], [-1], [0, 7, 1]):
        with pytest.raises(InvalidArgumentError):
            check_token_ids("prompt", token_ids, 5)


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_sequence_limits() -> None:
    assert SequenceLimits().speculates
    assert SequenceLimits(max_nodes=4).speculates
    assert not SequenceLimits(max_nodes=0).speculates
    for values in ({"max_nodes": -1}, {"ttft_ms": 0.0}, {"tpot_ms": math.nan}, {"tpot_ms": -1.0}):
        with pytest.raises(InvalidArgumentError):
            SequenceLimits(**values)  # type: ignore[arg-type]
