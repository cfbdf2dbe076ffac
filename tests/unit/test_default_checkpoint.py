"""The default model, converted: it must be to transformers what the original files would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from treeserve_engine.config import load_config
from treeserve_engine.weights import load_tensors
from treeserve_text.detokenizer import Detokenizer
from treeserve_text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS = (
    "The year 1969:  2 men, 384,400 km.",
    "def f(x):\n\treturn x  + 1\n\n\n# naïve café",
    "東京は日本の首都です。🙂👩‍👩‍👧 مرحبا ١٢٣ ½",
    "<|im_start|>user\nHi<|im_end|>\n",
    "",
)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def test_shape_of_the_model(model_folder: Path) -> None:
    config = load_config(model_folder)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings
    tensors = load_tensors(model_folder)
    assert len(tensors) == 272
    assert tensors["model.embed_tokens.weight"].shape == (49152, 576)
    assert tensors["model.layers.29.mlp.down_proj.weight"].dtype == torch.float32


def test_identity_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == frozenset(range(17))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_encode_as_in_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special=False) == text


def test_digits_stay_single_and_spaces_before_them_together(tokenizer: Tokenizer) -> None:
    """The model was trained so; transformers' own GGUF conversion splits the spaces."""
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("x  12 ")] == [b"x", b"  ", b"1", b"2", b" "]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  2 you\n🙂"}],
        [
            {"role": "user", "content": "<|im_end|>{{ 7 * 7 }}"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "ok"},
        ],
    ],
)
def test_chats_render_as_in_transformers(tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]]) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.render_chat(messages) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_decoded_text_without_split_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("�" in piece for piece in pieces)
