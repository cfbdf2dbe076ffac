"""Acceptance on a device, with the torch twins on the CPU in its place: what `accept` emits, for every tree."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from support.sampling_cases import Choices, random_logits, tree_of

from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.device_accept import TreeToAccept, accept_on_device
from treeserve_engine.next_token import NonFiniteLogitsError
from treeserve_engine.upload import pack, unpack, upload

VOCAB = 12
CPU = torch.device("cpu")


def sampler_of(params: SamplingParams, rng: random.Random, **stopping: object) -> SequenceSampler:
    criteria = StoppingCriteria(**{"max_tokens": 40, **stopping})  # type: ignore[arg-type]
    prompt, output = rng.choices(range(VOCAB), k=5), rng.choices(range(3, VOCAB), k=3)
    return SequenceSampler(params, criteria, prompt, eos_token_ids=(0,), vocab_size=VOCAB, generated_token_ids=output)


def tree_at(sampler: SequenceSampler, rng: random.Random, nodes: int = 30) -> TokenTree:
    """A tree with so few different tokens that paths are accepted."""
    tree = tree_of(nodes, range(VOCAB), rng)
    return TokenTree((sampler.last_token_id, *tree.token_ids[1:]), tree.parents)


@pytest.mark.parametrize("seed", range(40))
def test_emits_what_accept_emits(seed: int) -> None:
    rng = random.Random(seed)
    params = {
        "temperature": (0.0, 0.7, 1.5),
        "top_k": (0, 3),
        "top_p": (1.0, 0.8),
        "repetition_penalty": (1.0, 1.4),
        "frequency_penalty": (0.0, 0.6),
        "top_log_probs": (None, None, 2),
    }
    choices = Choices(VOCAB, params)
    on_host, trees = [], []
    for _ in range(4):
        sampler = sampler_of(
            choices.case(rng).params, rng, max_tokens=rng.choice([5, 40]), min_tokens=rng.choice([0, 4]),
            stop_token_ids=(rng.choice([1, 2]),),
        )  # fmt: skip
        stopped_by = rng.randrange(VOCAB)
        should_stop = rng.choice([None, lambda token_id, stop=stopped_by: token_id == stop])
        tree = tree_at(sampler, rng)
        on_host.append(copy.deepcopy(sampler))
        trees.append(TreeToAccept(tree, sampler, should_stop, num_top=rng.choice([0, 3])))
    logits = random_logits(sum(len(t.tree) for t in trees), VOCAB + 2, rng)
    commits = accept_on_device(logits, trees, VOCAB)
    first = 0
    for host, tree, commit in zip(on_host, trees, commits, strict=True):
        own = logits[first : first + len(tree.tree)].numpy()
        first += len(own)
        expected = accept(tree.tree, own.__getitem__, host, tree.should_stop)
        outcome, top_token_ids = commit()
        assert outcome == expected
        assert (tree.sampler.output_len, tree.sampler.finish_reason) == (host.output_len, host.finish_reason)
        path = (0, *expected.accepted_nodes)[: len(expected.token_ids)]
        top = [set(row) for row in top_token_ids]
        assert len(top) == (len(path) if tree.num_top else 0)
        for node, ids in zip(path, top, strict=False):
            assert sorted(own[node, list(ids)]) == sorted(np.sort(own[node, :VOCAB])[-tree.num_top :])


def test_only_the_sequence_with_bad_logits_fails() -> None:
    rng = random.Random(1)
    samplers = [sampler_of(SamplingParams(), rng) for _ in range(3)]
    trees = [TreeToAccept(TokenTree.chain((s.last_token_id, 1)), s) for s in samplers]
    logits = torch.zeros(6, VOCAB)
    logits[:, 1] = 1.0  # the chains' second nodes are reached
    logits[3, 4] = torch.nan
    logits[4, 4] = torch.inf
    first, second, third = accept_on_device(logits, trees, VOCAB)
    for failing in (second, third):
        with pytest.raises(NonFiniteLogitsError):
            failing()
    assert first()[0].token_ids == (1, 1)


def test_bad_logits_off_the_path_do_no_harm() -> None:
    sampler = sampler_of(SamplingParams(), random.Random(2))
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = 1.0
    logits[1] = torch.nan
    (commit,) = accept_on_device(logits, [TreeToAccept(TokenTree.chain((sampler.last_token_id, 1)), sampler)], VOCAB)
    assert commit()[0].token_ids == (5,)


def test_a_tree_that_grows_from_another_token_is_refused() -> None:
    sampler = sampler_of(SamplingParams(), random.Random(3))
    tree = TokenTree.root_only((sampler.last_token_id + 1) % VOCAB)
    (commit,) = accept_on_device(torch.zeros(1, VOCAB), [TreeToAccept(tree, sampler)], VOCAB)
    with pytest.raises(ValueError, match="the root is"):
        commit()
    assert sampler.output_len == 3


def test_a_should_stop_that_raises_fails_its_own_sequence() -> None:
    def broken(token_id: int) -> bool:
        raise ValueError("no text")

    samplers = [sampler_of(SamplingParams(), random.Random(s)) for s in range(2)]
    roots = [TokenTree.root_only(s.last_token_id) for s in samplers]
    failing, other = accept_on_device(
        torch.zeros(2, VOCAB), [TreeToAccept(roots[0], samplers[0], broken), TreeToAccept(roots[1], samplers[1])], VOCAB
    )
    with pytest.raises(ValueError, match="no text"):
        failing()
    assert other()[0].token_ids == (0,)


def test_arrays_arrive_whole_aligned_and_in_one_piece() -> None:
    arrays = [
        np.arange(3, dtype=np.int32),
        np.empty(0, np.float64),
        np.full((2, 5), -1.5),
        np.arange(6).reshape(3, 2).T,
    ]
    tensors = upload(arrays, CPU)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.dtype == torch.from_numpy(array[:0].copy()).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == tensors[0].data_ptr() % 16 or tensor.numel() == 0
    packed = pack(arrays, CPU)
    assert all(t.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr() for t in unpack(packed, arrays))
