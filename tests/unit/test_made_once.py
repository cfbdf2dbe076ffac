"""Files made once: complete or absent, made by one process only, and hashes that notice every change."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine import made_once
from treeserve_engine.made_once import content_hash, default_cache_dir, make_once


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as settled at once."""
    monkeypatch.setattr(made_once, "_SETTLED_NS", -(10**9))
    path = tmp_path / "weights"
    path.write_bytes(b"first content")
    return path


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are really read from now on."""
    seen: list[Path] = []
    plain = made_once._sha256

    def counted(path: Path, skip_last: int) -> str:
        seen.append(path)
        return plain(path, skip_last)

    monkeypatch.setattr(made_once, "_sha256", counted)
    return seen


def test_a_hash_is_worked_out_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = reads(monkeypatch)
    hashes = [content_hash(file, tmp_path) for _ in range(3)]
    assert hashes == [hashlib.sha256(b"first content").hexdigest()] * 3
    assert len(seen) == 1
    assert content_hash(file, tmp_path, skip_last=8) == hashlib.sha256(b"first").hexdigest()
    assert len(seen) == 2


def write_in_place(file: Path) -> None:
    """Other content of the same size, with the old time of the last write put back."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"other content")
    os.utime(file, ns=times)


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"other content")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)


@pytest.mark.parametrize("change", [write_in_place, replace, lambda file: file.write_bytes(b"longer than before")])
def test_every_change_is_noticed(file: Path, tmp_path: Path, change: Any) -> None:
    before = content_hash(file, tmp_path)
    time.sleep(0.02)  # a tick of the file system's clock
    change(file)
    assert content_hash(file, tmp_path) == hashlib.sha256(file.read_bytes()).hexdigest() != before


def test_what_changed_a_moment_ago_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    seen = reads(monkeypatch)
    content_hash(path, tmp_path)
    content_hash(path, tmp_path)
    assert len(seen) == 2


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b'{"signature": 1, "sha256": 2}'])
def test_a_broken_note_is_not_believed(file: Path, tmp_path: Path, note: bytes) -> None:
    expected = content_hash(file, tmp_path)
    (written,) = (tmp_path / ".hashes").iterdir()
    written.write_bytes(note)
    assert content_hash(file, tmp_path) == expected


def test_a_place_that_cannot_be_written_costs_time_only(file: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    assert content_hash(file, tmp_path / "occupied") == hashlib.sha256(b"first content").hexdigest()


def test_of_many_who_want_it_one_makes_it(tmp_path: Path) -> None:
    target, made = tmp_path / "cache" / "thing", []

    def make(path: Path) -> None:
        made.append(path)
        time.sleep(0.1)
        path.write_text("whole")

    threads = [threading.Thread(target=make_once, args=(target, target.exists, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and target.read_text() == "whole"


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_interrupted_attempt_leaves_nothing_and_a_bad_target_is_replaced(tmp_path: Path, is_folder: bool) -> None:
    target = tmp_path / "thing"

    def content(path: Path) -> Path:
        if is_folder:
            path.mkdir(exist_ok=True)
        return path / "content" if is_folder else path

    def fail(path: Path) -> None:
        content(path).write_text("half")
        raise OSError("disk full")

    content(target).write_text("bad")
    with pytest.raises(OSError, match="disk full"):
        make_once(target, lambda: False, fail)
    assert content(target).read_text() == "bad"
    assert not target.with_name(".thing.unfinished").exists()
    make_once(target, lambda: content(target).read_text() == "good", lambda path: content(path).write_text("good"))
    assert content(target).read_text() == "good"


def test_a_filled_cache_may_be_read_only_and_an_empty_one_may_not(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")

    def make(_path: Path) -> None:
        raise AssertionError("it was ready")

    make_once(occupied / "thing", lambda: True, make)
    with pytest.raises(InvalidArgumentError, match=r"cache_dir: .* cannot be written"):
        make_once(occupied / "thing", lambda: False, make)


def test_the_default_is_a_place_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert default_cache_dir() == tmp_path / "not" / "yet" / "treeserve"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for an image's user without a home
    monkeypatch.setattr(made_once.tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_cache_dir() == tmp_path / "treeserve"
