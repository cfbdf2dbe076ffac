"""Choosing tokens and walking trees on the device: the host's tokens, and both ways' times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.device import Device
from treeserve_core.outcome import VerifyOutcome
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.device_accept import TreeToAccept, accept_on_device
from treeserve_engine.sampling_rows import sampling_rows
from treeserve_kernels.dispatch import Kernels
from treeserve_kernels.kv import move_kv, write_kv
from treeserve_kernels.next_token import choose_tokens, walk_trees
from treeserve_kernels.tree_attention import tree_attention
from treeserve_kernels.triton.next_token import choose_tokens_triton
from treeserve_kernels.triton.walk import walk_trees_triton

# The kernels under test even where the device would get the twins.
TRITON = Kernels(tree_attention, write_kv, move_kv, choose_tokens_triton, walk_trees_triton)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "all": {
        "temperature": 0.7,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {5: 2.0, 7: -100.0},
    },
}


@dataclass(frozen=True)
class Size:
    """Sequences of a step, nodes of each tree and ids of the vocabulary."""

    sequences: int
    nodes: int
    vocab_size: int


SIZES = (Size(1, 1, 49152), Size(1, 16, 49152), Size(8, 16, 128256), Size(32, 1, 128256), Size(8, 64, 151936))
TINY_SIZES = (Size(2, 2, 1030),)


@dataclass(frozen=True)
class SamplingResult:
    """One batch: how many tokens differ from the host's, and median times in milliseconds.

    choose and walk are the device's time for the kernels; accept and host the time from logits on the device to
    outcomes on the host: all that is on the way, and of the host's way the copy of all logits.
    """

    params: str
    size: Size
    rows: int
    differing_tokens: int
    twin_differing_tokens: int
    outcomes_agree: bool
    walk_agrees: bool
    choose_ms: float
    walk_ms: float
    accept_ms: float
    host_ms: float

    @property
    def agrees(self) -> bool:
        """Whether the device gives the host's tokens."""
        return self.differing_tokens == self.twin_differing_tokens == 0 and self.outcomes_agree and self.walk_agrees

    def line(self) -> str:
        """For reading along."""
        return (
            f"{'ok ' if self.agrees else 'BAD'} {self.params:<8}rows {self.rows:<5}vocabulary {self.size.vocab_size:<7}"
            f"differing {self.differing_tokens}  ms: choose {self.choose_ms:.3f}, walk {self.walk_ms:.3f}, "
            f"accept {self.accept_ms:.3f}, on the host {self.host_ms:.3f}"
        )


def check_sampling(device: Device, sizes: Sequence[Size]) -> Iterator[SamplingResult]:
    """Every size with every kind of parameters."""
    return (check_batch(device, size, name) for size in sizes for name in PARAMS)


def check_batch(device: Device, size: Size, params: str) -> SamplingResult:
    """Compares tokens of all rows and outcomes of all trees with the host's, then times both."""
    logits = torch.randn(size.sequences * size.nodes, size.vocab_size, device=device.name) * 3
    on_host = logits.cpu().numpy()

    def trees() -> list[TreeToAccept]:
        """The same trees with fresh samplers: acceptance advances them."""
        return [_tree(random.Random(f"{size} {params} {s}"), params, size) for s in range(size.sequences)]

    rows = sampling_rows([(t.tree, t.sampler.state) for t in trees()], size.vocab_size, device.torch)
    tokens = choose_tokens_triton(logits, rows)
    twin = choose_tokens(logits, rows)
    expected = [_after(tree, node).next_token(row) for (tree, node), row in zip(_nodes(trees), on_host, strict=True)]
    outcomes = _accept_on_device(logits, trees())
    return SamplingResult(
        params=params,
        size=size,
        rows=len(logits),
        differing_tokens=sum(a != b for a, b in zip(tokens.tolist(), expected, strict=True)),
        twin_differing_tokens=int((tokens != twin).sum()),
        outcomes_agree=outcomes == _accept_on_host(logits, trees()),
        walk_agrees=torch.equal(walk_trees_triton(tokens, rows), walk_trees(tokens, rows)),
        choose_ms=device.median_ms(lambda: choose_tokens_triton(logits, rows)),
        walk_ms=device.median_ms(lambda: walk_trees_triton(tokens, rows)),
        accept_ms=_median_ms(lambda ts: _accept_on_device(logits, ts), trees, device),
        host_ms=_median_ms(lambda ts: _accept_on_host(logits, ts), trees, device),
    )


def _nodes(trees: Callable[[], list[TreeToAccept]]) -> Iterator[tuple[TreeToAccept, int]]:
    """Every node of every tree, each with a sampler of its own."""
    counts = [len(t.tree) for t in trees()]
    return ((trees()[s], node) for s, count in enumerate(counts) for node in range(count))


def _after(tree: TreeToAccept, node: int) -> SequenceSampler:
    """The sampler after the tokens of a node's path."""
    for step in tree.tree.path(node):
        tree.sampler.append(tree.tree.token_ids[step])
    return tree.sampler


def _tree(rng: random.Random, params: str, size: Size) -> TreeToAccept:
    prompt = [rng.randrange(size.vocab_size) for _ in range(100)]
    sampler = SequenceSampler(
        SamplingParams(seed=rng.getrandbits(64), **PARAMS[params]),
        StoppingCriteria(10_000, ignore_eos=True),
        prompt,
        eos_token_ids=(),
        vocab_size=size.vocab_size,
        generated_token_ids=[rng.randrange(size.vocab_size) for _ in range(20)],
    )
    parents = (-1, *(rng.randrange(i) for i in range(1, size.nodes)))
    carried = rng.sample(range(size.vocab_size), size.nodes - 1)
    return TreeToAccept(TokenTree((sampler.last_token_id, *carried), parents), sampler)


def _accept_on_device(logits: torch.Tensor, trees: Sequence[TreeToAccept]) -> list[VerifyOutcome]:
    return [commit()[0] for commit in accept_on_device(logits, trees, logits.shape[1], TRITON)]


def _accept_on_host(logits: torch.Tensor, trees: Sequence[TreeToAccept]) -> list[VerifyOutcome]:
    """What the engine does without a device: all logits copied, each tree walked in numpy."""
    rows = logits.cpu().numpy()
    outcomes: list[VerifyOutcome] = []
    first = 0
    for t in trees:
        own = rows[first : first + len(t.tree)]
        outcomes.append(accept(t.tree, own.__getitem__, t.sampler))
        first += len(t.tree)
    return outcomes


def _median_ms(
    accept_all: Callable[[Sequence[TreeToAccept]], object], trees: Callable[[], list[TreeToAccept]], device: Device
) -> float:
    """Median wall time of `accept_all` over fresh trees: it ends with the outcomes on the host."""
    times: list[float] = []
    for _ in range(15 if device.is_cuda else 1):
        fresh = trees()
        start = time.perf_counter()
        accept_all(fresh)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]
