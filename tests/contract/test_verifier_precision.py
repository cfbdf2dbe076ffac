"""A verifier says what it really computes with, not what its configuration left open."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.verifier_peers import RouterPeer, running_verifier

from treeserve_kernels.cpu.library import is_built


@pytest.mark.parametrize("configured", ["auto", "int8", "bfloat16"])
async def test_the_welcome_names_the_dtype_that_was_chosen(tiny_model: Path, tmp_path: Path, configured: str) -> None:
    chosen = {"auto": "int8" if is_built() else "float32"}.get(configured, configured)
    async with running_verifier(tiny_model, tmp_path, dtype=configured) as running, RouterPeer(running.address) as peer:
        assert peer.welcome is not None and peer.welcome.dtype == chosen
        output = await peer.generate(1, [7, 8, 9], max_tokens=5)
        assert len(output.token_ids) == 5
