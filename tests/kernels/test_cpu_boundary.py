"""Arguments that a native decoder must refuse: by name, with nothing written, and without harm to the process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.int8_decoders import Sizes, batch_arguments, native_decoder, native_shape, native_weights, random_model

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows, build_batch
from treeserve_engine.block_manager import BlockManager
from treeserve_kernels.cpu.decoder import Decoder, KvCache
from treeserve_kernels.cpu.library import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

SIZES = Sizes(num_layers=1, max_positions=64)
BLOCKS, BLOCK = 12, 4
SLOTS = BLOCKS * BLOCK
CONTEXTS = (0, 5, 8)
ARRAYS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "block_tables",
    "context_lens",
    "query_offsets",
    "node_offsets",
    "ancestor_words",
    "logits_indices",
)
TREE = TokenTree((7, 1, 2, 3), (-1, 0, 0, 1))
Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def plain():
    return random_model(SIZES)


@pytest.fixture(scope="module")
def decoder(plain) -> Decoder:
    return native_decoder(plain, threads=2)


class Step:
    """A step of three sequences, and what shows whether a cache was written to."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.kv: KvCache = decoder.new_kv(BLOCKS, BLOCK, "float32")
        blocks = BlockManager(BLOCKS, BLOCK)
        for seq_id, length in enumerate(CONTEXTS):
            blocks.add(seq_id)
            if length:
                blocks.reserve(seq_id, length)
                chunk = SequenceRows.from_chain(seq_id, range(length), [])
                decoder.forward(self.kv, **batch_arguments(build_batch([chunk], blocks)))
                blocks.commit(seq_id, range(length))
            blocks.reserve(seq_id, len(TREE))
        rows = [SequenceRows.from_tree(seq_id, TREE) for seq_id in range(len(CONTEXTS))]
        self.valid: Arguments = batch_arguments(build_batch(rows, blocks))
        self.forward(self.valid)
        # One row that sees all slots of the cache but the one that it writes.
        self.witness: Arguments = {
            "input_ids": np.array([9]),
            "positions": np.array([20]),
            "slot_mapping": np.array([SLOTS - 1]),
            "block_tables": np.arange(BLOCKS, dtype=np.int32)[None],
            "context_lens": np.array([SLOTS - 1], dtype=np.int32),
            "query_offsets": np.array([0, 1], dtype=np.int32),
            "node_offsets": np.array([0], dtype=np.int32),
            "ancestor_words": np.array([[1]], dtype=np.uint64),
            "block_size": BLOCK,
            "logits_indices": np.array([0]),
        }

    def forward(self, arguments: Arguments) -> np.ndarray:
        return self.decoder.forward(self.kv, **arguments)

    def contents(self) -> bytes:
        """Changes whenever a slot does."""
        return self.forward(self.witness).tobytes()

    def assert_refused(self, arguments: Arguments, match: str) -> None:
        before = self.contents()
        with pytest.raises(ValueError, match=match):
            self.forward(arguments)
        assert self.contents() == before, "a refused batch was written"


@pytest.fixture
def step(decoder) -> Step:
    return Step(decoder)


def at(index: int | tuple[int, int], value: int) -> Callable[[np.ndarray], np.ndarray]:
    """Sets one entry of an array."""

    def corrupt(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return corrupt


INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)
# Argument, what is done to it, what the error speaks of (by default the argument).
CORRUPTIONS = [
    *(("input_ids", at(3, bad)) for bad in (-1, SIZES.vocab_size, INT64.max, INT64.min)),
    *(("positions", at(0, bad)) for bad in (-1, SIZES.max_positions, INT64.max, INT64.min)),
    *(("slot_mapping", at(11, bad)) for bad in (-1, SLOTS, INT64.max, INT64.min)),
    *(("context_lens", at(1, bad)) for bad in (-1, SLOTS, INT32.max, INT32.min)),
    *(("query_offsets", at(1, bad)) for bad in (-1, 13, INT32.max, INT32.min)),
    ("query_offsets", at(0, 1)),
    ("query_offsets", at(3, 11)),
    ("query_offsets", at(3, 13)),
    *(("node_offsets", at(2, bad)) for bad in (-1, INT32.max, INT32.min)),
    *(("block_tables", at((1, 0), bad)) for bad in (-1, BLOCKS, INT32.max, INT32.min)),
    *(("logits_indices", at(5, bad)) for bad in (-1, 12, INT64.max, INT64.min)),
    *(("block_size", lambda _, bad=bad: bad) for bad in (0, -1, 3, 8, 2**40)),
    ("slot_mapping", lambda slots: np.repeat(slots[:1], len(slots))),
    ("ancestor_words", at((0, 0), 0)),  # a row that sees nothing
    ("ancestor_words", at((2, 0), 1 << 4)),  # a node that no row computes
    ("ancestor_words", at((2, 0), 1 << 63)),
]


# What an error calls an argument where it speaks of what the argument describes.
SPOKEN = {
    "block_tables": "block [0-9]+ of sequence",
    "block_size": "block size",
    "context_lens": "context_lens|KV positions",
    "node_offsets": "node_offsets|KV positions",
    "query_offsets": "query_offsets|KV positions",
    "ancestor_words": "row [0-9]+ (does not see its own|sees a) node",
}


@pytest.mark.parametrize(
    ("name", "corrupt"), CORRUPTIONS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CORRUPTIONS)]
)
def test_an_index_out_of_range_is_refused(step, name, corrupt):
    step.assert_refused({**step.valid, name: corrupt(step.valid[name])}, SPOKEN.get(name, name))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    "corrupt",
    [
        lambda a: a.astype(np.float32),
        lambda a: a.astype(np.int16),
        lambda a: a.astype(a.dtype.newbyteorder()),
        lambda a: a[..., None],
        lambda a: np.repeat(a, 2, axis=0)[::2],
    ],
    ids=["float", "short", "byte-order", "dimensions", "strides"],
)
def test_an_array_of_another_kind_is_refused(step, name, corrupt):
    step.assert_refused({**step.valid, name: corrupt(step.valid[name])}, name)


@pytest.mark.parametrize(
    "name", [name for name in ARRAYS if name not in ("input_ids", "context_lens", "logits_indices")]
)
def test_an_array_of_another_length_is_refused(step, name):
    step.assert_refused({**step.valid, name: step.valid[name][:-1].copy()}, name)


def test_rows_beyond_the_last_are_not_read(step):
    """Offsets that rise past the last row and fall again, where everything else would allow the rows they claim."""
    wide = np.tile(np.arange(BLOCKS, dtype=np.int32), (len(CONTEXTS), 1))
    chain = (np.uint64(2) << np.arange(12, dtype=np.uint64)[:, None]) - np.uint64(1)
    for last in (13, 40, 41):
        offsets = np.array([0, last, 12, 12], dtype=np.int32)
        beyond = {"block_tables": wide, "ancestor_words": chain, "query_offsets": offsets}
        step.assert_refused(step.valid | beyond, "query_offsets")


def test_a_batch_without_rows_computes_nothing(step):
    before = step.contents()
    empty = step.valid | {name: step.valid[name][:0] for name in ARRAYS}
    logits = step.forward(empty | {"query_offsets": np.zeros(1, dtype=np.int32)})
    assert logits.shape == (0, SIZES.vocab_size) and step.contents() == before


def test_a_second_thread_waits_its_turn(decoder):
    """Two threads with batches of different sizes on one decoder get what each gets alone."""
    steps = [Step(decoder), Step(decoder)]
    batches = [steps[0].valid, steps[1].witness]
    expected = [step.forward(batch) for step, batch in zip(steps, batches, strict=True)]

    def repeat(i: int) -> bool:
        return all(np.array_equal(steps[i].forward(batches[i]), expected[i]) for _ in range(300))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(repeat, range(2)))


def test_a_cache_of_another_shape_is_refused(step):
    other = native_decoder(random_model(replace(SIZES, num_kv_heads=3)))
    with pytest.raises(ValueError, match="KV cache"):
        step.decoder.forward(other.new_kv(BLOCKS, BLOCK, "float32"), **step.valid)


def test_a_closed_decoder_is_refused(plain):
    step = Step(native_decoder(plain))
    step.decoder.close()
    step.decoder.close()
    with pytest.raises(ValueError, match="closed"):
        step.forward(step.valid)


@pytest.mark.parametrize(("src", "dst"), [([0], [SLOTS]), ([-1], [0]), ([0, SLOTS], [1, 2]), ([3], [INT64.min])])
def test_moves_out_of_range_are_refused(step, src, dst):
    before = step.contents()
    with pytest.raises(ValueError, match="slot"):
        step.kv.move(np.array(src), np.array(dst))
    with pytest.raises(ValueError, match="slot"):
        step.kv.move(np.array([1, 2]), np.array([1]))
    assert step.contents() == before


def test_moves_happen_in_order(step):
    """Each source is the next destination: reading a slot after it was overwritten would show."""
    twin = Step(step.decoder)
    step.kv.move(np.arange(10, 20), np.arange(9, 19))
    for slot in range(10, 20):
        twin.kv.move(np.array([slot]), np.array([slot - 1]))
    assert step.contents() == twin.contents() != Step(step.decoder).contents()


@pytest.mark.parametrize(
    ("blocks", "block_size", "dtype", "match"),
    [
        (0, 4, "float32", "block"),
        (4, 0, "float32", "block"),
        (-1, 4, "float32", "block"),
        (2**62, 16, "float32", "block"),
        (4, 4, "float64", "dtype"),
    ],
)
def test_caches_that_cannot_be_are_refused(decoder, blocks, block_size, dtype, match):
    with pytest.raises((ValueError, MemoryError), match=match):
        decoder.new_kv(blocks, block_size, dtype)


@pytest.mark.parametrize("threads", [0, -1, 10**9])
def test_thread_counts_that_cannot_be_are_refused(plain, threads):
    with pytest.raises(ValueError, match="thread"):
        native_decoder(plain, threads=threads)


@pytest.mark.parametrize("isa", ["sse", "avx512vnni ", "AVX2"])
def test_unknown_instruction_sets_are_refused(plain, isa):
    with pytest.raises(ValueError, match=isa.strip()):
        native_decoder(plain, isa=isa)


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 204}, {"hidden_size": 71}, {"intermediate_size": 151}, {"num_layers": 2}, {"num_layers": 0},
     {"num_heads": 5}, {"num_kv_heads": 4}, {"num_kv_heads": 0}, {"head_dim": 15}, {"head_dim": -16},
     {"rms_norm_eps": float("nan")}, {"rms_norm_eps": -1.0}],
    ids=str,
)  # fmt: skip
def test_shapes_that_the_weights_do_not_have_are_refused(plain, change):
    with pytest.raises(ValueError):
        Decoder(replace(native_shape(plain), **change), native_weights(plain), threads=1)


def test_weights_of_other_sizes_are_refused(plain):
    weights = native_weights(plain)
    layer = weights.layers[0]
    bad = [
        replace(weights, embedding=weights.embedding[:, :-1].copy()),
        replace(weights, embedding=weights.embedding.astype(np.float64)),
        replace(weights, norm=weights.norm[:-1].copy()),
        replace(weights, rope_sin=weights.rope_sin[:-1].copy()),
        replace(weights, head=layer.down),
        replace(weights, head=replace(weights.head, panels=weights.head.panels[:-1].copy())),
        replace(weights, head=replace(weights.head, scales=weights.head.scales[:-1].copy())),
        replace(weights, layers=(replace(layer, gate_up=layer.down),)),
        replace(weights, layers=(replace(layer, q_norm=layer.input_norm),)),
        replace(weights, layers=()),
    ]
    for wrong in bad:
        with pytest.raises(ValueError):
            Decoder(native_shape(plain), wrong, threads=1)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_numbers_whatever_harm_the_process(decoder, data):
    """Any entries of any arrays, up to four at once: refused without a trace, or computed."""
    step = Step(decoder)
    arguments = dict(step.valid)
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(ARRAYS))
        array = arguments[name].copy()
        info = np.iinfo(array.dtype)
        near = st.integers(max(info.min, -3), 70) | st.sampled_from([info.min, info.max, 2**31 - 1])
        array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(near)
        arguments[name] = array
    before = step.contents()
    try:
        logits = step.forward(arguments)
    except ValueError:
        assert step.contents() == before
    else:
        assert logits.shape == (12, SIZES.vocab_size) and np.isfinite(logits).all()
