"""The largest logits: the same ids from numpy and natively, and no answer where one is not finite."""

from __future__ import annotations

import numpy as np
import pytest

from treeserve_engine import largest
from treeserve_engine.largest import find_largest


@pytest.fixture(params=["numpy", "native"])
def finder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(largest, "native_sampling", lambda: None)
    elif largest.native_sampling() is None:
        pytest.skip("the native kernels are not built")
    return str(request.param)


@pytest.mark.parametrize("vocab", [8, 9, 511, 520, 583, 2048, 49152, 49157])
def test_they_are_those_of_a_full_sort(finder: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for logits in (rng.standard_normal(vocab), np.linspace(0, 1, vocab), np.linspace(1, 0, vocab)):
        values = logits.astype(np.float32)
        assert find_largest(values, 8) == list(np.argsort(-values, kind="stable")[:8])
        assert find_largest(values, 1) == [int(values.argmax())]


def test_the_lowest_of_equal_ids_is_chosen(finder: str) -> None:
    assert find_largest(np.array([1.0, 3.0, 3.0, 2.0] * 9, np.float32), 1) == [1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 77, 999])
def test_what_is_not_finite_has_no_largest(finder: str, value: float, place: int) -> None:
    logits = np.linspace(0, 1, 1000, dtype=np.float32)
    logits[place] = value
    assert find_largest(logits, 1) is None and find_largest(logits, 8) is None


def test_logits_may_be_read_only_or_not_side_by_side(finder: str) -> None:
    logits = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    logits.flags.writeable = False
    assert find_largest(logits[::2], 8) == list(np.argsort(-logits[::2], kind="stable")[:8])
