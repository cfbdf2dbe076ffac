"""Greedy output under speculation equals transformers' own generate, token by token, for every architecture listed."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_families import CONTEXT, FAMILIES, VOCAB, tiny_reference, write_tiny_family
from support.tree_shapes import SHAPES

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.tree import TokenTree
from treeserve_engine import transformers_model
from treeserve_engine.batch import SequenceRows
from treeserve_engine.exactness import measure_divergence
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_engine.transformers_config import TESTED_MODEL_TYPES
from treeserve_engine.transformers_model import TransformersModel

NEW_TOKENS = 14
PROMPT_LENGTHS = (5, 11, 19)
CHUNK = 7
CPU = torch.device("cpu")


def test_the_list_of_tested_architectures_is_what_is_tested():
    assert sorted(FAMILIES) == list(TESTED_MODEL_TYPES)
    documented = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in TESTED_MODEL_TYPES if f"`{name}`" not in documented] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_under_speculation_equals_generate(tmp_path, name):
    reference = write_tiny_family(tmp_path, name)
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in PROMPT_LENGTHS]
    expected = [generate(reference, prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 3, "output that never changes shows nothing"
    model = load_model(tmp_path, dtype="float32", device="cpu", threads=1)
    assert model.config.vocab_size == VOCAB
    assert model.config.max_position_embeddings == CONTEXT
    assert speculate(model, prompts, expected, rng) == expected
    assert measure_divergence(model) == 0.0


def generate(reference, prompt):
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return output[0, len(prompt) :].tolist()


def speculate(model, prompts, truths, rng):
    """Decode all prompts side by side along trees that contain the truth, or seem to."""
    runner = ModelRunner(model, num_blocks=80, block_size=4)
    outputs = [[prefill(runner, seq_id, prompt)] for seq_id, prompt in enumerate(prompts)]
    accepted = 0
    while unfinished := [i for i, output in enumerate(outputs) if len(output) < NEW_TOKENS]:
        trees = {i: grow(outputs[i], truths[i], rng) for i in unfinished}
        for seq_id, tree in trees.items():
            runner.blocks.reserve(seq_id, len(tree))
        logits = runner.forward([SequenceRows.from_tree(seq_id, tree) for seq_id, tree in trees.items()])
        for (seq_id, tree), of_nodes in zip(trees.items(), logits, strict=True):
            path, tokens = walk(tree, of_nodes)
            runner.commit(seq_id, path)
            outputs[seq_id] += tokens
            accepted += len(tokens) - 1
    runner.blocks.check_integrity()
    assert accepted > len(prompts), "the trees must have been good for something, or nothing was tested"
    return [output[:NEW_TOKENS] for output in outputs]


def prefill(runner, seq_id, prompt):
    """The first new token, after the prompt in chunks."""
    runner.blocks.add(seq_id)
    for start in range(0, len(prompt), CHUNK):
        part = prompt[start : start + CHUNK]
        runner.blocks.reserve(seq_id, len(part))
        (logits,) = runner.forward([SequenceRows.from_chain(seq_id, part, [len(part) - 1])])
        runner.commit(seq_id, range(len(part)))
    return int(logits[0].argmax())


def grow(output, truth, rng) -> TokenTree:
    return rng.choice(list(SHAPES.values()))(output[-1], truth[len(output) :], 8, VOCAB, rng)


def walk(tree, logits):
    """The accepted path with its root, and the tokens emitted."""
    path, tokens = [0], []
    while True:
        tokens.append(int(logits[path[-1]].argmax()))
        child = tree.child(path[-1], tokens[-1])
        if child is None:
            return path, tokens
        path.append(child)


# --- bfloat16 ---


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "phi"])
def test_bfloat16_is_as_close_as_transformers_own_and_as_exact(tmp_path, name):
    reference = write_tiny_family(tmp_path, name)
    tokens = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
        rounded = reference.to(torch.bfloat16)(tokens[None]).logits[0].float()
    model = load_model(tmp_path, dtype="bfloat16", device="cpu", threads=1)
    runner = ModelRunner(model, num_blocks=8, block_size=8)
    runner.blocks.add(0)
    runner.blocks.reserve(0, len(tokens))
    (logits,) = runner.forward([SequenceRows.from_chain(0, tokens.tolist(), range(len(tokens)))])
    assert (torch.from_numpy(logits) - expected).abs().mean() <= 1.2 * (rounded - expected).abs().mean()
    assert measure_divergence(model) == 0.0


# --- what is refused ---

REFUSED = {
    "mamba": ({"state_size": 8}, "recurrent"),
    "rwkv": ({}, "recurrent"),
    "t5": ({}, "encoder-decoder"),
    "bert": ({}, "not plain causal"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "bloom": ({}, "does not let the attention"),
    "falcon": ({"alibi": True}, "does not let the attention"),
    "llama4_text": ({"attention_chunk_size": 64, **FAMILIES["mixtral"]}, "chunk"),
    "gpt_oss": ({"sliding_window": 4096, "head_dim": 16, **FAMILIES["mixtral"]}, "s_aux"),
    "gemma3_text": ({"sliding_window": 64, "head_dim": 16}, "reaches 64 tokens"),
    "starcoder2": ({"sliding_window": 64}, "reaches 64 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path, name):
    changes, reason = REFUSED[name]
    save_any(tmp_path, name, changes)
    with pytest.raises(InvalidArgumentError, match=reason):
        load_model(tmp_path, dtype="float32", device="cpu", threads=1)


def save_any(folder, name, changes):
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    if name == "t5":
        config = AutoConfig.for_model(name, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=VOCAB)
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    else:
        write_tiny_family(folder, name, **changes)


# --- the probe ---


def take_over(model):
    return TransformersModel.of(model, CONTEXT, torch.float32)


def mix_neighbours(model):
    model.transformer.h[0].register_forward_hook(lambda _, args, output: output + output.roll(1, dims=1))


def look_at_the_first_row(model):
    model.transformer.h[0].register_forward_hook(lambda _, args, output: output + output[:, :1])


def count_positions_itself(model):
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: (torch.arange(args[0].shape[1])[None],))


def keep_a_state(model):
    state = {}

    def remember(_, args, output):
        state["last"], last = output[:, -1:], state.get("last", 0.0)
        return output + 0.1 * last

    model.transformer.h[0].register_forward_hook(remember)


@pytest.mark.parametrize("damage", [mix_neighbours, look_at_the_first_row, count_positions_itself, keep_a_state])
def test_the_probe_refuses_a_model_that_is_no_function_of_the_tokens_before(damage):
    assert take_over(tiny_reference("gpt2")).config.vocab_size == VOCAB
    model = tiny_reference("gpt2")
    damage(model)
    with pytest.raises(InvalidArgumentError, match="computes something else"):
        take_over(model)


def wrong_scale(how):
    return replace(how, scale=how.scale * 1.05)


def without_softcap(how):
    return replace(how, softcap=None)


@pytest.mark.parametrize("changed", [wrong_scale, without_softcap])
def test_the_probe_refuses_other_attention(monkeypatch, changed):
    attend = transformers_model._tree_attention
    monkeypatch.setattr(
        transformers_model, "_tree_attention", lambda q, k, v, batch, how: attend(q, k, v, batch, changed(how))
    )
    with pytest.raises(InvalidArgumentError, match="computes something else"):
        take_over(tiny_reference("gemma2"))


def test_a_model_that_does_not_run_is_refused():
    model = tiny_reference("gpt2")
    model.transformer.h[1].register_forward_hook(lambda _, args, output: 1 / 0)
    with pytest.raises(InvalidArgumentError, match="ZeroDivisionError"):
        take_over(model)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    write_tiny_family(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidArgumentError, match=r"lacks transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_model(tmp_path, dtype="float32", device="cpu", threads=1)


def test_nodes_beyond_the_context_window_do_no_harm():
    """Learned positions end with the window; a tree's nodes may lie beyond, though nothing there is ever accepted."""
    model = TransformersModel.of(tiny_reference("gpt2", max_position_embeddings=64), 64, torch.float32)
    logits = []
    for tokens in ([7, 8], [7, 8, 9, 10]):
        runner = ModelRunner(model, num_blocks=20, block_size=4)
        prefill(runner, 0, list(range(3, 65)))
        runner.blocks.reserve(0, len(tokens))
        logits += runner.forward([SequenceRows.from_chain(0, tokens, [0, 1])])
    assert (logits[0] == logits[1]).all()
