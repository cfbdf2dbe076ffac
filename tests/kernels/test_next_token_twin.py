"""The torch twin of the sampling kernels against the engine: many rows, and how far the nucleus may differ."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.sampling_cases import Case, Choices, expected_tokens, random_logits, rows_of

from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_engine.next_token import _nucleus as engines_nucleus
from treeserve_kernels.dispatch import TWINS, kernels_for
from treeserve_kernels.next_token import choose_tokens, mass_target
from treeserve_kernels.noise import MASS_BITS, mass

PARAMS = {
    "temperature": (0.0, 0.2, 0.7, 1.0, 3.0),
    "top_k": (0, 0, 1, 2, 30),
    "top_p": (1.0, 0.95, 0.4, 0.999999),
    "min_p": (0.0, 0.0, 0.1),
    "repetition_penalty": (1.0, 1.2),
    "presence_penalty": (0.0, 1.5),
    "frequency_penalty": (0.0, -0.5),
    "logit_bias": ({}, {2: 3.0}),
}


@pytest.mark.parametrize("vocab", [3, 257, 5000])
def test_chooses_the_engines_tokens(vocab):
    rng = random.Random(vocab)
    choices = Choices(vocab, PARAMS, min_tokens_left=(0, 0, 2))
    for _ in range(25):
        cases = [choices.case(rng) for _ in range(3)]
        rows = rows_of(cases, vocab)
        logits = random_logits(len(rows.sequences), vocab + 3, rng)
        assert choose_tokens(logits, rows).tolist() == expected_tokens(cases, logits, vocab)


def _nucleus(values: torch.Tensor, top_p: float) -> int:
    masses = mass(values.double().sort(descending=True).values - values.max()).cumsum(0)
    return int((masses < mass_target(int(masses[-1]), top_p)).sum()) + 1


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99999])
def test_the_nucleus_is_the_engines_on_random_rows(scale, top_p):
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        values = torch.randn(20_000, generator=generator) * scale
        assert _nucleus(values, top_p) == len(engines_nucleus(values.numpy(), 1.0, top_p))


def test_the_nucleus_differs_only_where_its_edge_is_a_hair_away():
    """top_p just beside the exact share of a prefix: whichever side a sum falls on, it is within the stated bound."""
    generator = torch.Generator().manual_seed(6)
    differing = 0
    for _ in range(30):
        values = torch.randn(3000, generator=generator)
        weights = (values.double() - values.max()).sort(descending=True).values.exp()
        share = float((weights.cumsum(0) / weights.sum())[100])
        bound = len(values) * 2.0 ** (1 - MASS_BITS) / float(weights.sum())
        for top_p in np.array(
            [share - 2 * bound, np.nextafter(share, 0), share, np.nextafter(share, 1), share + 2 * bound]
        ):
            ours, theirs = _nucleus(values, top_p), len(engines_nucleus(values.numpy(), 1.0, top_p))
            differing += ours != theirs
            assert ours == theirs or abs(top_p - share) <= bound
    assert differing  # the edge was met


def test_masses_are_rounded_exponentials():
    x = torch.cat((torch.linspace(-45, 0, 10_001, dtype=torch.float64), torch.tensor([-1e300, -torch.inf])))
    exact = torch.exp(x) * 2.0**MASS_BITS
    assert ((mass(x) - exact).abs() <= 0.5 + exact * 2.0**-52).all()
    assert mass(x[-2:]).tolist() == [0, 0]
    assert mass(torch.zeros(1, dtype=torch.float64)).tolist() == [2**MASS_BITS]


def test_mass_targets():
    total = 3 * 2**MASS_BITS
    assert mass_target(total, 1e-300) == 1
    assert mass_target(total, float(np.nextafter(1.0, 0.0))) == total
    assert mass_target(4, 0.5) == 2
    assert mass_target(total, 0.7) == pytest.approx(Fraction(7, 10) * total, abs=1)


def test_a_uniform_row_shares_the_nucleus_evenly():
    rows = rows_of(
        [Case(TokenTree.root_only(1), SamplingParams(temperature=1.0, top_p=0.5, seed=s)) for s in range(60)], 4
    )
    assert set(choose_tokens(torch.zeros(60, 4), rows).tolist()) == {0, 1}


def test_a_cuda_device_gets_the_triton_kernels_and_a_cpu_the_twins():
    assert kernels_for(torch.device("cpu")) is TWINS
    of_cuda = kernels_for(torch.device("cuda"))
    names = [getattr(of_cuda, name).__name__ for name in TWINS.__dataclass_fields__]
    assert names == [f"{getattr(TWINS, name).__name__}_triton" for name in TWINS.__dataclass_fields__]
