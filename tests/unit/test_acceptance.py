"""Acceptance rules as a request's choice: names, labels, limits, and what speculation must be on for."""

from __future__ import annotations

import math

import pytest

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.sampling import SequenceLimits


def test_replay_is_the_default_and_typical_alone_is_lossy() -> None:
    assert SequenceLimits().acceptance == Acceptance() == Acceptance(AcceptanceRule.REPLAY)
    assert {rule.label: rule.is_lossy for rule in AcceptanceRule} == {
        "replay": False,
        "multi_step": False,
        "typical": True,
    }


@pytest.mark.parametrize("name", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, math.nan, math.inf])
def test_parameters_have_limits(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        Acceptance(AcceptanceRule.TYPICAL, **{name: value})
    assert raised.value.field == f"speculation.typical_{name}"


def test_parameters_belong_to_typical() -> None:
    assert Acceptance.of(AcceptanceRule.TYPICAL, None, 1.0) == Acceptance(AcceptanceRule.TYPICAL, 0.09, 1.0)
    assert Acceptance.of(AcceptanceRule.TYPICAL, 0.5, None) == Acceptance(AcceptanceRule.TYPICAL, 0.5, 0.3)
    for rule in (AcceptanceRule.REPLAY, AcceptanceRule.MULTI_STEP):
        assert Acceptance.of(rule, None, None).rule is rule
        with pytest.raises(InvalidArgumentError, match="typical_epsilon"):
            Acceptance.of(rule, 0.09, None)


def test_without_speculation_there_is_nothing_to_choose() -> None:
    assert not SequenceLimits(max_nodes=0).speculates
    with pytest.raises(InvalidArgumentError, match=r"speculation\.acceptance"):
        SequenceLimits(max_nodes=0, acceptance=Acceptance(AcceptanceRule.MULTI_STEP))
