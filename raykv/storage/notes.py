"""A small file beside the pools, of what a store's next life must know and no slot says: written whole, or not at all.

It is for this user alone (0600), carries a version and a check of its bytes, and is never trusted: what is not as it
was written is as if it were not there. Its content is msgpack; who reads it checks each field.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from typing import Any

import msgspec
import xxhash

from raykv.errors import StorageError

VERSION = 1
MOST_NBYTES = 512 << 20
_MAGIC = b"RAYKVNTS"
_HEAD = struct.Struct("<8sQQ")  # magic, version, check of what follows


def write_notes(path: str, notes: dict[str, Any]) -> None:
    """Replace the file at `path`; on the medium when this returns. Raises StorageError; then the old one is there."""
    body = msgspec.msgpack.encode(notes)
    temp = f"{path}.{secrets.token_hex(6)}.tmp"
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(_HEAD.pack(_MAGIC, VERSION, xxhash.xxh3_64_intdigest(body)) + body)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
    except OSError as error:
        raise StorageError(f"Can't write {path}: {error.strerror}. Check the folder and its rights.") from error


def read_notes(path: str) -> dict[str, Any]:
    """What was written last; empty if nothing is there that can be believed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        status = os.fstat(fd)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not own or not _HEAD.size < status.st_size <= MOST_NBYTES:
            return {}
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read()
    except OSError:
        return {}
    finally:
        os.close(fd)
    if len(data) <= _HEAD.size:
        return {}
    magic, version, check = _HEAD.unpack_from(data)
    if (magic, version) != (_MAGIC, VERSION) or check != xxhash.xxh3_64_intdigest(data[_HEAD.size :]):
        return {}
    try:
        notes = msgspec.msgpack.decode(data[_HEAD.size :])
    except msgspec.MsgspecError:
        return {}
    return notes if isinstance(notes, dict) and all(isinstance(name, str) for name in notes) else {}


def remove_notes(path: str) -> None:
    """Nothing happens if there are none."""
    with contextlib.suppress(OSError):
        os.unlink(path)
