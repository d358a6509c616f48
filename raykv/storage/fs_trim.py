"""Keep a folder of the fs tier within its limit: system calls, that block as long as the file system likes."""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from raykv.core.fs_limit import Listed, is_leftover, to_evict
from raykv.storage.fs_header import is_block, is_temp

LEFTOVER_S = 15 * 60.0
"""A file that is being written for so long has lost its writer."""


class Trimmed(NamedTuple):
    """What was removed from a folder, and what it holds now, in files and bytes."""

    evicted: int
    leftovers: int
    files: int
    nbytes: int


def trim(folder: int, limit: int, ahead_s: float, newest: str = "") -> Trimmed:
    """Remove what is too much, oldest first, and what killed writers left. `newest`: a file that was just written, and
    stays. `ahead_s`: seconds by which the file system's clock is ahead of this machine's. Raises OSError."""
    blocks, temps = list_files(folder)
    own = next((file.mtime_ns for file in blocks if file.name == newest), None)
    now = time.time_ns() + int(ahead_s * 1e9) if own is None else own
    gone = to_evict(blocks, limit, newest)
    left = [file for file in temps if is_leftover(file.mtime_ns, now, LEFTOVER_S)]
    evicted = sum(unlink(folder, file.name) for file in gone)
    leftovers = sum(unlink(folder, file.name) for file in left)
    nbytes = sum(file.nbytes for file in blocks) - sum(file.nbytes for file in gone)
    return Trimmed(evicted, leftovers, len(blocks) - len(gone), nbytes)


def list_files(folder: int) -> tuple[list[Listed], list[Listed]]:
    """The block files, and those that are being written."""
    blocks: list[Listed] = []
    temps: list[Listed] = []
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                into = blocks if is_block(entry.name) else temps if is_temp(entry.name) else None
                if into is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    into.append(Listed(entry.name, status.st_size, status.st_mtime_ns))
    finally:
        os.close(fd)
    return blocks, temps


def unlink(folder: int, name: str) -> bool:
    """Remove a file of it. False: somebody else has."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True
