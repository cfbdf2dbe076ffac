"""Blocks of the native KV cache copied out and in: all bytes of every layer, nothing else, and no stray argument."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from support.int8_decoders import NativeModel, Sizes, native_decoder, random_model
from support.plain_decoding import assert_same_bits, prefill, random_tokens

from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.library import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

BLOCKS = 6
DTYPES = ("float32", "bfloat16", "int8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_a_block_saved_and_loaded_elsewhere_is_the_same_to_the_bit(dtype: str, block_size: int) -> None:
    decoder = native_decoder(random_model(Sizes()))
    source, target = (decoder.new_kv(BLOCKS, block_size, dtype) for _ in range(2))
    assert source.block_nbytes * BLOCKS == source.nbytes
    rng = np.random.default_rng(block_size)
    blocks = [rng.integers(0, 256, source.block_nbytes, np.uint8) for _ in range(BLOCKS)]
    for i, data in enumerate(blocks):
        source.load(i, data)
    for i in range(BLOCKS):
        out = np.zeros(source.block_nbytes, np.uint8)
        source.save(i, out)
        assert (out == blocks[i]).all(), "loading one block changed another"
        target.load(BLOCKS - 1 - i, out)
    for i in range(BLOCKS):
        target.save(i, out)
        assert (out == blocks[BLOCKS - 1 - i]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_block_holds_what_the_decoder_wrote(dtype: str) -> None:
    """Blocks swapped behind the decoder's back, and the table with them: it computes on as if nothing had happened."""
    model, tokens = NativeModel(random_model(Sizes()), dtype), random_tokens(random.Random(1), 40, 203)
    runner, plain = (ModelRunner(model, 8, 16) for _ in range(2))
    for each in (runner, plain):
        each.blocks.add(0)
        prefill(each, 0, tokens, 40)
    table, kv = runner.blocks._sequences[0].table, runner._kv
    first, second = (np.empty(kv.block_nbytes, np.uint8) for _ in range(2))
    kv.save(table[0], first)
    kv.save(table[1], second)
    kv.load(table[0], second)
    kv.load(table[1], first)
    table[0], table[1] = table[1], table[0]
    assert_same_bits(prefill(runner, 0, [5, 6, 7], 1), prefill(plain, 0, [5, 6, 7], 3))


@pytest.mark.parametrize("what", ["save", "load"])
def test_wrong_blocks_and_arrays_are_refused(what: str) -> None:
    kv = native_decoder(random_model(Sizes())).new_kv(BLOCKS, 4, "float32")
    right = np.zeros(kv.block_nbytes, np.uint8)
    call = getattr(kv, what)
    for block in (-1, BLOCKS, 2**40):
        with pytest.raises(ValueError, match=rf"block to {what} is {block}, outside \[0, {BLOCKS}\)"):
            call(block, right)
    for data in (right[1:], right[None], right.view(np.int8), np.zeros(2 * kv.block_nbytes, np.uint8)[::2]):
        with pytest.raises(ValueError, match="data is"):
            call(0, data)
    call(BLOCKS - 1, right)


def test_a_large_cache_takes_its_memory_at_once_and_not_while_somebody_computes() -> None:
    decoder = native_decoder(random_model(Sizes()))
    before = _resident_bytes()
    kv = decoder.new_kv((128 << 20) // decoder.new_kv(1, 16, "float32").nbytes, 16, "float32")
    until = time.monotonic() + 20.0
    while _resident_bytes() - before < 0.9 * kv.nbytes:
        assert time.monotonic() < until, "nothing touches its pages"
        time.sleep(0.01)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
