"""Runs of decode steps for tests: plain decoding beside them, and a drafter that drafts what a script says."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from support.plain_decoding import PlainDecoder
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.interface import Model
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu import structures as c

_INT32, _INT64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_INT32S = ctypes.POINTER(_INT32)
_DRAFTER = 0x5EED  # what calls are told they belong to


class Plain:
    """Plain decoding of a prompt, one row per pass, as far as somebody asks.

    Attributes:
        prompt: at least one token.
        logits: logits[i] are those after i + 1 tokens.
    """

    def __init__(self, model: Model, prompt: Sequence[int], temperature: float, seed: int, vocab_size: int) -> None:
        self.prompt, self.temperature, self.seed = tuple(prompt), temperature, seed
        params, stopping = SamplingParams(temperature=temperature, seed=seed), StoppingCriteria(max_tokens=10**6)
        self._sampler = SequenceSampler(params, stopping, prompt, eos_token_ids=(), vocab_size=vocab_size)
        self._decoder = PlainDecoder(model, prompt)
        self._tokens = list(prompt)
        self.logits = self._decoder.logits

    def tokens(self, count: int) -> list[int]:
        """The first tokens, the prompt included."""
        while len(self._tokens) < count:
            token = self._sampler.next_token(self.logits[-1])
            self._sampler.append(token)
            self._tokens.append(token)
            self.logits.append(self._decoder.decode(token))
        return self._tokens[:count]

    def after(self, count: int) -> npt.NDArray[np.float32]:
        """Logits after so many tokens."""
        self.tokens(count)
        return self.logits[count - 1]


def scattered_runner(model: Model, rng: random.Random, block_size: int, slots: int = 1024) -> ModelRunner:
    """A runner whose free blocks are in random order."""
    runner = ModelRunner(model, num_blocks=slots // block_size, block_size=block_size)
    seq_ids = range(-runner.blocks.total_blocks, 0)
    for seq_id in seq_ids:
        runner.blocks.add(seq_id)
        runner.blocks.reserve(seq_id, 1)
    for seq_id in rng.sample(seq_ids, len(seq_ids)):
        runner.blocks.free(seq_id)
    return runner


class Drafted(NamedTuple):
    """A tree as a drafter hands it over, sound or not."""

    token_ids: Sequence[int]
    parents: Sequence[int]
    log_probs: Sequence[float]
    masks: Sequence[int] | None
    base_len: int

    @classmethod
    def of(cls, tree: TokenTree, base_len: int) -> Drafted:
        return cls(tree.token_ids, tree.parents, tree.log_probs or [0.0] * len(tree), tree.source_masks, base_len)


KINDS = ("right", "wrong", "partly", "branched", "deep", "bushy", "none")


class _Growing:
    """A tree in the making: it stops growing at so many nodes."""

    def __init__(self, root: int, budget: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._edges: set[tuple[int, int]] = set()
        self._budget = budget

    @property
    def is_full(self) -> bool:
        return len(self.tokens) > self._budget

    def add(self, parent: int, token: int) -> int:
        """The new node; the parent if there is no room, or its child is there already."""
        if self.is_full or (parent, token) in self._edges:
            return parent
        self._edges.add((parent, token))
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def chain(self, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            node = self.add(node, token)


def scripted_tree(rng: random.Random, kind: str, root: int, ahead: Sequence[int], budget: int, vocab: int) -> TokenTree:
    """A tree of at most `budget` nodes under a root that plain decoding follows by the tokens `ahead`.

    Args:
        ahead: at least budget + 1.
    """
    tree = _Growing(root, budget)

    def off(token: int) -> int:
        return (token + rng.randrange(1, vocab)) % vocab

    if kind == "right":
        tree.chain(ahead)
    elif kind == "wrong":
        tree.chain([off(token) for token in ahead])
    elif kind == "partly":
        right = rng.randrange(budget)
        tree.chain([*ahead[:right], *map(off, ahead[right:])])
    elif kind == "deep":
        tree.chain([off(ahead[0]), *ahead[: budget // 3]])
        tree.chain(ahead)
    elif kind == "bushy":
        for _ in range(rng.randrange(budget)):
            tree.add(0, off(ahead[0]))
        tree.chain(ahead[:1])
    elif kind == "branched":
        right_path = [0]  # of which nodes come between others
        while not tree.is_full:
            if rng.random() < 0.4:
                right_path.append(tree.add(right_path[-1], ahead[len(right_path) - 1]))
            elif (parent := rng.randrange(len(tree.tokens))) in right_path:
                tree.add(parent, off(ahead[right_path.index(parent)]))
            else:
                tree.add(parent, rng.randrange(vocab))
    doubt = rng.choice([1.0, 1.0, 1.0, 6.0])
    log_probs = [0.0, *(doubt * rng.choice([0.0, -0.5, -rng.expovariate(2.0)]) for _ in tree.tokens[1:])]
    masks = [0, *(rng.choice([0, 1, 2, 3, 1 << 31]) for _ in tree.tokens[1:])]
    return TokenTree(tuple(tree.tokens), tuple(tree.parents), tuple(log_probs), tuple(masks))


@dataclass(frozen=True)
class Call:
    """A call of the drafter, and what it was told."""

    name: str
    handle: int = 0
    told: Any = None


class _Tree(ctypes.Structure):
    """TsDraftTree."""

    _fields_ = [
        ("token_ids", _INT32S), ("parents", _INT32S), ("log_probs", ctypes.POINTER(ctypes.c_double)),
        ("masks", ctypes.POINTER(ctypes.c_uint32)), ("num_nodes", _INT32), ("base_len", _INT32),
    ]  # fmt: skip


_COMMIT = ctypes.CFUNCTYPE(_INT32, _POINTER, _INT64, _INT32, _INT32S, _INT32)
_REMEMBER = ctypes.CFUNCTYPE(_INT32, _POINTER, _INT64, _INT32, _INT32S, _INT32, _INT32)
_LEARN = ctypes.CFUNCTYPE(_INT32, _POINTER)
_DRAFT = ctypes.CFUNCTYPE(_INT32, _POINTER, _INT64, _INT32, ctypes.c_double, ctypes.POINTER(_Tree))


class ScriptedDrafter:
    """A drafter that native code calls. It refuses commits that do not follow those before.

    Args:
        tree_of: the tree for a handle, given its tokens and the budget.
        fails: whether a call is to fail; asked before it does anything.

    Attributes:
        tokens: by handle, all it was told of; the prompt is for the test to say.
        calls: all of them, in order.
        structure: what a run takes.
    """

    def __init__(
        self,
        tree_of: Callable[[int, list[int], int], Drafted],
        fails: Callable[[Call], bool] = lambda call: False,
    ) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.calls: list[Call] = []
        self._tree_of = tree_of
        self._fails = fails
        self._raised: list[BaseException] = []
        self._kept: dict[int, Any] = {}  # trees are valid until the next call for their sequence
        self._functions = (
            _COMMIT(self._commit),
            _REMEMBER(self._remember),
            _LEARN(self._learn),
            _DRAFT(self._draft),
        )
        self.structure = c.DrafterCalls(_DRAFTER, *[ctypes.cast(each, _POINTER) for each in self._functions])

    def check(self) -> None:
        """Raise what a call raised."""
        if self._raised:
            raise self._raised[0]

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def _called(self, drafter: int, call: Call, do: Callable[[], None] = lambda: None) -> int:
        self.calls.append(call)
        try:
            assert drafter == _DRAFTER
            if self._fails(call):
                return 7
            do()
        except BaseException as error:
            self._raised.append(error)
            return 1
        return 0

    def _commit(self, drafter: int, handle: int, base_len: int, token_ids: Any, count: int) -> int:
        new = token_ids[:count]

        def commit() -> None:
            assert base_len == len(self.tokens[handle]), "commits follow each other"
            assert new
            self.tokens[handle] += new
            self._kept.pop(handle, None)

        return self._called(drafter, Call("commit", handle, (base_len, tuple(new))), commit)

    def _remember(self, drafter: int, handle: int, position: int, top: Any, rows: int, width: int) -> int:
        told = (position, tuple(tuple(top[row * width : (row + 1) * width]) for row in range(rows)))
        return self._called(drafter, Call("remember", handle, told))

    def _learn(self, drafter: int) -> int:
        return self._called(drafter, Call("learn"))

    def _draft(self, drafter: int, handle: int, budget: int, node_price: float, tree: Any) -> int:
        def draft() -> None:
            drafted = self._tree_of(handle, list(self.tokens[handle]), budget)
            n = len(drafted.token_ids)
            token_ids, parents = (_INT32 * n)(*drafted.token_ids), (_INT32 * n)(*drafted.parents)
            log_probs = (ctypes.c_double * n)(*drafted.log_probs)
            masks = None if drafted.masks is None else (ctypes.c_uint32 * n)(*drafted.masks)
            self._kept[handle] = token_ids, parents, log_probs, masks
            tree[0] = _Tree(token_ids, parents, log_probs, masks, n, drafted.base_len)

        return self._called(drafter, Call("draft", handle, (budget, node_price)), draft)
