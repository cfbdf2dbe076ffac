"""config.json files of a small Llama and its like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def write_config(folder: Path, **changes: Any) -> Path:
    """Write one into the folder, which is made; `...` leaves a setting out."""
    raw = {key: value for key, value in (_LLAMA | changes).items() if value is not ...}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
