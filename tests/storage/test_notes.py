"""Notes beside the pools: read as they were written, or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from raykv.errors import StorageError
from raykv.storage import notes as module
from raykv.storage.notes import read_notes, remove_notes, write_notes

NOTES = {"pins": [["1", 5.5, "note", [b"\0\xff"]]], "quotas": []}


def test_what_was_written_is_read_and_for_this_user_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "notes")
    assert read_notes(path) == {}
    write_notes(path, {"old": 1})
    old = os.umask(0)
    try:
        write_notes(path, NOTES)
    finally:
        os.umask(old)
    assert read_notes(path) == NOTES and stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["notes"], "nothing else is left"
    remove_notes(path)
    remove_notes(path)
    assert read_notes(path) == {}


def test_every_flipped_or_cut_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    write_notes(str(path), NOTES)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        assert read_notes(str(path)) == {}
        path.write_bytes(whole[:at])
        assert read_notes(str(path)) == {}
    path.write_bytes(whole)
    assert read_notes(str(path)) == NOTES


def test_a_link_or_what_others_may_write_is_not_believed(tmp_path: Path) -> None:
    path, link = tmp_path / "notes", tmp_path / "link"
    write_notes(str(path), NOTES)
    link.symlink_to(path)
    assert read_notes(str(link)) == {}
    path.chmod(0o620)
    assert read_notes(str(path)) == {}
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read_notes(str(tmp_path / "pipe")) == {} == read_notes(str(tmp_path))


def test_a_write_that_fails_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notes")
    write_notes(path, NOTES)

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "rename", full)
    with pytest.raises(StorageError, match="No space left"):
        write_notes(path, {"new": 1})
    assert read_notes(path) == NOTES and os.listdir(tmp_path) == ["notes"]
    with pytest.raises(StorageError, match="Can't write"):
        write_notes(str(tmp_path / "none" / "notes"), NOTES)
