"""Incremental decoding: the whole text whatever the chunks, whole characters only, and at once where possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizer_folders import byte_level_bpe, sentencepiece_bpe, write_folder

from treeserve_text.detokenizer import Detokenizer
from treeserve_text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(byte_level_bpe(), tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(sentencepiece_bpe(), tmp_path_factory.mktemp("sentencepiece")))


def _stream(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def _cut(ids: Sequence[int], cuts: set[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


_CUTS = st.sets(st.integers(0, 60))


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=60), cuts=_CUTS)
def test_any_ids_in_any_chunks_give_the_decoded_text(byte_level: Tokenizer, ids: list[int], cuts: set[int]) -> None:
    """Random ids: invalid UTF-8, special and unknown ids included."""
    assert "".join(_stream(byte_level, _cut(ids, cuts))) == byte_level.decode(ids)


@settings(deadline=None)
@given(text=st.text(alphabet="ab hé東🙂", max_size=30), cuts=_CUTS)
def test_sentencepiece_in_any_chunks_gives_the_decoded_text(
    sentencepiece: Tokenizer, text: str, cuts: set[int]
) -> None:
    ids = sentencepiece.encode(text)
    assert "".join(_stream(sentencepiece, _cut(ids, cuts))) == sentencepiece.decode(ids) == text


@pytest.mark.parametrize("text", ["東", "🙂", "é", "👩‍👩‍👧", "a🙂b"])
def test_a_split_character_appears_whole_with_its_last_byte(byte_level: Tokenizer, text: str) -> None:
    ids = [byte_level.encode(chr(byte))[0] if byte < 128 else _byte_id(byte_level, byte) for byte in text.encode()]
    pieces = _stream(byte_level, [[i] for i in ids])
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    seen = bytearray()
    for byte, piece in zip(text.encode(), pieces, strict=False):  # as early as possible: nothing is held longer
        seen.append(byte)
        try:
            expected = seen.decode()
        except UnicodeDecodeError:
            expected = ""
        assert piece == expected
        if expected:
            seen.clear()


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def test_special_ids_within_a_character_do_not_break_it(byte_level: Tokenizer) -> None:
    ids = [_byte_id(byte_level, byte) for byte in "東".encode()]
    (special,) = byte_level.encode("<|im_end|>")
    assert _stream(byte_level, [[ids[0], special], [ids[1]], [special, ids[2]]]) == ["", "", "東", ""]


def test_an_unfinished_character_becomes_one_replacement_when_flushed(byte_level: Tokenizer) -> None:
    ids = [_byte_id(byte_level, byte) for byte in "🙂".encode()[:3]]
    assert _stream(byte_level, [ids]) == ["", "�"]


def test_bytes_that_cannot_be_mended_are_replaced_at_once(byte_level: Tokenizer) -> None:
    lead, (letter,) = _byte_id(byte_level, 0xE6), byte_level.encode("a")
    assert _stream(byte_level, [[lead], [letter]]) == ["", "�a", ""]


def test_text_that_begins_or_ends_within_a_character_is_not_pushed_as_a_whole(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    lead, *rest = [_byte_id(byte_level, byte) for byte in "東".encode()]
    assert detokenizer.push_whole([lead]) is None
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push_whole(rest) is None
    assert detokenizer.push(rest) == "東"
    assert detokenizer.push_whole([lead, *rest, *byte_level.encode("a")]) == "東a"


def test_the_first_space_of_sentencepiece_text_is_dropped_from_a_whole_too(sentencepiece: Tokenizer) -> None:
    detokenizer = Detokenizer(sentencepiece)
    assert [detokenizer.push_whole(sentencepiece.encode("he")) for _ in range(2)] == ["he", " he"]


def test_nothing_in_nothing_out(byte_level: Tokenizer) -> None:
    assert _stream(byte_level, [[], []]) == ["", "", ""]


def test_only_the_first_space_of_sentencepiece_text_is_dropped(sentencepiece: Tokenizer) -> None:
    (he, *rest) = sentencepiece.encode("he he")
    assert _stream(sentencepiece, [[he], rest]) == ["he", " he", ""]
    space = sentencepiece.encode("a")[0]
    assert sentencepiece.token_bytes(space) == b" "
    assert _stream(sentencepiece, [[space], [space], [he]]) == ["", " ", " he", ""]
