"""One int8 linear layer: the same bits as its plain twin, on every instruction set, for any size and number of rows."""

import numpy as np
import pytest
from support.int8_twin import Int8Linear, PlainLinear

from treeserve_kernels.cpu.decoder import apply_linear
from treeserve_kernels.cpu.library import is_built, isas
from treeserve_kernels.cpu.packing import pack_linear

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

ISAS = ("avx512vnni", "avx2", "portable")
# (N, K): whole panels and groups, one more, one less, less than a vector.
SIZES = [(32, 64), (33, 65), (31, 63), (1, 1), (3, 200), (203, 72), (160, 576), (96, 1536)]
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 70)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def assert_same_bits(x: np.ndarray, plain: PlainLinear, isa: str) -> None:
    if isa not in isas():
        pytest.skip(f"this CPU has no {isa}")
    actual, expected = apply_linear(x, pack_linear(plain.weight, plain.bias), isa=isa), Int8Linear(plain)(x)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_and_rows(size, isa):
    outputs, inputs = size
    plain = PlainLinear(normal(outputs, inputs), normal(outputs, seed=1))
    for rows in ROWS:
        x = normal(rows, inputs, seed=2) * np.geomspace(1e-3, 1e3, rows, dtype=np.float32)[:, None]
        assert_same_bits(x, plain, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_products_do_not_saturate(isa):
    signs = np.where(np.arange(40)[:, None] % 3, 1, -1)
    weight = np.broadcast_to(signs, (40, 192)).astype(np.float32)
    for x in (np.ones((5, 192), np.float32), -np.ones((5, 192), np.float32)):
        assert_same_bits(x, PlainLinear(weight), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_halves_round_to_even(isa):
    x = np.zeros((2, 64), dtype=np.float32)
    x[:, :10] = [127, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 126.5, -127]
    x[1] /= 1024
    assert_same_bits(x, PlainLinear(np.eye(64, dtype=np.float32)), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_and_very_small_and_large_numbers(isa):
    x = normal(8, 200)
    x[0] = 0
    x[1, :64] = 0  # one group of zeros
    x[2] *= np.float32(1e-44)  # subnormal
    x[3] *= np.float32(1e-36)
    x[4] *= np.float32(1e33)
    x[5] = 0
    x[5, 199] = 3  # the last input of a group that padding fills
    assert_same_bits(x, PlainLinear(normal(50, 200)), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_bits_it_has_alone(isa):
    if isa not in isas():
        pytest.skip(f"this CPU has no {isa}")
    packed, x = pack_linear(normal(77, 150)), normal(37, 150)
    together = apply_linear(x, packed, isa=isa)
    for i in range(len(x)):
        np.testing.assert_array_equal(apply_linear(x[i : i + 1], packed, isa=isa)[0], together[i])
