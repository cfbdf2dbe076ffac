"""What is looked up in logits natively, on every instruction set: the largest, and rivals, of which the chosen token is
that of the whole noise in numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from treeserve_core.noise import gumbel, uniform_counters
from treeserve_core.sampling import SamplingParams
from treeserve_engine import noisy_argmax as module
from treeserve_engine.next_token import next_token
from treeserve_engine.noisy_argmax import noisy_argmax
from treeserve_engine.processors import TokenContext
from treeserve_kernels.cpu import sampling
from treeserve_kernels.cpu.library import LIBRARY_VARIABLE, is_built, isas

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

ISAS = ("avx512vnni", "avx2", "portable")
FLOAT32_MAX = np.finfo(np.float32).max
MARGIN = 2.0**-10  # see rivals.cpp
# Less than a vector, whole vectors, more; less than a scan, whole scans, more; vocabularies.
SMALL = (1, 2, 3, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 100, 257)
LARGE = (1023, 1024, 1025, 2047, 5000, 16385, 32000, 49152, 70_000)

Floats = npt.NDArray[np.float32]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set that `noisy_argmax` then uses."""
    if request.param not in isas():
        pytest.skip(f"this CPU has no {request.param}")
    limits = {name: getattr(sampling, name) for name in ("MIN_TEMPERATURE", "MAX_TEMPERATURE")}
    native = SimpleNamespace(find_rivals=partial(sampling.find_rivals, isa=request.param), **limits)
    monkeypatch.setattr(module, "native_sampling", lambda: native)
    return request.param


def some_logits(size: int, rng: np.random.Generator) -> Floats:
    """Flat, peaked, tied, sorted, extreme, or with tokens that are blocked."""
    x = rng.standard_normal(size) * rng.choice([0.0, 0.1, 1.0, 5.0, 30.0])
    match rng.integers(7):
        case 0:
            x = np.round(x * 2) / 2
        case 1:
            x = np.sort(x)
        case 2:
            x = x * rng.choice([1e-44, 1e-30, 1e30, 3e36])
        case 3:
            x[rng.random(size) < 0.3] = -FLOAT32_MAX
        case 4:
            x[rng.integers(size)] += rng.choice([10.0, 40.0, 1e5, FLOAT32_MAX / 2])
    logits = np.clip(x, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
    if rng.random() < 0.3:
        best = int(logits.argmax())
        blocked = rng.random(size) < 0.2
        blocked[best] = False
        logits[blocked] = -np.inf
    return logits


def scores_of(values: Floats, kept: npt.NDArray[np.int64] | None, temperature: float, seed: int, position: int):
    ids = np.arange(len(values)) if kept is None else kept
    with np.errstate(over="ignore"):
        return (values - np.float64(values.max())) / temperature + gumbel(seed, position, ids)


def check_draw(values: Floats, kept: npt.NDArray[np.int64] | None, temperature: float, seed: int, position: int) -> int:
    """The token that wins; rivals are exactly what is within the margin of it. Returns how many there are."""
    scores = scores_of(values, kept, temperature, seed, position)
    winner = int(np.argmax(scores)) if kept is None else int(kept[np.argmax(scores)])
    assert noisy_argmax(values, kept, temperature, seed, position) == winner
    rivals = module.native_sampling().find_rivals(values, kept, temperature, seed, position)
    behind = scores.max() - scores
    assert np.isin(np.flatnonzero(behind <= MARGIN - 1e-9), rivals).all()
    assert (behind[rivals] <= MARGIN + 1e-9).all()
    assert (np.diff(rivals) > 0).all()
    return len(rivals)


def a_draw(sizes: tuple[int, ...], rng: np.random.Generator):
    values = some_logits(int(rng.choice(sizes)), rng)
    kept = None
    if rng.random() < 0.5:
        kept = np.sort(rng.choice(3 * len(values), len(values), replace=False)).astype(np.int64)
    temperature = float(10 ** rng.uniform(-3, 2))
    seed = int(rng.choice(np.array([0, 2**63, 2**64 - 1, rng.integers(2**64, dtype=np.uint64)], np.uint64)))
    return values, kept, temperature, seed, int(rng.choice([0, 1, 7, 131071, 2**31 - 1]))


class TestTheChosenToken:
    def test_small_sizes(self, isa: str) -> None:
        rng = np.random.default_rng(1)
        for _ in range(3000):
            check_draw(*a_draw(SMALL, rng))

    def test_large_sizes(self, isa: str) -> None:
        rng = np.random.default_rng(2)
        for _ in range(60):
            check_draw(*a_draw(LARGE, rng))

    def test_near_ties(self, isa: str) -> None:
        """Several tokens as close to the best as float32 logits can bring them."""
        rng = np.random.default_rng(6)
        for seed in range(300):
            tied = rng.choice(100, 5, replace=False)
            noise = gumbel(seed, 3, np.arange(100))
            values = np.full(100, -100, np.float32)
            values[tied] = noise[tied].min() - noise[tied]
            assert check_draw(values, None, 1.0, seed, 3) == 5

    @pytest.mark.parametrize("temperature", [5e-324, 1e-40, 2.0**-101, 2.0**-100, 1e-20, 2.0**100, 1e40])
    def test_temperatures_beyond_use(self, temperature: float, isa: str) -> None:
        rng = np.random.default_rng(3)
        for _ in range(30):
            values, kept, _, seed, position = a_draw(SMALL, rng)
            scores = scores_of(values, kept, temperature, seed, position)
            index = noisy_argmax(values, kept, temperature, seed, position)
            assert index == (np.argmax(scores) if kept is None else kept[np.argmax(scores)])

    def test_values_that_are_not_contiguous(self, isa: str) -> None:
        values = some_logits(200, np.random.default_rng(4))
        assert noisy_argmax(values[::2], None, 1.0, 5, 6) == np.argmax(scores_of(values[::2], None, 1.0, 5, 6))

    def test_whole_requests(self, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(5)
        draws = []
        for i in range(60):
            params = SamplingParams(
                temperature=float(10 ** rng.uniform(-1, 1)), seed=i, top_k=int(rng.choice([0, 1, 40])),
                top_p=float(rng.choice([0.3, 0.9, 1.0])), min_p=float(rng.choice([0.0, 0.05])), logit_bias={3: 2.0},
            )  # fmt: skip
            draws.append(((rng.standard_normal(3000) * 4).astype(np.float32), params, TokenContext([1, 2]), i, (5, 9)))
        natively = [next_token(*draw) for draw in draws]
        monkeypatch.setattr(module, "native_sampling", lambda: None)
        assert natively == [next_token(*draw) for draw in draws]


def test_the_library_is_used_where_it_is_built() -> None:
    assert module.native_sampling() is sampling


def test_without_the_library_numpy_chooses_the_same(tmp_path) -> None:
    environ = os.environ | {LIBRARY_VARIABLE: str(tmp_path / "missing.so")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, check=True)
    missing, *tokens = done.stdout.split()
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    assert missing == "None"
    assert [int(t) for t in tokens] == [noisy_argmax(logits, None, 0.8, 3, p) for p in range(50)]


SCRIPT = """
import numpy as np
from treeserve_engine import noisy_argmax as module
logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
print(module.native_sampling(), *(module.noisy_argmax(logits, None, 0.8, 3, p) for p in range(50)))
"""


GOLDEN, MIX_1, MIX_2, MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1


def unmixed(x: int) -> int:
    """What SplitMix64's finaliser makes x of."""
    for shift, factor in ((31, MIX_2), (27, MIX_1), (30, 1)):
        y = x
        for _ in range(64 // shift):
            y = x ^ y >> shift
        x = y * pow(factor, -1, 2**64) & MASK
    return x


def seed_with(counter: int, token_id: int, position: int, low_bits: int = 0) -> int:
    """A seed with which a token draws U = counter / 2^53."""
    bits = (counter >> 1) << 12 | low_bits
    key = unmixed(unmixed(bits)) ^ (token_id + 1) * GOLDEN & MASK
    seed = (unmixed((unmixed(key) - (position + 1) * GOLDEN) & MASK) - GOLDEN) & MASK
    assert uniform_counters(seed, position, np.array([token_id]))[0] == counter
    return seed


class TestExtremeNoise:
    """Where the approximations of the scan meet their bounds."""

    # The largest U there is, and 1 - U at both sides of where the scan can tell: 1024 / 2^31, that is 2^32 / 2^53.
    @pytest.mark.parametrize("complement", [1, 3, 2**21 - 1, 2**22 + 1, 2**31 + 1, 2**32 - 1, 2**32 + 1, 2**33 - 1])
    @pytest.mark.parametrize("size", [40, 3000])
    def test_the_most_noise_there_is(self, complement: int, size: int, isa: str) -> None:
        rng = np.random.default_rng(complement)
        for token_id in (0, 7, 16, size - 1):
            seed = seed_with(2**53 - complement, token_id, 12)
            values = rng.standard_normal(size).astype(np.float32)
            others = scores_of(values, None, 1.0, seed, 12)
            others[token_id] = -np.inf
            start = float(values.max()) + others.max() - gumbel(seed, 12, np.array([token_id]))[0]
            for gap, wins in ((1e-4, True), (-1e-4, False)):
                values[token_id] = start + gap
                check_draw(values, None, 1.0, seed, 12)
                assert (noisy_argmax(values, None, 1.0, seed, 12) == token_id) is wins

    def test_the_least_noise_there_is(self, isa: str) -> None:
        """The best has noise -3.6037 but leads by its r; what beats it has an r that is 5.19 powers of 2 smaller."""
        for low_bits in range(40):
            seed = seed_with(1, 5, 77, low_bits)
            noise, counters = gumbel(seed, 77, np.arange(2000)), uniform_counters(seed, 77, np.arange(2000))
            other = int(counters.argmax())
            for gap, winner in ((1e-3, other), (-1e-3, 5)):
                values = np.full(2000, -1000, np.float32)
                values[5] = 0
                values[other] = noise[5] - noise[other] + gap
                behind = (-values[other] + np.log1p(-counters[other] * 2.0**-53)) / np.log(2)
                assert 5.1 < behind < 5.2 + 0.01
                check_draw(values, None, 1.0, seed, 77)
                assert noisy_argmax(values, None, 1.0, seed, 77) == winner


class TestRefused:
    @pytest.mark.parametrize("size", [1, 15, 16, 64, 65, 100, 2000])
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_values_that_are_not_numbers(self, bad: float, size: int, isa: str) -> None:
        for where in {0, size // 2, size - 1}:
            values = np.zeros(size, np.float32)
            values[where] = bad
            with pytest.raises(ValueError, match="NaN"):
                sampling.find_rivals(values, None, 1.0, 0, 0, isa=isa)

    @pytest.mark.parametrize("size", [1, 64, 100])
    def test_nothing_to_choose_from(self, size: int, isa: str) -> None:
        with pytest.raises(ValueError, match="all are -inf"):
            sampling.find_rivals(np.full(size, -np.inf, np.float32), None, 1.0, 0, 0, isa=isa)
        with pytest.raises(ValueError, match="0 values"):
            sampling.find_rivals(np.empty(0, np.float32), None, 1.0, 0, 0, isa=isa)

    def test_arrays_that_do_not_fit(self) -> None:
        values, ids = np.zeros(20, np.float32), np.arange(20)
        for bad in (values.astype(np.float64), values[::2], values.reshape(4, 5)):
            with pytest.raises(ValueError, match="values"):
                sampling.find_rivals(bad, None, 1.0, 0, 0)
        for bad in (ids[:19], ids.astype(np.int32), np.arange(40)[::2]):
            with pytest.raises(ValueError, match="ids"):
                sampling.find_rivals(values, bad, 1.0, 0, 0)

    @pytest.mark.parametrize("temperature", [0.0, -1.0, 2.0**-101, 2.0**101, np.nan, np.inf])
    def test_temperatures(self, temperature: float) -> None:
        with pytest.raises(ValueError, match="temperature is"):
            sampling.find_rivals(np.zeros(3, np.float32), None, temperature, 0, 0)

    def test_an_unknown_instruction_set(self) -> None:
        with pytest.raises(ValueError, match="this CPU does not run 'abacus'"):
            sampling.find_rivals(np.zeros(3, np.float32), None, 1.0, 0, 0, isa="abacus")


@pytest.mark.parametrize("size", (*SMALL, 127, 128, 129, 1025, 49157))
def test_the_largest_are_those_of_a_full_sort(isa, size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        x = np.nan_to_num(some_logits(size, rng))
        order = np.argsort(-x, kind="stable")
        for num in {1, min(8, size), min(64, size)}:
            assert sampling.find_largest(x, num, isa=isa) == order[:num].tolist()


def test_no_largest_among_what_is_not_finite(isa):
    for place in (0, 63, 64, 500, 511, 512, 519):
        for value in (np.nan, np.inf, -np.inf):
            x = np.linspace(0, 1, 520, dtype=np.float32)
            x[place] = value
            assert sampling.find_largest(x, 8, isa=isa) is None


@pytest.mark.parametrize("num", [0, -1, 65, 101])
def test_as_many_largest_as_there_are(num):
    with pytest.raises(ValueError, match=f"{num} of the largest of 100 values"):
        sampling.find_largest(np.zeros(100, np.float32), num)
