"""A checkpoint's int8 weights in one file, converted once and read by every verifier afterwards.

    python -m treeserve_engine.packed_weights MODEL_FOLDER [--cache-dir FOLDER]

converts a model ahead of time, for a cache that verifiers cannot write. The file is named by all that decides its
content: the format's version, the model's sizes, and a hash of the whole weights, which is worked out again only when
a file has changed. It is never trusted unseen: a file that is shortened, damaged or of another version is replaced.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeserve_core.errors import InvalidArgumentError, TreeserveError
from treeserve_engine.array_file import FOOTER_BYTES, DamagedFileError, Item, map_arrays, write_arrays
from treeserve_engine.config import ModelConfig, load_config
from treeserve_engine.made_once import cache_key, content_hash, default_cache_dir, make_once
from treeserve_engine.rope import RopeTable
from treeserve_engine.weight_files import weight_files
from treeserve_kernels.cpu.decoder import DecoderWeights, LayerWeights
from treeserve_kernels.cpu.packing import PackedLinear, pack_linear

if TYPE_CHECKING:
    import torch

    from treeserve_engine.weights import LayerTensors, LinearTensors

# Part of the name: raise it when the same checkpoint packs differently, or the layout of `PackedLinear` changes.
_FORMAT_VERSION = 1
_NAME = "name"  # of the file, in the file: one that was renamed is another model's
_PANELS = ".panels"  # of a linear layer: every forward pass reads all of them
_LINEARS = ("qkv", "attention_output", "gate_up", "down")


def packed_weights(folder: Path, cache_dir: Path, progress: Callable[[str], None]) -> DecoderWeights:
    """The int8 weights of a Hugging Face folder, read-only; converted first if the cache lacks them.

    The conversion runs in a process of its own, which alone needs torch and the float weights.

    Args:
        cache_dir: where the file lies. It need not be writable if the file is there.
        progress: told what happens, one line at a time.

    Raises:
        InvalidArgumentError: if the model is not supported, its weights are damaged, or the cache cannot be written.
    """
    target = packed_file(folder, cache_dir)
    mapped = _mapped(target, cache_dir, progress)
    if mapped is None:
        _convert_in_subprocess(folder, cache_dir, progress)
        mapped = _mapped(target, cache_dir, progress)
    if mapped is None:
        raise InvalidArgumentError("cache_dir", f"{target} was damaged as soon as it was written")
    return _decoder_weights(mapped, load_config(folder).num_layers)


def packed_file(folder: Path, cache_dir: Path) -> Path:
    """Where the int8 weights of a folder lie, or will."""
    hashes = {path.name: content_hash(path, cache_dir) for path in weight_files(folder)}
    key = cache_key(_FORMAT_VERSION, load_config(folder), hashes)
    return cache_dir / f"{folder.resolve().name}-{key}.int8"


def convert(folder: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Make the file of a folder in this process, unless it is there and whole."""
    target = packed_file(folder, cache_dir)
    make_once(
        target,
        lambda: _mapped(target, cache_dir, lambda _line: None) is not None,
        lambda path: _write(path, target.name, folder, progress),
    )
    return target


def _mapped(path: Path, cache_dir: Path, progress: Callable[[str], None]) -> Mapping[str, Any] | None:
    """The file's content; None if it is not there or not whole."""
    try:
        mapped = map_arrays(
            path,
            lambda file: content_hash(file, cache_dir, skip_last=FOOTER_BYTES),
            is_hot=lambda name: name.endswith(_PANELS),
        )
        if mapped.get(_NAME) != path.name:
            raise DamagedFileError("it was made of another model")
        return mapped
    except FileNotFoundError:
        return None
    except (DamagedFileError, OSError) as error:
        progress(f"{path} cannot be used, {error}: it is made anew")
        return None


def _convert_in_subprocess(folder: Path, cache_dir: Path, progress: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "treeserve_engine.packed_weights", str(folder), "--cache-dir", str(cache_dir)]
    last_lines: deque[str] = deque(maxlen=20)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            progress(line.rstrip())
            last_lines.append(line)
    if process.returncode:
        said = "".join(last_lines).strip()
        raise InvalidArgumentError("model", f"no int8 weights, the conversion ended with {process.returncode}: {said}")


def _write(path: Path, name: str, folder: Path, progress: Callable[[str], None]) -> None:
    config = load_config(folder)
    progress(f"converting the weights of {folder} to int8, once")
    write_arrays(path, itertools.chain([(_NAME, name)], _items(folder, config, progress)))
    progress(f"int8 weights: {path.stat().st_size / 1e6:.0f} MB")


def _items(folder: Path, config: ModelConfig, progress: Callable[[str], None]) -> Iterator[tuple[str, Item]]:
    """Everything in a `DecoderWeights`, by name, one layer in memory at a time."""
    import torch  # here alone: verifiers import this module

    from treeserve_engine.weights import FloatWeights

    tensors = FloatWeights.of(folder, config, torch.float32, torch.device("cpu"))
    embedding = tensors.embedding()
    yield "embedding", _finite(embedding)
    yield from flat_items("head", pack_tensors(tensors.head(embedding)))
    del embedding
    for i, layer in enumerate(tensors.layers()):
        yield from flat_items(f"layers.{i}", pack_layer(layer))
        if (i + 1) % 8 == 0:
            progress(f"layer {i + 1} of {config.num_layers}")
    yield "norm", _finite(tensors.norm())
    rope = RopeTable.of(config)
    yield "rope_cos", rope.cos
    yield "rope_sin", rope.sin


def pack_layer(layer: LayerTensors) -> LayerWeights:
    """A layer in int8.

    Raises:
        InvalidArgumentError: if a weight is not finite.
    """
    return LayerWeights(
        input_norm=_finite(layer.input_norm),
        qkv=pack_tensors(layer.qkv),
        q_norm=_finite(layer.q_norm),
        k_norm=_finite(layer.k_norm),
        attention_output=pack_tensors(layer.attention_output),
        feed_forward_norm=_finite(layer.feed_forward_norm),
        gate_up=pack_tensors(layer.gate_up, interleave=True),
        down=pack_tensors(layer.down),
    )


def pack_tensors(linear: LinearTensors, *, interleave: bool = False) -> PackedLinear:
    """One linear layer in int8; raises as `pack_layer`."""
    try:
        return pack_linear(_finite(linear.weight), _finite(linear.bias), interleave=interleave)
    except ValueError as error:
        raise InvalidArgumentError("model", f"int8 weights: {error}") from error


def _finite(tensor: torch.Tensor | None) -> Any:
    """The tensor as an array."""
    if tensor is not None and not tensor.isfinite().all():
        raise InvalidArgumentError("model", "a weight is not finite")
    return None if tensor is None else tensor.numpy()


def flat_items(name: str, value: Any) -> Iterator[tuple[str, Item]]:
    """The fields of a dataclass, and of those in it, by dotted names."""
    if not is_dataclass(value):
        yield name, value
        return
    for field in fields(value):
        yield from flat_items(f"{name}.{field.name}", getattr(value, field.name))


def linear_of(items: Mapping[str, Any], name: str) -> PackedLinear:
    """A linear layer from its flat items."""
    return PackedLinear(**{field.name: items[f"{name}.{field.name}"] for field in fields(PackedLinear)})


def layer_of(items: Mapping[str, Any], name: str) -> LayerWeights:
    """A decoder layer from its flat items."""
    parts: dict[str, Any] = {}
    for part in fields(LayerWeights):
        at = f"{name}.{part.name}"
        parts[part.name] = linear_of(items, at) if part.name in _LINEARS else items[at]
    return LayerWeights(**parts)


def _decoder_weights(items: Mapping[str, Any], num_layers: int) -> DecoderWeights:
    return DecoderWeights(
        embedding=items["embedding"],
        layers=tuple(layer_of(items, f"layers.{i}") for i in range(num_layers)),
        norm=items["norm"],
        head=linear_of(items, "head"),
        rope_cos=items["rope_cos"],
        rope_sin=items["rope_sin"],
    )


def main() -> None:
    """Convert the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Convert a model's weights to int8 ahead of time.")
    parser.add_argument("folder", type=Path, help="Hugging Face folder with safetensors weights")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where the file goes (%(default)s)")
    arguments = parser.parse_args()
    try:
        print(convert(arguments.folder, arguments.cache_dir, lambda line: print(line, flush=True)))
    except (TreeserveError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
