"""The Triton sampling kernels, in Triton's interpreter on the CPU: the tokens of the engine's `next_token`."""

import random

import numpy as np
import pytest
import torch
from support.sampling_cases import Case, Choices, expected_tokens, random_logits, rows_of, tree_of

from treeserve_core import noise as core_noise
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_kernels import noise
from treeserve_kernels.next_token import NO_TOKEN, choose_tokens, walk_trees

TEMPERATURES = (0.3, 1.0, 2.0)
PENALTIES = {
    "repetition_penalty": (1.0, 1.3, 0.7, 1e-30),
    "presence_penalty": (0.0, 0.8, -1.0),
    "frequency_penalty": (0.0, 0.4),
    "logit_bias": ({}, {0: 5.0, 3: -100.0, 5: 0.5}),
}
FILTERS = {"top_k": (0, 1, 3, 40), "top_p": (1.0, 0.9, 0.5, 1e-12), "min_p": (0.0, 0.05, 1.0)}
# Vocabularies around the sizes of tiles and chunks.
GREEDY = [(vocab, Choices(vocab, PENALTIES, min_tokens_left=(0, 2))) for vocab in (8, 63, 1024, 2500)]
PLAIN = [(vocab, Choices(vocab, {"temperature": (0.0, *TEMPERATURES, 1e-30)})) for vocab in (1, 8, 1023, 1025, 2500)]
FILTERED = [(vocab, Choices(vocab, {"temperature": TEMPERATURES} | FILTERS, (1, 2))) for vocab in (1, 50, 1024, 1300)]
EVERYTHING = [
    (vocab, Choices(vocab, {"temperature": (0.0, 1.0)} | FILTERS | PENALTIES, (3,), (0, 1))) for vocab in (41, 1100)
]


def _chooses_as_the_engine(vocab, choices, seed, sequences=3):
    from treeserve_kernels.triton.next_token import choose_tokens_triton

    rng = random.Random(seed)
    cases = [choices.case(rng) for _ in range(sequences)]
    rows = rows_of(cases, vocab)
    logits = random_logits(len(rows.sequences), vocab + rng.choice([0, 5]), rng)
    before = logits.clone()
    tokens = choose_tokens_triton(logits, rows)
    assert tokens.tolist() == expected_tokens(cases, logits, vocab)
    assert torch.equal(tokens, choose_tokens(logits, rows))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("vocab", "choices"),
    GREEDY + PLAIN + EVERYTHING,
    ids=[f"{n}{v}" for n, of in (("greedy", GREEDY), ("plain", PLAIN), ("all", EVERYTHING)) for v, _ in of],
)
def test_chooses_the_engines_tokens(interpreter, vocab, choices, seed):
    interpreter(_chooses_as_the_engine, vocab, choices, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab", "choices"), FILTERED, ids=[f"vocab{v}" for v, _ in FILTERED])
def test_filters_keep_what_the_engine_keeps(interpreter, vocab, choices, seed):
    interpreter(_chooses_as_the_engine, vocab, choices, seed, 4)


def _refuses_logits_that_are_not_finite():
    from treeserve_kernels.triton.next_token import choose_tokens_triton

    # An edit that overwrites the bad logit must not hide it; one that is not finite after an edit is another matter.
    plain = Case(TokenTree.root_only(1), SamplingParams(temperature=1.0))
    biased = Case(TokenTree.root_only(1), SamplingParams(logit_bias={3: 2.0}))
    penalised = Case(TokenTree.root_only(1), SamplingParams(repetition_penalty=2.0), prompt=(3,))
    blocked = Case(TokenTree.root_only(1), SamplingParams(), blocked_ids=(3, 4), min_tokens_left=1)
    for bad in (float("nan"), float("inf"), float("-inf")):
        cases = [plain, biased, penalised, blocked]
        logits = torch.randn(4, 9)
        good = choose_tokens_triton(logits, rows_of(cases, 9))
        assert (good >= 0).all() and good.tolist() == expected_tokens(cases, logits, 9)
        logits[:, 3] = bad
        assert choose_tokens_triton(logits, rows_of(cases, 9)).tolist() == [NO_TOKEN] * 4
        assert choose_tokens(logits, rows_of(cases, 9)).tolist() == [NO_TOKEN] * 4
        padding = torch.cat((torch.zeros(4, 9), torch.full((4, 1), bad)), 1)
        assert (choose_tokens_triton(padding, rows_of(cases, 9)) >= 0).all()


def test_logits_that_are_not_finite_give_no_token(interpreter):
    interpreter(_refuses_logits_that_are_not_finite)


def _noise(seed, position, n):
    import triton
    import triton.language as tl

    from treeserve_kernels.triton import noise as device

    @triton.jit
    def kernel(seeds, x, values, noise_out, mass_out, key_out, size: tl.constexpr):
        ids = tl.arange(0, size)
        tl.store(noise_out + ids, device.gumbel(tl.load(seeds), tl.load(seeds + 1), ids))
        tl.store(mass_out + ids, device.mass(tl.load(x + ids)))
        tl.store(key_out + ids, device.order_key(tl.load(values + ids)))

    x, values = -torch.rand(n, dtype=torch.float64) * 70, torch.randn(n)
    x[:2] = torch.tensor([0.0, -torch.inf])
    values[:3] = torch.tensor([-0.0, 0.0, -torch.inf])
    out = torch.empty(n, dtype=torch.float64)
    masses, keys = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
    kernel.fn.__globals__["device"] = device
    kernel.fn.__globals__["tl"] = tl
    kernel[(1,)](torch.tensor([noise.signed(seed), position]), x, values, out, masses, keys, n)
    assert torch.equal(masses, noise.mass(x))
    assert torch.equal(keys, noise.order_key(values))
    return out.numpy().tobytes()


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 131071), (2**63, 12345)])
def test_the_noise_has_the_bits_of_the_engine(interpreter, seed, position):
    expected = core_noise.gumbel(seed, position, np.arange(4096)).tobytes()
    assert interpreter(_noise, seed, position, 4096) == expected
    assert noise.gumbel(noise.signed(seed), position, torch.arange(4096)).numpy().tobytes() == expected


def _walks(cases, tokens):
    from treeserve_kernels.triton.walk import walk_trees_triton

    rows = rows_of(cases, 50)
    tokens = torch.tensor(tokens, dtype=torch.int32)
    walked = walk_trees_triton(tokens, rows)
    assert torch.equal(walked, walk_trees(tokens, rows))
    return walked.tolist()


def test_walk_by_hand(interpreter):
    # 7 -> 8, 9; 9 -> 8, 5. Chosen: 9 after 7, then 5, then 6, which nobody carries.
    tree = TokenTree((7, 8, 9, 8, 5), (-1, 0, 0, 2, 2))
    cases = [Case(tree, SamplingParams()), Case(TokenTree.root_only(1), SamplingParams())]
    walked = interpreter(_walks, cases, [9, 0, 5, 0, 6, 3])
    assert walked == [[[9, 5, 6], [2, 4, -1]], [[3, -1, -1], [-1, -1, -1]]]


@pytest.mark.parametrize("seed", range(8))
def test_walk_equals_its_twin(interpreter, seed):
    rng = random.Random(seed)
    ids = range(rng.choice([2, 4]))
    cases = [Case(tree_of(rng.choice([1, 2, 9, 40, 70]), ids, rng), SamplingParams()) for _ in range(6)]
    tokens = [rng.choice([*ids, NO_TOKEN]) for case in cases for _ in range(len(case.tree))]
    interpreter(_walks, cases, tokens)


def _launched(params, min_tokens_left=0):
    """Names of the kernels that one call launches, and the grid of each."""
    from treeserve_kernels.triton import next_token as module

    launches = []
    names = [name for name in vars(module) if name.endswith("_kernel")]
    kernels = {name: getattr(module, name) for name in names}

    class Spy:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            launches.append((self.name.removesuffix("_kernel"), grid))
            return kernels[self.name][grid]

    try:
        for name in names:
            setattr(module, name, Spy(name))
        case = Case(TokenTree.chain((1, 2)), params, blocked_ids=(3,), min_tokens_left=min_tokens_left)
        rows = rows_of([case], 2500)
        module.choose_tokens_triton(torch.randn(2, 2500), rows)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    assert tuple(name for name, _ in launches) == module.SamplingPlan.of(rows).kernels
    return launches


@pytest.mark.parametrize(
    ("params", "min_tokens_left", "kernels"),
    [
        (SamplingParams(top_k=5), 0, "scan score pick"),
        (SamplingParams(temperature=1.0), 0, "scan score pick"),
        (SamplingParams(temperature=1.0), 1, "edit scan score pick"),
        (SamplingParams(temperature=1.0, presence_penalty=0.5), 0, "edit scan score pick"),
        (SamplingParams(temperature=1.0, logit_bias={1: 1.0}), 0, "edit scan score pick"),
        (SamplingParams(temperature=1.0, min_p=0.5), 0, "scan filter score pick"),
        (SamplingParams(temperature=1.0, top_p=0.5), 0, "scan weigh filter score pick"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_only_what_a_batch_needs_is_launched(interpreter, params, min_tokens_left, kernels):
    grids = {"edit": (2,), "scan": (2, 3), "weigh": (2, 3), "filter": (2,), "score": (2, 3), "pick": (2,)}
    expected = [(name, grids[name]) for name in kernels.split()]
    assert interpreter(_launched, params, min_tokens_left) == expected


def _refusals():
    from treeserve_kernels.triton.next_token import choose_tokens_triton

    rows = rows_of([Case(TokenTree.root_only(1), SamplingParams())], 9)
    with pytest.raises(ValueError, match="float32"):
        choose_tokens_triton(torch.zeros(1, 9, dtype=torch.float16), rows)
    with pytest.raises(ValueError, match="contiguous"):
        choose_tokens_triton(torch.zeros(9, 2).T[:1], rows)
    with pytest.raises(ValueError, match="do not fit"):
        choose_tokens_triton(torch.zeros(1, 8), rows)
    with pytest.raises(ValueError, match="do not fit"):
        choose_tokens_triton(torch.zeros(2, 9), rows)


def test_inputs_it_does_not_take_are_refused(interpreter):
    interpreter(_refusals)
