"""Packing int8 weights: what comes back, how it is padded and aligned, and what is refused."""

import numpy as np
import pytest
from support.int8_twin import quantize

from treeserve_kernels.cpu.packing import pack_linear, unpack_linear

SHAPES = [(1, 1), (16, 64), (17, 65), (31, 1), (32, 128), (203, 150), (300, 72), (64, 576), (130, 1536)]


def random_weight(outputs: int, inputs: int) -> np.ndarray:
    rng = np.random.default_rng(outputs * inputs)
    return (rng.standard_normal((outputs, inputs)) * rng.uniform(0.01, 10, (outputs, 1))).astype(np.float32)


@pytest.mark.parametrize("interleave", [False, True], ids=["plain", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_was_packed_comes_back(shape, interleave):
    outputs, inputs = shape
    weight = random_weight(outputs * 2 if interleave else outputs, inputs)
    packed = pack_linear(weight, interleave=interleave)
    unpacked, scales = unpack_linear(packed)
    expected, expected_scales = quantize(weight)
    assert unpacked.dtype == np.int8 and scales.dtype == np.float32
    np.testing.assert_array_equal(unpacked, expected)
    np.testing.assert_array_equal(scales, expected_scales)
    assert (packed.num_outputs, packed.num_inputs) == weight.shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantised_weights_are_within_half_a_step(shape):
    weight = random_weight(*shape)
    unpacked, scales = unpack_linear(pack_linear(weight))
    assert (np.abs(unpacked * scales[:, None] - weight) <= scales[:, None] * 0.5001).all()


def test_a_row_of_zeros_packs_to_zeros():
    weight = random_weight(20, 70)
    weight[7] = 0
    unpacked, scales = unpack_linear(pack_linear(weight))
    assert not unpacked[7].any() and np.isfinite(scales).all()


def test_halves_round_to_even():
    weight = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -127]], dtype=np.float32)
    unpacked, scales = unpack_linear(pack_linear(weight))
    assert unpacked[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126, -127] and scales[0] == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_and_alignment(shape):
    outputs, inputs = shape
    weight = random_weight(outputs, inputs)
    bias = weight[:, 0].copy()
    packed = pack_linear(weight, bias)
    assert packed.panels.flags.c_contiguous and packed.panels.ctypes.data % 64 == 0
    assert packed.panels.nbytes >= outputs * inputs
    assert len(packed.scales) >= outputs and len(packed.scales) == len(packed.bias)
    assert not packed.scales[outputs:].any() and not packed.bias[outputs:].any()
    np.testing.assert_array_equal(packed.bias[:outputs], bias)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_without_a_scale_are_refused(bad):
    weight = random_weight(4, 70)
    weight[2, 69] = bad
    with pytest.raises(ValueError, match="finite"):
        pack_linear(weight)


def test_shapes_that_make_no_layer_are_refused():
    with pytest.raises(ValueError, match="weight"):
        pack_linear(np.zeros(4, dtype=np.float32))
    with pytest.raises(ValueError, match="weight"):
        pack_linear(np.zeros((0, 4), dtype=np.float32))
    with pytest.raises(ValueError, match="bias"):
        pack_linear(random_weight(4, 8), np.zeros(5, dtype=np.float32))
    with pytest.raises(ValueError, match="interleave"):
        pack_linear(random_weight(5, 8), interleave=True)
