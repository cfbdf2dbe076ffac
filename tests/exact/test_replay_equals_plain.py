"""Replay along any trees emits the tokens of plain decoding, for every combination of parameters.

The model is a table: logits are a fixed function of the last tokens of a path. Plain decoding is written out here from
the parameters' definitions, over whole token lists and with none of the engine's shortcuts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from treeserve_core.noise import gumbel
from treeserve_core.outcome import FinishReason, PositionLogProbs
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept

VOCAB, PADDED = 8, 11
EOS = (6, 7)


@functools.cache
def table(last_tokens: tuple[int, ...], model: int) -> npt.NDArray[np.float32]:
    """Logits after these tokens: coarse, so that ties are common; padding rows are the largest of all."""
    rng = np.random.default_rng([model, len(last_tokens), *last_tokens])
    logits = np.round(rng.normal(0, 1.5, PADDED) * 2).astype(np.float32) / 2
    logits[VOCAB:] = 40.0
    logits.flags.writeable = False
    return logits


def logits_after(tokens: Sequence[int], model: int) -> npt.NDArray[np.float32]:
    return table(tuple(tokens[-3:]), model)


@dataclass(frozen=True)
class Request:
    params: SamplingParams
    stopping: StoppingCriteria
    prompt: tuple[int, ...]
    model: int
    stop_pair: tuple[int, int] | None = None  # stands for a stop string: these two tokens in a row

    def sampler(self, generated: Sequence[int] = ()) -> SequenceSampler:
        return SequenceSampler(
            self.params,
            self.stopping,
            self.prompt,
            eos_token_ids=EOS,
            vocab_size=VOCAB,
            generated_token_ids=generated,
        )


@dataclass(frozen=True)
class Generation:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    log_probs: tuple[PositionLogProbs, ...]


# --- Plain decoding from the definitions ---------------------------------------------------------------------------


def reference_logits(request: Request, output: Sequence[int]) -> npt.NDArray[np.float32]:
    params = request.params
    logits = logits_after((*request.prompt, *output), request.model)[:VOCAB].astype(np.float64)
    counts = Counter(output)
    for token_id in {*request.prompt, *output}:
        factor = params.repetition_penalty
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        present = token_id in counts
        logits[token_id] -= params.presence_penalty * present + params.frequency_penalty * counts[token_id]
    logits = logits.astype(np.float32)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] = np.float32(np.float64(logits[token_id]) + bias)
    if len(output) < request.stopping.min_tokens:
        logits[sorted(end_ids(request))] = -np.inf
    return logits


def end_ids(request: Request) -> set[int]:
    return set(request.stopping.stop_token_ids) | (set() if request.stopping.ignore_eos else set(EOS))


def reference_kept(logits: npt.NDArray[np.float32], params: SamplingParams) -> list[int]:
    """Ids that the filters leave, by a full stable sort."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    kept = sorted(range(VOCAB), key=lambda i: (-logits[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        reached = np.cumsum(weights[kept]) >= params.top_p * weights[sorted(kept)].sum()
        kept = kept[: int(np.argmax(reached)) + 1] if reached.any() else kept
    if params.min_p > 0:
        kept = [i for i in kept if logits[i] >= np.float32(logits.max() + params.temperature * np.log(params.min_p))]
    return sorted(kept)


def reference_token(request: Request, output: Sequence[int]) -> int:
    logits, params = reference_logits(request, output), request.params
    if params.temperature == 0:
        return int(np.argmax(logits))
    noise = gumbel(params.seed, len(request.prompt) + len(output), np.arange(VOCAB))
    scores = (logits.astype(np.float64) - logits.max()) / params.temperature + noise
    kept = reference_kept(logits, params)
    return kept[int(np.argmax(scores[kept]))]


def plain_decoding(request: Request) -> tuple[list[int], FinishReason]:
    output: list[int] = []
    while True:
        output.append(reference_token(request, output))
        if output[-1] in end_ids(request) or tuple(output[-2:]) == request.stop_pair:
            return output, FinishReason.STOP
        if len(output) == request.stopping.max_tokens:
            return output, FinishReason.LENGTH


# --- Decoding along trees ------------------------------------------------------------------------------------------

TreeMaker = Callable[[int, list[int]], TokenTree]  # (root, what plain decoding emits from here) -> tree


def stop_hook(request: Request, generated: Sequence[int]) -> Callable[[int], bool]:
    emitted = list(generated)

    def should_stop(token_id: int) -> bool:
        emitted.append(token_id)
        return tuple(emitted[-2:]) == request.stop_pair

    return should_stop


def decode_along(request: Request, make_tree: TreeMaker, plain: list[int], restart_every_step: bool) -> Generation:
    """Generate along the trees `make_tree` gives, checking each outcome's own invariants."""
    output: list[int] = []
    log_probs: list[PositionLogProbs] = []
    sampler, should_stop = request.sampler(), stop_hook(request, ())
    while sampler.finish_reason is None:
        if restart_every_step:  # as after preemption, or on another pod
            sampler, should_stop = request.sampler(output), stop_hook(request, output)
        committed = (*request.prompt, *output)
        tree = make_tree(committed[-1], plain[len(output) :])
        asked: list[int] = []

        def logits_of(
            node: int, tree: TokenTree = tree, committed: tuple[int, ...] = committed, asked: list[int] = asked
        ) -> npt.NDArray[np.float32]:
            asked.append(node)
            return logits_after((*committed, *(tree.token_ids[i] for i in tree.path(node))), request.model)

        outcome = accept(tree, logits_of, sampler, should_stop)
        accepted = outcome.accepted_nodes
        assert [tree.token_ids[i] for i in accepted] == list(outcome.token_ids[: len(accepted)])
        assert accepted == (tree.path(accepted[-1]) if accepted else ())
        assert asked == [0, *accepted][: len(outcome.token_ids)]
        has_bonus = len(outcome.token_ids) == len(accepted) + 1
        assert has_bonus or (outcome.finish_reason is not None and len(outcome.token_ids) == len(accepted))
        assert len(outcome.log_probs) == (len(outcome.token_ids) if request.params.top_log_probs is not None else 0)
        output += outcome.token_ids
        log_probs += outcome.log_probs
        assert sampler.output_len == len(output)
    return Generation(tuple(output), sampler.finish_reason, tuple(log_probs))


# --- Strategies ----------------------------------------------------------------------------------------------------

token_ids = st.integers(0, VOCAB - 1)


def mostly(usual: Any, strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(usual) | strategy


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.05, 0.7, 1.0, 3.0]),
    top_k=mostly(0, st.integers(1, VOCAB)),
    top_p=mostly(1.0, st.sampled_from([0.05, 0.5, 0.8, 0.97])),
    min_p=mostly(0.0, st.sampled_from([0.05, 0.3, 1.0])),
    repetition_penalty=mostly(1.0, st.sampled_from([0.5, 1.3, 4.0])),
    presence_penalty=mostly(0.0, st.sampled_from([-1.0, 0.5, 2.0])),
    frequency_penalty=mostly(0.0, st.sampled_from([-0.5, 0.25, 2.0])),
    logit_bias=mostly({}, st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=3)),
    seed=st.integers(0, 2**64 - 1),
    top_log_probs=st.none() | st.integers(0, VOCAB),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    max_tokens = draw(st.integers(1, 14))
    stopping = StoppingCriteria(
        max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=tuple(draw(st.lists(token_ids, max_size=2))),
        ignore_eos=draw(st.booleans()),
    )
    prompt = tuple(draw(st.lists(token_ids, min_size=1, max_size=6)))
    stop_pair = draw(st.none() | st.tuples(token_ids, token_ids))
    return Request(draw(sampling), stopping, prompt, draw(st.integers(0, 50)), stop_pair)


def random_tree(random: Any, max_nodes: int, hit_rate: float) -> TreeMaker:
    """Any shape; a node below the plain path carries the plain token at `hit_rate`, else an arbitrary one."""

    def make(root: int, plain: list[int]) -> TokenTree:
        ids, parents, depths, on_path = [root], [-1], [0], [True]
        for _ in range(random.randint(0, max_nodes)):
            # Lean towards the deepest node on the path, so that long paths occur.
            deepest = max((i for i in range(len(ids)) if on_path[i]), key=lambda i: depths[i])
            parent = deepest if random.random() < 0.6 else random.randrange(len(ids))
            follows = on_path[parent] and depths[parent] < len(plain)
            token_id = plain[depths[parent]] if follows and random.random() < hit_rate else random.randrange(PADDED)
            if (parent, token_id) in zip(parents, ids, strict=True):
                continue
            on_path.append(follows and token_id == plain[depths[parent]])
            ids.append(token_id)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return TokenTree(tuple(ids), tuple(parents))

    return make


def root_only(root: int, plain: list[int]) -> TokenTree:
    return TokenTree.root_only(root)


def whole_future(root: int, plain: list[int]) -> TokenTree:
    """The plain output, and on past its end."""
    return TokenTree.chain([root, *plain, 0, 1])


def wrong_everywhere(root: int, plain: list[int]) -> TokenTree:
    """Every child but the right one, each with children that would have been right one level up."""
    wrong = [i for i in range(VOCAB) if i != plain[0]]
    n = len(wrong)
    return TokenTree((root, *wrong, *[plain[0]] * n), (-1, *[0] * n, *range(1, n + 1)))


def every_child(root: int, plain: list[int]) -> TokenTree:
    """All tokens under the root and under the right child, padding ids among them, ends included."""
    right = 1 + plain[0]
    return TokenTree((root, *range(PADDED), *range(PADDED)), (-1, *[0] * PADDED, *[right] * PADDED))


def below_the_end(root: int, plain: list[int]) -> TokenTree:
    """EOS everywhere, with children below it that must never be reached."""
    return TokenTree((root, 6, 7, 6, 7, 0), (-1, 0, 0, 1, 2, 3))


ADVERSARIAL: tuple[TreeMaker, ...] = (root_only, whole_future, wrong_everywhere, every_child, below_the_end)


# --- Tests ---------------------------------------------------------------------------------------------------------


def check(request: Request, make_tree: TreeMaker, restart_every_step: bool = False) -> None:
    plain, finish_reason = plain_decoding(request)
    one_by_one = decode_along(request, root_only, plain, restart_every_step=False)
    assert (list(one_by_one.token_ids), one_by_one.finish_reason) == (plain, finish_reason)
    along_trees = decode_along(request, make_tree, plain, restart_every_step)
    assert along_trees == one_by_one  # log-probabilities bit for bit


@settings(max_examples=300)
@given(
    requests(),
    st.randoms(use_true_random=False),
    st.integers(0, 24),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.booleans(),
)
def test_random_trees(request: Request, random: Any, max_nodes: int, hit_rate: float, restart: bool) -> None:
    check(request, random_tree(random, max_nodes, hit_rate), restart)


@settings(max_examples=60)
@pytest.mark.parametrize("make_tree", ADVERSARIAL, ids=lambda make: make.__name__)
@given(request=requests())
@example(request=Request(SamplingParams(), StoppingCriteria(1), (0,), 0))
def test_adversarial_trees(make_tree: TreeMaker, request: Request) -> None:
    check(request, make_tree)


EACH_PARAMETER: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {1: 2.0, 3: -100.0}},
    "top_log_probs": {"top_log_probs": 4},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", EACH_PARAMETER)
def test_each_parameter_has_an_effect_and_keeps_parity(name: str, temperature: float) -> None:
    """Parity of a parameter that does nothing would prove nothing."""
    changed = 0
    for model in range(12):
        stopping = StoppingCriteria(12, ignore_eos=True)
        base = Request(SamplingParams(temperature=temperature, seed=model), stopping, (1, 2, 3), model)
        params = SamplingParams(temperature=temperature, seed=model, **EACH_PARAMETER[name])
        request = Request(params, stopping, (1, 2, 3), model)
        for make_tree in ADVERSARIAL:
            check(request, make_tree)
        changed += plain_decoding(request) != plain_decoding(base)
    harmless = name in ("plain", "top_log_probs") or (temperature == 0 and name in ("top_k", "top_p", "min_p"))
    assert (changed == 0) == harmless


def test_neighbours_in_a_batch_do_not_matter() -> None:
    """Greedy and sampled sequences verified alternately generate what each does alone."""
    stopping = StoppingCriteria(10, ignore_eos=True)
    batch = [
        Request(SamplingParams(temperature=t, seed=s), stopping, (1, s), 4) for t, s in ((0.0, 0), (1.0, 1), (2.0, 2))
    ]
    alone = [tuple(plain_decoding(request)[0]) for request in batch]
    samplers, outputs = [request.sampler() for request in batch], [list[int]() for _ in batch]
    while any(s.finish_reason is None for s in samplers):
        for request, sampler, output in zip(batch, samplers, outputs, strict=True):
            if sampler.finish_reason is None:
                committed = (*request.prompt, *output)
                logits = logits_after(committed, request.model)
                output += accept(TokenTree.root_only(committed[-1]), lambda _, row=logits: row, sampler).token_ids  # type: ignore[misc]
    assert [tuple(output) for output in outputs] == alone


def test_a_walk_that_trusts_the_tree_is_caught() -> None:
    """Negative control: taking the first child instead of the child that carries the token breaks parity."""

    class Trusting(TokenTree):
        def child(self, node: int, token_id: int) -> int | None:
            return self.children[node][0] if self.children[node] else None

    request = Request(SamplingParams(), StoppingCriteria(6, ignore_eos=True), (1, 2, 3), 4)
    plain, _ = plain_decoding(request)
    wrong = (plain[0] + 1) % VOCAB
    with pytest.raises(AssertionError):
        check(request, lambda root, plain: Trusting((root, wrong), (-1, 0)))
