"""Loads the draft model of an ssm source: a trained one, which takes the target's embedding, or a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import ModelConfig, load_config
from treeserve_engine.interface import Model
from treeserve_engine.loading import int8_model, load_model
from treeserve_engine.memory_limits import available_bytes
from treeserve_engine.memory_plan import MemoryPlan, ModelSizes, megabytes
from treeserve_engine.packed_weights import packed_weights
from treeserve_engine.precision import AUTO, Precision, choose_precision
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.ssm_file import SsmFile
from treeserve_text.tokenizer import Tokenizer

BLOCK_SIZE = 16
_TYPICAL_ROWS = 256  # of a large pass: two chunks of catching up, or trees for many sequences

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class DraftModel:
    """A draft model and what its outputs mean.

    Attributes:
        vocab_size: ids that both models know; no other is read or proposed.
        vocabulary: int64[N], ascending: the target's id of each output; None where they are the same.
        cut_prefix: left out of the model's context where a sequence begins with it.
    """

    model: Model
    vocab_size: int
    vocabulary: npt.NDArray[np.int64] | None = None
    cut_prefix: tuple[int, ...] = ()


def load_whole_model(settings: SourceSettings, folder: Path) -> DraftModel:
    """A Hugging Face folder with the target's tokenizer.

    Raises:
        InvalidArgumentError: if its token ids do not mean the target's, or it is not supported or does not fit.
    """
    config = settings.config
    if Tokenizer.from_folder(folder).hash != settings.tokenizer_hash:
        raise InvalidArgumentError("ssm_folder", f"the tokenizer of {folder.name} is not the target's")
    device = _device()
    precision = choose_precision(folder, config.ssm_dtype, AUTO, device)
    _check_memory(config, ModelSizes.of(folder), precision, device)
    model = load_model(folder, dtype=precision.dtype, device=device, threads=config.threads, cache_dir=config.cache_dir)
    return DraftModel(model, min(settings.vocab_size, model.config.vocab_size))


def load_trained_model(settings: SourceSettings, source: str) -> DraftModel:
    """A drafter that was trained for the target, on the CPU in int8.

    Raises:
        InvalidArgumentError: if there is none, it is damaged or was made for another target.
    """
    config = settings.config
    target_config = load_config(config.model_folder)
    ssm = SsmFile.read(settings.trained_file(source, target_config.hidden_size), config.cache_dir)
    ssm.check(settings.vocab_size)
    own_config = replace(target_config, num_layers=len(ssm.layers))
    precision = choose_precision(config.model_folder, "int8", AUTO, "cpu")
    _check_memory(config, _sizes(ssm, own_config), precision, "cpu")
    weights = ssm.with_target(packed_weights(config.model_folder, config.cache_dir, _log.info))
    model = int8_model(own_config, weights, precision, config.threads)
    return DraftModel(model, settings.vocab_size, ssm.token_ids, ssm.cut_prefix)


def _sizes(ssm: SsmFile, config: ModelConfig) -> ModelSizes:
    """The embedding is not counted: its pages are the target's, and a pass reads a row of it a token."""
    linears = [
        ssm.head,
        *(linear for layer in ssm.layers for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)),
    ]
    return ModelSizes(
        parameters=sum(linear.num_outputs * linear.num_inputs for linear in linears),
        embedding=0,
        is_tied=False,
        vocab_size=len(ssm.token_ids),
        widest=config.intermediate_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _check_memory(config: SpeculatorConfig, sizes: ModelSizes, precision: Precision, device: str) -> None:
    """Refuse a draft model that does not fit into memory with its KV cache."""
    plan = MemoryPlan.of(
        sizes,
        precision,
        device=device,
        num_blocks=num_blocks(config),
        block_size=BLOCK_SIZE,
        rows=_TYPICAL_ROWS,
    )
    available = available_bytes(device)
    table: Mapping[str, str] = plan.table()
    _log.info("draft model", dtype=precision.dtype, **table, available=megabytes(available))
    plan.check(available, "ssm_kv_tokens")


def num_blocks(config: SpeculatorConfig) -> int:
    """Blocks of the draft model's KV cache."""
    return -(-config.ssm_kv_tokens // BLOCK_SIZE)


def _device() -> str:
    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch  # to ask it is worth the while only where there may be a GPU

    return "cuda" if torch.cuda.is_available() else "cpu"
