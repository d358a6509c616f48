"""What one life of a store leaves to the next: read field by field, and what makes no sense is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from raykv.actors.store_files import host_path, remove_stale
from raykv.actors.store_notes import NAME, KeptPin, Notes, NotesFile
from raykv.admin_messages import tenant_tag
from raykv.core.known_models import KnownModel
from raykv.storage.notes import write_notes
from raykv.store_messages import KEY_NBYTES, Medium, StoreSpec, TierSpec

HOST = TierSpec(Medium.HOST, 1 << 20)
KEYS = tuple(bytes((n,)) * KEY_NBYTES for n in range(3))
NOTES = Notes(
    (KnownModel(bytes(16), "m", '{"a":1}', 2),),
    {tenant_tag("a"): 5},
    (KeptPin("1", 7.5, "why", ((Medium.HOST, KEYS[:2]), (Medium.DISK, KEYS[2:]))),),
)


def test_what_was_noted_is_known_again(tmp_path: Path) -> None:
    file = NotesFile(StoreSpec("s", (HOST,)), tmp_path / "x.host")
    assert file.read() == Notes() and file.write(NOTES) and file.read() == NOTES
    assert [path.name for path in tmp_path.iterdir()] == ["x.host.notes"]
    file.host_removed()
    assert file.read() == Notes() and not list(tmp_path.iterdir())


def test_with_a_disk_tier_it_stays_there(tmp_path: Path) -> None:
    spec = StoreSpec("s", (HOST, TierSpec(Medium.DISK, 1 << 20, str(tmp_path))))
    file = NotesFile(spec, tmp_path / "none" / "x.host")
    assert file.write(NOTES) and (tmp_path / NAME).exists()
    file.host_removed()
    assert file.read() == NOTES


def test_fields_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    file = NotesFile(StoreSpec("s", (HOST,)), tmp_path / "x.host")
    good = [bytes(16), "m", "", 1]
    write_notes(
        str(tmp_path / "x.host.notes"),
        {
            "models": [good, [b"short", "m", "", 1], [bytes(16), "m", "", 0], [bytes(16), 1, "", 1], "x", [], None],
            "quotas": [[b"8" * 8, -1], [b"7" * 7, 1], [b"8" * 8, 1.5], [bytes(8), 2], [b"8" * 8, 3]],
            "pins": [
                ["", 1.0, "", []],
                ["1", float("nan"), "", []],
                ["2", 1.0, "", [["tape", b""], ["host", b"x"], 5]],
            ],
            "more": 1,
        },
    )
    assert file.read() == Notes((KnownModel(bytes(16), "m", "", 1),), {b"8" * 8: 3}, (KeptPin("2", 1.0, "", ()),))
    write_notes(str(tmp_path / "x.host.notes"), {"models": 5, "quotas": {"a": 1}, "pins": "x"})
    assert file.read() == Notes()


def test_what_can_not_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = NotesFile(StoreSpec("s", (HOST,)), tmp_path / "none" / "x.host")
    assert not file.write(NOTES) and not file.write(NOTES)
    assert len([one for one in caplog.records if "next life" in one.message]) == 1


def test_stale_notes_go_with_their_host_tier(tmp_path: Path) -> None:
    host = host_path("ns", "s", tmp_path)
    host.write_bytes(b"x")
    host.chmod(0o600)
    NotesFile(StoreSpec("s", (HOST,)), host).write(NOTES)
    assert remove_stale(tmp_path) == [host.name] and not list(tmp_path.iterdir())
