"""Names of token prefixes, block by block: equal names mean equal tokens from the first on, of the same tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

PrefixHash = bytes

_HASH_BYTES = 16


def prefix_hashes(token_ids: Sequence[int], block_size: int, tenant: str) -> list[PrefixHash]:
    """The name of each prefix that fills whole blocks, shortest first: len(token_ids) // block_size of them.

    Args:
        tenant: label of whom the tokens are for. It salts the names, so that nobody finds, or is found out by, the
            prefixes of others.
    """
    return extend_hashes([], token_ids, block_size, tenant)


def extend_hashes(
    known: Sequence[PrefixHash], token_ids: Sequence[int], block_size: int, tenant: str
) -> list[PrefixHash]:
    """`prefix_hashes` of the tokens, of which the names of the first len(known) blocks are known."""
    names = list(known)
    name = names[-1] if names else hashlib.blake2b(tenant.encode(), digest_size=_HASH_BYTES).digest()
    for start in range(len(names) * block_size, len(token_ids) - block_size + 1, block_size):
        block = np.asarray(token_ids[start : start + block_size], dtype="<u4").tobytes()
        name = hashlib.blake2b(block, key=name, digest_size=_HASH_BYTES).digest()
        names.append(name)
    return names
