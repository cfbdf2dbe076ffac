"""Features of a sequence: shapes, the latest rows without a gap, narrowing, and their way to a drafting sequence."""

import numpy as np
import pytest

from treeserve_core.features import FeatureRows, FeatureShape, FeatureWindow
from treeserve_core.sampling import SamplingParams
from treeserve_speculator.sequence import DraftSequence


def rows(first: int, count: int) -> FeatureRows:
    """Each row's numbers are its token's place."""
    places = np.arange(first, first + count, dtype=np.float16)
    return FeatureRows(first, np.broadcast_to(places[:, None, None], (count, 2, 3)).copy())


def places(found: FeatureRows | None) -> list[int]:
    """The tokens whose rows these are, checked against `first`."""
    if found is None:
        return []
    inside = found.values[:, 0, 0].astype(int).tolist()
    assert inside[0] == found.first and (found.values == found.values[:, :1, :1]).all()
    return inside


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(30, (2, 15, 27)), (5, (2,)), (4, (1, 2)), (2, (1,)), (1, ()), (24, (2, 12, 21))]
)
def test_low_middle_and_high_layers(num_layers, layers):
    assert FeatureShape.of_model(num_layers, 8) == FeatureShape(layers, 8)


def test_a_window_of_features_takes_at_most_a_quarter_of_a_message():
    assert FeatureShape((2, 15, 27), 576).window_tokens == 64
    wide = FeatureShape((2, 40, 77), 8192)
    assert 1 <= wide.window_tokens < 64 and wide.window_tokens * wide.row_bytes <= 2**18
    assert FeatureShape((2, 40, 77), 10**6).window_tokens == 1


def test_the_window_keeps_the_latest_without_a_gap():
    window = FeatureWindow(4)
    assert window.since(0) is None
    window.extend(rows(1, 3))
    assert places(window.since(0)) == [1, 2, 3] and places(window.since(3)) == [3] and window.since(4) is None
    window.extend(rows(3, 3))  # 3 is there already
    assert places(window.since(0)) == [2, 3, 4, 5]
    window.extend(rows(2, 3))  # all are
    assert (places(window.since(0)), window.start, window.end) == ([2, 3, 4, 5], 2, 6)
    window.extend(rows(9, 2))
    assert places(window.since(0)) == [9, 10], "6 to 8 are missing"
    window.extend(rows(11, 9))
    assert places(window.since(0)) == [16, 17, 18, 19]


def test_what_float16_cannot_hold_becomes_its_largest():
    values = np.array([[[1e9, -1e9, 1.0]]], np.float32)
    assert FeatureRows.narrowed(5, values).values.tolist() == [[[65504.0, -65504.0, 1.0]]]


def test_after_damage_a_sequence_takes_no_features():
    sequence = DraftSequence(1, [5, 6, 7], 3, SamplingParams(), 4)
    sequence.take_features((rows(1, 1), rows(2, 1)))
    assert sequence.features is not None and places(sequence.features.since(0)) == [1, 2]
    sequence.take_features(None)
    sequence.take_features((rows(3, 1),))
    assert sequence.features is None
