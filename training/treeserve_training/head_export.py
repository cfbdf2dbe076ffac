"""Writes a trained head as the speculator loads it: all in int8, without the target's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeserve_engine.packed_weights import pack_layer, pack_tensors
from treeserve_engine.weights import LinearTensors
from treeserve_speculator.drafter_files import DrafterFolder, DrafterTarget, open_for_writing
from treeserve_speculator.head_file import HeadFile
from treeserve_training.config import HEAD
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.head_model import HeadModel


def export_head(
    model: HeadModel,
    vocabulary: DraftVocabulary,
    *,
    folder: Path,
    target: DrafterTarget,
    licence: str,
    recipe: Mapping[str, Any],
) -> DrafterFolder:
    """Put a head into a drafter folder, in place of an earlier one.

    Raises:
        InvalidArgumentError: if the folder holds drafters of another target, or a weight is not finite.
    """
    drafters = open_for_writing(folder, target, licence)
    from_features, from_hidden = model.projections()
    content = HeadFile(
        shape=model.shape,
        token_ids=vocabulary.token_ids,
        from_features=pack_tensors(from_features),
        from_hidden=pack_tensors(from_hidden),
        layer=pack_layer(model.layer_tensors()),
        norm=model.norm.detach().numpy(),
        head=pack_tensors(LinearTensors(model.head.detach())),
    )
    return drafters.with_written(HEAD, content.write, recipe)
