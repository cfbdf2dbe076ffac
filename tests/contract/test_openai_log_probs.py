"""Log-probabilities in the completions format: each token's own, and where its text begins."""

from __future__ import annotations

import pytest

from treeserve_core.outcome import PositionLogProbs
from treeserve_router.openai_response import CompletionFormat, Head
from treeserve_router.visible_output import TokenChunk
from treeserve_text.tokenizer import Tokenizer

TEXT = "one 😀 naïve"


def log_probs(tokenizer: Tokenizer, positions: list[PositionLogProbs]) -> dict[str, list]:
    answer = CompletionFormat(Head("r", 0, "m", 0), tokenizer, with_log_probs=True)
    pieces = [answer.piece(TokenChunk(i, (p.token_id,), "", (p,))) for i, p in enumerate(positions)]
    found = [piece["choices"][0]["logprobs"] for piece in pieces]
    return {name: [value for each in found for value in each[name]] for name in found[0]}


def test_offsets_point_into_the_text(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.eos_token_ids[0], *tokenizer.encode_inner(TEXT)]
    found = log_probs(tokenizer, [PositionLogProbs(token_id, -1.0) for token_id in ids])
    shown = [tokenizer.decode(ids[:end], skip_special=True).rstrip("\ufffd") for end in range(len(ids))]
    assert found["text_offset"] == [len(text) for text in shown], "a special token is not shown"
    assert len({*found["text_offset"]}) < len(ids), "some token ends within a character"


def test_no_token_takes_the_place_of_another(tokenizer: Tokenizer) -> None:
    ids = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1][-100:]
    assert any(tokenizer.decode([i]) == "\ufffd" for i in ids)
    top = tuple((token_id, -float(n)) for n, token_id in enumerate(ids))
    found = log_probs(tokenizer, [PositionLogProbs(ids[0], 0.0, top)])
    assert list(found["top_logprobs"][0].values()) == [log_prob for _, log_prob in top]
    assert found["top_logprobs"][0][found["tokens"][0]] == found["token_logprobs"][0]


@pytest.mark.parametrize("data", [b"\xf0\x9f", b"\xff"])
def test_bytes_that_are_no_text_are_told_as_such(tokenizer: Tokenizer, data: bytes) -> None:
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == data]
    for token_id in ids:
        (text,) = log_probs(tokenizer, [PositionLogProbs(token_id, -1.0)])["tokens"]
        assert text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    assert ids or data != b"\xff", "every byte is a token"
