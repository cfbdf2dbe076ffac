"""The native int8 decoder and its torch twin: the same bits in every linear layer, the same logits but for rounding."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.plain_decoding import assert_same_bits, fragmented_runner, prefill, random_tokens
from support.tiny_model import write_tiny_model

from treeserve_engine.batch import SequenceRows
from treeserve_engine.config import load_config
from treeserve_engine.linear import Int8Linear, RowTiles
from treeserve_engine.model import LlamaModel
from treeserve_engine.native_model import NativeModel
from treeserve_engine.packed_weights import convert, packed_weights
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decoder import apply_linear
from treeserve_kernels.cpu.library import is_built, isas
from treeserve_kernels.cpu.packing import PackedLinear, pack_linear, unpack_linear

pytestmark = pytest.mark.skipif(not is_built(), reason="the native decoder is not built")

TILES = RowTiles((4,))  # which int8 does not need
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def twin_of(packed: PackedLinear) -> Int8Linear:
    weight, scales = unpack_linear(packed)
    bias = None if packed.bias is None else torch.from_numpy(packed.bias[: packed.num_outputs])
    return Int8Linear(torch.from_numpy(weight), torch.from_numpy(scales), bias)


@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (96, 64), (203, 150), (576, 1536), (2000, 576)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear_layers_have_the_same_bits(shape: tuple[int, int], has_bias: bool) -> None:
    rng = np.random.default_rng(shape)
    weight = (rng.standard_normal(shape) * rng.uniform(0.01, 10, (shape[0], 1))).astype(np.float32)
    packed = pack_linear(weight, weight[:, 0].copy() if has_bias else None)
    for rows in (1, 5, 64):
        x = (rng.standard_normal((rows, shape[1])) * np.exp(rng.uniform(-9, 9, (rows, 1)))).astype(np.float32)
        x[0, :64] *= rng.choice([0.0, 1e-31, 1e-28])  # groups of zeros, and of numbers too small for a scale
        ours = twin_of(packed)(torch.from_numpy(x), TILES).numpy()
        for isa in isas():
            assert_same_bits(apply_linear(x, packed, isa=isa), ours)


def test_a_twin_that_fuses_or_reorders_would_be_seen() -> None:
    """Negative control: the order of the float operations decides bits."""
    rng = np.random.default_rng(1)
    packed = pack_linear(rng.standard_normal((64, 576)).astype(np.float32))
    x = rng.standard_normal((8, 576)).astype(np.float32)
    backwards = pack_linear(np.ascontiguousarray(np.flip(unpack_linear(packed)[0].astype(np.float32), 1)))
    other = apply_linear(np.ascontiguousarray(np.flip(x, 1)), backwards)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(other * (packed.scales[:64] / backwards.scales[:64]), apply_linear(x, packed))


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaModel, ...]:
    """The native decoder, its twin, and the float32 model of a family."""
    cache = tmp_path_factory.mktemp("cache")
    folder = write_tiny_model(cache / "model", name=request.param, scale=0.2)
    convert(folder, cache, lambda _line: None)
    config, weights = load_config(folder), packed_weights(folder, cache, lambda _line: None)
    return (
        NativeModel(config, weights, kv_dtype="float32", threads=2),
        LlamaModel.from_int8(config, weights, torch.float32),
        LlamaModel.load(folder, config, torch.float32, torch.device("cpu")),
    )


def test_a_family_computes_what_its_twin_computes(models: tuple[LlamaModel, ...]) -> None:
    native, twin, plain = models
    tokens = random_tokens(random.Random(3), 60, native.config.vocab_size)
    ours, expected, exact = (_logits(model, tokens) for model in (native, twin, plain))
    size = np.linalg.norm(exact, axis=1)
    apart = np.linalg.norm(ours - expected, axis=1) / size
    # An input that lies on the border between two int8 steps may fall to either side; it moves its row a little.
    assert np.median(apart) < 1e-5 and apart.max() < 0.05
    quantisation = np.linalg.norm(ours - exact, axis=1) / size
    assert np.median(quantisation) < 0.1, "int8 stays close to float32"
    assert np.median(quantisation) > 100 * np.median(apart)


def test_the_twin_is_exact_too(models: tuple[LlamaModel, ...]) -> None:
    _, twin, _ = models
    rng = random.Random(5)
    tokens = random_tokens(rng, 40, twin.config.vocab_size)
    alone = ModelRunner(twin, num_blocks=16, block_size=16)
    alone.blocks.add(0)
    expected = prefill(alone, 0, tokens, 1)
    runner = fragmented_runner(twin, rng)
    runner.blocks.add(0)
    assert_same_bits(prefill(runner, 0, tokens, 17), expected)


def _logits(model: LlamaModel, tokens: list[int]) -> np.ndarray:
    runner = ModelRunner(model, num_blocks=8, block_size=16)
    runner.blocks.add(0)
    runner.blocks.reserve(0, len(tokens))
    (logits,) = runner.forward([SequenceRows.from_chain(0, tokens, range(len(tokens)))])
    return logits
