"""The bytes each token adds to the text, so that text can be assembled token by token without decoding twice.

Two families cover the models served here: byte-level BPE, whose tokens spell bytes in GPT-2's printable alphabet, and
SentencePiece-style vocabularies, which write spaces as U+2581 and unknown bytes as <0xNN>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeserve_core.errors import InvalidArgumentError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class TokenBytes:
    """How a tokenizer's token strings spell bytes.

    Attributes:
        byte_level: GPT-2's alphabet; otherwise SentencePiece's spelling.
        byte_tokens: <0xNN> is one byte.
        strips_first_space: decoding drops one space from the beginning of the text.
    """

    byte_level: bool = False
    byte_tokens: bool = False
    strips_first_space: bool = False

    @classmethod
    def from_decoder(cls, decoder: Mapping[str, Any] | None) -> TokenBytes:
        """Read a tokenizer.json's decoder.

        Raises:
            InvalidArgumentError: for a decoder whose text is not the tokens' bytes one after another.
        """
        steps: Sequence[Mapping[str, Any]] = []
        if decoder is not None:
            steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space_mark(steps[0]):
            if len(steps) == 3:
                return cls(byte_tokens=True)
            if len(steps) == 4 and _strips_one_space(steps[3]):
                return cls(byte_tokens=True, strips_first_space=True)
        raise InvalidArgumentError("model", f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is not supported")

    def of(self, token: str) -> bytes:
        """Bytes of a token that is not special."""
        if self.byte_level:
            if all(char in _ALPHABET for char in token):
                return bytes(_ALPHABET[char] for char in token)
            return token.encode()  # an added token, written as it is read
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_tokens else None
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE_MARK, " ").encode()


def _replaces_space_mark(step: Mapping[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": _SPACE_MARK} and step["content"] == " ")


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0))
