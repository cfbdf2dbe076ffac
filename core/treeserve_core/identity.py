"""What two peers must agree on before they exchange token ids."""

from __future__ import annotations

from dataclasses import dataclass

from treeserve_core.errors import HandshakeError, InvalidArgumentError

PROTOCOL_VERSION = 1
MAX_TENANT_CHARS = 64
MAX_SESSION_CHARS = 128


@dataclass(frozen=True)
class ModelIdentity:
    """A served model as its tokens see it.

    Attributes:
        tokenizer_hash: SHA-256 (hex) over the tokenizer's vocabulary, special ids and merges.
        vocab_size: token ids the tokenizer knows.
        padded_vocab_size: rows of the output layer; the surplus is padding and never sampled.
        eos_token_ids: end-of-sequence ids, ascending.
    """

    name: str
    tokenizer_hash: str
    vocab_size: int
    padded_vocab_size: int
    eos_token_ids: tuple[int, ...]

    def check_peer(self, peer: ModelIdentity, *, own_role: str, peer_role: str) -> None:
        """Raise HandshakeError with the reason if a peer's token ids do not mean the same. Padding may differ."""
        for what in ("name", "tokenizer_hash", "vocab_size", "eos_token_ids"):
            ours, theirs = getattr(self, what), getattr(peer, what)
            if ours != theirs:
                raise HandshakeError(f"{what} differs: the {own_role} has {ours!r}, the {peer_role} {theirs!r}")


def check_tenant(label: str) -> None:
    """Raise InvalidArgumentError if a tenant's label is longer than peers may send."""
    if len(label) > MAX_TENANT_CHARS:
        raise InvalidArgumentError("tenant", f"has more than {MAX_TENANT_CHARS} characters")


def check_protocol(version: int) -> None:
    """Raise HandshakeError if the peer speaks another version."""
    if version != PROTOCOL_VERSION:
        raise HandshakeError(f"protocol version {version} is not supported; this side speaks {PROTOCOL_VERSION}")
