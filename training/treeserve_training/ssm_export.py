"""Writes a trained SSM as the speculator loads it: int8 layers and output layer, without the target's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeserve_engine.config import load_config
from treeserve_engine.packed_weights import pack_layer, pack_tensors
from treeserve_engine.weights import LinearTensors
from treeserve_speculator.drafter_files import DrafterFolder, DrafterTarget, open_for_writing
from treeserve_speculator.ssm_file import SsmFile
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.ssm_model import SsmModel


def drafter_target(model_folder: Path, name: str) -> DrafterTarget:
    """What drafters record of the model that they are trained for."""
    tokenizer = Tokenizer.from_folder(model_folder)
    return DrafterTarget(name, tokenizer.hash, tokenizer.vocab_size, load_config(model_folder).hidden_size)


def export_ssm(
    model: SsmModel,
    vocabulary: DraftVocabulary,
    *,
    cut_prefix: tuple[int, ...],
    source: str,
    folder: Path,
    target: DrafterTarget,
    licence: str,
    recipe: Mapping[str, Any],
) -> DrafterFolder:
    """Put a drafter into a folder, in place of one of the same source.

    Raises:
        InvalidArgumentError: if the folder holds drafters of another target, or a weight is not finite.
    """
    drafters = open_for_writing(folder, target, licence)
    content = SsmFile(
        token_ids=vocabulary.token_ids,
        cut_prefix=cut_prefix,
        layers=tuple(pack_layer(layer) for layer in model.layer_tensors()),
        norm=model.norm.detach().numpy(),
        head=pack_tensors(LinearTensors(model.head.detach())),
    )
    return drafters.with_written(source, content.write, recipe)
