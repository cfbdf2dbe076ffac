"""Tokenizers and chat templates as a checkpoint folder gives them."""

from __future__ import annotations

import datetime
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.tokenizer_folders import ADDED, SPECIAL, byte_level_bpe, sentencepiece_bpe, write_folder
from tokenizers import decoders, processors

from treeserve_core.errors import InvalidArgumentError
from treeserve_text.chat import ChatTemplate
from treeserve_text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _load(folder: Path, **settings: object) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(byte_level_bpe(), folder, **settings))


@pytest.mark.parametrize("text", ["", "the fox", " naïve 東京 🙂\n\t22", f"<|im_end|>{ADDED}x"])
def test_encode_then_decode_gives_the_text_back(tmp_path: Path, text: str) -> None:
    tokenizer = _load(tmp_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        encoded = executor.submit(tokenizer.encode, "one two 12 " * 30_000)
        steps = 0
        while not encoded.done():
            time.sleep(0.001)
            steps += 1
    assert steps > 5


def test_special_tokens_are_left_out_of_the_text(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    start, end = (tokenizer.encode(token)[0] for token in SPECIAL)
    assert tokenizer.special_ids == {start, end}
    ids = [start, *tokenizer.encode("fox"), end]
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>fox<|im_end|>"


def test_bos_only_if_the_post_processor_adds_it(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    assert Tokenizer.from_folder(write_folder(backend, tmp_path / "plain")).encode("a")[0] != 0
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    with_bos = Tokenizer.from_folder(write_folder(backend, tmp_path / "bos", chat_template=TEMPLATE))
    assert with_bos.encode("a")[0] == 0
    assert with_bos.render_chat([{"role": "user", "content": "a"}]).count(0) == 2, "a template writes its own BOS"


def test_truncation_stored_in_the_file_is_ignored(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer.from_folder(write_folder(backend, tmp_path)).encode("q" * 10)) == 10


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [9, 3, 9]}, "config.json": {"eos_token_id": 5}}, (3, 9)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, (5,)),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": None}}, ()),
        ({}, ()),
    ],
)
def test_eos_ids_come_from_the_first_file_that_names_any(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    write_folder(byte_level_bpe(), tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == expected


def test_hash_tells_vocabularies_and_merges_apart(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    assert tokenizer.hash == _load(tmp_path / "again", chat_template=TEMPLATE).hash
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    hashes = {tokenizer.hash}
    spec["model"]["merges"].reverse()
    hashes.add(_rewritten(tmp_path, spec))
    first, second = list(spec["model"]["vocab"])[10:12]
    vocab = spec["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    hashes.add(_rewritten(tmp_path, spec))
    spec["added_tokens"][-1]["special"] = True
    hashes.add(_rewritten(tmp_path, spec))
    assert len(hashes) == 4


def test_hash_is_the_same_for_both_spellings_of_merges(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    assert isinstance(spec["model"]["merges"][0], list)
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    assert _rewritten(tmp_path, spec) == tokenizer.hash


def _rewritten(folder: Path, spec: object) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return Tokenizer.from_folder(folder).hash


def test_token_bytes_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path)
    text = f"naïve 東京 🙂 {ADDED}"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert tokenizer.token_bytes(0) == tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_a_decoder_that_is_not_bytes_in_a_row_is_refused(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InvalidArgumentError, match="WordPiece"):
        Tokenizer.from_folder(write_folder(backend, tmp_path))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_sentencepiece_text_loses_its_artificial_first_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(sentencepiece_bpe(), tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_chat_is_rendered_up_to_the_answer(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path, chat_template=TEMPLATE)
    ids = tokenizer.render_chat([{"role": "user", "content": "the fox"}])
    expected = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special=False) == expected
    assert ids[0] in tokenizer.special_ids


def test_chat_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    tokenizer = _load(tmp_path, chat_template="settings")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": ""}])) == "file"


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ bos_token }}d"}]
    template = ChatTemplate.from_folder(tmp_path, {"chat_template": named, "bos_token": {"content": "<s>"}})
    assert template is not None
    assert template.render([{"role": "user", "content": ""}]) == "<s>d"


def _render(source: str, content: str = "x") -> str:
    now = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
    return ChatTemplate(source, {"eos_token": "</s>"}, lambda: now).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026"),
        ("{{ messages[0] | tojson }}{{ eos_token }}", '{"role": "user", "content": "é<b>"}</s>'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aé<b>b"),
        ("{% if tools is none and documents is none %}\n  none\n{% endif %}", "  none\n"),
    ],
)
def test_templates_find_what_transformers_offers_them(source: str, expected: str) -> None:
    assert _render(source, "é<b>") == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 'x' }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "unsafe|not callable|undefined"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
    ],
)
def test_a_template_that_fails_is_the_callers_error(source: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        _render(source)
    assert caught.value.field == "messages"


def test_messages_are_data_never_template(tmp_path: Path) -> None:
    assert _render("{{ messages[0].content }}", "{{ 1 + 1 }}") == "{{ 1 + 1 }}"


def test_no_template_no_messages_and_a_broken_template_are_refused(tmp_path: Path) -> None:
    message = {"role": "user", "content": "x"}
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        _load(tmp_path / "none").render_chat([message])
    with pytest.raises(InvalidArgumentError, match="empty"):
        _load(tmp_path / "empty", chat_template=TEMPLATE).render_chat([])
    with pytest.raises(InvalidArgumentError, match="does not compile"):
        _load(tmp_path / "broken", chat_template="{% if %}").render_chat([message])
