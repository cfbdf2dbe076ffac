"""Stop strings: text and ids end together, at the first stop string, whatever the tokens and chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizer_folders import byte_level_bpe, write_folder

from treeserve_text.assembler import Released, TextAssembler
from treeserve_text.tokenizer import Tokenizer

Outcome = tuple[tuple[int, ...], str, str | None]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(byte_level_bpe(), tmp_path_factory.mktemp("tokenizer")))


def _run(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], stops: Sequence[str] = ()) -> Outcome:
    assembler = TextAssembler(tokenizer, tuple(stops))
    pieces = [*(assembler.push(chunk) for chunk in chunks), assembler.flush()]
    return tuple(i for p in pieces for i in p.token_ids), "".join(p.text for p in pieces), assembler.stopped


def _byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [ids[bytes([byte])] for byte in text.encode()]


def _expected(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> Outcome:
    """The definition, on whole texts: the stop complete first, of several the longest; ids cut by byte spans."""
    text = tokenizer.decode(ids)
    found = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not found:
        return tuple(ids), text, None
    end, stop = min(found, key=lambda item: (item[0], -len(item[1])))
    kept_text = text[: end - len(stop)]
    kept_bytes, start, kept = len(kept_text.encode()), 0, []
    for token_id in ids:
        token_end = start + len(tokenizer.token_bytes(token_id))
        if start < kept_bytes or token_end <= kept_bytes:
            kept.append(token_id)
        start = token_end
    return tuple(kept), kept_text, stop


@st.composite
def _generations(draw: st.DrawFn) -> tuple[list[str], list[str], list[str]]:
    """Texts to be encoded as wholes or byte by byte, special tokens between bytes, chunk sizes and stop strings."""
    alphabet = "aab é東🙂"
    words = draw(st.lists(st.text(alphabet, max_size=4), max_size=8))
    modes = [draw(st.sampled_from(["whole", "bytes", "special"])) for _ in words]
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3, unique=True))
    return words, modes, stops


@settings(deadline=None)
@given(generation=_generations(), chunk=st.integers(1, 9), special_at=st.integers(0, 40))
def test_every_generation_matches_the_definition_in_any_chunks(
    tokenizer: Tokenizer, generation: tuple[list[str], list[str], list[str]], chunk: int, special_at: int
) -> None:
    words, modes, stops = generation
    ids: list[int] = []
    for word, mode in zip(words, modes, strict=True):
        ids += tokenizer.encode(word) if mode == "whole" else _byte_ids(tokenizer, word)
        if mode == "special":
            ids.insert(special_at % (len(ids) + 1), min(tokenizer.special_ids))
    expected = _expected(tokenizer, ids, stops)
    assert _run(tokenizer, [[i] for i in ids], stops) == expected
    assert _run(tokenizer, [ids[i : i + chunk] for i in range(0, len(ids), chunk)], stops) == expected


@pytest.mark.parametrize("spelling", ["whole", "bytes"])
def test_stop_at_every_offset(tokenizer: Tokenizer, spelling: str) -> None:
    text = "the quick naïve 東京 🙂 fox, 22 end"
    ids = tokenizer.encode(text) if spelling == "whole" else _byte_ids(tokenizer, text)
    for length in (1, 2, 5):
        for offset in range(len(text) - length + 1):
            stop = text[offset : offset + length]
            kept_ids, kept_text, stopped = _run(tokenizer, [ids], [stop])
            assert (kept_text, stopped) == (text[: text.find(stop)], stop)
            assert (kept_ids, kept_text, stopped) == _expected(tokenizer, ids, [stop])


def test_text_is_independent_of_the_tokens(tokenizer: Tokenizer) -> None:
    text, stops = "abcdbcd", ["bcd", "c"]
    assert _run(tokenizer, [tokenizer.encode(text)], stops)[1:] == ("ab", "c")
    assert _run(tokenizer, [_byte_ids(tokenizer, text)], stops)[1:] == ("ab", "c")


@pytest.mark.parametrize(
    ("text", "stops", "kept", "stopped"),
    [
        ("aab", ["ab"], "a", "ab"),
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("one two", ["two", "one"], "", "one"),
        ("xxSTOP", ["TOP", "STOP"], "xx", "STOP"),
        ("STO", ["STOP"], "STO", None),
        ("nothing", [], "nothing", None),
        ("", ["a"], "", None),
        ("a", ["a"], "", "a"),
    ],
)
def test_overlaps_several_stops_and_none(
    tokenizer: Tokenizer, text: str, stops: list[str], kept: str, stopped: str | None
) -> None:
    ids = _byte_ids(tokenizer, text)
    assert _run(tokenizer, [[i] for i in ids], stops)[1:] == (kept, stopped)


def test_a_stop_over_token_boundaries_drops_its_tokens_and_what_follows(tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tokenizer, "fox<end>junk")
    assert _run(tokenizer, [ids], ["<end>"]) == (tuple(ids[:3]), "fox", "<end>")


def test_a_stop_that_begins_within_a_token_keeps_that_token_and_its_first_part(tokenizer: Tokenizer) -> None:
    quick = tokenizer.encode(" quick")
    assert len(quick) == 1, "the test needs one token"
    assert _run(tokenizer, [[*quick, *quick]], ["ick "]) == (tuple(quick), " qu", "ick ")
    assert _run(tokenizer, [[*quick, *quick]], ["ui"]) == (tuple(quick), " q", "ui")
    assert _run(tokenizer, [[*quick, *quick]], [" q"]) == ((), "", " q")


def test_a_stop_within_a_character_that_a_kept_token_begins(tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tokenizer, "a東b")
    assert _run(tokenizer, [[i] for i in ids], ["東"]) == ((ids[0],), "a", "東")


def test_tokens_are_held_only_while_they_may_begin_a_stop(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, ("ab",))
    a, b, c = _byte_ids(tokenizer, "abc")
    assert assembler.push([c]) == Released((c,), "c")
    assert assembler.push([a]) == Released()
    assert assembler.push([a]) == Released((a,), "a")
    assert assembler.push([c]) == Released((a, c), "ac")
    assert assembler.push([a, b, c]) == Released()
    assert assembler.stopped == "ab"
    assert assembler.push([c]) == assembler.flush() == Released()


def test_each_piece_is_exactly_the_text_of_its_tokens(tokenizer: Tokenizer) -> None:
    assembler = TextAssembler(tokenizer, ("end.",))
    for token_id in _byte_ids(tokenizer, "the 東京 🙂 ends"):
        piece = assembler.push([token_id])
        assert tokenizer.decode(piece.token_ids) == piece.text


def test_special_ids_are_released_without_text(tokenizer: Tokenizer) -> None:
    a, b, c = _byte_ids(tokenizer, "abc")
    eos = tokenizer.encode("<|im_end|>")[0]
    assembler = TextAssembler(tokenizer, ("ab",))
    assert assembler.push([eos]) == Released((eos,), "")
    assert _run(tokenizer, [[a, eos, c, eos]], ["ab"]) == ((a, eos, c, eos), "ac", None)
    assert _run(tokenizer, [[c, eos, a, eos, b, eos]], ["ab"]) == ((c, eos), "c", "ab")


def test_flush_releases_held_text_and_replaces_an_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tokenizer, "ST🙂")[:-1]
    assembler = TextAssembler(tokenizer, ("STOP",))
    assert assembler.push(ids[:2]) == Released()
    assert assembler.push(ids[2:]) == Released(), "an O may follow as far as whole characters tell"
    assert assembler.flush() == Released(tuple(ids), "ST�")
    assert assembler.stopped is None


def test_a_long_run_of_one_token_takes_linear_time(tokenizer: Tokenizer) -> None:
    """Held tokens are looked at once each: 20,000 pushes of an almost-matching token end well within the time limit."""
    a = _byte_ids(tokenizer, "a")[0]
    stop = "a" * 200 + "b"
    ids, text, stopped = _run(tokenizer, [[a]] * 20_000, [stop])
    assert (len(ids), len(text), stopped) == (20_000, 20_000, None)
