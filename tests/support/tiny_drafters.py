"""Drafters of every trained kind for a tiny model: untrained, and as real to the code as any."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from treeserve_core.features import FeatureShape
from treeserve_engine.config import load_config
from treeserve_speculator.drafter_files import open_for_writing
from treeserve_speculator.sources.ngram_table_file import (
    EMPTY_CONTEXT,
    Calibration,
    TableEntries,
    TableIdentity,
    longer_context,
    write_table,
)
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.draft_vocabulary import DraftVocabulary
from treeserve_training.head_export import export_head
from treeserve_training.head_model import HeadModel
from treeserve_training.ssm_export import drafter_target, export_ssm
from treeserve_training.ssm_model import SsmModel

TRAINED = ("ngram_table", "ssm", "ssm2", "head")
_LICENCE = "Apache-2.0"


def write_drafters(model: Path, folder: Path) -> Path:
    """A folder for `drafter_folder` with all of TRAINED; `ssm` is the model itself with half of its vocabulary."""
    tokenizer = Tokenizer.from_folder(model)
    config = load_config(model)
    vocabulary = DraftVocabulary(np.arange(1, tokenizer.vocab_size, 2), config.vocab_size)
    target = drafter_target(model, "tiny")
    for source, layers in (("ssm", 2), ("ssm2", 1)):
        small = SsmModel.from_target(model, vocabulary, layers)
        small.norm.data /= 0.2  # which is what training begins with
        export_ssm(
            small, vocabulary, cut_prefix=(), source=source, folder=folder, target=target, licence=_LICENCE, recipe={}
        )
    head = HeadModel.from_target(model, FeatureShape((1,), config.hidden_size), vocabulary, passes=3)
    export_head(head, vocabulary, folder=folder, target=target, licence=_LICENCE, recipe={})
    file = folder / "ngram_table.bin"
    write_table(
        file, TableIdentity(tokenizer.hash, tokenizer.vocab_size), 1, _table(tokenizer.vocab_size), Calibration()
    )
    open_for_writing(folder, target, _LICENCE).with_file("ngram_table", file, {})
    return folder


def _table(vocab_size: int) -> TableEntries:
    """After each token one of two, and after an unknown context some other."""
    ids = np.arange(vocab_size)
    contexts = [EMPTY_CONTEXT, *(longer_context(EMPTY_CONTEXT, token_id) for token_id in ids.tolist())]
    followers = np.concatenate([[0, 1], np.stack([(7 * ids + 1) % vocab_size, (5 * ids + 2) % vocab_size], 1).ravel()])
    weights = np.log(np.tile([0.6, 0.3], vocab_size + 1))
    return TableEntries(np.array(contexts, np.uint64), np.arange(2, 2 * len(contexts) + 1, 2), followers, weights)
