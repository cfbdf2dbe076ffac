"""Turn what the operator names (a folder or a .gguf file) into a checkpoint folder that the engine can load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import is_llama_like, load_config
from treeserve_engine.made_once import cache_key, content_hash, make_once
from treeserve_engine.weight_files import weight_files

# Part of the cache key: raise it when a conversion of the same file comes out differently.
_CONVERSION_VERSION = 1
# What transformers makes a tokenizer of, where there is no tokenizer.json.
_TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.model", "vocab.txt", "spiece.model")


def prepare_checkpoint(source: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """A folder with config.json, tokenizer.json and safetensors weights, in Hugging Face's layout.

    A folder is checked and returned as it is, unless its tokenizer has to be converted: then one that refers to it is
    made in `cache_dir`. A .gguf file is converted once into `cache_dir`/<name>-<content hash> (float32, which holds
    every dequantised value exactly) and reused afterwards.

    Args:
        progress: told what happens, one line at a time.

    Raises:
        InvalidArgumentError: if `source` does not exist or is a model that the engine does not support.
    """
    if source.is_dir():
        return _with_tokenizer(_checked(source), cache_dir, progress)
    if not source.is_file():
        raise InvalidArgumentError("model", f"{source} does not exist")
    if source.suffix.lower() != ".gguf":
        raise InvalidArgumentError("model", f"{source} is neither a checkpoint folder nor a .gguf file")
    target = cache_dir / f"{source.stem}-{cache_key(_CONVERSION_VERSION, content_hash(source, cache_dir))}"
    make_once(target, target.is_dir, lambda folder: _convert(source, folder, progress))
    return _checked(target)


def _convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    # Imported here: most starts find a converted folder and need neither gguf nor the tokenizer builder.
    from treeserve_engine.gguf_file import GgufFile
    from treeserve_engine.gguf_tokenizer import write_tokenizer
    from treeserve_engine.gguf_weights import ARCHITECTURES, write_config, write_weights

    folder.mkdir()
    progress(f"reading {source}")
    file = GgufFile(source)
    if file.architecture not in ARCHITECTURES:
        from treeserve_engine.gguf_transformers import convert_through_transformers

        convert_through_transformers(source, file, folder, progress)
        return
    write_config(file, folder)
    load_config(folder)  # refuse an unsupported model before the long part
    progress("converting the tokenizer")
    write_tokenizer(file, folder)
    progress("converting the weights to float32")
    write_weights(file, folder)


def _checked(folder: Path) -> Path:
    if is_llama_like(folder):
        load_config(folder)
    else:
        from treeserve_engine.transformers_config import read_transformers_config

        read_transformers_config(folder)
    weight_files(folder)
    return folder


def _with_tokenizer(folder: Path, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The folder if it holds a tokenizer.json, else one in `cache_dir` that refers to its files and holds one."""
    if (folder / "tokenizer.json").is_file():
        return folder
    sources = sorted(path for path in folder.iterdir() if path.name in _TOKENIZER_FILES)
    if not sources:
        raise InvalidArgumentError("model", f"{folder} holds no tokenizer.json, nor {', '.join(_TOKENIZER_FILES)}")
    content = "".join(content_hash(path, cache_dir) for path in sources)
    target = cache_dir / f"{folder.name}-{cache_key(_CONVERSION_VERSION, folder.resolve(), content)}"
    make_once(target, target.is_dir, lambda made: _add_tokenizer(folder, made, progress))
    return target


def _add_tokenizer(folder: Path, made: Path, progress: Callable[[str], None]) -> None:
    from transformers import AutoTokenizer

    progress(f"{folder} holds no tokenizer.json: converting its vocabulary")
    made.mkdir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.save_pretrained(made)
    except Exception as error:  # whatever transformers and the files raise
        raise InvalidArgumentError("model", f"no tokenizer.json can be made of {folder}: {error}") from error
    if not (made / "tokenizer.json").is_file():
        raise InvalidArgumentError("model", f"{folder} has a tokenizer that only Python code can run")
    for path in folder.iterdir():
        if path.is_file() and not (made / path.name).exists():
            (made / path.name).symlink_to(path.resolve())
