"""Hidden states out of the native decoder and inputs into it: what they are, and what is refused."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.int8_decoders import NativeModel, Sizes, native_shape, native_weights, random_model
from support.int8_twin import Int8Twin
from support.plain_decoding import random_tokens

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decoder import Decoder, HiddenStates
from treeserve_kernels.cpu.library import is_built, isas

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

SIZES = Sizes(num_layers=4)
LAYERS = (1, 3)
CLOSE, FLIPPED = 1e-5, 5e-2  # see test_cpu_decoder.py


def hidden_states(model: object, brings_inputs: bool = False) -> list[HiddenStates]:
    """Of a prompt and then of a tree, of some rows in any order."""
    rng, embedding = random.Random(1), random_model(SIZES).embedding
    runner = ModelRunner(model, num_blocks=20, block_size=4)
    runner.blocks.add(0)
    tree = TokenTree((7, 1, 2, 3, 4, 9), (-1, 0, 0, 1, 1, 4))
    states = []
    for rows in (SequenceRows.from_chain(0, random_tokens(rng, 19, 203), [18, 2]), SequenceRows.from_tree(0, tree)):
        rows = replace(rows, feature_rows=[5, 0, 5, 3])
        if brings_inputs:
            noise = np.random.default_rng(2).standard_normal((len(rows.token_ids), SIZES.hidden_size))
            rows = replace(rows, inputs=embedding[np.array(rows.token_ids)] + noise.astype(np.float32))
        runner.blocks.reserve(0, len(rows.token_ids))
        states += runner.forward_hidden([rows], LAYERS)
        runner.commit(0, range(len(rows.token_ids)))
    return states


def apart(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row, relative to its length."""
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    return np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("brings_inputs", [False, True], ids=["tokens", "inputs"])
def test_they_are_the_twins(brings_inputs, threads):
    plain = random_model(SIZES)
    ours = hidden_states(NativeModel(plain, threads=threads, is_poisoned=True), brings_inputs)
    for actual, expected in zip(ours, hidden_states(Int8Twin(plain), brings_inputs), strict=True):
        for name in ("logits", "last", "features"):
            found = apart(getattr(actual, name), getattr(expected, name))
            assert (found <= FLIPPED).all() and np.median(found) <= CLOSE, (name, found)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_every_isa_gives_the_same_bits(isa):
    if isa not in isas():
        pytest.skip(f"this CPU has no {isa}")
    plain = random_model(SIZES)
    for actual, expected in zip(
        hidden_states(NativeModel(plain, isa=isa), True), hidden_states(NativeModel(plain), True), strict=True
    ):
        for name in ("logits", "last", "features"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


@pytest.fixture(scope="module")
def model() -> NativeModel:
    return NativeModel(random_model(SIZES), threads=2)


class Step:
    """One row of tokens, which shows whether a refused pass wrote anything."""

    def __init__(self, model: NativeModel) -> None:
        self._runner = ModelRunner(model, num_blocks=4, block_size=4)
        self._runner.blocks.add(0)
        self._runner.blocks.reserve(0, 3)
        self._rows = SequenceRows.from_chain(0, [5, 6, 7], [2])
        self.run()
        self._before = self.contents()

    def run(self, layers: tuple[int, ...] = (), **changes: object) -> HiddenStates:
        return self._runner.forward_hidden([replace(self._rows, **changes)], layers)[0]

    def contents(self) -> bytes:
        """Logits of a row that sees the others' KV."""
        row = SequenceRows(0, [9], [3], np.array([[7 | 1 << 2]], np.uint64), [0], node_offset=2)
        return self._runner.forward([row])[0].tobytes()

    def assert_refused(self, match: str, layers: tuple[int, ...] = (), **changes: object) -> None:
        self.run()
        with pytest.raises(ValueError, match=match):
            self.run(layers, token_ids=[1, 2, 3], **changes)
        assert self.contents() == self._before, "a refused pass was written"


@pytest.mark.parametrize("layers", [(0,), (-1,), (4,), (2**62,), (2, 2), (3, 1)], ids=str)
def test_layers_out_of_range_or_order_are_refused(model, layers):
    Step(model).assert_refused("feature_layers", layers, feature_rows=[0])


@pytest.mark.parametrize("row", [-1, 3, 2**62])
def test_feature_rows_out_of_range_are_refused(model, row):
    blocks = BlockManager(4, 4)
    blocks.add(0)
    blocks.reserve(0, 3)
    batch = build_batch([replace(SequenceRows.from_chain(0, [5, 6, 7], [2]), feature_rows=[0, 1])], blocks)
    kv = model.new_kv(4, 4)
    assert model.forward_hidden(batch, kv, (1,)).features.shape == (2, 1, SIZES.hidden_size)
    with pytest.raises(ValueError, match="feature_rows 1 is"):
        model.forward_hidden(replace(batch, feature_rows=np.array([0, row])), kv, (1,))


BAD_INPUTS: list[tuple[str, Callable[[np.ndarray], np.ndarray], str]] = [
    ("nan", lambda a: np.where(np.arange(a.size).reshape(a.shape) == 100, np.nan, a).astype(np.float32), "not finite"),
    ("infinite", lambda a: np.where(a == a[-1, -1], -np.inf, a).astype(np.float32), "not finite"),
    ("wide", lambda a: np.concatenate([a, a], 1), "inputs is float32"),
    ("double", lambda a: a.astype(np.float64), "inputs is float64"),
    ("strides", lambda a: np.repeat(a, 2, axis=1)[:, ::2], "not contiguous"),
]


@pytest.mark.parametrize(("change", "match"), [case[1:] for case in BAD_INPUTS], ids=[case[0] for case in BAD_INPUTS])
def test_inputs_of_another_kind_are_refused(model, change, match):
    inputs = np.random.default_rng(0).standard_normal((3, SIZES.hidden_size)).astype(np.float32)
    Step(model).run(inputs=inputs)
    Step(model).assert_refused(match, inputs=change(inputs))


def test_enormous_inputs_do_no_harm(model):
    states = Step(model).run(inputs=np.full((3, SIZES.hidden_size), 3e38, np.float32))
    assert states.logits.shape == (1, SIZES.vocab_size)


def test_without_an_embedding_there_must_be_inputs():
    plain = random_model(SIZES)
    bare = NativeModel(plain)
    bare.decoder = Decoder(native_shape(plain), replace(native_weights(plain), embedding=None), threads=1)
    step = SequenceRows.from_chain(0, [5], [0])
    runner, whole = (ModelRunner(m, num_blocks=4, block_size=4) for m in (bare, NativeModel(plain)))
    for r in (runner, whole):
        r.blocks.add(0)
        r.blocks.reserve(0, 1)
    with pytest.raises(ValueError, match="inputs are missing"):
        runner.forward_hidden([step])
    (ours,) = runner.forward_hidden([replace(step, inputs=plain.embedding[5:6])])
    np.testing.assert_array_equal(ours.logits, whole.forward([step])[0])


def test_inputs_and_features_are_not_for_the_plain_pass(model):
    runner = ModelRunner(model, num_blocks=4, block_size=4)
    runner.blocks.add(0)
    runner.blocks.reserve(0, 1)
    row = SequenceRows.from_chain(0, [5], [0])
    for changed in (replace(row, feature_rows=[0]), replace(row, inputs=np.zeros((1, SIZES.hidden_size), np.float32))):
        with pytest.raises(ValueError, match="forward_hidden"):
            runner.forward([changed])
