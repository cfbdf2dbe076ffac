"""The noise has the same bits in numpy and torch, alone and in any batch, today and in any later version."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeserve_core.noise import GUMBEL_MAX, GUMBEL_MIN, exact_log, gumbel, uniform_counters
from treeserve_kernels import noise as kernels_noise

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50)

GOLDEN_IDS = [0, 1, 49151, 2**31 - 1]
GOLDEN = {
    (0, 0): [
        (0x177DAE2D2E45EF, "0x1.2c8cb5ceeb22dp+0"),
        (0x1562E703AB4C33, "0x1.d15603c0eb803p-1"),
        (0x172AE5D4D63029, "0x1.2151fbec38710p+0"),
        (0x14CE65C06362F9, "0x1.af89b6b390236p-1"),
    ],
    (42, 7): [
        (0x4362FD95D0135, "-0x1.69fa8891c7f8cp-1"),
        (0x1EF9F9C5779003, "0x1.b68fe2141e134p+1"),
        (0x17301E52ED1859, "0x1.2204c27a59a61p+0"),
        (0x580FA2011AB0D, "-0x1.2186b6be7ac44p-1"),
    ],
    (2**64 - 1, 131071): [
        (0x13A03AA8E6A701, "0x1.6e6683fd0b60fp-1"),
        (0x130A6C7857BFEF, "0x1.4fa450f78e167p-1"),
        (0x1CCAFE2249226F, "0x1.1fbfe0e85e7abp+1"),
        (0xE06F77045E779, "0x1.8aa1a680adbc9p-3"),
    ],
}


def array(ids: list[int]) -> npt.NDArray[np.int64]:
    return np.array(ids, dtype=np.int64)


def same_bits(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> bool:
    return a.dtype == b.dtype == np.float64 and a.tobytes() == b.tobytes()


def mix(x: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor % 2**64
    return x ^ x >> 31


def reference_counter(seed: int, position: int, token_id: int) -> int:
    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) % 2**64) + (position + 1) * golden) % 2**64)
    bits = mix(mix((token_id + 1) * golden % 2**64 ^ key))
    return bits >> 12 << 1 | 1


@pytest.mark.parametrize(("seed", "position"), GOLDEN)
def test_golden_values(seed: int, position: int) -> None:
    counters, noise = uniform_counters(seed, position, array(GOLDEN_IDS)), gumbel(seed, position, array(GOLDEN_IDS))
    assert [(int(k), float(g).hex()) for k, g in zip(counters, noise, strict=True)] == GOLDEN[seed, position]


@given(SEEDS, POSITIONS, IDS)
def test_counters_equal_plain_integer_arithmetic(seed: int, position: int, ids: list[int]) -> None:
    assert uniform_counters(seed, position, array(ids)).tolist() == [reference_counter(seed, position, i) for i in ids]


@given(SEEDS, POSITIONS, IDS)
def test_numpy_and_torch_give_the_same_bits(seed: int, position: int, ids: list[int]) -> None:
    twin = kernels_noise.gumbel(kernels_noise.signed(seed), position, torch.tensor(ids, dtype=torch.int64))
    assert same_bits(gumbel(seed, position, array(ids)), twin.numpy())


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 4095), (2**63, 12345)])
def test_a_whole_vocabulary_has_the_same_bits_in_torch(seed: int, position: int) -> None:
    ids = np.arange(49152)
    twin = kernels_noise.gumbel(kernels_noise.signed(seed), position, torch.arange(49152).reshape(64, 768))
    assert same_bits(gumbel(seed, position, ids), twin.reshape(-1).numpy())


@given(SEEDS, POSITIONS, IDS, st.randoms(use_true_random=False))
def test_alone_in_a_batch_or_permuted(seed: int, position: int, ids: list[int], random: object) -> None:
    whole = gumbel(seed, position, array(ids))
    assert same_bits(whole, np.concatenate([gumbel(seed, position, array([i])) for i in ids]))
    order = list(range(len(ids)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert same_bits(whole[order], gumbel(seed, position, array([ids[i] for i in order])))
    assert same_bits(whole[::2], gumbel(seed, position, array(ids)[::2]))


def test_each_of_seed_position_and_id_matters() -> None:
    ids = np.arange(1000)
    base = uniform_counters(1, 1, ids)
    assert len(set(base.tolist())) == 1000
    for seed, position in ((2, 1), (1, 2), (2**63 + 1, 1), (0, 2)):
        assert not np.isin(uniform_counters(seed, position, ids), base).any()


def test_noise_equals_its_definition_and_stays_in_its_bounds() -> None:
    ids = np.arange(200_000)
    counters, noise = uniform_counters(9, 9, ids), gumbel(9, 9, ids)
    assert np.all(counters % 2 == 1)
    assert counters.min() > 0
    assert counters.max() < 2**53
    np.testing.assert_allclose(noise, -np.log(-np.log(counters * 2.0**-53)), rtol=1e-13, atol=1e-13)


def test_bounds_are_those_of_the_extreme_draws() -> None:
    extremes = -exact_log(-exact_log(np.array([2.0**-53, 1.0 - 2.0**-53])))
    assert GUMBEL_MIN < extremes[0] < GUMBEL_MIN + 0.01
    assert GUMBEL_MAX - 0.1 < extremes[1] < GUMBEL_MAX


@given(st.floats(min_value=2.3e-308, max_value=1e308))
def test_exact_log_is_a_logarithm(x: float) -> None:
    assert exact_log(np.array([x]))[0] == pytest.approx(math.log(x), rel=4e-16, abs=1e-300)


def test_exact_log_of_one_is_zero() -> None:
    assert exact_log(np.array([1.0]))[0] == 0.0
